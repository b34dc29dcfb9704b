//! Fills memory with what does not compress, and then does nothing, for ever.

use std::hint::black_box;

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "idle [--mib THE-SAME-IN-EVERY-GUEST] [--own-mib OF-THE-SEED] [--seed N]";

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let alike = filled(arguments.get("mib", 0), 0);
    // The seed 0 stands for the content that every guest has.
    let own = filled(arguments.get("own-mib", 0), arguments.get("seed", 0_u64) + 1);
    let pages = black_box(&alike).len() + black_box(&own).len();
    Report::from_environment().line(format_args!("IDLE ready pages={pages}"));
    loop {
        std::thread::park();
    }
}

/// So many MiB of pages, no two of which are equal.
fn filled(mib: usize, seed: u64) -> Vec<Page> {
    let mut pages = Page::zeroed(mib << 8);
    // The generator does not look at a seed's lowest bit.
    let mut random = Random::new(seed << 1);
    for page in &mut pages {
        page.scramble(PAGE_BYTES, &mut random);
    }
    pages
}
