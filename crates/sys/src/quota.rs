//! Less processor time for some threads of a process: a cgroup of their own, below the one they are in, with a CPU
//! quota (kernel's `Documentation/scheduler/sched-bwc.rst`).
//!
//! No record says where a thread came from: our group is a child of the thread's own group, and its name says whose it
//! is. So limits that are set above still hold, and after a crash the threads can be put back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::mountinfo::{self, Mount};

/// The period in which a thread gets its share. It is short, so that the thread pauses often and briefly.
const PERIOD_US: u64 = 20_000;
/// The kernel's least quota.
const LEAST_QUOTA_US: u64 = 1_000;
/// The kernel's longest period.
const LONGEST_PERIOD_US: u64 = 1_000_000;
/// The tries to remove a group that the kernel still holds.
const REMOVALS: u32 = 50;

/// A quota on the processor time of threads of one process. Dropping it ends the quota, as far as possible.
#[derive(Debug)]
pub struct CpuQuota {
    pid: u32,
    groups: BTreeMap<PathBuf, Group>,
}

/// The two generations of cgroups; a host may have the cpu controller in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy for all.
    V2,
}

impl Version {
    /// The file of a group that lists its threads, and by which threads are moved into it.
    fn threads(self) -> &'static str {
        match self {
            Self::V1 => "tasks",
            Self::V2 => "cgroup.threads",
        }
    }
}

/// A group that this quota made.
#[derive(Debug, Clone, Copy)]
struct Group {
    version: Version,
    /// Whether the controller was passed on from the group above because of this one.
    passed_on: bool,
}

/// The place of a thread: its group.
#[derive(Debug)]
struct Place {
    version: Version,
    directory: PathBuf,
}

impl CpuQuota {
    /// A quota for threads of the process `pid`. Nothing is changed yet.
    pub fn of(pid: u32) -> Self {
        Self { pid, groups: BTreeMap::new() }
    }

    /// Tries whether a quota can be set here: makes the groups that these threads would get, with a quota, and removes
    /// them.
    ///
    /// # Errors
    /// The reason why no quota can be set.
    pub fn try_out(&mut self, threads: &[u32]) -> Result<()> {
        let made = self.places(threads).and_then(|places| {
            places.into_iter().try_for_each(|(origin, (version, threads))| {
                let group = self.make(&origin, version)?;
                set_quota(&group, version, room(&origin, version).min(threads.len() as f64))
            })
        });
        let removed = self.lift();
        made.and(removed)
    }

    /// Leaves these threads `percent` of the processor time that they could use, together where they share a group.
    /// Other threads of the process stay as they were, also those that these have started meanwhile. Numbers that are
    /// no threads of the process (any more) are passed over, so nobody can name another process's threads.
    ///
    /// # Errors
    /// The kernel refuses, or none of these is a thread of the process. Some may be limited already.
    pub fn limit(&mut self, threads: &[u32], percent: u8) -> Result<()> {
        let places = self.places(threads)?;
        for (origin, (version, threads)) in &places {
            let group = self.make(origin, *version)?;
            let share = room(origin, *version).min(threads.len() as f64) * f64::from(percent.min(100)) / 100.0;
            set_quota(&group, *version, share)?;
            let inside: BTreeSet<u32> = list(&group, *version)?;
            for thread in threads.difference(&inside) {
                move_to(&group, *version, *thread)?;
            }
        }
        for (group, Group { version, .. }) in &self.groups {
            let Some(origin) = group.parent() else { continue };
            let wanted = places.get(origin).map(|(_, threads)| threads.clone()).unwrap_or_default();
            for thread in list(group, *version)?.difference(&wanted) {
                move_to(origin, *version, *thread)?;
            }
        }
        Ok(())
    }

