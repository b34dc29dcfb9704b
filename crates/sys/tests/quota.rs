//! Processor time taken from threads of other processes. Needs a cpu controller and root; says what it skips.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_sys::process::{cpu_time_of, thread_cpu_time};
use sterna_sys::quota::CpuQuota;

/// Prints why and returns `true` where no quota can be set.
fn skip(quota: &mut CpuQuota, threads: &[u32]) -> bool {
    let works = quota.try_out(threads);
    if let Err(error) = &works {
        println!("skipped: {error}: {:?}", std::error::Error::source(error).map(ToString::to_string));
    }
    works.is_err()
}

/// A child that does nothing, as fast as it can.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        Self(Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().expect("a child"))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn cgroups(pid: u32, thread: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/cgroup")).expect("the thread lives")
}

/// Directories of a process's quota anywhere in the host's cgroups.
fn left_over(pid: u32) -> Vec<PathBuf> {
    fn look(directory: &Path, name: &str, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if *entry.file_name() == *name {
                    found.push(entry.path());
                }
                look(&entry.path(), name, found);
            }
        }
    }
    let mut found = Vec::new();
    look(Path::new("/sys/fs/cgroup"), &format!("sterna-throttle-{pid}"), &mut found);
    found
}

/// A thread of this process that counts its own processor time.
struct Worker {
    stop: Arc<AtomicBool>,
    id: u32,
    thread: Option<JoinHandle<Duration>>,
}

impl Worker {
    fn start() -> Self {
        let (stop, id) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (stopped, said) = (Arc::clone(&stop), Arc::clone(&id));
        let thread = std::thread::spawn(move || {
            said.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Release);
            while !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            thread_cpu_time()
        });
        while id.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        Self { stop, id: id.load(Ordering::Acquire), thread: Some(thread) }
    }

    fn used(mut self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("it ends")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn threads_that_are_limited_get_their_share_and_others_of_the_process_are_not() {
    let pid = std::process::id();
    let (slow, free) = (Worker::start(), Worker::start());
    let mut quota = CpuQuota::of(pid);
    if skip(&mut quota, &[slow.id]) {
        return;
    }
    assert_eq!(left_over(pid), [""; 0].map(PathBuf::from), "trying out leaves nothing");
    let before = cgroups(pid, slow.id);
    quota.limit(&[slow.id], 10).unwrap();
    assert_ne!(cgroups(pid, slow.id), before);
    assert_eq!(cgroups(pid, free.id), before);
    assert_eq!(cgroups(pid, pid), before, "the first thread stays where it was");
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let (slow_id, took) = (slow.id, began.elapsed());
    let used = slow.used();
    assert!(used < took.mul_f64(0.4), "{used:?} of {took:?} at 10 %");
    // Another one takes its place, as where a virtual processor is plugged.
    quota.limit(&[free.id, slow_id], 50).unwrap();
    assert_ne!(cgroups(pid, free.id), before);
    quota.limit(&[free.id], 30).unwrap();
    quota.loosen().unwrap();
    quota.lift().unwrap();
    assert_eq!(cgroups(pid, free.id), before);
    assert_eq!(left_over(pid).len(), 0);
}

#[test]
fn a_limit_that_is_loosened_limits_no_more() {
    let busy = Busy::start();
    let mut quota = CpuQuota::of(busy.pid());
    if skip(&mut quota, &[busy.pid()]) {
        return;
    }
    // Its share of a processor in about a second.
    let share = || {
        let (began, before) = (Instant::now(), cpu_time_of(busy.pid()).unwrap());
        std::thread::sleep(Duration::from_secs(1));
        (cpu_time_of(busy.pid()).unwrap() - before).as_secs_f64() / began.elapsed().as_secs_f64()
    };
    quota.limit(&[busy.pid()], 1).unwrap();
    let limited = share();
    assert!(limited < 0.15, "{limited:?}");
    quota.loosen().unwrap();
    // It may have to wait for others.
    let most = (0..300).map(|_| share()).find(|loose| *loose > limited * 2.0 && *loose > 0.02);
    assert!(most.is_some(), "{limited:?} limited, and no more afterwards");
}

#[test]
fn what_a_crash_left_behind_is_undone_by_the_next() {
    let mut busy = Busy::start();
    let pid = busy.pid();
    let mut quota = CpuQuota::of(pid);
    if skip(&mut quota, &[pid]) {
        return;
    }
    let before = cgroups(pid, pid);
    quota.limit(&[pid], 50).unwrap();
    std::mem::forget(quota);
    CpuQuota::of(pid).lift().unwrap();
    assert_eq!(cgroups(pid, pid), before);
    assert_eq!(left_over(pid).len(), 0);

    // And where the process is gone, too.
    let mut quota = CpuQuota::of(pid);
    quota.limit(&[pid], 50).unwrap();
    std::mem::forget(quota);
    busy.0.kill().unwrap();
    busy.0.wait().unwrap();
    CpuQuota::of(pid).lift().unwrap();
    assert_eq!(left_over(pid).len(), 0);
}

#[test]
fn threads_of_another_process_are_out_of_reach() {
    let (busy, other) = (Busy::start(), Busy::start());
    let mut quota = CpuQuota::of(busy.pid());
    if skip(&mut quota, &[busy.pid()]) {
        return;
    }
    let before = cgroups(other.pid(), other.pid());
    let refused = quota.limit(&[other.pid()], 50).unwrap_err();
    let reason = std::error::Error::source(&refused).unwrap().to_string();
    assert!(reason.contains(&other.pid().to_string()), "{reason}");
    quota.limit(&[other.pid(), busy.pid()], 50).unwrap();
    assert_eq!(cgroups(other.pid(), other.pid()), before);
    drop(quota);
    assert_eq!(left_over(busy.pid()).len(), 0, "a quota ends when it is dropped");
}
