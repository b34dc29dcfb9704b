//! Threads that go before all others for a moment: a real-time priority (`SCHED_RR`), given back.
//!
//! Why not a nice value: where the kernel groups processes by session (autogroups, the default of most distributions)
//! or by cgroup, a nice value counts among the threads of that group alone.
//!
//! No record says which threads these are. Only threads of the normal policy are taken, and the kernel keeps a thread's
//! nice value while it has a real-time priority: so what was there is the normal policy with that nice value. And
//! threads of other processes bear a mark that nobody else uses, the lowest priority together with
//! `SCHED_RESET_ON_FORK`: after a crash [`give_back`] finds them by it. The same flag keeps threads that they start
//! from having the priority, too.
//!
//! A thread that never rests would keep others from a processor. So a limit ends it all, by a thread that goes before
//! even these; and the kernel itself leaves normal threads a twentieth (`sched_rt_runtime_us`).

use std::fs;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The lowest real-time priority: above all normal threads, below every thread that somebody gave a priority.
const PRIORITY: libc::c_int = 1;
/// The priority of the thread that ends it.
const ABOVE: libc::c_int = 2;
/// The policy of threads of other processes, and the mark by which they are found again.
const MARKED: libc::c_int = libc::SCHED_RR | linux_raw_sys::general::SCHED_RESET_ON_FORK as libc::c_int;

/// Threads that go before others. Dropped, each has what it had before.
#[derive(Debug)]
pub struct Precedence(Option<Arc<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    raised: Vec<Thread>,
    until: Option<Instant>,
    over: bool,
}

/// A thread of a process. A number that another process's thread has by now is not taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Thread {
    process: u32,
    number: u32,
}

impl Precedence {
    /// Of no threads: all stay as they are.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Of threads that are to be named.
    ///
    /// # Errors
    /// This process can start no thread.
    pub fn begin() -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let watch = move || {
            // Where this is not permitted, the priority is not either, and there is nothing to end.
            let _ = set(0, libc::SCHED_RR, ABOVE);
            theirs.watch();
        };
        let started = std::thread::Builder::new().name("precedence".into()).spawn(watch);
        started.map_err(|error| Error::new("start a thread", error))?;
        Ok(Self(Some(shared)))
    }

    /// The calling thread goes before others, and threads that it starts do so to their end: they must end before this
    /// is dropped.
    ///
    /// # Errors
    /// This process may not give priorities.
    pub fn this_thread(&self) -> Result<()> {
        self.own(crate::process::this_thread())
    }

    /// A thread of this process goes before others.
    ///
    /// # Errors
    /// As [`this_thread`](Self::this_thread).
    pub fn own(&self, number: u32) -> Result<()> {
        self.raise(Thread { process: std::process::id(), number }, libc::SCHED_RR)
    }

    /// The threads that a process has now go before others, those of them that are `chosen`. Threads that they start do
    /// not. The caller knows that the number means that process until this is dropped.
    ///
    /// # Errors
    /// As [`this_thread`](Self::this_thread). A process that has ended has no threads.
    pub fn process(&self, process: u32, chosen: impl Fn(u32) -> bool) -> Result<()> {
        let threads = threads(process).into_iter().filter(|thread| chosen(thread.number));
        threads.map(|thread| self.raise(thread, MARKED)).fold(Ok(()), Result::and)
    }

    /// Threads of a process have what they had before.
    pub fn release(&self, process: u32, threads: &[u32]) {
        let Some(shared) = &self.0 else { return };
        let is_one = |thread: &mut Thread| thread.process == process && threads.contains(&thread.number);
        shared.lock().raised.extract_if(.., is_one).for_each(lower);
    }

    /// All threads have what they had before once so much time has passed from now.
    pub fn limit(&self, time: Duration) {
        if let Some(shared) = &self.0 {
            shared.lock().until = Instant::now().checked_add(time);
            shared.changed.notify_all();
        }
    }

    /// Raises a thread, unless it has a policy that somebody chose.
    fn raise(&self, thread: Thread, policy: libc::c_int) -> Result<()> {
        let Some(shared) = &self.0 else { return Ok(()) };
        let mut state = shared.lock();
        if state.over || policy_of(thread.number) != Some(libc::SCHED_OTHER) {
            return Ok(());
        }
        match set(thread.number, policy, PRIORITY) {
            Ok(()) => state.raised.push(thread),
            Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(Error::new("give a thread a real-time priority", error)),
        }
        Ok(())
    }
}

