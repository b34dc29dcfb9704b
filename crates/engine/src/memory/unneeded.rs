//! Pages of pools that no guest needs any more, and giving them back.
//!
//! A page of a pool is needed by every process that maps it and has nothing in its place: neither a page of its own, as
//! a write makes one, nor zeros, as a discard does. That it is in no page table says nothing: a page that nobody has
//! read yet is in none.
//!
//! # Guests run meanwhile
//! Processes are looked at one after another while their guests write. That is right, because what is not needed never
//! is again:
//! * a page in the place of a pool's page stays. Agents do not let QEMU drop it; they put zeros there
//! * only arrivals map pages of a pool. A pool with arrivals is *held*, which is asked after the first look: one that
//!   is not held then has no arrivals any more, and what it is found to be mapped by after that is all
//! * a request to map that a daemon left unanswered when it died is carried out before its machine has all its pages.
//!   The caller does not ask while a machine waits for pages
//! * a child that a process makes has what its parent has put in the place of pages
//!
//! A process that nobody knows may map a pool, too. So all processes of the host are asked before anything is given
//! back; first those that are known are, because that mostly shows that there is nothing.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;

use rustix::fs::{Mode, Stat};
use sterna_sys::Error;
use sterna_sys::file::{self, FileId, allocated_runs};
use sterna_sys::pagemap::Pagemap;
use sterna_sys::process::{numbers, open_mapped};

use super::areas::{Area, Areas, without};
use super::common::needed_in;

/// The mode that tells a pool's file from any other of root's on its file system: nobody else gives one the sticky bit.
const POOL: Mode = Mode::SVTX.union(Mode::RUSR).union(Mode::WUSR);

/// All addresses of a process.
const EVERYWHERE: &[Range<u64>] = std::slice::from_ref(&(0..u64::MAX));

/// The parts of pools that processes need.
type Needed = HashMap<FileId, Vec<Range<u64>>>;

/// Marks a file as a pool: pages of it may be given back once nobody needs them.
///
/// # Errors
/// The file's mode cannot be changed.
pub fn mark_as_pool(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fchmod(file, POOL)?)
}

/// Marks all files of this device that a process maps privately as pools.
///
/// # Errors
/// The process cannot be looked into, or a file cannot be opened or changed.
pub fn mark_mapped(pid: u32, device: (u32, u32)) -> io::Result<()> {
    let Some(areas) = unless_gone(Areas::of(pid, EVERYWHERE))? else { return Ok(()) };
    let mut marked = HashSet::new();
    for area in areas.iter().filter(|area| area.file.device == device) {
        if marked.insert(area.file)
            && let Some((file, stat)) = open_own(pid, area)?
            && Mode::from_raw_mode(stat.st_mode) != POOL
        {
            mark_as_pool(&file)?;
        }
    }
    Ok(())
}

/// Gives back the pages of pools that no process needs. `known` are the numbers of processes that may map pools of this
/// device; `held` says whether machines on their way may still be given pages of a pool. Returns how much was given
/// back, bytes.
///
/// # Errors
/// A known process cannot be looked into, or a pool cannot be opened: nothing is given back.
pub fn give_back(known: &[u32], device: (u32, u32), held: impl Fn(FileId) -> bool) -> io::Result<u64> {
    let mut pools = pools_of(known, device)?;
    pools.retain(|id, _| !held(*id));
    if pools.is_empty() {
        return Ok(0);
    }
    let mut needed = Needed::new();
    known.iter().try_for_each(|pid| add_needed_by(*pid, &pools, &mut needed))?;
    pools.retain(|id, pool| !unneeded(pool, needed.get(id)).is_empty());
    if pools.is_empty() {
        return Ok(0);
    }
    for pid in numbers()?.into_iter().filter(|pid| !known.contains(pid)) {
        match add_needed_by(pid, &pools, &mut needed) {
            // It is no VMM of this daemon's, and no child of one: it never had a pool.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
            added => added?,
        }
    }
    let mut given_back = 0;
    for (id, pool) in &pools {
        for run in unneeded(pool, needed.get(id)) {
            file::punch(pool, run.clone())?;
            given_back += run.end - run.start;
        }
    }
    Ok(given_back)
}

/// The pools of this device that these processes map, each opened.
///
/// # Errors
/// A process cannot be looked into, or a pool cannot be opened.
pub fn pools_of(pids: &[u32], device: (u32, u32)) -> io::Result<HashMap<FileId, File>> {
    let mut pools: HashMap<FileId, Option<File>> = HashMap::new();
    for &pid in pids {
        let Some(areas) = unless_gone(Areas::of(pid, EVERYWHERE))? else { continue };
        for area in areas.iter().filter(|area| area.file.device == device) {
            if let Entry::Vacant(unknown) = pools.entry(area.file) {
                unknown.insert(open_pool(pid, area)?);
            }
        }
    }
    Ok(pools.into_iter().filter_map(|(id, pool)| Some((id, pool?))).collect())
}

/// The file of this area, if it is a pool and the process maps it still.
fn open_pool(pid: u32, area: &Area) -> io::Result<Option<File>> {
    let own = open_own(pid, area)?.filter(|(_, stat)| Mode::from_raw_mode(stat.st_mode) == POOL);
    Ok(own.map(|(file, _)| file))
}

/// The file of this area and what it is like, if it is this daemon's and the process maps it still.
fn open_own(pid: u32, area: &Area) -> io::Result<Option<(File, Stat)>> {
    let Some(file) = unless_gone(open_mapped(pid, area.addresses.start).map_err(io::Error::from))?.flatten() else {
        return Ok(None);
    };
    let stat = rustix::fs::fstat(&file)?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw() && file::id(&file)? == area.file;
    Ok(ours.then_some((file, stat)))
}

/// Adds the parts of the pools that a process needs.
fn add_needed_by(pid: u32, pools: &HashMap<FileId, File>, needed: &mut Needed) -> io::Result<()> {
    let Some(areas) = unless_gone(Areas::of(pid, EVERYWHERE))? else { return Ok(()) };
    let mut of_pools = areas.iter().filter(|area| pools.contains_key(&area.file)).peekable();
    if of_pools.peek().is_none() {
        return Ok(());
    }
    let Some(pagemap) = unless_gone(Pagemap::open(pid).map_err(io::Error::from))? else { return Ok(()) };
    for area in of_pools {
        let Some(parts) = unless_gone(needed_in(&pagemap, area))? else { break };
        needed.entry(area.file).or_default().extend(parts.into_iter().map(|part| area.in_file(part)));
    }
    Ok(())
}

/// The parts of a pool that take memory and are not needed. Where that cannot be told, none.
fn unneeded(pool: &File, needed: Option<&Vec<Range<u64>>>) -> Vec<Range<u64>> {
    let mut needed = needed.cloned().unwrap_or_default();
    needed.sort_unstable_by_key(|part| part.start);
    let rest = without(std::slice::from_ref(&(0..i64::MAX as u64)), needed.into_iter());
    rest.into_iter().flat_map(|part| allocated_runs(pool, part).flatten()).collect()
}

/// Nothing where a process has ended: then it needs nothing.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    let gone = |error: &io::Error| {
        let number = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).and_then(Error::errno);
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) || number == Some(libc::ESRCH)
    };
    match result {
        Err(error) if gone(&error) => Ok(None),
        result => result.map(Some),
    }
}

#[cfg(test)]
#[path = "unneeded_tests.rs"]
mod tests;
