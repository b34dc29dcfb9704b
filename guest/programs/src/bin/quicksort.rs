//! Fills memory with random numbers and sorts them by quicksort, again and again, for ever.

use std::hint::black_box;
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::Every;
use sterna_guest_programs::report::Report;
use sterna_guest_programs::sorting::{fill_sort_check, visits};

const USAGE: &str = "quicksort [--mib N] [--seed N] [--interval-ms BETWEEN-LINES]";

/// What was done since the last line, and in all.
struct Tally {
    report: Report,
    interval: Every,
    visits_of_a_sort: f64,
    visited: usize,
    sorts: u64,
    bad: u64,
}

impl Tally {
    fn note(&mut self, visited: usize) {
        self.visited += visited;
        if let Some(elapsed) = self.interval.elapsed(Instant::now()) {
            let per_second = std::mem::take(&mut self.visited) as f64 / elapsed.as_secs_f64();
            self.report.line(format_args!(
                "QUICKSORT ok sorts_per_s={:.6} visits_per_s={per_second:.0} sorts={} bad={}",
                per_second / self.visits_of_a_sort,
                self.sorts,
                self.bad
            ));
        }
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let count = arguments.get("mib", 512_usize) << 17;
    let seed = arguments.get("seed", 1_u64);
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    if count == 0 {
        arguments.reject("mib", "nothing to sort");
    }
    let mut tally = Tally {
        report: Report::from_environment(),
        interval: Every::new(interval, Instant::now()),
        visits_of_a_sort: visits(count),
        visited: 0,
        sorts: 0,
        bad: 0,
    };
    tally.report.line(format_args!("QUICKSORT ready numbers={count}"));
    loop {
        // Memory of its own for each sort, as the papers have it.
        let mut numbers = vec![0; count];
        let whole = fill_sort_check(&mut numbers, seed.wrapping_add(tally.sorts), &mut |visited| tally.note(visited));
        if !whole {
            tally.bad += 1;
            tally.report.line(format_args!("QUICKSORT BAD sort={}", tally.sorts));
        }
        black_box(&numbers);
        tally.sorts += 1;
    }
}
