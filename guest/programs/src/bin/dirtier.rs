//! Writes the pages of a working set, in a given pattern and at a given rate, for ever.

use std::str::FromStr;
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::{EverySecond, Pace};
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "dirtier [--mib N] [--rate MIB-PER-SECOND, 0 = no limit] [--pattern sequential|random|hot-spot] \
    [--silent PERCENT-OF-STORES] [--bytes WRITTEN-OF-EACH-PAGE]";

/// Pages written between two looks at the clock.
const BATCH: usize = 32;
/// A hot spot: this share of the writes goes to …
const HOT_WRITES_PERCENT: u32 = 90;
/// … this share of the pages.
const HOT_PAGES_PERCENT: usize = 10;

/// Which page is written next.
#[derive(Clone, Copy)]
enum Pattern {
    Sequential,
    Random,
    HotSpot,
}

impl FromStr for Pattern {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "sequential" => Ok(Self::Sequential),
            "random" => Ok(Self::Random),
            "hot-spot" => Ok(Self::HotSpot),
            _ => Err("is none of sequential, random, hot-spot"),
        }
    }
}

impl Pattern {
    fn next(self, last: usize, pages: usize, random: &mut Random) -> usize {
        match self {
            Self::Sequential => (last + 1) % pages,
            Self::Random => random.below(pages),
            Self::HotSpot if random.percent(HOT_WRITES_PERCENT) => {
                random.below((pages * HOT_PAGES_PERCENT / 100).max(1))
            }
            Self::HotSpot => random.below(pages),
        }
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let pattern = arguments.get("pattern", Pattern::Random);
    let silent_percent = arguments.get("silent", 0_u32);
    let bytes = arguments.get("bytes", PAGE_BYTES);
    let rate_mib = arguments.get("rate", 0.0_f64);
    let mut pages = Page::zeroed(arguments.get("mib", 64_usize) << 8);
    if pages.is_empty() {
        arguments.reject("mib", "nothing to write to");
    }

    let report = Report::from_environment();
    let mut random = Random::new(1);
    for page in &mut pages {
        page.scramble(PAGE_BYTES, &mut random);
    }
    report.line(format_args!("DIRTIER ready pages={}", pages.len()));

    let mut pace = Pace::new(rate_mib * 256.0, Instant::now());
    let mut second = EverySecond::new(Instant::now());
    let (mut page, mut writes, mut silent) = (0, 0_u64, 0_u64);
    loop {
        let now = Instant::now();
        let due = pace.due(now, BATCH);
        for _ in 0..due {
            page = pattern.next(page, pages.len(), &mut random);
            writes += 1;
            if random.percent(silent_percent) {
                silent += 1;
                pages[page].store_silently(bytes);
            } else {
                pages[page].scramble(bytes, &mut random);
            }
        }
        if let Some(elapsed) = second.elapsed(now) {
            let per_second = writes as f64 / elapsed.as_secs_f64();
            report.line(format_args!("DIRTIER ok writes_per_s={per_second:.0} writes={writes} silent={silent}"));
            (writes, silent) = (0, 0);
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
