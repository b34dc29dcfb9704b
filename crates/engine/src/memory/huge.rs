//! Huge pages under a guest's shared RAM: huge where it rests, small where its writes are watched.
//!
//! The file of such RAM has folios of 2 MiB, and the VMM maps each by one entry of its page tables. A write to memory
//! that is mapped so counts as 512 written pages. So before its writes are watched, RAM is *mapped small*: the entries
//! go, and come back one for each page. The folios stay as they are, no page is copied, and a write counts as one page
//! (`docs/design/huge-pages.md`).
//!
//! # Races with a guest that runs
//! * It touches memory between two steps: the first step forbids huge mappings, under the lock of the process's memory,
//!   so whatever is mapped afterwards is mapped small.
//! * Somebody makes a huge page of the memory at this moment (the kernel's own thread, or this daemon where the guest
//!   is at rest): the kernel refuses that where huge mappings are forbidden, and looks once more before it maps one.
//! * It writes memory whose entry is being dropped: the page is in the file. The write finds it there again.
//! * It gives memory back that is about to be touched here: a page of zeros comes in the hole's place, which travels
//!   as zeros.
//! * A huge mapping is left all the same, as where memory is locked: then the scan that arms finds it, it is protected
//!   entry by entry (`left_huge`), and whatever was written meanwhile is sent, because nothing has been sent yet. One
//!   that comes later makes tracking coarse there, and loses nothing.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::{self, HugePolicy, Kind};
use sterna_sys::huge::transparent_bytes;
use sterna_sys::map::{Access, SharedMapping};
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::process::ProcessMemory;

use crate::agent::Advice;
use crate::error::MigrateError;
use crate::faults::GuestFaults;

/// How much RAM is unmapped at a time, bytes: a processor of the guest that meets it waits for one fault of each huge
/// page that it touches, and never for all of them.
const PORTION: u64 = 64 << 20;

/// What one fault maps of a huge page on kernels that do not map all of it, bytes.
const FAULT_AROUND: u64 = 16 * PAGE_BYTES;

/// Has these addresses of shared RAM, where pages are small or transparently huge, mapped page by page, and so from now
/// on. Returns how much of it was mapped by huge pages, bytes.
///
/// # Errors
/// The VMM does not answer, or has ended.
pub fn map_small(faults: &GuestFaults, pagemap: &Pagemap, spans: &[Range<u64>]) -> Result<u64, MigrateError> {
    let Some(huge) = transparent_bytes() else { return Ok(0) };
    let pid = {
        let mut inside = faults.inside();
        inside.advise(Advice::NoHugePage, spans)?;
        inside.pid()
    };
    let memory = ProcessMemory::open(pid, Access::Read).map_err(process)?;
    let (mut regions, mut bytes) = (Vec::new(), 0);
    for span in spans {
        let mut at = span.start;
        while at < span.end {
            let end = (at / PORTION + 1).saturating_mul(PORTION).min(span.end);
            pagemap.huge(at..end, &mut regions).map_err(process)?;
            let mapped: Vec<_> = regions.iter().map(Region::range).collect();
            bytes += mapped.iter().map(|range| range.end - range.start).sum::<u64>();
            map_again(faults, pagemap, &memory, &mapped, huge)?;
            at = end;
        }
    }
    Ok(bytes)
}

/// Drops the mappings of these addresses, which are of huge pages, and maps them small.
fn map_again(
    faults: &GuestFaults,
    pagemap: &Pagemap,
    memory: &ProcessMemory,
    ranges: &[Range<u64>],
    huge: u64,
) -> Result<(), MigrateError> {
    if ranges.is_empty() {
        return Ok(());
    }
    // Where memory is locked the kernel refuses: then the huge mappings stay, and are found once it is armed.
    if let Err(error) = faults.inside().advise(Advice::DontNeed, ranges) {
        tracing::debug!(%error, "huge pages stay mapped");
        return Ok(());
    }
    let mut present = Vec::new();
    for range in ranges {
        for start in (range.start..range.end).step_by(huge as usize) {
            let page = start..(start + huge).min(range.end);
            touch(memory, page.start)?;
            pagemap.scan(page.clone(), Scan::of(Categories::PRESENT), &mut present).map_err(process)?;
            if present.iter().map(Region::pages).sum::<u64>() * PAGE_BYTES < page.end - page.start {
                page.step_by(FAULT_AROUND as usize).try_for_each(|at| touch(memory, at))?;
            }
        }
    }
    Ok(())
}

