//! Reads or writes the pages of a working set, one after another or at random, and tells how long each took, for ever.

use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::histogram::Histogram;
use sterna_guest_programs::pace::{Every, Pace};
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;
use sterna_guest_programs::writer::{Pattern, Silent, Stores};

const USAGE: &str = "toucher [--mib N] [--access read|write] [--pattern sequential|random|hot-spot] [--bytes OF-EACH-PAGE] \
    [--rate MIB-PER-SECOND, 0 = no limit] [--freed-mib FILLED-AND-GIVEN-BACK-BEFORE] [--interval-ms BETWEEN-LINES]";

/// Pages touched between two looks at what is due.
const BATCH: usize = 32;

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let pattern = arguments.get("pattern", Pattern::Sequential);
    let access = arguments.get("access", "read".to_owned());
    let bytes = arguments.get("bytes", PAGE_BYTES);
    let rate_mib = arguments.get("rate", 0.0_f64);
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    let count = arguments.get("mib", 64_usize) << 8;
    if count == 0 {
        arguments.reject("mib", "nothing to touch");
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

    let mut next = Stores::new(count, pattern, Silent::Stores(0));
    let mut pace = Pace::new(rate_mib * 256.0, Instant::now());
    let mut interval = Every::new(interval, Instant::now());
    let (mut total, mut touches, mut longest, mut latency) = (0_u64, 0_u64, Duration::ZERO, Histogram::default());
    loop {
        let now = Instant::now();
        let due = pace.due(now, BATCH);
        let mut begin = now;
        for store in next.by_ref().take(due) {
            let page = &mut pages[store.page];
            if access == "read" {
                std::hint::black_box(page.sum(bytes));
            } else {
                page.fill(bytes, total + touches);
            }
            // The end of one is the beginning of the next: a clock that is slow to read is read once for each.
            let end = Instant::now();
            let took = end - begin;
            begin = end;
            touches += 1;
            longest = longest.max(took);
            latency.note(took.as_nanos() as u64);
        }
        if let Some(elapsed) = interval.elapsed(now) {
            let per_second = touches as f64 / elapsed.as_secs_f64();
            total += touches;
            report.line(format_args!(
                "TOUCHER ok touches_per_s={per_second:.0} touches={touches} longest_us={} total={total} elapsed_ms={} latency_ns={latency}",
                longest.as_micros(),
                elapsed.as_millis(),
            ));
            (touches, longest, latency) = (0, Duration::ZERO, Histogram::default());
        }
        if due == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
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
