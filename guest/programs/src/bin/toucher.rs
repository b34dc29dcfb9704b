//! Reads or writes the pages of a working set, one after another or at random, and tells how long each took, for ever.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::histogram::Histogram;
use sterna_guest_programs::pace::{Every, Pace};
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;
use sterna_guest_programs::writer::{Pattern, Silent, Stores};

const USAGE: &str = "toucher [--mib N] [--access read|write] [--pattern sequential|random|hot-spot] [--bytes OF-EACH-PAGE] \
    [--threads N, EACH-WITH-ITS-SHARE] [--rate MIB-PER-SECOND, 0 = no limit] [--freed-mib FILLED-AND-GIVEN-BACK-BEFORE] \
    [--interval-ms BETWEEN-LINES]";

/// Pages touched between two looks at what is due.
const BATCH: usize = 32;

/// How a thread touches its pages.
#[derive(Clone, Copy)]
struct Way {
    reads: bool,
    pattern: Pattern,
    bytes: usize,
    pages_per_s: f64,
    interval: Duration,
}

/// What a thread has done since the last line.
#[derive(Default)]
struct Tally {
    touches: u64,
    longest: Duration,
    latency: Histogram,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.touches += other.touches;
        self.longest = self.longest.max(other.longest);
        self.latency.add(&other.latency);
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let pattern = arguments.get("pattern", Pattern::Sequential);
    let access = arguments.get("access", "read".to_owned());
    let bytes = arguments.get("bytes", PAGE_BYTES);
    let rate_mib = arguments.get("rate", 0.0_f64);
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    let count = arguments.get("mib", 64_usize) << 8;
    let threads = arguments.get("threads", 1_usize);
    if count == 0 {
        arguments.reject("mib", "nothing to touch");
    }
    if !(1..=count).contains(&threads) {
        arguments.reject("threads", "each must have a page");
    }
    if !["read", "write"].contains(&access.as_str()) {
        arguments.reject("access", "is neither read nor write");
    }

    let mut noise = Random::new(3);
    // Its memory is the kernel's again, and holds what was written.
    drop(std::hint::black_box(filled(arguments.get("freed-mib", 0_usize) << 8, &mut noise)));
    let mut pages = filled(count, &mut noise);
    let report = Report::from_environment();
    report.line(format_args!("TOUCHER ready pages={count}"));

    let way = Way { reads: access == "read", pattern, bytes, pages_per_s: rate_mib * 256.0 / threads as f64, interval };
    std::thread::scope(|scope| {
        let begin = |pages| {
            let (teller, tallies) = sync_channel(1);
            scope.spawn(move || touch(pages, way, &teller));
            tallies
        };
        let threads: Vec<Receiver<Tally>> = pages.chunks_mut(count.div_ceil(threads)).map(begin).collect();
        tell(&threads, &report);
    });
}

/// Touches these pages, and says each interval what it has done.
fn touch(pages: &mut [Page], way: Way, teller: &SyncSender<Tally>) {
    let mut next = Stores::new(pages.len(), way.pattern, Silent::Stores(0));
    let mut pace = Pace::new(way.pages_per_s, Instant::now());
    let mut interval = Every::new(way.interval, Instant::now());
    let (mut tally, mut touched) = (Tally::default(), 0);
    loop {
        let now = Instant::now();
        let due = pace.due(now, BATCH);
        let mut begin = now;
        for store in next.by_ref().take(due) {
            let page = &mut pages[store.page];
            if way.reads {
                std::hint::black_box(page.sum(way.bytes));
            } else {
                page.fill(way.bytes, touched);
            }
            // The end of one is the beginning of the next: a clock that is slow to read is read once for each.
            let end = Instant::now();
            let took = end - begin;
            begin = end;
            touched += 1;
            tally.touches += 1;
            tally.longest = tally.longest.max(took);
            tally.latency.note(took.as_nanos() as u64);
        }
        if interval.elapsed(now).is_some() && teller.send(std::mem::take(&mut tally)).is_err() {
            return;
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Tells what all threads have done, as often as each of them says it.
fn tell(threads: &[Receiver<Tally>], report: &Report) {
    let (mut total, mut last) = (0, Instant::now());
    loop {
        let mut all = Tally::default();
        for thread in threads {
            let Ok(tally) = thread.recv() else { return };
            all.add(&tally);
        }
        let elapsed = last.elapsed();
        last += elapsed;
        total += all.touches;
        let per_second = all.touches as f64 / elapsed.as_secs_f64();
        report.line(format_args!(
            "TOUCHER ok touches_per_s={per_second:.0} touches={} longest_us={} total={total} elapsed_ms={} latency_ns={}",
            all.touches,
            all.longest.as_micros(),
            elapsed.as_millis(),
            all.latency,
        ));
    }
}

/// So many pages of what does not compress.
fn filled(count: usize, noise: &mut Random) -> Vec<Page> {
    let mut pages = Page::zeroed(count);
    for page in &mut pages {
        page.scramble(PAGE_BYTES, noise);
    }
    pages
}