impl Drop for Precedence {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            shared.end(&mut shared.lock());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it at its limit, or returns when it has ended.
    fn watch(&self) {
        let mut state = self.lock();
        while !state.over {
            let left = state.until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => {
                    self.end(&mut state);
                    // Threads that own threads have started have it, too, and nobody has listed them. Those of another
                    // pause lose it as well: better than one that computes for long and keeps others from a processor.
                    let own = threads(std::process::id()).into_iter();
                    return own.filter(|thread| is_raised(thread.number, libc::SCHED_RR)).for_each(lower);
                }
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn end(&self, state: &mut State) {
        state.over = true;
        state.raised.drain(..).for_each(lower);
        self.changed.notify_all();
    }
}

/// Gives threads of a process what they had before a process that died raised them. Returns how many these were.
pub fn give_back(process: u32) -> usize {
    let raised = threads(process).into_iter().filter(|thread| is_raised(thread.number, MARKED));
    raised.map(lower).count()
}

/// Lowers a thread that still is as it was raised.
fn lower(thread: Thread) {
    let own = thread.process == std::process::id();
    let is_there = || Path::new(&format!("/proc/{}/task/{}", thread.process, thread.number)).exists();
    if is_raised(thread.number, if own { libc::SCHED_RR } else { MARKED }) && is_there() {
        // The flag cannot be taken off without the privilege to give priorities, which a resource limit can replace.
        let kept = libc::SCHED_OTHER | (MARKED & !libc::SCHED_RR);
        let _ = set(thread.number, libc::SCHED_OTHER, 0).or_else(|_| set(thread.number, kept, 0));
    }
}

/// The threads of a process; none where it has ended.
fn threads(process: u32) -> Vec<Thread> {
    let entries = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.map(|number| Thread { process, number }).collect()
}

fn is_raised(thread: u32, policy: libc::c_int) -> bool {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel fills the structure, or fails.
    let read = unsafe { libc::sched_getparam(thread as libc::pid_t, &raw mut parameters) };
    read == 0 && parameters.sched_priority == PRIORITY && policy_of(thread) == Some(policy)
}

/// The policy of a thread, with its flag; `None` where there is no such thread.
fn policy_of(thread: u32) -> Option<libc::c_int> {
    // SAFETY: takes no memory.
    let policy = unsafe { libc::sched_getscheduler(thread as libc::pid_t) };
    (policy >= 0).then_some(policy)
}

/// Sets a thread's policy; 0 is the calling one.
fn set(thread: u32, policy: libc::c_int, priority: libc::c_int) -> rustix::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the structure, which lives until the call has returned.
    match unsafe { libc::sched_setscheduler(thread as libc::pid_t, policy, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .map_or(rustix::io::Errno::INVAL, rustix::io::Errno::from_raw_os_error)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    const NICE: i32 = 19;

    /// A limit that passes ends it for all threads of this process: tests that look at these take turns.
    static TURN: Mutex<()> = Mutex::new(());

    /// A process that waits, with a nice value of its own; ended when dropped.
    struct Waits(Child);

    impl Waits {
        fn start() -> Self {
            let waits = Self(Command::new("sleep").arg("1000").spawn().unwrap());
            // The highest: nobody needs a permission for it.
            rustix::process::setpriority_process(rustix::process::Pid::from_raw(waits.0.id() as i32), NICE).unwrap();
            waits
        }
    }

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn nice(thread: u32) -> i32 {
        let thread = rustix::process::Pid::from_raw(thread as i32);
        rustix::process::getpriority_process(thread).unwrap()
    }

    fn may() -> bool {
        let begun = Precedence::begin().unwrap();
        let may = std::thread::scope(|scope| scope.spawn(|| begun.this_thread().is_ok()).join().unwrap());
        if !may {
            println!("skipped: this process may not give real-time priorities");
        }
        may
    }

    fn wait_until(done: impl Fn() -> bool) {
        while !done() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_process_that_went_before_others_has_its_policy_and_nice_value_back() {
        if !may() {
            return;
        }
        let (one, other) = (Waits::start(), Waits::start());
        let precedence = Precedence::begin().unwrap();
        precedence.process(one.0.id(), |_| true).unwrap();
        precedence.process(other.0.id(), |thread| thread != other.0.id()).unwrap();
        assert!(is_raised(one.0.id(), MARKED));
        assert_eq!(policy_of(other.0.id()), Some(libc::SCHED_OTHER), "it was left out");
        precedence.process(other.0.id(), |_| true).unwrap();
        precedence.release(other.0.id(), &[other.0.id()]);
        assert_eq!((policy_of(other.0.id()), nice(other.0.id())), (Some(libc::SCHED_OTHER), NICE));
        assert!(is_raised(one.0.id(), MARKED), "it was not released");
        drop(precedence);
        assert_eq!((policy_of(one.0.id()), nice(one.0.id())), (Some(libc::SCHED_OTHER), NICE));
    }

    #[test]
    fn the_limit_ends_it_and_whoever_comes_later_is_not_raised() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if !may() {
            return;
        }
        let (early, late) = (Waits::start(), Waits::start());
        let precedence = Precedence::begin().unwrap();
        precedence.process(early.0.id(), |_| true).unwrap();
        precedence.limit(Duration::from_millis(20));
        wait_until(|| policy_of(early.0.id()) == Some(libc::SCHED_OTHER));
        precedence.process(late.0.id(), |_| true).unwrap();
        assert_eq!(policy_of(late.0.id()), Some(libc::SCHED_OTHER));
        // A thread that a raised one has started, and that does not end.
        let own = || {
            let precedence = Precedence::begin().unwrap();
            precedence.this_thread().unwrap();
            let computes = || {
                let raised = policy_of(0);
                precedence.limit(Duration::from_millis(20));
                wait_until(|| policy_of(0) == Some(libc::SCHED_OTHER));
                raised
            };
            std::thread::scope(|scope| scope.spawn(computes).join().unwrap())
        };
        assert_eq!(std::thread::spawn(own).join().unwrap(), Some(libc::SCHED_RR));
    }

    #[test]
    fn what_a_dead_process_raised_is_found_and_given_back() {
        if !may() {
            return;
        }
        let waits = Waits::start();
        let precedence = Precedence::begin().unwrap();
        precedence.process(waits.0.id(), |_| true).unwrap();
        // Nobody gives it back, as where the process has died.
        std::mem::forget(precedence);
        assert_eq!(give_back(waits.0.id()), 1);
        assert_eq!((policy_of(waits.0.id()), nice(waits.0.id())), (Some(libc::SCHED_OTHER), NICE));
        assert_eq!(give_back(waits.0.id()), 0);
    }

    #[test]
    fn a_thread_with_a_policy_of_its_users_choice_is_left_alone() {
        if !may() {
            return;
        }
        let waits = Waits::start();
        for (policy, priority) in [(libc::SCHED_BATCH, 0), (libc::SCHED_FIFO, 5), (libc::SCHED_RR, PRIORITY)] {
            set(waits.0.id(), policy, priority).unwrap();
            let precedence = Precedence::begin().unwrap();
            precedence.process(waits.0.id(), |_| true).unwrap();
            assert_eq!(policy_of(waits.0.id()), Some(policy));
            drop(precedence);
            assert_eq!((policy_of(waits.0.id()), give_back(waits.0.id())), (Some(policy), 0));
        }
    }

    #[test]
    fn own_threads_pass_it_on_and_have_it_no_longer_than_it_lasts() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if !may() {
            return;
        }
        let waiting = || {
            let precedence = Precedence::begin().unwrap();
            precedence.this_thread().unwrap();
            let started = std::thread::scope(|scope| scope.spawn(|| policy_of(0)).join().unwrap());
            let raised = policy_of(0);
            drop(precedence);
            (started, raised, policy_of(0))
        };
        let seen = std::thread::spawn(waiting).join().unwrap();
        assert_eq!(seen, (Some(libc::SCHED_RR), Some(libc::SCHED_RR), Some(libc::SCHED_OTHER)));
        let none = Precedence::none();
        none.this_thread().unwrap();
        assert_eq!(policy_of(0), Some(libc::SCHED_OTHER));
    }
}
