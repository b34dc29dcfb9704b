//! The census: what hosts hold before and after a test must be the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use sterna_bench::lab::{Host, cgroup, net, state};

use crate::site::files;
use crate::{PATIENCE, Site};

/// What one host holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    /// Programs that run, zombies too, and how many of each.
    pub programs: BTreeMap<String, usize>,
    /// The daemon's descriptors by what they are, and how many of each.
    pub descriptors: BTreeMap<String, usize>,
    /// Descriptors of userfaultfds of the daemon and of QEMU, whose agent keeps one while it is needed.
    pub userfaultfds: usize,
    /// The daemon's threads, without those of its asynchronous runtime's pool, which come with requests and end some
    /// seconds later.
    pub threads: usize,
    /// RAM files and machines' directories.
    pub files: usize,
    /// Network devices.
    pub devices: Vec<String>,
    /// What is mounted below the host's directory.
    pub mounts: Vec<String>,
}

impl Census {
    /// The census of the host with this name.
    ///
    /// # Panics
    /// Where the host has no daemon.
    #[must_use]
    pub fn of(site: &Site, host: &str) -> Self {
        let daemon = site.daemon_at(host);
        let host = site.host(host);
        Self {
            programs: programs(host, daemon),
            descriptors: descriptors(daemon),
            userfaultfds: host.group.processes().iter().map(|process| userfaultfds(process.pid)).sum(),
            threads: threads(daemon),
            files: files(host).len(),
            devices: devices(host),
            mounts: mounts(&host.directory),
        }
    }

    /// The census of the host once it has not changed for a second: what ended a moment ago may take another to go.
    ///
    /// # Panics
    /// Where the host has no daemon.
    #[must_use]
    pub fn settled(site: &Site, host: &str) -> Self {
        let (mut seen, mut since) = (Self::of(site, host), Instant::now());
        while since.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(100));
            let now = Self::of(site, host);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
        }
        seen
    }

    /// Waits until the host holds no more than this.
    ///
    /// Less is no fault: what was about to go when this was taken has gone.
    ///
    /// # Panics
    /// With what the host holds more, where that does not go.
    pub fn is_all_of(&self, site: &Site, host: &str) {
        let since = Instant::now();
        loop {
            let more = Self::of(site, host).beyond(self);
            if more.is_empty() {
                return;
            }
            assert!(since.elapsed() < PATIENCE, "host {host} holds more than it did: {}", more.join(", "));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// What this one has more than another, in words.
    fn beyond(&self, before: &Self) -> Vec<String> {
        let counts = |census: &Self| {
            let numbers = [
                ("userfaultfds", census.userfaultfds),
                ("threads of the daemon", census.threads),
                ("files", census.files),
            ];
            let mut counts: BTreeMap<String, usize> = numbers.map(|(name, count)| (name.to_owned(), count)).into();
            counts.extend(census.programs.iter().map(|(name, count)| (format!("program {name}"), *count)));
            counts.extend(census.descriptors.iter().map(|(name, count)| (format!("descriptor {name}"), *count)));
            let names = census.devices.iter().map(|name| format!("device {name}"));
            counts.extend(names.chain(census.mounts.iter().map(|name| format!("mount {name}"))).map(|name| (name, 1)));
            counts
        };
        let held = counts(before);
        let had = |name: &str| held.get(name).copied().unwrap_or(0);
        let more = counts(self).into_iter().filter(|(name, count)| *count > had(name));
        more.map(|(name, count)| format!("{count} {name} where there were {}", had(&name))).collect()
    }
}

/// Bytes of the files on a host's RAM file system.
#[must_use]
pub fn ram_bytes(host: &Host) -> u64 {
    let usage = nix::sys::statvfs::statvfs(&host.directory.join("state/ram"));
    usage.map_or(0, |usage| (usage.blocks() - usage.blocks_free()) * usage.fragment_size())
}

/// The remains of a lab that is down, in words.
///
/// # Panics
/// Where they cannot be listed.
#[must_use]
pub fn left_of_lab(name: &str) -> Vec<String> {
    let mut left = net::existing(name).expect("a list of namespaces");
    left.extend(cgroup::existing(name).iter().map(|group| format!("{group:?}")));
    left.extend(state::directory(name).exists().then(|| "its directory".into()));
    left.extend(mounts(&state::directory(name)));
    left
}

/// The programs of the control group, and the daemon's children: a zombie is one even when its group forgot it.
fn programs(host: &Host, daemon: u32) -> BTreeMap<String, usize> {
    let mut pids: Vec<u32> = host.group.processes().iter().map(|process| process.pid).collect();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if parent(pid) == Some(daemon) && !pids.contains(&pid) {
            pids.push(pid);
        }
    }
    count(pids.into_iter().map(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default()))
}

fn threads(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("tokio")).count()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The descriptors of a process by name. Numbers in names (`socket:[1234]`, random names of RAM files) differ from time
/// to time and are left out.
fn descriptors(pid: u32) -> BTreeMap<String, usize> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let name = |target: std::path::PathBuf| {
        let text = target.display().to_string();
        text.split(['[', '-']).next().unwrap_or_default().to_owned()
    };
    count(links.filter_map(|entry| std::fs::read_link(entry.path()).ok()).map(name))
}

fn userfaultfds(pid: u32) -> usize {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("[userfaultfd]")).count()
}

fn devices(host: &Host) -> Vec<String> {
    let text = host.output("ip", &["-o", "link", "show"]).unwrap_or_default();
    text.lines().filter_map(|line| line.split(": ").nth(1)).map(str::to_owned).collect()
}

fn mounts(below: &Path) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| Path::new(point).starts_with(below)).map(str::to_owned).collect()
}

fn count(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    names.fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name.trim().to_owned()).or_default() += 1;
        counts
    })
}
