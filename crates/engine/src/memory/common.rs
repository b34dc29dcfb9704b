//! What guests in private memory have in common: frames that KSM has merged, and files that stand behind their areas.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::FileId;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::process::merged_bytes;

use super::areas::{Area, Areas, without};

/// A guest's RAM in the private memory of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// The process's number.
    pub pid: u32,
    /// Where its RAM is.
    pub addresses: Vec<Range<u64>>,
}

/// How much of a guest's RAM others may have in common with it, bytes: what it takes in addition where it writes all of
/// that.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn common_bytes(guest: &Guest) -> io::Result<u64> {
    let pagemap = Pagemap::open(guest.pid)?;
    // Of a VMM's memory only the guest's RAM may be merged.
    let mut bytes = merged_bytes(guest.pid);
    for area in Areas::of(guest.pid, &guest.addresses)?.iter() {
        bytes += needed_in(&pagemap, area)?.iter().map(|part| part.end - part.start).sum::<u64>();
    }
    Ok(bytes)
}

/// The memory that guests have together, bytes: what several of them have in common counts once.
///
/// # Errors
/// As [`common_bytes`].
pub fn distinct_bytes(guests: &[Guest]) -> io::Result<u64> {
    let (mut own, mut frames) = (0, Vec::new());
    let mut files: HashMap<FileId, Vec<Range<u64>>> = HashMap::new();
    for guest in guests {
        let pagemap = Pagemap::open(guest.pid)?;
        each_frame(&pagemap, guest, |frame| match frame {
            Some(frame) => frames.push(frame),
            None => own += 1,
        })?;
        for area in Areas::of(guest.pid, &guest.addresses)?.iter() {
            let parts = needed_in(&pagemap, area)?;
            files.entry(area.file).or_default().extend(parts.into_iter().map(|part| area.in_file(part)));
        }
    }
    frames.sort_unstable();
    frames.dedup();
    let of_files = files.into_values().map(|mut parts| {
        parts.sort_unstable_by_key(|part| part.start);
        let (mut bytes, mut end) = (0, 0);
        for part in parts {
            bytes += part.end.saturating_sub(part.start.max(end));
            end = end.max(part.end);
        }
        bytes
    });
    Ok((own + frames.len() as u64) * PAGE_BYTES + of_files.sum::<u64>())
}

/// Shows each page of the guest's own: its frame where others may have it, too, `None` where it is the guest's alone.
fn each_frame(pagemap: &Pagemap, guest: &Guest, mut see: impl FnMut(Option<u64>)) -> io::Result<()> {
    let (mut regions, mut entries) = (Vec::new(), Vec::new());
    for addresses in &guest.addresses {
        pagemap.with_content(addresses.clone(), &mut regions)?;
        for region in &regions {
            pagemap.entries(region.range(), &mut entries)?;
            entries.iter().for_each(|entry| see(entry.frame().filter(|_| !entry.exclusive())));
        }
    }
    Ok(())
}

/// The addresses of an area in whose place the process has nothing: neither a page of its own, as a write makes one,
/// nor zeros, as a discard does.
pub(super) fn needed_in(pagemap: &Pagemap, area: &Area) -> io::Result<Vec<Range<u64>>> {
    let mut regions = Vec::new();
    pagemap.with_content(area.addresses.clone(), &mut regions)?;
    let mut replaced: Vec<_> = regions.iter().map(Region::range).collect();
    pagemap.scan(area.addresses.clone(), Scan::of(Categories::ZERO_PAGE), &mut regions)?;
    replaced.extend(regions.iter().map(Region::range));
    replaced.sort_unstable_by_key(|range| range.start);
    Ok(without(std::slice::from_ref(&area.addresses), replaced.into_iter()))
}
