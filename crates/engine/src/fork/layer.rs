//! Pages of a guest's own become a file that others can have: a layer over what the guest's RAM consists of already.
//!
//! They are copied into the file while the guest runs, each to where it lies in RAM, and watched: what the guest writes
//! meanwhile is copied again, in the end with the guest stopped. Then the file is mapped in their place. Content stays
//! what it is at each step: a part that is mapped already reads as the one that is not.
//!
//! Pages that are near one another are copied with what lies between them, so that the guest's RAM is in few mappings:
//! in the pause each costs two calls of the kernel, and every clone maps it again. How near they must be for that grows
//! with the number of runs: a guest of which every second page is its own becomes one layer without anything of the
//! former ones, and nothing grows from fork to fork.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::file::{reader, write_at};
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};

use super::Image;
use crate::agent::{AddressRange, Agent, MapRun};
use crate::error::MigrateError;
use crate::memory::areas::{Areas, content, without};
use crate::memory::runs::runs;
use crate::memory::{Memory, add_run, is_zero};
use crate::source::track::Tracker;
use crate::source::untracked::UntrackedWrites;
use crate::vmm::Untracked;

/// The most mappings that RAM may consist of when it is forked. Each clone has as many, and what it discards may cut
/// them up further. The kernel allows 65,530 of a process in all.
pub const MOST_PIECES: usize = 8192;

/// What is no farther apart is copied together, bytes: to copy so much before the pause is less than a mapping in it.
const NEAR: u64 = 8 * PAGE_BYTES as u64;
/// So few pages are copied in the pause.
const FEW_PAGES: u64 = 256;
/// How often pages are copied while the guest runs, at most.
const ROUNDS: usize = 8;

/// A layer that lies in the place of a guest's own pages.
#[derive(Debug)]
pub struct Layer {
    /// Its file, open for reading only.
    pub file: File,
    /// What lies in it, bytes of RAM.
    pub bytes: u64,
    /// What was copied with the guest stopped, bytes.
    pub late_bytes: u64,
}

/// A layer in the making. Until it is dropped the guest's writes are watched.
pub struct Draft {
    /// The process that has the RAM.
    pid: u32,
    memory: Arc<dyn Memory>,
    tracker: Box<dyn Tracker>,
    pagemap: Pagemap,
    file: File,
    /// Pages that the file has as the guest has them, but for what was written since they were last collected.
    current: PageMap,
    /// Pages of which the file has something that is not a hole.
    kept: PageMap,
    /// What the layer is to have; `None` until the process's page tables were looked at.
    own: Option<Own>,
    /// Runs that another process has mapped of it, by their addresses.
    mapped: Vec<Range<u64>>,
    /// All of RAM is copied, so that it is whole in this file.
    whole: bool,
    /// What is written past the page tables.
    untracked: UntrackedWrites,
}

/// Pages of a guest's own, and how many parts of its RAM files stand behind.
struct Own {
    pages: PageMap,
    areas: usize,
}

impl Draft {
    /// Begins to watch a process's private RAM. The file is empty and lies on tmpfs; nobody else has it. Where somebody
    /// is `untracked`, and not all that he writes is told of, the layer does not become whole.
    ///
    /// # Errors
    /// The kernel or the VMM refuses to watch, or the process cannot be looked into.
    pub fn begin(
        pid: u32,
        memory: Arc<dyn Memory>,
        mut tracker: Box<dyn Tracker>,
        file: File,
        untracked: Untracked,
    ) -> Result<Self, MigrateError> {
        let pagemap = Pagemap::open(pid).map_err(MigrateError::vmm_process("looking at the guest's RAM"))?;
        let bytes = memory.layout().blocks().map(|block| block.bytes).sum();
        file.set_len(bytes).map_err(MigrateError::host("making a file for the guest's own pages"))?;
        tracker.arm(memory.as_ref())?;
        let empty = || PageMap::empty(memory.layout());
        let (current, kept) = (empty(), empty());
        let mut untracked = UntrackedWrites::by(untracked, memory.layout());
        // Nothing is copied yet.
        untracked.landed(memory.as_ref(), tracker.as_mut())?;
        let (own, mapped, whole) = (None, Vec::new(), false);
        Ok(Self { pid, memory, tracker, pagemap, file, current, kept, own, mapped, whole, untracked })
    }

