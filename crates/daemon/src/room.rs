//! How much memory this host can still give: the least of free memory, the RAM file system's room and every cgroup's limit.

use std::path::{Path, PathBuf};

/// Bytes that can still be given to guests whose RAM lies on the file system of `ram_dir`.
#[must_use]
pub fn room_bytes(ram_dir: &Path) -> u64 {
    let mut room = available_memory().unwrap_or(u64::MAX);
    if let Ok(fs) = rustix::fs::statvfs(ram_dir) {
        room = room.min(fs.f_bavail.saturating_mul(fs.f_frsize));
    }
    for cgroup in memory_cgroups() {
        if let Some(left) = cgroup_room(&cgroup) {
            room = room.min(left);
        }
    }
    room
}

/// All memory of the host, bytes.
#[must_use]
pub fn total_memory() -> Option<u64> {
    meminfo("MemTotal:")
}

fn available_memory() -> Option<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The memory cgroups this process is in, from its own up to the root, of both versions.
fn memory_cgroups() -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let roots: &[&str] = if controllers.is_empty() {
            &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        } else if controllers.split(',').any(|name| name == "memory") {
            &["/sys/fs/cgroup/memory"]
        } else {
            continue;
        };
        for root in roots {
            let own = Path::new(root).join(path.trim_start_matches('/'));
            found.extend(own.ancestors().take_while(|dir| dir.starts_with(root)).map(PathBuf::from));
        }
    }
    found
}

/// What a cgroup may still use: its limit less its use, the file pages it would give back not counted as used.
fn cgroup_room(dir: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
    let (limit, usage) = match read("memory.max") {
        Some(limit) => (limit, read("memory.current")?),
        None => (read("memory.limit_in_bytes")?, read("memory.usage_in_bytes")?),
    };
    let limit: u64 = limit.trim().parse().ok()?; // "max": no limit
    let usage: u64 = usage.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    // Version 1 counts children only under "total_"; tmpfs pages are "anon" here, so they are not given back.
    let value =
        |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
    let either = |v1: &str, v2: &str| value(v1).or_else(|| value(v2)).unwrap_or(0);
    let reclaimable = either("total_inactive_file", "inactive_file") + either("total_active_file", "active_file");
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_some_room_and_less_than_all_memory() {
        let room = room_bytes(Path::new("/dev/shm"));
        assert!(room > 0 && room <= total_memory().unwrap(), "{room}");
    }

    #[test]
    fn a_cgroups_limit_counts_without_the_files_it_would_give_back() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("memory.max"), "1000\n").unwrap();
        std::fs::write(dir.path().join("memory.current"), "700\n").unwrap();
        std::fs::write(dir.path().join("memory.stat"), "anon 500\ninactive_file 150\nactive_file 50\n").unwrap();
        assert_eq!(cgroup_room(dir.path()), Some(500));
        std::fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(cgroup_room(dir.path()), None);
    }
}
