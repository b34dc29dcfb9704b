//! Other processes, this host's memory and huge pages.

use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::id;
use sterna_sys::memory::{LimitedBy, room};
use sterna_sys::process::{self, Identity, Pidfd};

mod support;
use support::vmm::Vmm;
use support::{PATIENCE, Ram, ram_file};

/// A child that sleeps, killed and collected when dropped.
struct Sleeper(std::process::Child);

impl Sleeper {
    fn start() -> Self {
        let mut command = Command::new("sleep");
        command.args(["600", "0"]).env("STERNA_TEST", "a=b").stdin(Stdio::null());
        let child = Self(command.spawn().expect("a child"));
        // Its parent goes on while the child is still in its memory (`vfork`), and so shows its arguments and
        // environment; then before the kernel has laid out the child's own arguments, and after them its environment.
        let deadline = Instant::now() + PATIENCE;
        let own = |(name, _): &(_, _)| name == OsStr::new("STERNA_TEST");
        while !process::environ(child.0.id()).expect("it lives").iter().any(own) {
            assert!(Instant::now() < deadline, "a process soon has an environment");
            std::thread::yield_now();
        }
        child
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_is_described_by_its_files() {
    let sleeper = Sleeper::start();
    let pid = sleeper.0.id();
    assert_eq!(process::cmdline(pid).unwrap(), ["sleep", "600", "0"]);
    assert_eq!(process::comm(pid).unwrap(), "sleep");
    let environ = process::environ(pid).unwrap();
    assert!(environ.iter().any(|(name, value)| name == OsStr::new("STERNA_TEST") && value == OsStr::new("a=b")));
    let ours = Identity::of(std::process::id()).unwrap();
    let theirs = Identity::of(pid).unwrap();
    assert!(theirs.start_time >= ours.start_time && theirs.exists());
    let reused = Identity { start_time: theirs.start_time + 1, ..theirs };
    assert!(!reused.exists());
    assert!(process::cpu_time_of(pid).unwrap() < Duration::from_secs(1));
}

#[test]
fn a_process_that_is_gone_is_an_error_everywhere() {
    let sleeper = Sleeper::start();
    let pid = sleeper.0.id();
    let identity = Identity::of(pid).unwrap();
    let pidfd = Pidfd::open(pid).unwrap();
    drop(sleeper);
    assert!(!identity.exists());
    assert!(Pidfd::open(pid).is_err() && Pidfd::open(0).is_err() && Pidfd::open(u32::MAX).is_err());
    assert!(process::cmdline(pid).is_err() && process::maps(pid).is_err() && process::start_time(pid).is_err());
    assert_eq!(pidfd.duplicate(0).unwrap_err().errno(), Some(libc::ESRCH));
    pidfd.kill().expect("that it has ended already is no error");
    assert!(pidfd.ended().unwrap());
}

#[test]
fn waiting_ends_with_the_process_or_with_the_time() {
    let sleeper = Sleeper::start();
    let pidfd = Pidfd::open(sleeper.0.id()).unwrap();
    let start = Instant::now();
    assert!(!pidfd.wait(Duration::from_millis(30)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert!(!pidfd.ended().unwrap());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pidfd.wait(Duration::MAX).unwrap());
        pidfd.terminate().unwrap();
        assert!(waiter.join().unwrap());
    });
    assert!(pidfd.ended().unwrap());
}

#[test]
fn a_descriptor_of_another_process_is_the_same_file() {
    let file = ram_file(1);
    let (vmm, _uffd) = Vmm::start(|| Ram::shared(&file, 1));
    // The process is a copy of this one, descriptors and all.
    let duplicate = vmm.pidfd.duplicate(file.as_raw_fd()).unwrap();
    assert_eq!(id(&duplicate).unwrap(), id(&file).unwrap());
    assert_eq!(vmm.pidfd.duplicate(1 << 20).unwrap_err().errno(), Some(libc::EBADF));
}

#[test]
fn who_maps_a_file_is_found() {
    let file = ram_file(4);
    assert_eq!(process::mappers_of(id(&file).unwrap()).unwrap(), [], "open it may be, mapped it is not");
    let (vmm, _uffd) = Vmm::start(|| Ram::shared(&file, 4));
    let mappers = process::mappers_of(id(&file).unwrap()).unwrap();
    assert_eq!(mappers.iter().map(|mapper| mapper.pid).collect::<Vec<_>>(), [vmm.pid]);
    assert_eq!(mappers[0].comm, process::comm(vmm.pid).unwrap());
    let maps = process::maps(vmm.pid).unwrap();
    let ram = maps.iter().find(|mapping| mapping.file == Some(id(&file).unwrap())).unwrap();
    assert_eq!((ram.range.clone(), ram.offset), (vmm.addresses.clone(), 0));
    assert!(ram.permissions.shared && ram.permissions.write && ram.deleted);
}

#[test]
fn processor_time_runs_with_the_work() {
    // The process first: what this thread works until its own clock is read counts for the process alone.
    let process = process::process_cpu_time();
    let thread = process::thread_cpu_time();
    let start = Instant::now();
    while process::thread_cpu_time() - thread < Duration::from_millis(20) {
        assert!(start.elapsed() < PATIENCE, "this thread works all the time");
    }
    assert!(process::process_cpu_time() - process >= Duration::from_millis(20));
    let usage = process::usage();
    assert!(usage.user + usage.system > Duration::ZERO && usage.minor_faults > 0);
    assert!(usage.resident_most_bytes > 100 * PAGE_BYTES);
}

#[test]
fn room_is_no_more_than_the_host_has() {
    let room = room().unwrap();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total = total.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
    assert!(room.bytes > 0 && room.bytes < total, "{room:?}");
}

/// In a cgroup of its own with a limit, from a process of its own: this one stays where it is.
#[test]
fn room_is_what_a_cgroup_leaves() {
    const LIMIT: u64 = 64 << 20;
    if let Ok(text) = std::env::var("STERNA_TEST_ROOM") {
        let room = room().unwrap();
        println!("\nroom={}", room.bytes);
        assert_eq!(room.limited_by, LimitedBy::Cgroup(text.into()));
        return;
    }
    let Some(cgroup) = limited_cgroup(LIMIT) else { return eprintln!("skipped: no cgroup with a limit can be made") };
    let test = std::env::current_exe().unwrap();
    let shell =
        r#"echo $$ > "$STERNA_TEST_ROOM/cgroup.procs" && exec "$0" --exact room_is_what_a_cgroup_leaves --nocapture"#;
    let output =
        Command::new("sh").args(["-c", shell]).arg(test).env("STERNA_TEST_ROOM", &cgroup).output().expect("a shell");
    let removed = std::fs::remove_dir(&cgroup);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    removed.expect("nobody is left in the cgroup");
    // Where tests run one at a time, as on a single processor, their names stand before what they print.
    let bytes = printed.lines().find_map(|line| line.strip_prefix("room=")?.parse::<u64>().ok()).expect("the room");
    assert!(bytes <= LIMIT && bytes > LIMIT / 2, "{bytes}");
}

fn limited_cgroup(limit: u64) -> Option<std::path::PathBuf> {
    let mounts = sterna_sys::mountinfo::mounts().unwrap();
    let name = format!("sterna-sys-test-{}", std::process::id());
    let make = |mount: &sterna_sys::mountinfo::Mount, file: &str| {
        let directory = mount.point.join(&name);
        std::fs::create_dir(&directory).ok()?;
        if std::fs::write(directory.join(file), limit.to_string()).is_err() {
            let _ = std::fs::remove_dir(&directory);
            return None;
        }
        Some(directory)
    };
    mounts.iter().find_map(|mount| match mount.kind.as_str() {
        "cgroup" if mount.option("memory").is_some() => make(mount, "memory.limit_in_bytes"),
        "cgroup2" => make(mount, "memory.max"),
        _ => None,
    })
}

#[test]
fn huge_page_pools_are_consistent() {
    for pool in sterna_sys::huge::pools().unwrap() {
        assert!(pool.page_bytes.is_power_of_two() && pool.page_bytes > PAGE_BYTES);
        assert!(pool.free <= pool.total && pool.available_bytes() <= pool.free * pool.page_bytes);
    }
}

#[test]
fn a_process_is_spared_where_memory_lacks() {
    let sleeper = Sleeper::start();
    if let Err(error) = process::spare(sleeper.0.id()) {
        return println!("skipped: {error}");
    }
    let kept = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", sleeper.0.id())).unwrap();
    assert_eq!(kept.trim(), "-1000");
    assert!(process::spare(u32::MAX >> 1).is_err(), "nobody is spared");
}
