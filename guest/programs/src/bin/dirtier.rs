//! Writes the pages of a working set, in a given pattern and at a given rate, for ever.

use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::{Every, Pace};
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;
use sterna_guest_programs::writer::{Changed, Pattern, Silent, Stores};

const USAGE: &str = "dirtier [--mib N] [--rate MIB-PER-SECOND, 0 = no limit] [--pattern sequential|random|hot-spot] \
    [--silent PERCENT] [--silent-of stores|pages] [--bytes WRITTEN-OF-EACH-PAGE] [--interval-ms BETWEEN-LINES]";

/// Pages written between two looks at the clock.
const BATCH: usize = 32;

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let pattern = arguments.get("pattern", Pattern::Random);
    let silent = Silent::new(arguments.get("silent", 0), &arguments.get("silent-of", "stores".to_owned()));
    let silent = silent.unwrap_or_else(|problem| arguments.reject("silent-of", problem));
    let bytes = arguments.get("bytes", PAGE_BYTES);
    let rate_mib = arguments.get("rate", 0.0_f64);
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    let mut pages = Page::zeroed(arguments.get("mib", 64_usize) << 8);
    if pages.is_empty() {
        arguments.reject("mib", "nothing to write to");
    }

    let report = Report::from_environment();
    let mut noise = Random::new(2);
    for page in &mut pages {
        page.scramble(PAGE_BYTES, &mut noise);
    }
    report.line(format_args!("DIRTIER ready pages={}", pages.len()));

    let mut stores = Stores::new(pages.len(), pattern, silent);
    let mut changed = Changed::new(pages.len());
    let mut pace = Pace::new(rate_mib * 256.0, Instant::now());
    let mut interval = Every::new(interval, Instant::now());
    let (mut total, mut writes, mut silent) = (0_u64, 0_u64, 0_u64);
    loop {
        let now = Instant::now();
        let due = pace.due(now, BATCH);
        for store in stores.by_ref().take(due) {
            changed.note(store);
            writes += 1;
            if store.silent {
                silent += 1;
                pages[store.page].store_silently(bytes);
            } else {
                pages[store.page].scramble(bytes, &mut noise);
            }
        }
        if let Some(elapsed) = interval.elapsed(now) {
            let per_second = writes as f64 / elapsed.as_secs_f64();
            total += writes;
            let changed = changed.mark();
            report.line(format_args!(
                "DIRTIER ok writes_per_s={per_second:.0} writes={writes} silent={silent} changed={changed} total={total}"
            ));
            (writes, silent) = (0, 0);
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
