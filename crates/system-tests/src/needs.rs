//! What tests need of this machine, and the turns that they take.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use sterna_bench::tools;

/// What a test cannot do without, as [`tools`] looks for it.
pub type Need = fn() -> sterna_bench::Result<PathBuf>;

/// What every test with a Linux guest needs.
pub const GUEST: [Need; 3] = [tools::kernel, tools::initrd, tools::qemu_7_2];

/// Whether something is missing; the reason is then printed as `./x test` counts it.
#[must_use]
pub fn skip_without(needs: &[Need]) -> bool {
    let programs: [Need; 3] = [tools::sternad, tools::sterna, tools::agent];
    let missing = programs.iter().chain(needs).find_map(|need| need().err().map(|error| error.to_string()));
    let reason = missing.or_else(|| (!nix::unistd::Uid::effective().is_root()).then(|| "a lab needs root".into()));
    if let Some(reason) = &reason {
        println!("skipped: {reason}");
    }
    reason.is_some()
}

/// The number of repetitions: a small one every day, a large one where `STERNA_LONG=1` asks for proof.
#[must_use]
pub fn times(every_day: usize, long: usize) -> usize {
    if std::env::var("STERNA_LONG").is_ok_and(|word| word == "1") { long } else { every_day }
}

/// Whether this test has its turn on one day in so many, and not today; if so, it prints when. Which day that is
/// follows from its name. In the long proofs all have their turn; `STERNA_DAY` is another day than today's.
#[must_use]
pub fn left_to_another_day(days: u64) -> bool {
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let place = name.bytes().map(u64::from).sum::<u64>();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / (24 * 60 * 60);
    let today = std::env::var("STERNA_DAY").ok().and_then(|day| day.parse().ok()).unwrap_or(since);
    let wait = (place + days - today % days) % days;
    // Where tests are no threads of their own their names are not known.
    let left = wait > 0 && name != "main" && times(0, 1) == 0;
    if left {
        println!("skipped: its turn comes with STERNA_DAY={}, or with STERNA_LONG=1", today + wait);
    }
    left
}

/// Whether a test runs only in the long proofs, and not today; if so, it prints that.
#[must_use]
pub fn left_to_the_proofs() -> bool {
    let left = times(0, 1) == 0;
    if left {
        println!("skipped: its turn comes with STERNA_LONG=1");
    }
    left
}

static TURN: Mutex<()> = Mutex::new(());

/// Waits for the turn of this test. One test of a program runs at a time, because a single guest keeps a processor
/// busy; `./x test` runs as many programs beside each other as there is room for.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
