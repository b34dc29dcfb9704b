//! Memory that this process can still get.
//!
//! Memory that is received into a RAM file is charged to the cgroup of the process that first touches it, which is the
//! daemon. So the room is the least of what the host has and what each limit above this process leaves. It is an
//! estimate, because others take memory at the same time.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::mountinfo::{self, Mount};

/// A cgroup's limit at or above this value means no limit: version 1 shows the largest number of pages that a signed
/// word can count.
const NO_LIMIT: u64 = 1 << 62;

/// What sets the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitedBy {
    /// The host's memory.
    Host,
    /// The memory limit of the cgroup at this path.
    Cgroup(PathBuf),
}

/// Memory that this process can still get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The memory, bytes.
    pub bytes: u64,
    /// The limit that allows no more.
    pub limited_by: LimitedBy,
}

/// Memory that this process can still get, bytes.
///
/// # Errors
/// `/proc` is not mounted or not understood.
pub fn room_bytes() -> Result<u64> {
    Ok(room()?.bytes)
}

/// Memory that this process can still get, and what sets the limit. Swap is not counted.
///
/// # Errors
/// `/proc` is not mounted or not understood.
pub fn room() -> Result<Room> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| Error::new(format!("read {path}"), error));
    let host = parse_available(&read("/proc/meminfo")?)
        .ok_or_else(|| Error::malformed("read /proc/meminfo", "it has no line MemAvailable"))?;
    let cgroups = parse_cgroups(&read("/proc/self/cgroup")?);
    let mut room = Room { bytes: host, limited_by: LimitedBy::Host };
    for mount in mountinfo::mounts()? {
        let Some((version, path)) = own_directory(&mount, &cgroups) else { continue };
        for directory in path.ancestors().take_while(|directory| directory.starts_with(&mount.point)) {
            if let Some(bytes) = room_of(directory, version).filter(|&bytes| bytes < room.bytes) {
                room = Room { bytes, limited_by: LimitedBy::Cgroup(directory.to_owned()) };
            }
        }
    }
    Ok(room)
}

/// `MemAvailable` of `/proc/meminfo`, bytes.
pub fn parse_available(meminfo: &str) -> Option<u64> {
    size_in(meminfo, "MemAvailable")
}

/// The size that the kernel gives under this name, on a line of its own, bytes.
pub(crate) fn size_in(text: &str, name: &str) -> Option<u64> {
    let size = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    size.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

/// The two generations of cgroups; a host may have the memory controller in either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// This process's cgroups that may limit its memory, from `/proc/self/cgroup`.
pub fn parse_cgroups(text: &str) -> Vec<(Version, PathBuf)> {
    let cgroup = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = match controllers {
            "" if number == "0" => Version::V2,
            list if list.split(',').any(|controller| controller == "memory") => Version::V1,
            _ => return None,
        };
        Some((version, PathBuf::from(path)))
    };
    text.lines().filter_map(cgroup).collect()
}

/// The directory of this process's cgroup in the mount's hierarchy, if that hierarchy limits memory. A cgroup that lies
/// outside what is mounted (in a container) is represented by the mount's root.
fn own_directory(mount: &Mount, cgroups: &[(Version, PathBuf)]) -> Option<(Version, PathBuf)> {
    let version = match mount.kind.as_str() {
        "cgroup2" => Version::V2,
        "cgroup" if mount.option("memory").is_some() => Version::V1,
        _ => return None,
    };
    let (_, path) = cgroups.iter().find(|(found, _)| *found == version)?;
    let below = path.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let below = if below.components().any(|part| part.as_os_str() == "..") { Path::new("") } else { below };
    Some((version, mount.point.join(below)))
}

/// What the limit of one cgroup leaves, bytes; `None` where it has none.
fn room_of(directory: &Path, version: Version) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(directory.join(file)).ok();
    let (limit, usage) = match version {
        Version::V1 => (read("memory.limit_in_bytes")?, read("memory.usage_in_bytes")?),
        Version::V2 => (read("memory.max")?, read("memory.current")?),
    };
    parse_room(&limit, &usage, &read("memory.stat").unwrap_or_default(), version)
}

/// What a cgroup's limit leaves, bytes, from the contents of its files; `None` where it has no limit. Cached file pages
/// that were not used lately count as room, because the kernel gives them up first.
pub fn parse_room(limit: &str, usage: &str, stat: &str, version: Version) -> Option<u64> {
    // "max" is no number, and no limit.
    let limit = limit.trim().parse::<u64>().ok().filter(|&limit| limit < NO_LIMIT)?;
    let usage = usage.trim().parse::<u64>().ok()?;
    // Version 1 counts the cgroups below only under the second name.
    let name = match version {
        Version::V1 => "total_inactive_file",
        Version::V2 => "inactive_file",
    };
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(parse_available("MemTotal:  9 kB\nMemAvailable:   12345 kB\n"), Some(12_345 * 1024));
        assert_eq!(parse_available("MemTotal:  9 kB\n"), None);
        assert_eq!(parse_available("MemAvailable: 18446744073709551615 kB"), None, "more than a word counts");
    }

    #[test]
    fn only_cgroups_that_limit_memory_are_kept() {
        let text = "9:name=systemd:/\n4:cpu,memory:/a:b/c\n3:memory_fake:/x\n0::/user.slice\n";
        assert_eq!(
            parse_cgroups(text),
            [(Version::V1, PathBuf::from("/a:b/c")), (Version::V2, PathBuf::from("/user.slice"))]
        );
    }

    #[test]
    fn room_is_the_limit_without_what_cannot_be_reclaimed() {
        let stat = "cache 1\ninactive_file 300\ntotal_inactive_file 500\n";
        assert_eq!(parse_room("1000\n", "900\n", stat, Version::V2), Some(400));
        assert_eq!(parse_room("1000\n", "900\n", stat, Version::V1), Some(600));
        assert_eq!(parse_room("1000\n", "900\n", "", Version::V1), Some(100));
        assert_eq!(parse_room("1000\n", "1100\n", "", Version::V2), Some(0), "the limit was lowered");
        assert_eq!(parse_room("max\n", "900\n", stat, Version::V2), None);
        assert_eq!(parse_room("9223372036854771712\n", "900\n", stat, Version::V1), None);
    }

    #[test]
    fn a_cgroup_outside_the_mount_is_represented_by_its_root() {
        let mount = |root: &str| Mount {
            id: 1,
            device: (0, 1),
            root: root.into(),
            point: "/cg".into(),
            kind: "cgroup2".into(),
            options: "rw".into(),
        };
        let own = |root: &str, path: &str| own_directory(&mount(root), &[(Version::V2, path.into())]).unwrap().1;
        assert_eq!(own("/", "/a/b"), Path::new("/cg/a/b"));
        assert_eq!(own("/a", "/a/b"), Path::new("/cg/b"));
        assert_eq!(own("/x", "/a/b"), Path::new("/cg/"));
        assert_eq!(own("/", "/../up"), Path::new("/cg/"));
    }
}
