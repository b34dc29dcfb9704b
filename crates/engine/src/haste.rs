//! Haste: while a guest stands still, the threads that bring it on go before all others of their host, so that its
//! pause does not grow with what else wants the processors.
//!
//! These are threads of this daemon, and those of the VMM. Threads that run the guest's processors are among them only
//! while the guest stands still, when they work for the VMM: they load and save their processor, and whoever holds a
//! lock of the VMM's must not wait. A guest never has more than its host gives it. What a VMM's threads had before is
//! found again after a crash (`give_back`).

use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use sterna_sys::precedence::Precedence;
pub use sterna_sys::precedence::give_back;

use crate::vmm::VmmError;

/// How long a pause may be hurried. One that takes longer waits for something else than a processor, and others want
/// theirs.
const LIMIT: Duration = Duration::from_secs(1);

/// Haste that lasts until this is dropped.
#[derive(Debug)]
pub struct Haste(Precedence);

impl Haste {
    /// No haste: no thread goes before others.
    #[must_use]
    pub fn none() -> Self {
        Self(Precedence::none())
    }

    /// The calling thread goes before others, and those that it starts. Without a permission for it there is no haste.
    #[must_use]
    pub fn begin(allowed: bool) -> Self {
        Self::of_those(allowed, |haste| haste.0.this_thread())
    }

    /// Threads of this daemon go before others, for no longer than a pause may be hurried.
    #[must_use]
    pub fn of(crew: &Crew, allowed: bool) -> Self {
        let haste = Self::of_those(allowed, |_| Ok(()));
        haste.limit();
        haste.crew(crew);
        haste
    }

    fn of_those(allowed: bool, raise: impl FnOnce(&Self) -> Result<(), sterna_sys::Error>) -> Self {
        if !allowed {
            return Self::none();
        }
        let begun = Precedence::begin().map(Self).and_then(|haste| raise(&haste).map(|()| haste));
        begun.unwrap_or_else(|error| {
            let reason = std::error::Error::source(&error).map(ToString::to_string);
            tracing::debug!(%error, reason, "a pause is not hurried");
            Self::none()
        })
    }

    /// The threads that a VMM has now go before others, but not those of the guest's processors.
    pub fn vmm(&self, vmm: Option<&VmmThreads>) {
        if let Some(VmmThreads { process, processors }) = vmm {
            // Without a permission, `begin` has said so.
            let _ = self.0.process(*process, |thread| !processors.contains(&thread));
        }
    }

    /// The threads of the guest's processors do, too: the guest stands still.
    pub fn stands_still(&self, vmm: Option<&VmmThreads>) {
        if let Some(VmmThreads { process, processors }) = vmm {
            let _ = self.0.process(*process, |thread| processors.contains(&thread));
        }
    }

    /// The threads of the guest's processors have what they had before: the guest is about to run.
    pub fn runs(&self, vmm: Option<&VmmThreads>) {
        if let Some(VmmThreads { process, processors }) = vmm {
            self.0.release(*process, processors);
        }
    }

    /// Threads of this daemon go before others.
    pub fn crew(&self, crew: &Crew) {
        let threads = crew.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().for_each(|thread| drop(self.0.own(*thread)));
    }

    /// The guest is about to stop, or has stopped: no haste lasts longer than a second from now.
    pub fn limit(&self) {
        self.0.limit(LIMIT);
    }
}

/// What is to be known of a VMM's threads.
#[derive(Debug)]
pub struct VmmThreads {
    process: u32,
    processors: Vec<u32>,
}

impl VmmThreads {
    /// Of the VMM with this process and these threads for the guest's processors. `None` where it does not name them:
    /// then none of its threads is hurried, because nobody knows which are the guest's.
    #[must_use]
    pub fn of(process: Option<u32>, processors: Result<Vec<u32>, VmmError>) -> Option<Self> {
        process.zip(processors.ok()).map(|(process, processors)| Self { process, processors })
    }
}

/// Threads of this daemon that were started before a pause and are needed in it.
#[derive(Debug, Default)]
pub struct Crew(Mutex<Vec<u32>>);

impl Crew {
    /// Starts a thread that is one of them: it is when this returns, however long the thread waits for a processor, so
    /// that whoever gives them haste next has not missed it.
    ///
    /// # Errors
    /// No thread left.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<JoinHandle<T>> {
        let (tell, heard) = mpsc::channel();
        let work = move || {
            let _ = tell.send(sterna_sys::process::this_thread());
            drop(tell);
            work()
        };
        let thread = Builder::new().name(name.into()).spawn(work)?;
        heard.recv().into_iter().for_each(|thread| self.add(thread));
        Ok(thread)
    }

    /// The calling thread is one of them.
    pub fn join(&self) {
        self.add(sterna_sys::process::this_thread());
    }

    fn add(&self, thread: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_was_started_is_one_of_the_crew_before_it_has_done_anything() {
        let (crew, (go, wait)) = (Crew::default(), mpsc::channel::<()>());
        let thread = crew.spawn("one", move || {
            let _ = wait.recv();
            sterna_sys::process::this_thread()
        });
        let known = crew.0.lock().unwrap().clone();
        drop(go);
        assert_eq!(known, [thread.unwrap().join().unwrap()]);
    }

    /// What the kernel schedules a thread of this process by: 0 for a normal one, 2 for one that goes before them.
    fn policy(thread: u32) -> u32 {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        // The 41st field; the name, the second, is in parentheses.
        stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(38).unwrap().parse().unwrap()
    }

    #[test]
    fn a_crew_goes_before_others_as_long_as_its_haste_lasts_and_who_hurries_it_does_not() {
        let (crew, (go, wait)) = (Crew::default(), mpsc::channel::<()>());
        let thread = crew.spawn("one", move || wait.recv()).unwrap();
        let [one] = crew.0.lock().unwrap()[..] else { panic!("one thread was started") };
        let haste = Haste::of(&crew, true);
        if policy(one) == 0 {
            eprintln!("skipped: no thread may have a real-time priority here");
        } else {
            assert_eq!((policy(one), policy(sterna_sys::process::this_thread())), (2, 0));
            drop(haste);
            assert_eq!(policy(one), 0);
            drop(Haste::of(&crew, false));
            assert_eq!(policy(one), 0);
        }
        drop(go);
        assert!(thread.join().unwrap().is_err());
    }
}
