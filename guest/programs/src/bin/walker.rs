//! Goes through memory that it has never touched, and then through it again, and tells how long each pass took.

use std::hint::black_box;
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::report::Report;

const USAGE: &str = "walker [--mib N] [--passes N, 0 = for ever] [--rest-ms BETWEEN-PASSES]";

/// Words of a page.
const WORDS: usize = 512;

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let mib = arguments.get("mib", 64_usize);
    let passes = arguments.get("passes", 2_u64);
    let rest = Duration::from_millis(arguments.get("rest-ms", 0));
    if mib == 0 {
        arguments.reject("mib", "nothing to touch");
    }
    let report = Report::from_environment();
    // The kernel has no page for any of it until it is written.
    let mut words = vec![0_u64; mib << 17];
    report.line(format_args!("WALKER ready pages={}", mib << 8));
    for pass in (1..).take_while(|pass| passes == 0 || *pass <= passes) {
        let (began, mut longest, mut bad) = (Instant::now(), Duration::ZERO, 0);
        let mut begin = began;
        for (number, page) in words.chunks_exact_mut(WORDS).enumerate() {
            let content = |pass: u64| (pass << 32) + number as u64;
            bad += u64::from(pass > 1 && page.iter().any(|word| *word != content(pass - 1)));
            black_box(page).fill(content(pass));
            let end = Instant::now();
            longest = longest.max(end - begin);
            begin = end;
        }
        report.line(format_args!(
            "WALKER pass={pass} pages={} elapsed_us={} longest_us={} bad={bad}",
            mib << 8,
            began.elapsed().as_micros(),
            longest.as_micros(),
        ));
        std::thread::sleep(rest);
    }
    report.line("WALKER done");
}
