//! What guests in private memory have in common: frames that KSM has merged, and files that stand behind their areas.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use sterna_protocol::spec::SharedPages;
use sterna_sys::PAGE_BYTES;
use sterna_sys::file::FileId;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::process::{Anonymous, anonymous, merged_bytes};

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
/// that. A merged page that it has written counts until the kernel looks at it again.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn common_bytes(guest: &Guest) -> io::Result<u64> {
    // Of a VMM's memory only the guest's RAM may be merged.
    Ok(merged_bytes(guest.pid) + of_areas(guest)?)
}

/// The same as it is at this moment, and what the guest's process has for itself, bytes, as far as the kernel says. All
/// of its page tables are gone through.
///
/// # Errors
/// As [`common_bytes`].
pub fn common_now(guest: &Guest) -> io::Result<(u64, Option<u64>)> {
    let Some(Anonymous { own, merged }) = anonymous(guest.pid) else { return Ok((common_bytes(guest)?, None)) };
    Ok((merged + of_areas(guest)?, Some(own)))
}

/// What stands in files behind a guest's areas, and is not replaced.
fn of_areas(guest: &Guest) -> io::Result<u64> {
    let pagemap = Pagemap::open(guest.pid)?;
    let mut bytes = 0;
    for area in Areas::of(guest.pid, &guest.addresses)?.iter() {
        bytes += needed_in(&pagemap, area)?.iter().map(|part| part.end - part.start).sum::<u64>();
    }
    Ok(bytes)
}

/// What guests have together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Together {
    /// Their memory, bytes: what several of them have in common counts once.
    pub bytes: u64,
    /// What each of them may share, in their order.
    pub shared: Vec<SharedPages>,
}

/// Looks at what guests have together. How their shared pages will lie where they go is told from how they lie here: a
/// body lies where the first page lies that has it. A guest that cannot be looked at, because its process ends, counts
/// for nothing: it does not come.
#[must_use]
pub fn together(guests: &[Guest]) -> Together {
    let mut seen = Seen::default();
    let shared = guests.iter().enumerate().map(|(member, guest)| {
        seen.add(member, guest).unwrap_or_else(|error| {
            tracing::warn!(pid = guest.pid, %error, "it cannot be told how much memory a guest has in common with others");
            SharedPages::default()
        })
    });
    let shared = shared.collect();
    Together { bytes: seen.bytes(), shared }
}

/// What was seen of guests.
#[derive(Debug, Default)]
struct Seen {
    /// Pages that no other guest can have.
    own: u64,
    /// Where each frame was first seen.
    frames: HashMap<u64, Place>,
    files: HashMap<FileId, Vec<Range<u64>>>,
}

impl Seen {
    /// Adds a guest. Returns what it may share.
    fn add(&mut self, member: usize, guest: &Guest) -> io::Result<SharedPages> {
        let pagemap = Pagemap::open(guest.pid)?;
        let mut runs = Runs::default();
        each_frame(&pagemap, guest, |address, frame| match frame {
            Some(frame) => runs.add(address, frame, *self.frames.entry(frame).or_insert(Place { member, address })),
            None => self.own += 1,
        })?;
        let mut shared = SharedPages { pages: runs.pages, mappings: runs.mappings };
        for area in Areas::of(guest.pid, &guest.addresses)?.iter() {
            let parts = needed_in(&pagemap, area)?;
            shared.pages += parts.iter().map(|part| part.end - part.start).sum::<u64>() / PAGE_BYTES;
            shared.mappings += 2 * parts.len() as u64;
            self.files.entry(area.file).or_default().extend(parts.into_iter().map(|part| area.in_file(part)));
        }
        Ok(shared)
    }

    /// What takes memory of all that, each part once.
    fn bytes(self) -> u64 {
        let of_files = self.files.into_values().map(|mut parts| {
            parts.sort_unstable_by_key(|part| part.start);
            let (mut bytes, mut end) = (0, 0);
            for part in parts {
                bytes += part.end.saturating_sub(part.start.max(end));
                end = end.max(part.end);
            }
            bytes
        });
        (self.own + self.frames.len() as u64) * PAGE_BYTES + of_files.sum::<u64>()
    }
}