/// Has a page mapped that the file has: pages around it come with it. What cannot be read is mapped when the guest
/// touches it.
fn touch(memory: &ProcessMemory, address: u64) -> Result<(), MigrateError> {
    memory.read(address, &mut [0]).map(drop).map_err(process)
}

/// What of these addresses is mapped by huge pages all the same.
///
/// # Errors
/// The VMM has ended.
pub fn left_huge(pagemap: &Pagemap, spans: &[Range<u64>]) -> Result<Vec<Range<u64>>, MigrateError> {
    let (mut regions, mut left) = (Vec::new(), Vec::new());
    for span in spans {
        pagemap.huge(span.clone(), &mut regions).map_err(process)?;
        left.extend(regions.iter().map(Region::range));
    }
    Ok(left)
}

fn process(error: sterna_sys::Error) -> MigrateError {
    MigrateError::vmm_process("mapping the guest's RAM page by page")(error)
}

/// A mapping of a RAM file through which its memory comes in huge pages: a page that is written to the file by itself
/// is a small one.
#[derive(Debug)]
pub struct HugePages {
    mapping: SharedMapping,
    page_bytes: u64,
    /// Those that were made here.
    made: Mutex<HashSet<u64>>,
}

impl HugePages {
    /// The mapping of the first so many bytes of this file; `None` where its file system makes no huge pages.
    #[must_use]
    pub fn of(file: &File, bytes: u64) -> Option<Self> {
        let page_bytes = transparent_bytes()?;
        let policy = file::backing(file).ok()?.kind;
        if !matches!(policy, Kind::Tmpfs(HugePolicy::Advise | HugePolicy::Always | HugePolicy::WithinSize)) {
            return None;
        }
        // Where any of this fails, the RAM is in small pages.
        let mapping = SharedMapping::new(file, bytes, Access::ReadWrite).ok()?;
        mapping.advise_huge(true).ok()?;
        Some(Self { mapping, page_bytes, made: Mutex::default() })
    }

    /// Has the memory around this offset be a huge page; what is there already stays as it is. How much was taken,
    /// bytes; none where there is no huge page left, or the file has not room for a whole one there.
    pub fn make(&self, offset: u64) -> u64 {
        let start = offset / self.page_bytes * self.page_bytes;
        let end = start + self.page_bytes;
        // Held until it is there: who writes there first would get a small page.
        let mut made = self.made();
        if end > self.mapping.bytes() || made.contains(&start) {
            return 0;
        }
        if let Err(error) = self.mapping.populate_write(start..end) {
            tracing::debug!(%error, "no huge page for a guest that comes");
            return 0;
        }
        made.insert(start);
        self.page_bytes
    }

    /// The huge page around this offset, where it was made here.
    #[must_use]
    pub fn page_at(&self, offset: u64) -> Option<Range<u64>> {
        let start = offset / self.page_bytes * self.page_bytes;
        self.made().contains(&start).then(|| start..start + self.page_bytes)
    }

    fn made(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parts of RAM at these addresses, which this file holds from its start on, that a huge page could map and does
/// not: those of which the file has all.
///
/// # Errors
/// The kernel does not tell, or the process has ended.
pub fn small_pieces(pid: u32, file: &File, span: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let Some(huge) = transparent_bytes() else { return Ok(Vec::new()) };
    let (pagemap, mut regions) = (Pagemap::open(pid)?, Vec::new());
    pagemap.huge(span.clone(), &mut regions)?;
    let mut pieces = Vec::new();
    for run in file::allocated_runs(file, 0..span.end - span.start) {
        let run = run?;
        let whole = run.start.next_multiple_of(huge)..run.end / huge * huge;
        let addresses = whole.step_by(huge as usize).map(|offset| span.start + offset);
        pieces.extend(addresses.map(|at| at..at + huge));
    }
    // Both are sorted.
    let mut mapped = regions.iter().peekable();
    pieces.retain(|piece| {
        while mapped.next_if(|region| region.end <= piece.start).is_some() {}
        mapped.peek().is_none_or(|region| region.start > piece.start)
    });
    Ok(pieces)
}
