//! A control group per host: its memory limit, its processor time, and the list of everything it runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::state::make_all;
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::process::ProcessId;

const ROOT: &str = "/sys/fs/cgroup";
/// All labs' groups are below this one.
const PARENT: &str = "sterna-lab";

/// The control group of one host.
#[derive(Debug, Clone)]
pub struct Group {
    version: Version,
    name: PathBuf,
}

/// Which control groups this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// A hierarchy per controller.
    V1,
    /// One hierarchy.
    V2,
}

impl Version {
    fn of_this_machine() -> Self {
        if Path::new(ROOT).join("cgroup.controllers").exists() { Self::V2 } else { Self::V1 }
    }

    /// The paths of the hierarchies in which a host's group is made; memory first.
    fn roots(self) -> Vec<PathBuf> {
        match self {
            Self::V1 => ["memory", "cpuacct"].map(|controller| Path::new(ROOT).join(controller)).to_vec(),
            Self::V2 => vec![PathBuf::from(ROOT)],
        }
    }
}

impl Group {
    /// The group of a host, which need not exist yet.
    #[must_use]
    pub fn of(lab: &str, host: &str) -> Self {
        Self { version: Version::of_this_machine(), name: Path::new(PARENT).join(lab).join(host) }
    }

    /// Makes the group, with a memory limit where one is asked for.
    ///
    /// # Errors
    /// Where the kernel refuses; the message says which file.
    pub fn create(&self, memory_limit_bytes: Option<u64>) -> Result<()> {
        if self.version == Version::V2 {
            self.delegate()?;
        }
        for directory in self.directories() {
            make_all(&directory)?;
        }
        if let Some(limit) = memory_limit_bytes {
            write(&self.limit_file(), &limit.to_string())?;
        }
        Ok(())
    }

    /// Limits its memory until the returned value is dropped.
    ///
    /// # Errors
    /// Where the kernel refuses, perhaps because more is in use.
    pub fn limit(&self, bytes: u64) -> Result<Limit> {
        let file = self.limit_file();
        let before = read(&file)?.trim().to_owned();
        write(&file, &bytes.to_string())?;
        Ok(Limit { file, before })
    }