/// A page of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Whose it is.
    member: usize,
    address: u64,
}

/// The runs of a guest's shared pages: neighbours whose bodies are neighbours, too.
#[derive(Debug, Default)]
struct Runs {
    pages: u64,
    mappings: u64,
    /// The last page: its address, its frame, and where its body lies.
    last: Option<(u64, u64, Place)>,
}

impl Runs {
    /// Adds a page behind the others.
    fn add(&mut self, address: u64, frame: u64, body: Place) {
        let last = self.last.replace((address, frame, body));
        let behind = last.filter(|(at, ..)| at + PAGE_BYTES == address);
        // Equal neighbours are zeros almost always, and those are not shared where they go.
        if behind.is_some_and(|(_, before, _)| before == frame) {
            return;
        }
        self.pages += 1;
        let follows =
            |(_, _, before): (u64, u64, Place)| Place { address: before.address + PAGE_BYTES, ..before } == body;
        if !behind.is_some_and(follows) {
            self.mappings += if behind.is_some() { 1 } else { 2 };
        }
    }
}

/// Shows each page of the guest's own, with its address: its frame where others may have it, too, `None` where it is
/// the guest's alone.
fn each_frame(pagemap: &Pagemap, guest: &Guest, mut see: impl FnMut(u64, Option<u64>)) -> io::Result<()> {
    let (mut regions, mut entries) = (Vec::new(), Vec::new());
    for addresses in &guest.addresses {
        pagemap.with_content(addresses.clone(), &mut regions)?;
        for region in &regions {
            pagemap.entries(region.range(), &mut entries)?;
            let pages = region.range().step_by(PAGE_BYTES as usize);
            pages.zip(&entries).for_each(|(at, entry)| see(at, entry.frame().filter(|_| !entry.exclusive())));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The pages and mappings of a guest that has these frames at these pages, each of whose bodies lies there.
    fn shared(pages: &[(u64, u64, u64)]) -> (u64, u64) {
        let mut runs = Runs::default();
        for (page, frame, body) in pages {
            runs.add(page * PAGE_BYTES, *frame, Place { member: 0, address: body * PAGE_BYTES });
        }
        (runs.pages, runs.mappings)
    }

    #[test]
    fn neighbours_whose_bodies_are_neighbours_are_one_mapping() {
        let whole: Vec<_> = (0..512).map(|page| (page, 7000 - page, page + 40)).collect();
        assert_eq!(shared(&whole), (512, 2), "one, and what lies before it");
        assert_eq!(shared(&[(0, 1, 0), (1, 2, 9), (2, 3, 10)]), (3, 3));
        assert_eq!(shared(&[(0, 1, 0), (2, 2, 1), (3, 3, 2)]), (3, 4), "the guest has nothing to share at page 1");
    }

    #[test]
    fn what_is_full_of_one_page_is_taken_for_zeros() {
        let zeros: Vec<_> = (0..100).map(|page| (page, 1, 0)).chain([(100, 2, 100), (101, 3, 101)]).collect();
        assert_eq!(shared(&zeros), (3, 3));
    }

    #[test]
    fn of_a_file_the_parts_that_are_still_needed_count() {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(16 * PAGE_BYTES).expect("grown");
        let rams = [(); 2].map(|()| {
            let ram = sterna_sys::map::PrivateMapping::new(16 * PAGE_BYTES).expect("a mapping");
            ram.lay(0, &file, 0..12 * PAGE_BYTES).expect("laid");
            ram
        });
        rams[1].write(5 * PAGE_BYTES, &[1; 4096]);
        let of = |ram: &sterna_sys::map::PrivateMapping| Guest {
            pid: std::process::id(),
            addresses: Vec::from([ram.addresses()]),
        };
        let shared = |pages, mappings| SharedPages { pages, mappings };
        let nobody = Guest { pid: i32::MAX as u32, ..of(&rams[0]) };
        let together = together(&[of(&rams[0]), nobody, of(&rams[1])]);
        assert_eq!(together.shared, [shared(12, 2), SharedPages::default(), shared(11, 4)]);
        assert_eq!(together.bytes, 13 * PAGE_BYTES);
    }
}
