//! Faults, each at a named moment. Whatever happens, the guest runs on exactly one host with every page it wrote, a
//! person is told what happened, and the next attempt succeeds (`docs/failure.md`).
//!
//! All tests of this program share one guest, one after the other: each leaves it at work, wherever it then is.

/// Somebody changes his mind.
mod cancel;
/// Both sides are compared, and what does it is lost.
mod comparison;
/// Daemons that are killed.
mod daemons;
/// What goes wrong at the destination, and what it refuses.
mod destination;
/// The guest itself ends.
mod guest;
/// Threads that go before others while the guest stands still.
mod haste;
/// The link is cut.
mod link;
/// Peers that are absent, silent, strange.
mod peers;
/// Requests that cannot be.
mod requests;

use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::{Site, needs, on_shared_site, skip_without};

/// So slow that pre-copy lasts for minutes.
pub const SLOW: [&str; 4] = ["--mode", "precopy", "--bandwidth", "1MB"];

/// Runs a test with the guest that all of them share, where that can be had.
pub fn with_guest(test: impl FnOnce(&mut Site)) {
    if !left_to_another_day(9) && !skip_without(&needs::GUEST) {
        on_shared_site(test);
    }
}
