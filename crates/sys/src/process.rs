//! Other processes: their identity, mappings and end.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use crate::PAGE_BYTES;
use crate::error::{Error, Result};
use crate::file::FileId;
use crate::memory::size_in;

// Waking a thread of this process.
mod interrupt;
// The mappings of a process.
mod maps;
// The open files of a process.
mod files;
// The memory of a process.
mod memory;
// A handle on a process, which never refers to another.
mod pidfd;
// Processor time and faults.
mod usage;

pub use files::{OpenFile, descriptors_of, open_files};
pub use interrupt::interrupt;
pub use maps::{Mapping, Permissions, each_mapping, maps, open_mapped, open_mapping, parse_maps};
pub use memory::ProcessMemory;
pub use pidfd::Pidfd;
pub use usage::{Usage, process_cpu_time, thread_cpu_time, usage};

/// A process, by number and moment of birth: the number alone may be given to another once it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The process's number.
    pub pid: u32,
    /// The time of its start, clock ticks since the host's start.
    pub start_time: u64,
}

impl Identity {
    /// The identity of the process that has this number now.
    ///
    /// # Errors
    /// No such process.
    pub fn of(pid: u32) -> Result<Self> {
        Ok(Self { pid, start_time: start_time(pid)? })
    }

    /// Whether this very process still exists, if only as a zombie.
    pub fn exists(&self) -> bool {
        start_time(self.pid).is_ok_and(|start_time| start_time == self.start_time)
    }
}

/// The time when a process started, clock ticks since the host's start. Together with the number it identifies the
/// process until the host restarts.
///
/// # Errors
/// No such process.
pub fn start_time(pid: u32) -> Result<u64> {
    stat_field(pid, 22)
}

/// Processor time that a process has used, its ended threads included.
///
/// # Errors
/// No such process.
pub fn cpu_time_of(pid: u32) -> Result<Duration> {
    let ticks = stat_field(pid, 14)?.saturating_add(stat_field(pid, 15)?);
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_nanos(
        (u128::from(ticks) * 1_000_000_000 / u128::from(per_second)).try_into().unwrap_or(u64::MAX),
    ))
}

/// Field `number` of `/proc/PID/stat`, counted from 1 as in its manual page, 3 or above.
fn stat_field(pid: u32, number: usize) -> Result<u64> {
    let text = read(pid, "stat")?;
    parse_stat_field(&text, number)
        .ok_or_else(|| Error::malformed(format!("read /proc/{pid}/stat"), format!("it has no field {number}")))
}

fn parse_stat_field(text: &[u8], number: usize) -> Option<u64> {
    // The second field is the name in brackets, and a name may hold brackets and spaces.
    let behind_name = text.iter().rposition(|&byte| byte == b')')? + 1;
    let fields = std::str::from_utf8(&text[behind_name..]).ok()?;
    fields.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

/// Memory of a process that the kernel has merged with other memory (KSM), bytes; 0 where the kernel merges none or
/// does not say (before 6.1).
pub fn merged_bytes(pid: u32) -> u64 {
    let pages = read(pid, "ksm_merging_pages").ok();
    let pages = pages.and_then(|text| std::str::from_utf8(text.trim_ascii()).ok()?.parse::<u64>().ok());
    pages.unwrap_or(0).saturating_mul(PAGE_BYTES)
}

/// A process's anonymous memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anonymous {
    /// What it has for itself, bytes.
    pub own: u64,
    /// What the kernel has merged with other memory (KSM), bytes. A page that is written counts as the process's own at
    /// once; in [`merged_bytes`] it counts as merged until the kernel looks at it again.
    pub merged: u64,
}

/// The anonymous memory of a process as it is mapped now (`smaps_rollup`, proc(5)). All of its page tables are gone
/// through for that. `None` where there is no such process, or the kernel does not say (before 6.7).
pub fn anonymous(pid: u32) -> Option<Anonymous> {
    parse_anonymous(&read(pid, "smaps_rollup").ok()?)
}

fn parse_anonymous(text: &[u8]) -> Option<Anonymous> {
    let text = std::str::from_utf8(text).ok()?;
    let merged = size_in(text, "KSM")?;
    Some(Anonymous { own: size_in(text, "Anonymous")?.saturating_sub(merged), merged })
}

/// Has the kernel end other processes than this one where memory lacks (`oom_score_adj`, proc(5)).
///
/// # Errors
/// No such process, or this one may not (`CAP_SYS_RESOURCE`).
pub fn spare(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    fs::write(&path, "-1000").map_err(|error| Error::new(format!("write {path}"), error))
}