    /// Copies all of RAM, and not only the guest's own pages. Once it is laid over, the file is the guest's RAM, whole,
    /// block by block.
    #[must_use]
    pub fn whole(self) -> Self {
        Self { whole: true, ..self }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Copies the guest's own pages while it runs, until few are left that it has written since, or it writes them as
    /// fast as they are copied.
    ///
    /// # Errors
    /// The RAM cannot be read, or no memory is left.
    pub fn copy_ahead(&mut self) -> Result<(), MigrateError> {
        let mut before = u64::MAX;
        for _ in 0..ROUNDS {
            let runs = self.runs()?;
            let copied = self.copy(&runs)?;
            tracing::debug!(pages = copied, runs = runs.len(), "copied ahead of the fork");
            if copied <= FEW_PAGES || copied > before / 4 * 3 {
                break;
            }
            before = copied;
        }
        Ok(())
    }

    /// Puts the layer in the place of the guest's own pages. The guest does not run, and nothing in the VMM uses its
    /// RAM. Nobody writes the file any more.
    ///
    /// # Errors
    /// As [`copy_ahead`](Self::copy_ahead), or the agent does not answer. The RAM reads as before.
    pub fn lay_over(&mut self, agent: &mut Agent) -> Result<Layer, MigrateError> {
        let (layer, runs) = self.finish()?;
        agent.map_over(layer.file.as_fd(), &self.placed(&runs)).map_err(|source| MigrateError::Agent {
            doing: "putting a layer in the place of the guest's own pages",
            source: Box::new(source),
        })?;
        Ok(layer)
    }

    /// What the guest's RAM is so far, with the layer, for another process to map before the pause. It must not touch
    /// it until it has [the rest](Self::rest): the layer is still written.
    ///
    /// While the RAM is watched, nothing changes what lies under the layer. What is mapped now stays part of the layer,
    /// so that it is copied again where the guest writes it.
    ///
    /// # Errors
    /// As [`copy_ahead`](Self::copy_ahead).
    pub fn ahead(&mut self) -> Result<Image, MigrateError> {
        let runs = self.runs()?;
        self.copy(&runs)?;
        let pages = self.pages(&runs);
        if let Some(own) = &mut self.own {
            own.pages.add(&pages);
        }
        self.mapped = in_order(&runs);
        self.image_of(&self.file, &self.placed(&runs))
    }

    /// What the guest's RAM is, with the layer, beyond what was mapped [ahead](Self::ahead). The process goes on with
    /// its own pages. The guest does not run, and nothing in the VMM uses its RAM. Nobody writes the file any more.
    ///
    /// # Errors
    /// As [`copy_ahead`](Self::copy_ahead).
    pub fn rest(&mut self) -> Result<(Image, Layer), MigrateError> {
        let (layer, runs) = self.finish()?;
        let rest = without(&in_order(&runs), self.mapped.iter().cloned());
        let image = self.image_of(&layer.file, &self.placed(&rest))?;
        Ok((if self.mapped.is_empty() { image } else { image.without_what_is_under() }, layer))
    }

    fn image_of(&self, layer: &File, placed: &[MapRun]) -> Result<Image, MigrateError> {
        let image = Image::under(self.pid, &self.memory.spans(), layer, placed);
        image.map_err(MigrateError::host("looking at the guest's RAM"))
    }

    /// Copies the last pages. The layer is whole, and is what these runs of RAM are.
    fn finish(&mut self) -> Result<(Layer, Vec<Range<u64>>), MigrateError> {
        let runs = self.runs()?;
        if !self.untracked.all_told() {
            return Err(MigrateError::UntoldReads);
        }
        tracing::debug!(runs = runs.len(), "what was written last is known");
        let late_bytes = self.copy(&runs)? * PAGE_BYTES as u64;
        tracing::debug!(late_bytes, "the layer is whole");
        let again = || reader(&self.file).map_err(MigrateError::kernel("opening the layer of the guest's own pages"));
        let (file, own) = (again()?, again()?);
        // The one that could be written goes.
        self.file = own;
        Ok((Layer { file, bytes: runs.iter().map(|run| run.end - run.start).sum(), late_bytes }, runs))
    }

    /// The runs of RAM that the layer is to have, as it is now; what was written before is no longer current.
    ///
    /// The page tables are looked at once, which takes the longer the more RAM there is. From then on a page becomes
    /// the guest's own only by a write, and a page of zeros comes in a file's place only where something was discarded.
    /// Both are collected. The writes are collected before the look: what becomes the guest's own after the look was
    /// written after that, and is collected the next time. A page that was discarded since stays in a run: it is copied
    /// as zeros.
    fn runs(&mut self) -> Result<Vec<Range<u64>>, MigrateError> {
        let layout = self.memory.layout();
        let (mut written, mut discarded) = (PageMap::empty(layout), PageMap::empty(layout));
        self.tracker.collect(self.memory.as_ref(), &mut written, &mut discarded)?;
        written.add(&self.untracked.landed(self.memory.as_ref(), self.tracker.as_mut())?);
        self.current.take_out(&written);
        let mut own = match self.own.take() {
            Some(own) => own,
            None => self.look().map_err(MigrateError::host("finding the guest's own pages"))?,
        };
        own.pages.add(&written);
        let ram = self.memory.spans();
        let places = own.pages.iter().flat_map(|(chunk, pages)| runs(layout, chunk, pages));
        let ranges: Vec<_> = places.map(|run| run.at(ram[run.block].start)).collect();
        let runs = near_ones_together(&ranges, &ram, NEAR, MOST_PIECES.saturating_sub(own.areas).max(1) / 2);
        self.own = Some(own);
        Ok(runs)
    }

    /// The pages that the layer is to have, by the page tables of the guest's process.
    fn look(&self) -> io::Result<Own> {
        let ram = self.memory.spans();
        // While the RAM is watched, nothing makes an area smaller.
        let areas = Areas::of(self.pid, &ram)?;
        let mut pages = PageMap::empty(self.memory.layout());
        for (block, span) in ram.iter().enumerate() {
            let pages_there = match self.whole {
                true => content(&self.pagemap, &areas, span.clone())?,
                false => own_pages(&self.pagemap, &areas, span.clone())?,
            };
            for own in pages_there {
                add_run(&mut pages, self.memory.layout(), block, own.start - span.start..own.end - span.start);
            }
        }
        Ok(Own { pages, areas: areas.iter().count() })
    }

    /// The pages of these runs.
    fn pages(&self, runs: &[Range<u64>]) -> PageMap {
        let mut pages = PageMap::empty(self.memory.layout());
        for (block, span) in self.memory.spans().into_iter().enumerate() {
            for run in runs.iter().filter(|run| span.contains(&run.start)) {
                add_run(&mut pages, self.memory.layout(), block, run.start - span.start..run.end - span.start);
            }
        }
        pages
    }

    /// Copies those pages of these runs that are not current. Returns how many.
    fn copy(&mut self, runs: &[Range<u64>]) -> Result<u64, MigrateError> {
        let mut wanted = self.pages(runs);
        if self.whole {
            // What was copied and has no content any more becomes zeros.
            wanted.add(&self.kept);
        }
        wanted.take_out(&self.current);
        let mut bodies = vec![0; CHUNK_BYTES];
        let mut copy = || -> io::Result<()> {
            for (chunk, pages) in wanted.iter().filter(|(_, pages)| !pages.is_empty()) {
                let bodies = &mut bodies[..pages.len() * PAGE_BYTES];
                self.memory.read(chunk, pages, bodies)?;
                self.keep(chunk, pages, bodies)?;
            }
            // RAM that was taken away has no content.
            self.memory.intact()
        };
        copy().map_err(MigrateError::host("copying the guest's own pages"))?;
        self.current.add(&wanted);
        Ok(wanted.len())
    }

    /// Puts bodies of these pages into the file. What is zero stays a hole, or becomes zeros where it is none.
    fn keep(&mut self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        let (each, _) = bodies.as_chunks::<PAGE_BYTES>();
        let kept = self.kept.chunk_mut(chunk);
        let written = pages.iter().zip(each).filter(|(page, body)| kept.contains(*page) || !is_zero(body));
        let written: PageSet = written.map(|(page, _)| page).collect();
        *kept = kept.or(&written);
        let start = self.offset_of(chunk).ok_or_else(|| io::Error::other("a page outside of RAM"))?;
        for (first, count) in written.runs() {
            let before = pages.and(&PageSet::first(first)).len();
            let run = &bodies[before * PAGE_BYTES..(before + count) * PAGE_BYTES];
            write_at(&self.file, start + (first * PAGE_BYTES) as u64, run)?;
        }
        Ok(())
    }

    /// Where a chunk lies in the file, which has all blocks, one behind the other.
    fn offset_of(&self, chunk: ChunkIndex) -> Option<u64> {
        let place = self.memory.layout().place(chunk)?;
        let before: u64 = self.memory.layout().blocks().take(place.block).map(|block| block.bytes).sum();
        Some(before + place.offset)
    }

    /// Where these runs lie in the file.
    fn placed(&self, runs: &[Range<u64>]) -> Vec<MapRun> {
        let mut placed = Vec::with_capacity(runs.len());
        let mut before = 0;
        for span in self.memory.spans() {
            for run in runs.iter().filter(|run| span.contains(&run.start)) {
                let at = AddressRange { address: run.start, length: run.end - run.start };
                placed.push(MapRun { at, offset: before + (run.start - span.start) });
            }
            before += span.end - span.start;
        }
        placed
    }
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

/// Runs by their addresses: blocks may lie in any order.
fn in_order(runs: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut runs = runs.to_vec();
    runs.sort_unstable_by_key(|run| run.start);
    runs
}

/// The same pages in at most so many runs, where that can be: runs of one block that are at least so near each other,
/// bytes, are one.
fn near_ones_together(own: &[Range<u64>], ram: &[Range<u64>], mut near: u64, most: usize) -> Vec<Range<u64>> {
    let together = |near: u64| {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for range in own {
            let block = |at: u64| ram.iter().position(|block| block.contains(&at));
            match runs.last_mut() {
                Some(last) if block(last.start) == block(range.start) && range.start - last.end <= near => {
                    last.end = range.end;
                }
                _ => runs.push(range.clone()),
            }
        }
        runs
    };
    let whole = ram.iter().map(|block| block.end - block.start).max().unwrap_or(0);
    loop {
        let runs = together(near);
        if runs.len() <= most || near >= whole {
            return runs;
        }
        near = (near * 2).max(PAGE_BYTES as u64);
    }
}

#[cfg(test)]
#[path = "layer_tests.rs"]
mod tests;
