//! What a guest does with memory of which a part is elsewhere, and what an ideal run would find missing.

use sterna_guest_programs::writer::{Pattern, Silent, Stores};

use super::super::ideal::least_misses;
use super::super::lenders::{self, MIB};
use super::{REQUESTS, SORTS, WORDS};
use crate::command::PATIENCE;
use crate::error::Result;
use crate::guest::Guest;
use crate::load::memcached::LoadConfig;

/// How often a program reports.
pub(super) const INTERVAL_MS: i64 = 100;
/// The words of an ideal run whose misses are counted, and those before and after them: so many for each page of the
/// working set. Nine pages of ten are read once in eleven words for each page where there is a hot spot.
const SETTLING: usize = 32;
/// What programs go through, MiB. A sort goes through its memory several times, and with a disk that takes minutes.
const READ_MIB: u64 = 256;
const CACHE_MIB: u32 = 256;
const SORTED_MIB: u64 = 128;
const SEED: u64 = 7;

/// What the guest does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// It reads a word of each page, in that order. Each of its threads has a processor and a share of the memory.
    Reads(Pattern, usize),
    /// Its memcached, which is full, answers clients: few of its keys are asked for often, one request in ten sets a
    /// value. It has so many processors.
    Cache(u32),
    /// It sorts numbers, again and again.
    Sort,
}

/// The reads of one thread, and of two.
pub(super) const READS: [[Work; 3]; 2] = [reads(1), reads(2)];

const fn reads(threads: usize) -> [Work; 3] {
    [
        Work::Reads(Pattern::Sequential, threads),
        Work::Reads(Pattern::Random, threads),
        Work::Reads(Pattern::HotSpot, threads),
    ]
}

