//! Memory that is promised to what is only being made, and that nothing else shows yet: to a machine before its record,
//! to clones before theirs, to a copy that a fork makes.
//!
//! Who wants memory of this host for a guest asks here, one after the other: what one was promised the next does not
//! find. A promise is this daemon's word and on no record, because what it is for does not outlive the daemon either.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_api::Problem;

/// What is promised, bytes.
#[derive(Debug, Default)]
pub struct Promises(Mutex<u64>);

/// Memory that is somebody's until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Promise {
    of: Arc<Promises>,
    bytes: u64,
}

impl Promises {
    /// Promises so many bytes, where `admit` agrees: it hears how many were promised to others.
    ///
    /// # Errors
    /// What `admit` says.
    pub fn make(
        self: &Arc<Self>,
        bytes: u64,
        admit: impl FnOnce(u64) -> Result<(), Problem>,
    ) -> Result<Promise, Problem> {
        self.beside(|promised| {
            admit(*promised)?;
            *promised = promised.saturating_add(bytes);
            Ok(Promise { of: Arc::clone(self), bytes })
        })
    }

    /// Does what nothing may be promised beside.
    pub fn beside<T>(&self, act: impl FnOnce(&mut u64) -> T) -> T {
        act(&mut self.lock())
    }

    /// What is promised now, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.of.beside(|promised| *promised = promised.saturating_sub(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use sterna_api::{Blame, Code};

    use super::*;

    /// Room for so much, seen by somebody who takes a while to look.
    fn within(room: u64, wanted: u64) -> impl FnOnce(u64) -> Result<(), Problem> {
        move |promised| {
            std::thread::yield_now();
            let full = || Problem::new(Code::OutOfMemory, Blame::Host, "no room");
            if promised + wanted > room { Err(full()) } else { Ok(()) }
        }
    }

    #[test]
    fn of_many_who_ask_at_once_as_many_are_promised_memory_as_there_is_for() {
        let (promises, asked) = (Arc::new(Promises::default()), Barrier::new(8));
        let promised = || {
            asked.wait();
            promises.make(30, within(100, 30))
        };
        let made: Vec<Promise> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..8).map(|_| scope.spawn(promised)).collect();
            asking.into_iter().filter_map(|asking| asking.join().expect("it asks").ok()).collect()
        });
        assert_eq!((made.len(), promises.bytes()), (3, 90));
    }

    #[test]
    fn what_was_promised_is_anybodys_again_when_what_it_was_for_is_there_or_came_to_nothing() {
        let promises = Arc::new(Promises::default());
        let first = promises.make(60, within(100, 60)).expect("there is room");
        assert_eq!(promises.make(60, within(100, 60)).unwrap_err().code, Code::OutOfMemory);
        assert_eq!(promises.bytes(), 60, "who was refused has nothing");
        drop(first);
        let failing = std::panic::catch_unwind(|| {
            let _room = promises.make(60, within(100, 60)).expect("there is room");
            panic!("it comes to nothing");
        });
        assert!(failing.is_err());
        assert_eq!(promises.bytes(), 0);
    }
}