    /// Takes the limit away at once. The threads stay in their groups, which [`lift`](Self::lift) removes: moving a
    /// thread can take the kernel tens of milliseconds.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn loosen(&mut self) -> Result<()> {
        self.groups.iter().try_for_each(|(group, Group { version, .. })| match version {
            Version::V1 => write(&group.join("cpu.cfs_quota_us"), "-1"),
            Version::V2 => write(&group.join("cpu.max"), "max"),
        })
    }

    /// Ends the limit: threads go back to where they were, and groups are removed. This also removes what an earlier
    /// quota of this process left behind, whoever made it. Finding nothing is no error.
    ///
    /// # Errors
    /// The part that could not be undone; the other parts are undone.
    pub fn lift(&mut self) -> Result<()> {
        let mut result = self.loosen();
        let mut groups = std::mem::take(&mut self.groups);
        for place in self.left_behind() {
            groups.entry(place.directory).or_insert(Group { version: place.version, passed_on: false });
        }
        for (group, about) in groups {
            result = result.and(dissolve(&group, about));
        }
        result
    }

    fn name(&self) -> String {
        format!("sterna-throttle-{}", self.pid)
    }

    /// The threads by the group they are in, or were in before they came into one of ours.
    fn places(&self, threads: &[u32]) -> Result<BTreeMap<PathBuf, (Version, BTreeSet<u32>)>> {
        let mounts = mountinfo::mounts()?;
        let mut places = BTreeMap::new();
        for &thread in threads {
            let place = match place_of(&mounts, format!("/proc/{}/task/{thread}/cgroup", self.pid)) {
                Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::ESRCH)) => continue,
                place => place?,
            };
            let ours = place.directory.file_name().is_some_and(|name| *name == *self.name());
            let origin = match place.directory.parent() {
                Some(above) if ours => above.to_owned(),
                _ => place.directory,
            };
            places.entry(origin).or_insert_with(|| (place.version, BTreeSet::new())).1.insert(thread);
        }
        if places.is_empty() {
            let doing = format!("limit the processor time of process {}", self.pid);
            return Err(Error::malformed(doing, format!("it has none of the threads {threads:?}")));
        }
        Ok(places)
    }

    /// Groups of ours that exist: where threads of the process are, and beside this process, in case the other process
    /// is gone.
    fn left_behind(&self) -> Vec<Place> {
        let Ok(mounts) = mountinfo::mounts() else { return Vec::new() };
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        let mut places: Vec<Place> =
            threads.filter_map(|thread| place_of(&mounts, thread.path().join("cgroup")).ok()).collect();
        if let Ok(own) = place_of(&mounts, "/proc/self/cgroup") {
            places.push(Place { directory: own.directory.join(self.name()), ..own });
        }
        let name = self.name();
        places
            .retain(|place| place.directory.file_name().is_some_and(|file| *file == *name) && place.directory.exists());
        places
    }

    /// Makes our group below `origin`, ready for a quota, or finds it.
    fn make(&mut self, origin: &Path, version: Version) -> Result<PathBuf> {
        let group = origin.join(self.name());
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::new(format!("make the cgroup {}", group.display()), error));
            }
            _ => {}
        }
        let about = self.groups.entry(group.clone()).or_insert(Group { version, passed_on: false });
        if version == Version::V2 {
            let kind = group.join("cgroup.type");
            if read(&kind)?.trim() != "threaded" {
                // Refused where the group above has other groups with processes of their own, or passes on other
                // controllers.
                write(&kind, "threaded")?;
            }
            if !group.join("cpu.max").exists() {
                write(&origin.join("cgroup.subtree_control"), "+cpu")?;
                about.passed_on = true;
            }
        }
        Ok(group)
    }
}

impl Drop for CpuQuota {
    fn drop(&mut self) {
        if !self.groups.is_empty() {
            let _ = self.lift();
        }
    }
}

/// Empties a group of ours into the one above and removes it.
fn dissolve(group: &Path, Group { version, passed_on }: Group) -> Result<()> {
    let Some(origin) = group.parent() else { return Ok(()) };
    for attempt in 1.. {
        // A thread can start another one between the listing and its own move: list again until no thread is left.
        for thread in list(group, version).unwrap_or_default() {
            move_to(origin, version, thread)?;
        }
        match fs::remove_dir(group) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            // The kernel lets go of a thread a moment after it has moved or ended.
            Err(error) if attempt < REMOVALS && error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(Error::new(format!("remove the cgroup {}", group.display()), error)),
        }
    }
    let serves_others = fs::read_dir(origin)
        .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|entry| entry.path().is_dir())));
    if passed_on && !serves_others {
        write(&origin.join("cgroup.subtree_control"), "-cpu")?;
    }
    Ok(())
}

/// Sets a group's quota so that its threads get `share` processors together.
fn set_quota(group: &Path, version: Version, share: f64) -> Result<()> {
    let (quota, period) = quota_and_period(share);
    match version {
        Version::V1 => {
            let file = group.join("cpu.cfs_period_us");
            if read(&file)?.trim() != period.to_string() {
                write(&file, &period.to_string())?;
            }
            write(&group.join("cpu.cfs_quota_us"), &quota.to_string())
        }
        Version::V2 => write(&group.join("cpu.max"), &format!("{quota} {period}")),
    }
}

/// Quota and period, microseconds, that come to `share` processors. The period is longer where the quota would be too
/// small.
fn quota_and_period(share: f64) -> (u64, u64) {
    let share = share.max(LEAST_QUOTA_US as f64 / LONGEST_PERIOD_US as f64);
    let period = PERIOD_US.max((LEAST_QUOTA_US as f64 / share).ceil() as u64).min(LONGEST_PERIOD_US);
    (((share * period as f64) as u64).max(LEAST_QUOTA_US), period)
}

