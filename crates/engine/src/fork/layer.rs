//! Pages of a guest's own become a file that others can have: a layer over what the guest's RAM consists of already.
//!
//! The guest does not run. Its own pages are copied into a file, each where it lies in RAM; then the file is mapped in
//! their place. Content stays what it is at each step: a part that is mapped already reads as the one that is not.
//!
//! Pages that are near one another are copied with what lies between them, so that the guest's RAM is in few mappings.
//! How near they must be for that grows with the number of runs: a guest of which every second page is its own becomes
//! one layer without anything of the former ones, and nothing grows from fork to fork.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use sterna_sys::PAGE_BYTES;
use sterna_sys::file::{reader, write_at};
use sterna_sys::map::Access;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::process::ProcessMemory;

use crate::agent::{AddressRange, Agent, MapRun, Sharing};
use crate::error::MigrateError;
use crate::memory::areas::Areas;
use crate::memory::is_zero;

/// The most mappings that RAM may consist of when it is forked. Each clone has as many, and what it discards may cut
/// them up further. The kernel allows 65,530 of a process in all.
pub const MOST_PIECES: usize = 8192;

/// How much is copied at a time, bytes.
const STEP: u64 = 1 << 20;

/// A layer that lies in the place of a guest's own pages.
#[derive(Debug)]
pub struct Layer {
    /// Its file, open for reading only.
    pub file: File,
    /// What was copied, bytes.
    pub bytes: u64,
}

/// Makes a layer of what a process has of its own of the RAM at these addresses, in `file`, which is empty and lies on
/// tmpfs; and puts it in the place of these pages. Nobody writes the file afterwards.
///
/// # Errors
/// The RAM cannot be read, no memory is left, or the agent does not answer. The RAM reads as before.
pub fn lay_over(pid: u32, ram: &[Range<u64>], file: File, agent: &mut Agent) -> Result<Layer, MigrateError> {
    let look = MigrateError::host("looking at the guest's RAM");
    let pagemap = Pagemap::open(pid).map_err(MigrateError::vmm_process("looking at the guest's RAM"))?;
    let areas = Areas::of(pid, ram).map_err(look)?;
    let mut own = Vec::new();
    for block in ram {
        own.extend(
            own_pages(&pagemap, &areas, block.clone()).map_err(MigrateError::host("finding the guest's pages"))?,
        );
    }
    let runs = near_ones_together(&own, ram, MOST_PIECES.saturating_sub(areas.iter().count()).max(1) / 2);
    let copied = copy(pid, ram, &runs, &file).map_err(MigrateError::host("copying the guest's own pages"))?;
    let file = reader(&file).map_err(MigrateError::kernel("opening the layer of the guest's own pages"))?;
    agent.map(file.as_fd(), Sharing::Private, &copied).map_err(|source| MigrateError::Agent {
        doing: "putting a layer in the place of the guest's own pages",
        source: Box::new(source),
    })?;
    Ok(Layer { file, bytes: runs.iter().map(|run| run.end - run.start).sum() })
}

/// The pages among these addresses that are no file's: the process's own, and zeros in the place of a file's page.
fn own_pages(pagemap: &Pagemap, areas: &Areas, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut regions = Vec::new();
    pagemap.with_content(addresses.clone(), &mut regions)?;
    let mut own: Vec<_> = regions.iter().map(Region::range).collect();
    for part in areas.within(addresses) {
        pagemap.scan(part, Scan::of(Categories::ZERO_PAGE), &mut regions)?;
        own.extend(regions.iter().map(Region::range));
    }
    own.sort_unstable_by_key(|range| range.start);
    Ok(own)
}

/// The same pages in at most so many runs, where that can be: runs of one block that are near each other are one.
fn near_ones_together(own: &[Range<u64>], ram: &[Range<u64>], most: usize) -> Vec<Range<u64>> {
    let together = |near: u64| {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for range in own {
            let starts_block = |at: u64| ram.iter().any(|block| block.start == at);
            match runs.last_mut() {
                Some(last) if range.start - last.end <= near && !starts_block(range.start) => last.end = range.end,
                _ => runs.push(range.clone()),
            }
        }
        runs
    };
    let whole = ram.iter().map(|block| block.end - block.start).max().unwrap_or(0);
    let mut near = 0;
    loop {
        let runs = together(near);
        if runs.len() <= most || near >= whole {
            return runs;
        }
        near = (near * 2).max(PAGE_BYTES);
    }
}

