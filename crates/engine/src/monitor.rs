//! What others see of a running migration, and how they cancel it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::{Phase, Progress};

use crate::error::MigrateError;

const RUNNING: u8 = 0;
const CANCELLED: u8 = 1;
const COMMITTED: u8 = 2;

/// A running migration as others see it.
///
/// Cancelling and committing exclude each other: the first wins, and the other fails.
#[derive(Debug)]
pub struct Monitor {
    began: Instant,
    gate: AtomicU8,
    interrupted: AtomicBool,
    given_up: AtomicBool,
    bytes_sent: AtomicU64,
    pages_left: AtomicU64,
    progress: Mutex<Kept>,
    changed: Condvar,
}

#[derive(Debug)]
struct Kept {
    progress: Progress,
    version: u64,
    turn: Instant,
    meter: (Instant, u64),
}

impl Monitor {
    /// Begins the monitor of a machine of this name; its clock starts now.
    #[must_use]
    pub fn new(vm: &str) -> Self {
        let began = Instant::now();
        let progress = Progress { vm: vm.into(), ..Progress::default() };
        Self {
            began,
            gate: AtomicU8::new(RUNNING),
            interrupted: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            bytes_sent: AtomicU64::new(0),
            pages_left: AtomicU64::new(0),
            progress: Mutex::new(Kept { progress, version: 0, turn: began, meter: (began, 0) }),
            changed: Condvar::new(),
        }
    }

    /// The time since the request was accepted.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Notes that the migration's turn has come: time limits count from now.
    pub(crate) fn begin(&self) {
        self.lock().turn = Instant::now();
    }

    /// The time since its turn came.
    pub(crate) fn under_way(&self) -> Duration {
        self.lock().turn.elapsed()
    }

    /// Where the migration stands now.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut kept = self.lock();
        let sent = self.bytes_sent.load(Ordering::Relaxed);
        let (since, before) = kept.meter;
        if since.elapsed() >= Duration::from_millis(250) {
            kept.progress.throughput_bytes_per_s = ((sent - before) as f64 / since.elapsed().as_secs_f64()) as u64;
            kept.meter = (Instant::now(), sent);
        }
        let mut progress = kept.progress.clone();
        progress.bytes_on_wire = sent;
        progress.pages_left = self.pages_left.load(Ordering::Relaxed);
        progress.elapsed_ms = self.elapsed().as_secs_f64() * 1e3;
        let sending = matches!(progress.phase, Phase::Precopy | Phase::Postcopy) && progress.waiting_for.is_none();
        progress.remaining_ms = (sending && progress.throughput_bytes_per_s > 0).then(|| {
            progress.pages_left as f64 * 4096e3 / progress.throughput_bytes_per_s as f64
                + progress.predicted_downtime_ms.filter(|_| progress.phase == Phase::Precopy).unwrap_or(0.0)
        });
        progress
    }

    /// Waits until something changes after version `seen`, or for `timeout`; yields the version to pass next time.
    #[must_use]
    pub fn wait(&self, seen: u64, timeout: Duration) -> u64 {
        let kept = self.lock();
        let (kept, _) = self
            .changed
            .wait_timeout_while(kept, timeout, |kept| kept.version == seen)
            .unwrap_or_else(PoisonError::into_inner);
        kept.version
    }

    /// Asks the migration to end. Returns `false` where it is past the point of no return, or has ended.
    pub fn cancel(&self) -> bool {
        self.gate.compare_exchange(RUNNING, CANCELLED, Ordering::AcqRel, Ordering::Acquire) != Err(COMMITTED)
    }

    /// Tells the caller to end its work where the migration was cancelled or nothing is left to move.
    ///
    /// # Errors
    /// [`MigrateError::Cancelled`].
    pub fn check(&self) -> Result<(), MigrateError> {
        let ends = self.gate.load(Ordering::Acquire) == CANCELLED || self.interrupted.load(Ordering::Acquire);
        if ends { Err(MigrateError::Cancelled) } else { Ok(()) }
    }

    /// Ends a migration that is past the point of no return and waits for its destination: the guest there loses the
    /// pages that are still here. Only a user who knows that asks for it.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.update(|_| {});
    }

    /// Whether [`give_up`](Self::give_up) was called.
    pub(crate) fn given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Ends the work of other threads for this migration at their next [`check`](Self::check). The caller keeps the
    /// reason.
    pub(crate) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
    }

    /// Passes the point of no return: from now on the migration cannot be cancelled.
    ///
    /// # Errors
    /// [`MigrateError::Cancelled`] where the migration was cancelled before.
    pub(crate) fn commit(&self) -> Result<(), MigrateError> {
        match self.gate.compare_exchange(RUNNING, COMMITTED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(_) => Err(MigrateError::Cancelled),
        }
    }

    /// Changes what others see.
    pub fn update(&self, change: impl FnOnce(&mut Progress)) {
        let mut kept = self.lock();
        change(&mut kept.progress);
        kept.version += 1;
        self.changed.notify_all();
    }

    /// Enters a phase.
    pub fn enter(&self, phase: Phase) {
        tracing::debug!(?phase, "phase");
        self.update(|progress| progress.phase = phase);
    }

    /// Begins a round of this many pages.
    pub(crate) fn begin_round(&self, round: u32, pages: u64) {
        self.pages_left.store(pages, Ordering::Relaxed);
        self.update(|progress| (progress.round, progress.round_pages) = (round, pages));
    }

    /// Notes how many pages of the round are done, and how many bytes were sent.
    pub(crate) fn sent(&self, pages: u64, bytes: u64) {
        self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
        let _ =
            self.pages_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(pages)));
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancelling_and_committing_exclude_each_other() {
        let first = Monitor::new("vm");
        assert!(first.cancel());
        assert!(first.commit().is_err());
        assert!(first.cancel(), "cancelling twice is no error");
        let second = Monitor::new("vm");
        assert!(second.commit().is_ok());
        assert!(!second.cancel());
        assert!(second.check().is_ok());
    }
}