/// The number of processors that a group may use by its own limit and those above; infinite where there is no limit.
fn room(group: &Path, version: Version) -> f64 {
    let limit = |group: &Path| -> Option<f64> {
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|&number| number > 0.0);
        match version {
            Version::V1 => {
                // -1 means no limit.
                let quota = number(&fs::read_to_string(group.join("cpu.cfs_quota_us")).ok()?)?;
                Some(quota / number(&fs::read_to_string(group.join("cpu.cfs_period_us")).ok()?)?)
            }
            Version::V2 => {
                let text = fs::read_to_string(group.join("cpu.max")).ok()?;
                let (quota, period) = text.split_once(' ')?;
                Some(number(quota)? / number(period)?)
            }
        }
    };
    group.ancestors().filter_map(limit).fold(f64::INFINITY, f64::min)
}

/// The threads of a group.
fn list(group: &Path, version: Version) -> Result<BTreeSet<u32>> {
    Ok(read(&group.join(version.threads()))?.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Moves a thread; one that has ended is no error.
fn move_to(group: &Path, version: Version, thread: u32) -> Result<()> {
    match write(&group.join(version.threads()), &thread.to_string()) {
        Err(error) if error.errno() == Some(libc::ESRCH) => Ok(()),
        result => result,
    }
}

/// The place of the cpu controller for the thread or process whose `cgroup` file this is.
fn place_of(mounts: &[Mount], file: impl AsRef<Path>) -> Result<Place> {
    let text = read(file.as_ref())?;
    find(mounts, &text).map_err(|why| Error::malformed("find the cgroup that has the cpu controller", why))
}

/// The directory of the cgroup that `text`, as `/proc/PID/cgroup` has it, names for the cpu controller; or the reason
/// why there is none.
fn find(mounts: &[Mount], text: &str) -> std::result::Result<Place, &'static str> {
    let path_of = |wanted: &dyn Fn(&str, &str) -> bool| {
        text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            wanted(number, controllers).then(|| PathBuf::from(path))
        })
    };
    let (version, path) = match path_of(&|_, controllers| controllers.split(',').any(|controller| controller == "cpu"))
    {
        Some(path) => (Version::V1, path),
        None => match path_of(&|number, controllers| number == "0" && controllers.is_empty()) {
            Some(path) => (Version::V2, path),
            None => return Err("the kernel has none"),
        },
    };
    let mount = mounts
        .iter()
        .rfind(|mount| match version {
            Version::V1 => mount.kind == "cgroup" && mount.option("cpu").is_some(),
            Version::V2 => mount.kind == "cgroup2",
        })
        .ok_or("its hierarchy is not mounted here")?;
    let below = path.strip_prefix(&mount.root).map_err(|_| "the cgroup lies outside of what is mounted here")?;
    if below.components().any(|part| part.as_os_str() == "..") {
        return Err("the cgroup lies outside of this one's namespace");
    }
    Ok(Place { version, directory: mount.point.join(below) })
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).map_err(|error| Error::new(format!("read {}", file.display()), error))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).map_err(|error| Error::new(format!("write {text} to {}", file.display()), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts() -> Vec<Mount> {
        mountinfo::parse(
            b"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
              33 31 0:30 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
              41 31 0:38 /box /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        )
    }

    fn directory(text: &str) -> std::result::Result<(Version, PathBuf), &'static str> {
        find(&mounts(), text).map(|place| (place.version, place.directory))
    }

    #[test]
    fn the_group_is_found_in_the_hierarchy_that_has_the_controller() {
        let old = directory("9:memory:/box\n2:cpu,cpuacct:/guests/one\n0::/box/two\n");
        assert_eq!(old, Ok((Version::V1, "/sys/fs/cgroup/cpu/guests/one".into())));
        let new = directory("9:cpuset:/x\n0::/box/two\n");
        assert_eq!(new, Ok((Version::V2, "/sys/fs/cgroup/unified/two".into())));
    }

    #[test]
    fn a_group_that_cannot_be_reached_is_refused_with_the_reason() {
        assert!(directory("0::/elsewhere\n").unwrap_err().contains("outside"));
        assert!(directory("0::/box/../../other\n").unwrap_err().contains("namespace"));
        assert!(directory("9:memory:/\n").unwrap_err().contains("none"));
        assert!(directory("nonsense").is_err());
        assert!(find(&[], "0::/\n").unwrap_err().contains("not mounted"));
    }

    #[test]
    fn a_quota_is_the_share_asked_for_and_never_below_the_kernels_least() {
        assert_eq!(quota_and_period(0.8), (16_000, 20_000));
        assert_eq!(quota_and_period(3.2), (64_000, 20_000));
        assert_eq!(quota_and_period(0.01), (1_000, 100_000));
        assert_eq!(quota_and_period(0.0), (1_000, 1_000_000));
    }
}
