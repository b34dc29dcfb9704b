//! The compressor's level in use, and the waits by which it is chosen.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::options::Compress;

use super::compress::Method;
use super::level::{Chooser, Window};

/// The shortest window that is judged: some tens of chunks.
const WINDOW: Duration = Duration::from_millis(50);

/// The meter of waits. It chooses the level where the options name none.
#[derive(Debug)]
pub struct Meter {
    ladder: Vec<Method>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    chooser: Chooser,
    /// The window so far. Times are sums over threads here, and only time within rounds counts.
    window: Window,
    since: Instant,
    encoders: u32,
    senders: u32,
}

impl Meter {
    /// A meter for a compressor and its level, where the options name one.
    #[must_use]
    pub fn new(compress: Compress, level: Option<i32>) -> Self {
        let (ladder, first) = match (compress, level) {
            (Compress::Off, _) => (vec![Method::Plain], 0),
            (Compress::Lz4, _) => (vec![Method::Plain, Method::Lz4], 1),
            (Compress::Zstd, Some(level)) => (vec![Method::Zstd(level)], 0),
            (Compress::Zstd, None) => {
                let levels = [-5, -1, 1, 3, 6].map(Method::Zstd);
                (std::iter::once(Method::Plain).chain(levels).collect(), 2)
            }
        };
        let chooser = Chooser::new(ladder.len(), first);
        let state = State { chooser, window: Window::default(), since: Instant::now(), encoders: 1, senders: 1 };
        Self { ladder, state: Mutex::new(state) }
    }

    /// The method to compress with now.
    #[must_use]
    pub fn method(&self) -> Method {
        self.ladder[self.lock().chooser.step()]
    }

    /// Notes the beginning of a round with this many threads.
    pub fn round_begins(&self, encoders: usize, senders: usize) {
        let mut state = self.lock();
        (state.since, state.encoders, state.senders) = (Instant::now(), encoders.max(1) as u32, senders.max(1) as u32);
    }

    /// Notes the end of a round.
    pub fn round_ends(&self) {
        let mut state = self.lock();
        let now = Instant::now();
        let length = now - state.since;
        state.window.length += length;
        state.since = now;
    }

    /// Notes how many pages a thread encoded, and how long it then waited for room in a queue.
    pub fn encoded(&self, pages: u64, waited: Duration) {
        let mut state = self.lock();
        state.window.pages += pages;
        state.window.encoders_waited += waited;
        let length = state.window.length + state.since.elapsed();
        if length >= WINDOW {
            let seen = Window {
                length,
                pages: state.window.pages,
                senders_waited: state.window.senders_waited / state.senders,
                encoders_waited: state.window.encoders_waited / state.encoders,
            };
            state.chooser.seen(&seen);
            (state.window, state.since) = (Window::default(), Instant::now());
        }
    }

    /// Notes how long a thread that sends waited for a frame.
    pub fn sender_waited(&self, waited: Duration) {
        self.lock().window.senders_waited += waited;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