impl Work {
    /// All of it, what is judged by most targets first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        READS.into_iter().flatten().chain([Self::Cache(1), Self::Cache(2), Self::Sort])
    }

    /// Its name in tables.
    pub(super) fn name(self) -> String {
        match self {
            Self::Reads(pattern, 1) => format!("{} reads", word(pattern)),
            Self::Reads(pattern, threads) => format!("{} reads by {threads} threads", word(pattern)),
            Self::Cache(1) => "memcached".into(),
            Self::Cache(cpus) => format!("memcached on {cpus} processors"),
            Self::Sort => "a sort".into(),
        }
    }

    /// The metric that says how fast it is.
    pub(super) fn metric(self) -> &'static str {
        match self {
            Self::Reads(..) => WORDS,
            Self::Cache(_) => REQUESTS,
            Self::Sort => SORTS,
        }
    }

    /// The same in words.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Reads(..) => "words a second",
            Self::Cache(_) => "requests a second",
            Self::Sort => "sorts a minute",
        }
    }

    /// The name of its plot.
    pub(super) fn file(self) -> String {
        match self {
            Self::Reads(pattern, 1) => word(pattern).into(),
            Self::Reads(pattern, threads) => format!("{}-{threads}", word(pattern)),
            Self::Cache(cpus) => format!("memcached-{cpus}"),
            Self::Sort => "sort".into(),
        }
    }

    /// The guest's processors.
    pub(super) fn cpus(self) -> u32 {
        match self {
            Self::Reads(_, threads) => u32::try_from(threads).unwrap_or(1),
            Self::Cache(cpus) => cpus,
            Self::Sort => 1,
        }
    }

    /// The guest's jobs.
    pub(super) fn jobs(self) -> String {
        match self {
            Self::Reads(pattern, threads) => {
                let share = if threads > 1 { format!(",--threads,{threads}") } else { String::new() };
                let way = format!("--access,read,--pattern,{},--bytes,8,--interval-ms,{INTERVAL_MS}", word(pattern));
                format!("toucher:--mib,{READ_MIB},{way}{share}")
            }
            Self::Cache(cpus) => format!("memcached:-m,{CACHE_MIB},-t,{cpus}"),
            Self::Sort => format!("quicksort:--mib,{SORTED_MIB},--interval-ms,{INTERVAL_MS}"),
        }
    }

    /// What clients of its memcached do.
    pub(super) fn load(self) -> LoadConfig {
        LoadConfig {
            skewed: true,
            set_share: 0.1,
            rate_per_s: None,
            pipeline: 1,
            ..LoadConfig::full_cache(CACHE_MIB, 0.0, SEED)
        }
    }

    /// How many pages a swapping guest's kernel moves together, 2 to the power of that: of work on one processor
    /// neither is the faster one always. A sort with single pages takes minutes.
    pub(super) fn clusters(self) -> &'static [u32] {
        match self {
            Self::Reads(_, 1) | Self::Cache(1) => &[0, 3],
            Self::Reads(..) | Self::Cache(_) | Self::Sort => &[3],
        }
    }

    /// Waits until the guest is at it; clients of a memcached wait for it themselves.
    pub(super) fn is_begun(self, guest: &Guest) -> Result<()> {
        match self {
            Self::Reads(..) => lenders::is_at_work(guest),
            Self::Cache(_) => guest.wait_until_up(PATIENCE),
            Self::Sort => guest.wait_until_says("QUICKSORT ready", PATIENCE),
        }
    }

    /// What it goes through.
    fn bytes(self) -> u64 {
        MIB * match self {
            Self::Reads(..) => READ_MIB,
            Self::Cache(_) => u64::from(CACHE_MIB),
            Self::Sort => SORTED_MIB,
        }
    }

    /// What of that may be here, bytes.
    pub(super) fn share_bytes(self, share: u64) -> u64 {
        self.bytes() * share / 100
    }

    /// The pages that it reads, from its first word on, its threads in turn; none where it does something else. They
    /// are not recorded: it draws them with a seed of its own, which is the same in every guest, so the same generator
    /// says here what it read.
    fn accesses(self, count: usize) -> Vec<u32> {
        let Self::Reads(pattern, threads) = self else { return Vec::new() };
        let of_thread = pages(self.bytes()) / threads;
        let mut stores: Vec<Stores> =
            (0..threads).map(|_| Stores::new(of_thread, pattern, Silent::Stores(0))).collect();
        let page = |at: usize| {
            let thread = at % threads;
            stores[thread].next().map(|store| (thread * of_thread + store.page) as u32)
        };
        (0..count).filter_map(page).collect()
    }

    /// Words whose page is missing at best, of all, where that share of the pages has room; `None` where it does not
    /// read. The guest is measured in the middle of a long work, and for a time in which it does not come to all pages.
    /// So these are the misses in the middle of its sequence, where what was there at the beginning has no effect, nor
    /// has the end.
    pub(super) fn least_misses(self, share: u64) -> Option<f64> {
        let words = SETTLING * pages(self.bytes());
        let accesses = self.accesses(3 * words);
        let misses = least_misses(&accesses, pages(self.share_bytes(share)), words..2 * words);
        (!accesses.is_empty()).then(|| misses as f64 / words as f64)
    }

    /// Words that cannot be asked for before another is there, of those that are missing: of what is read in order it
    /// is known what comes, and threads wait beside each other.
    pub(super) fn dependent(self) -> f64 {
        match self {
            Self::Reads(Pattern::Random | Pattern::HotSpot, threads) => 1.0 / threads as f64,
            Self::Reads(Pattern::Sequential, _) | Self::Cache(_) | Self::Sort => 0.0,
        }
    }
}

fn word(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::Sequential => "sequential",
        Pattern::Random => "random",
        Pattern::HotSpot => "hot-spot",
    }
}

/// So many bytes in pages.
fn pages(bytes: u64) -> usize {
    (bytes / 4096) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_known_by_the_pages_that_it_reads() {
        let [sequential, random, hot_spot] = READS[0];
        let count = pages(READ_MIB * MIB);
        assert_eq!(sequential.accesses(3), [1, 2, 3]);
        assert!(random.accesses(count).iter().all(|page| (*page as usize) < count));
        assert_eq!(hot_spot.accesses(1000), hot_spot.accesses(1000));
        // Two threads begin with a page of each half.
        let half = count as u32 / 2;
        assert_eq!(READS[1][0].accesses(4), [1, half + 1, 2, half + 2]);
        // Of pages in a circle those without room are missing, of pages at random fewer: it is known which come soon.
        for (work, share, expected) in
            [(sequential, 25, 0.75), (random, 50, 0.187), (hot_spot, 25, 0.0434), (READS[1][1], 50, 0.187)]
        {
            let least = work.least_misses(share).unwrap();
            assert!((least / expected - 1.0).abs() < 0.01, "{work:?}: {least}");
        }
        assert_eq!(Work::Sort.least_misses(50), None);
    }

    #[test]
    fn each_work_has_a_name_and_jobs_of_its_own() {
        let all: Vec<Work> = Work::all().collect();
        let different = |of: fn(Work) -> String| {
            all.iter().map(|work| of(*work)).collect::<std::collections::BTreeSet<_>>().len() == all.len()
        };
        assert!(different(Work::name) && different(Work::jobs));
    }
}
