//! The steps in which daemons write down what they do, each of which one can be killed at.
//!
//! A record is written under another name, moved into its place, and then its directory is synced. The kernel asks here
//! before anything in a daemon's state directory is opened (`fanotify(7)`): the file of another name, which is the step
//! *before* the record, and the directory, which is the step *after* it. Whoever is not let go on stands there for as
//! long as a test likes, and can be killed. Nothing in a daemon knows of it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::fcntl::AT_FDCWD;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Site;

/// How often it is looked whether what is done has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Hosts whose daemons can be stopped at each of their steps, until it is dropped.
pub struct Steps {
    shared: Arc<Shared>,
    mounts: Vec<PathBuf>,
    watcher: Option<JoinHandle<()>>,
}

struct Shared {
    fanotify: Fanotify,
    plan: Mutex<Plan>,
    changed: Condvar,
    ended: AtomicBool,
}

/// What becomes of one daemon.
#[derive(Default)]
struct Plan {
    pid: i32,
    /// The steps that it has begun.
    taken: Vec<String>,
    /// At the step of this number it stands still.
    stop: Option<usize>,
    /// The record that it writes.
    record: Option<(PathBuf, String)>,
    held: Option<FanotifyEvent>,
}

impl Steps {
    /// Of the daemons of these hosts, which are started anew.
    ///
    /// # Panics
    /// Where the kernel cannot do it.
    #[must_use]
    pub fn of(site: &mut Site, hosts: &[&str]) -> Self {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC;
        let files = EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC | EventFFlags::O_LARGEFILE;
        let fanotify = Fanotify::init(flags, files).expect("fanotify");
        let (plan, changed, ended) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        let shared = Arc::new(Shared { fanotify, plan, changed, ended });
        let watching = Arc::clone(&shared);
        let watcher = Some(std::thread::spawn(move || watching.watch()));
        let mut steps = Self { shared, mounts: Vec::new(), watcher };
        for host in hosts {
            site.kill_daemon(host);
            steps.watch(&site.host(host).directory.join("state"));
            site.start_daemon(host);
        }
        steps
    }

    /// A mount of its own: so nobody else is asked about, not even the RAM in it.
    fn watch(&mut self, state: &Path) {
        let nothing = None::<&str>;
        mount(Some(state), state, nothing, MsFlags::MS_BIND | MsFlags::MS_REC, nothing).expect("a mount");
        self.mounts.push(state.into());
        let mask = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ONDIR;
        let marks = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT;
        self.shared.fanotify.mark(marks, mask, AT_FDCWD, Some(state)).expect("a mark");
    }

    /// From now on the steps of this daemon are noted, and where `stop` says so it stands still at one: 0 is the first.
    pub fn begin(&self, pid: u32, stop: Option<usize>) {
        let pid = i32::try_from(pid).expect("a process");
        *self.shared.plan() = Plan { pid, stop, ..Plan::default() };
    }

    /// Waits until the daemon stands still, at this step; `None` where what it does `has_ended` before.
    #[must_use]
    pub fn wait(&self, mut has_ended: impl FnMut() -> bool) -> Option<String> {
        loop {
            let plan = self.shared.plan();
            let (plan, _) = self.shared.changed.wait_timeout(plan, LOOK).unwrap_or_else(PoisonError::into_inner);
            if plan.held.is_some() {
                return plan.taken.last().cloned();
            }
            drop(plan);
            if has_ended() {
                return None;
            }
        }
    }

    /// Kills the daemon that stands still with -9: it does nothing more.
    ///
    /// # Panics
    /// Where it does not stand still.
    pub fn kill(&self) {
        let mut plan = self.shared.plan();
        let held = plan.held.take().expect("it stands still");
        kill(Pid::from_raw(plan.pid), Signal::SIGKILL).expect("it is there");
        self.shared.let_go_on(&held);
        *plan = Plan::default();
    }

    /// The steps that the daemon has taken since the beginning; it takes no more that are noted.
    #[must_use]
    pub fn end(&self) -> Vec<String> {
        std::mem::take(&mut *self.shared.plan()).taken
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        if let Some(held) = self.shared.plan().held.take() {
            self.shared.let_go_on(&held);
        }
        // The watcher is asked about that, and sees that this is the end. Nobody is asked from then on.
        if let Some(state) = self.mounts.first() {
            drop(std::fs::read_dir(state));
        }
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
        for state in &self.mounts {
            let _ = umount2(state, MntFlags::MNT_DETACH);
        }
    }
}

impl Shared {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_go_on(&self, event: &FanotifyEvent) {
        if let Some(file) = event.fd() {
            let _ = self.fanotify.write_response(FanotifyResponse::new(file, Response::FAN_ALLOW));
        }
    }

    /// Lets everybody go on but who is to stand still. It opens nothing where it is asked itself.
    fn watch(&self) {
        while let Ok(events) = self.fanotify.read_events() {
            for event in events {
                let mut plan = self.plan();
                if plan.is_to_stop(&event) {
                    plan.held = Some(event);
                    self.changed.notify_all();
                } else {
                    self.let_go_on(&event);
                }
            }
            if self.ended.load(Ordering::Acquire) {
                return;
            }
        }
    }
}

impl Plan {
    fn is_to_stop(&mut self, event: &FanotifyEvent) -> bool {
        if event.pid() != self.pid {
            return false;
        }
        let Some(step) = path_of(event).and_then(|path| self.step(path)) else { return false };
        self.taken.push(step);
        self.held.is_none() && self.stop.is_some_and(|stop| self.taken.len() == stop + 1)
    }

    /// The step that opens this.
    fn step(&mut self, path: PathBuf) -> Option<String> {
        if let Some((_, record)) = self.record.take_if(|(directory, _)| *directory == path) {
            return Some(format!("after {record}"));
        }
        if path.extension()? != "new" {
            return None;
        }
        let (directory, name) = (path.parent()?, path.file_name()?.to_str()?);
        let (of, name) = (directory.file_name()?.to_string_lossy(), name.split('.').next()?);
        // Numbers that are drawn at random are of no use to anybody.
        let record = if name.len() < 20 { format!("{of}/{name}") } else { of.into_owned() };
        self.record = Some((directory.into(), record.clone()));
        Some(format!("before {record}"))
    }
}

fn path_of(event: &FanotifyEvent) -> Option<PathBuf> {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", event.fd()?.as_raw_fd())).ok()
}
