//! What guests in private memory have in common: frames that KSM has merged, and files that stand behind their areas.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use sterna_protocol::spec::SharedPages;
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

/// What guests have together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Together {
    /// Their memory, bytes: what several of them have in common counts once.
    pub bytes: u64,
    /// What each of them may share, in their order.
    pub shared: Vec<SharedPages>,
}

/// Looks at what guests have together. How their shared pages will lie where they go is told from how they lie here: a
/// body lies where the first page lies that has it.
///
/// # Errors
/// As [`common_bytes`].
pub fn together(guests: &[Guest]) -> io::Result<Together> {
    let (mut own, mut together) = (0, Together::default());
    let mut frames: HashMap<u64, Place> = HashMap::new();
    let mut files: HashMap<FileId, Vec<Range<u64>>> = HashMap::new();
    for (member, guest) in guests.iter().enumerate() {
        let pagemap = Pagemap::open(guest.pid)?;
        let mut runs = Runs::default();
        each_frame(&pagemap, guest, |address, frame| match frame {
            Some(frame) => runs.add(address, frame, *frames.entry(frame).or_insert(Place { member, address })),
            None => own += 1,
        })?;
        let mut shared = SharedPages { pages: runs.pages, mappings: runs.mappings };
        for area in Areas::of(guest.pid, &guest.addresses)?.iter() {
            let parts = needed_in(&pagemap, area)?;
            shared.pages += parts.iter().map(|part| part.end - part.start).sum::<u64>() / PAGE_BYTES;
            shared.mappings += 2 * parts.len() as u64;
            files.entry(area.file).or_default().extend(parts.into_iter().map(|part| area.in_file(part)));
        }
        together.shared.push(shared);
    }
    let of_files = files.into_values().map(|mut parts| {
        parts.sort_unstable_by_key(|part| part.start);
        let (mut bytes, mut end) = (0, 0);
        for part in parts {
            bytes += part.end.saturating_sub(part.start.max(end));
            end = end.max(part.end);
        }
        bytes
    });
    together.bytes = (own + frames.len() as u64) * PAGE_BYTES + of_files.sum::<u64>();
    Ok(together)
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
        let together = together(&[of(&rams[0]), of(&rams[1])]).expect("looked at");
        let shared = |pages, mappings| SharedPages { pages, mappings };
        assert_eq!(together.shared, [shared(12, 2), shared(11, 4)]);
        assert_eq!(together.bytes, 13 * PAGE_BYTES);
    }
}