/// Copies these runs of a process's RAM into a file, each to where it lies in RAM. What is zero stays a hole.
fn copy(pid: u32, ram: &[Range<u64>], runs: &[Range<u64>], file: &File) -> io::Result<Vec<MapRun>> {
    file.set_len(ram.iter().map(|block| block.end - block.start).sum())?;
    let memory = ProcessMemory::open(pid, Access::Read)?;
    let mut bodies = vec![0; STEP as usize];
    let mut copied = Vec::with_capacity(runs.len());
    for run in runs {
        let offset = offset_in(ram, run.start).ok_or_else(|| io::Error::other("a page outside of RAM"))?;
        for at in (run.start..run.end).step_by(STEP as usize) {
            let bodies = &mut bodies[..(run.end - at).min(STEP) as usize];
            if memory.read(at, bodies)? != bodies.len() {
                return Err(io::Error::other("a page of the guest's cannot be read"));
            }
            write_what_is_not_zero(file, offset + (at - run.start), bodies)?;
        }
        let at = AddressRange { address: run.start, length: run.end - run.start };
        copied.push(MapRun { at, offset });
    }
    Ok(copied)
}

fn write_what_is_not_zero(file: &File, offset: u64, bodies: &[u8]) -> io::Result<()> {
    let (pages, _) = bodies.as_chunks::<{ PAGE_BYTES as usize }>();
    let mut at = 0;
    for alike in pages.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
        if !is_zero(&alike[0]) {
            write_at(file, offset + at, alike.as_flattened())?;
        }
        at += alike.len() as u64 * PAGE_BYTES;
    }
    Ok(())
}

/// Where an address of RAM lies in a file that has all blocks, one behind the other.
fn offset_in(ram: &[Range<u64>], address: u64) -> Option<u64> {
    let mut before = 0;
    for block in ram {
        if block.contains(&address) {
            return Some(before + (address - block.start));
        }
        before += block.end - block.start;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_BYTES;

    fn pages(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        ranges.iter().map(|range| range.start * P..range.end * P).collect()
    }

    #[test]
    fn near_runs_become_one_until_there_are_few_enough_and_never_across_blocks() {
        let ram = pages(&[0..100, 100..200]);
        let own = pages(&[0..1, 2..3, 6..8, 20..30, 98..100, 100..101]);
        let runs = |most| near_ones_together(&own, &ram, most);
        assert_eq!(runs(10), own);
        assert_eq!(runs(5), pages(&[0..3, 6..8, 20..30, 98..100, 100..101]));
        assert_eq!(runs(4), pages(&[0..8, 20..30, 98..100, 100..101]));
        assert_eq!(runs(1), pages(&[0..100, 100..101]), "as few as there are blocks");
        assert_eq!(near_ones_together(&[], &ram, 1), []);
    }

    #[test]
    fn a_layer_has_each_block_behind_the_one_before() {
        let ram = pages(&[10..20, 50..60]);
        assert_eq!(offset_in(&ram, 10 * P), Some(0));
        assert_eq!(offset_in(&ram, 52 * P), Some(12 * P));
        assert_eq!(offset_in(&ram, 20 * P), None);
    }

    #[test]
    fn zeros_take_no_memory_in_a_layer() {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        let page = P as usize;
        let mut bodies = vec![0; 5 * page];
        bodies[page..2 * page].fill(1);
        bodies[4 * page] = 1;
        file.set_len(10 * P).expect("its size");
        write_what_is_not_zero(&file, 2 * P, &bodies).expect("written");
        assert_eq!(sterna_sys::file::allocated_bytes(&file).expect("allocated"), 2 * P);
        let runs: Vec<_> = sterna_sys::file::allocated_runs(&file, 0..10 * P).flatten().collect();
        assert_eq!(runs, pages(&[3..4, 6..7]));
    }
}