/// The number of the calling thread.
pub fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// A process's arguments, the program's name first. Empty for a kernel thread, a zombie, and for a moment after a
/// process was started. The process can change them.
///
/// # Errors
/// No such process.
pub fn cmdline(pid: u32) -> Result<Vec<OsString>> {
    Ok(strings(&read(pid, "cmdline")?))
}

/// The environment that a process was started with. Empty as [`cmdline`] is.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn environ(pid: u32) -> Result<Vec<(OsString, OsString)>> {
    let pairs = strings(&read(pid, "environ")?).into_iter().filter_map(|entry| {
        let entry = entry.into_vec();
        let equals = entry.iter().position(|&byte| byte == b'=')?;
        Some((OsString::from_vec(entry[..equals].to_vec()), OsString::from_vec(entry[equals + 1..].to_vec())))
    });
    Ok(pairs.collect())
}

/// A process's short name. It is not trustworthy, because the process can change it.
///
/// # Errors
/// No such process.
pub fn comm(pid: u32) -> Result<String> {
    Ok(String::from_utf8_lossy(&read(pid, "comm")?).trim_end_matches('\n').to_owned())
}

fn strings(text: &[u8]) -> Vec<OsString> {
    let Some(text) = text.strip_suffix(b"\0").or((!text.is_empty()).then_some(text)) else { return Vec::new() };
    text.split(|&byte| byte == 0).map(|string| OsString::from_vec(string.to_vec())).collect()
}

fn read(pid: u32, file: &str) -> Result<Vec<u8>> {
    let path = format!("/proc/{pid}/{file}");
    fs::read(&path).map_err(|error| Error::new(format!("read {path}"), error))
}

/// The numbers of all processes that this one can see.
///
/// # Errors
/// `/proc` is not mounted.
pub fn numbers() -> Result<Vec<u32>> {
    let failed = |error| Error::new("list the processes of this host", error);
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/proc").map_err(failed)? {
        numbers.extend(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// A process that maps a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapper {
    /// The process's number.
    pub pid: u32,
    /// Its short name.
    pub comm: String,
}

/// Every process that maps `file`, this one too. A process that ends meanwhile is left out; so is one that this process
/// may not look into.
///
/// # Errors
/// `/proc` is not mounted.
pub fn mappers_of(file: FileId) -> Result<Vec<Mapper>> {
    let mut mappers = Vec::new();
    for pid in numbers()? {
        let Ok(maps) = maps(pid) else { continue };
        if maps.iter().any(|mapping| mapping.file == Some(file)) {
            mappers.push(Mapper { pid, comm: comm(pid).unwrap_or_default() });
        }
    }
    Ok(mappers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_full_of_brackets_does_not_shift_the_fields() {
        let stat = b"4711 (a) b) S 1) R 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 424242 20";
        assert_eq!(parse_stat_field(stat, 4), Some(1));
        assert_eq!(parse_stat_field(stat, 22), Some(424_242));
        assert_eq!(parse_stat_field(stat, 24), None);
        assert_eq!(parse_stat_field(stat, 3), None, "the state is no number");
        assert_eq!(parse_stat_field(b"4711", 22), None);
        assert_eq!(parse_stat_field(b"", 22), None);
    }

    #[test]
    fn memory_that_was_merged_is_told_from_what_is_the_process_s_own() {
        let text = "55d0c000-7ffd rw-p [rollup]\nRss:  900 kB\nPss_Anon: 1 kB\nAnonymous:   512 kB\nKSM:  128 kB\n";
        let anonymous = parse_anonymous(text.as_bytes()).expect("both are there");
        assert_eq!((anonymous.own, anonymous.merged), (384 << 10, 128 << 10));
        let missing = ["", "Anonymous: 5 kB\n", "KSM: 5\nAnonymous: 5 kB\n", "KSM: x kB\nAnonymous: 5 kB\n"];
        assert!(missing.iter().all(|text| parse_anonymous(text.as_bytes()).is_none()));
    }

    #[test]
    fn empty_arguments_are_kept_and_none_are_none() {
        assert_eq!(strings(b"qemu\0\0-S\0"), ["qemu", "", "-S"]);
        assert_eq!(strings(b"qemu"), ["qemu"]);
        assert!(strings(b"").is_empty());
    }
}