    fn limit_file(&self) -> PathBuf {
        self.memory().join(match self.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        })
    }

    /// How many of its processes the kernel has killed because they wanted more memory than it may have.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn killed_for_memory(&self) -> Result<u64> {
        self.count(match self.version {
            Version::V1 => ("memory.oom_control", "oom_kill"),
            Version::V2 => ("memory.events", "oom_kill"),
        })
    }

    /// How often its programs wanted more memory than it may have, whatever became of that.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn limit_hits(&self) -> Result<u64> {
        match self.version {
            Version::V1 => self.number("memory.failcnt"),
            Version::V2 => self.count(("memory.events", "max")),
        }
    }

    /// Memory of its programs, bytes: what is no file. A page that several of them map counts once.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn anonymous_bytes(&self) -> Result<u64> {
        self.count(match self.version {
            Version::V1 => ("memory.stat", "rss"),
            Version::V2 => ("memory.stat", "anon"),
        })
    }

    /// Memory that the kernel itself needs for its programs, bytes, such as page tables.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn kernel_bytes(&self) -> Result<u64> {
        match self.version {
            Version::V1 => self.number("memory.kmem.usage_in_bytes"),
            Version::V2 => self.count(("memory.stat", "kernel")),
        }
    }

    /// A line's number in one of its memory controller's files.
    fn count(&self, (file, name): (&str, &str)) -> Result<u64> {
        let file = self.memory().join(file);
        let text = read(&file)?;
        let number = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
        number.ok_or_else(|| Error::Form { what: file.display().to_string(), reason: format!("no {name}") })
    }

    /// The number in one of its memory controller's files.
    fn number(&self, file: &str) -> Result<u64> {
        let file = self.memory().join(file);
        let form = |_| Error::Form { what: file.display().to_string(), reason: "no number".into() };
        read(&file)?.trim().parse().map_err(form)
    }

    /// Enables the controllers in the groups above: in version 2 a controller works in a group only where every group
    /// above passes it on.
    fn delegate(&self) -> Result<()> {
        let mut directory = PathBuf::from(ROOT);
        for part in &self.name {
            write(&directory.join("cgroup.subtree_control"), "+memory +cpu")?;
            directory.push(part);
            make_all(&directory)?;
        }
        Ok(())
    }

    /// The files to which a process writes its id in order to join.
    #[must_use]
    pub fn entrances(&self) -> Vec<PathBuf> {
        self.directories().iter().map(|directory| directory.join("cgroup.procs")).collect()
    }

    /// The processes in it.
    #[must_use]
    pub fn processes(&self) -> Vec<ProcessId> {
        let lists = self.entrances().into_iter().filter_map(|file| std::fs::read_to_string(file).ok());
        let mut ids: Vec<u32> =
            lists.flat_map(|list| list.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().filter_map(ProcessId::of).collect()
    }

    /// Processor time, user and system, of everything that ever ran in it.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn cpu_time(&self) -> Result<Duration> {
        let form = |file: &Path| Error::Form { what: file.display().to_string(), reason: "no processor time".into() };
        match self.version {
            Version::V1 => {
                let file = Path::new(ROOT).join("cpuacct").join(&self.name).join("cpuacct.usage");
                read(&file)?.trim().parse().map(Duration::from_nanos).map_err(|_| form(&file))
            }
            Version::V2 => {
                let file = self.memory().join("cpu.stat");
                let text = read(&file)?;
                let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok());
                usage.map(Duration::from_micros).ok_or_else(|| form(&file))
            }
        }
    }

    /// Memory charged to it now, bytes.
    ///
    /// # Errors
    /// Where the kernel's account cannot be read.
    pub fn memory_bytes(&self) -> Result<u64> {
        self.number(match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        })
    }

    /// Ends everything in it for certain and removes it. A group that does not exist is no error.
    ///
    /// # Errors
    /// Where something in it would not end.
    pub fn remove(&self) -> Result<()> {
        // A process can fork between the look and the signal: look until nobody is left.
        wait_for(&format!("the end of every process in {}", self.name.display()), PATIENCE, || {
            let left = self.processes();
            left.iter().for_each(ProcessId::kill);
            Ok(left.is_empty().then_some(()))
        })?;
        for directory in self.directories().iter().filter(|directory| directory.exists()) {
            // The kernel lets go of the last process a moment after it has ended.
            wait_for(&format!("removal of {}", directory.display()), PATIENCE, || {
                Ok(std::fs::remove_dir(directory).is_ok().then_some(()))
            })?;
        }
        Ok(())
    }

    fn memory(&self) -> PathBuf {
        self.directories().swap_remove(0)
    }

    fn directories(&self) -> Vec<PathBuf> {
        self.version.roots().iter().map(|root| root.join(&self.name)).collect()
    }
}

/// A limit on a group's memory. Dropping it puts the limit before it back.
#[derive(Debug)]
pub struct Limit {
    file: PathBuf,
    before: String,
}

impl Drop for Limit {
    fn drop(&mut self) {
        // A group that is gone needs none.
        if self.file.exists()
            && let Err(error) = write(&self.file, &self.before)
        {
            eprintln!("a limit on memory stays: {error}");
        }
    }
}

/// The groups of a lab that exist.
#[must_use]
pub fn existing(lab: &str) -> Vec<Group> {
    let mut hosts: Vec<String> = parents(lab)
        .iter()
        .filter_map(|directory| std::fs::read_dir(directory).ok())
        .flatten()
        .filter_map(|entry| entry.ok().filter(|entry| entry.path().is_dir())?.file_name().into_string().ok())
        .collect();
    hosts.sort();
    hosts.dedup();
    hosts.iter().map(|host| Group::of(lab, host)).collect()
}

/// Removes every group of a lab, ending what runs in them.
///
/// # Errors
/// Where something would not end.
pub fn remove_all(lab: &str) -> Result<()> {
    existing(lab).iter().try_for_each(Group::remove)?;
    for directory in parents(lab).iter().filter(|directory| directory.exists()) {
        std::fs::remove_dir(directory).context(|| format!("removing {}", directory.display()))?;
        // The group above all labs goes with the last of them.
        if let Some(above) = directory.parent() {
            let _ = std::fs::remove_dir(above);
        }
    }
    Ok(())
}

fn parents(lab: &str) -> Vec<PathBuf> {
    Version::of_this_machine().roots().iter().map(|root| root.join(PARENT).join(lab)).collect()
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).context(|| format!("reading {}", file.display()))
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).context(|| format!("writing {text} to {}", file.display()))
}
