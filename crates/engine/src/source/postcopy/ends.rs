//! The end of a session: the first failure hangs up all its connections, and all threads that wait on one wake.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::MigrateError;
use crate::transport::connection::HangUp;

/// The ends of one session's connections.
#[derive(Debug, Default)]
pub struct Ends {
    ended: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<HangUp>,
    failure: Option<MigrateError>,
    /// Whether a thread has news for the thread that drives.
    woken: bool,
}

impl Ends {
    /// Adds a connection that ends with the rest.
    pub fn add(&self, connection: HangUp) {
        self.lock().connections.push(connection);
    }

    /// Ends the session because of this error. The first of several failures counts; the others are its consequences.
    pub fn fail(&self, error: MigrateError) {
        let mut state = self.lock();
        if !self.has_ended() {
            state.failure = Some(error);
            self.hang_up(state);
        }
    }

    /// From now on the end of a connection is no failure, and the other connections stay: the control connection may
    /// still carry messages.
    pub fn close(&self) {
        let _state = self.lock();
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Ends the session.
    pub fn end(&self) {
        self.hang_up(self.lock());
    }

    /// Whether the session has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The reason why it failed, which is returned once.
    #[must_use]
    pub fn failure(&self) -> Option<MigrateError> {
        self.lock().failure.take()
    }

    /// Wakes the thread that drives.
    pub fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Waits for this long, or until the session ends or [`wake`](Self::wake) is called.
    pub fn wait(&self, time: Duration) {
        let waited = self.changed.wait_timeout_while(self.lock(), time, |state| !state.woken && !self.has_ended());
        waited.unwrap_or_else(PoisonError::into_inner).0.woken = false;
    }

    /// Waits for this long, or until the session ends.
    pub fn wait_quietly(&self, time: Duration) {
        let waited = self.changed.wait_timeout_while(self.lock(), time, |_| !self.has_ended());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn hang_up(&self, state: MutexGuard<'_, State>) {
        self.ended.store(true, Ordering::Release);
        state.connections.iter().for_each(HangUp::now);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
