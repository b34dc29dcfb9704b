//! Fills memory with what does not compress, and then does nothing, for ever.

use std::hint::black_box;

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "idle [--mib N]";

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let mut pages = Page::zeroed(arguments.get("mib", 0_usize) << 8);
    let mut random = Random::new(1);
    for page in &mut pages {
        page.scramble(PAGE_BYTES, &mut random);
    }
    Report::from_environment().line(format_args!("IDLE ready pages={}", black_box(&pages).len()));
    loop {
        std::thread::park();
    }
}
