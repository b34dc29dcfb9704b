//! Samples of a guest's pages: how many hold zeros, how well they compress, and the time that a page takes. At most a
//! few thousand pages are read, whatever the guest's size.

use std::time::{Duration, Instant};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::error::MigrateError;
use crate::memory::{Memory, for_each_body, is_zero};

/// How many single pages are looked at: a share of one half is then known to within 0.02, with a probability of 95 %.
pub const SINGLE_PAGES: usize = 2048;
/// How many pages are compressed together, as an encoder does.
pub const BLOCK_PAGES: usize = 16;
/// How many blocks are compressed: 1,024 pages.
const BLOCKS: usize = 64;
/// The level that Zstandard is tried at.
const ZSTD_LEVEL: i32 = 1;

/// The result of sampling.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sampled {
    /// Pages that were read.
    pub pages: u64,
    /// The share of pages that hold zeros only.
    pub zero_share: f64,
    /// The time that reading and digesting a page takes here.
    pub time_per_page: Duration,
    /// The result of LZ4, where there was something to compress.
    pub lz4: Option<Compressed>,
    /// The result of Zstandard, likewise.
    pub zstd: Option<Compressed>,
}

/// The result of a compressor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compressed {
    /// Compressed bytes per byte; blocks that would grow travel plain.
    pub ratio: f64,
    /// The time that one thread takes to compress a page here.
    pub time_per_page: Duration,
}

/// Samples the content of these pages, which must be allocated: reading a hole fills it. (A page that the guest
/// discards after the caller looked is filled with zeros again, as if the guest had read it.)
///
/// # Errors
/// No memory is left for a compressor, or the RAM is lost.
pub fn sample(ram: &dyn Memory, allocated: &PageMap) -> Result<Sampled, MigrateError> {
    let began = Instant::now();
    let (mut singles, mut zeros) = (0, 0);
    let read = |group: &(ChunkIndex, PageSet), look: &mut dyn FnMut(&[u8; PAGE_BYTES])| {
        let read = |pages: &PageSet, bodies: &mut [u8]| ram.read(group.0, pages, bodies);
        for_each_body(&group.1, read, |_, body| look(body)).map_err(MigrateError::host("reading the guest's RAM"))
    };
    for page in choose(ram.layout(), allocated, SINGLE_PAGES, 1) {
        read(&page, &mut |body| {
            singles += 1;
            if is_zero(body) {
                zeros += 1;
            } else {
                std::hint::black_box(Digester::UNSEEDED.page(body));
            }
        })?;
    }
    let time_per_page = began.elapsed() / singles.max(1);
    let mut sampled = Sampled {
        pages: u64::from(singles),
        zero_share: f64::from(zeros) / f64::from(singles.max(1)),
        time_per_page,
        ..Sampled::default()
    };
    let (mut lz4, mut zstd) = (Tally::default(), Tally::default());
    let mut compressor =
        zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(MigrateError::host("setting up a compressor"))?;
    let mut block = Vec::with_capacity(BLOCK_PAGES * PAGE_BYTES);
    let mut output = Vec::with_capacity(lz4_flex::block::get_maximum_output_size(BLOCK_PAGES * PAGE_BYTES));
    for group in choose(ram.layout(), allocated, BLOCKS, BLOCK_PAGES) {
        block.clear();
        read(&group, &mut |body| {
            sampled.pages += 1;
            if !is_zero(body) {
                block.extend_from_slice(body);
            }
        })?;
        if block.is_empty() {
            continue;
        }
        lz4.add(block.len(), || {
            output.resize(output.capacity(), 0);
            lz4_flex::block::compress_into(&block, &mut output).unwrap_or(usize::MAX)
        });
        let result = {
            let mut result = Ok(0);
            zstd.add(block.len(), || {
                result = compressor.compress(&block).map(|bytes| bytes.len());
                result.as_ref().map_or(usize::MAX, |bytes| *bytes)
            });
            result
        };
        result.map_err(MigrateError::host("compressing a sample of the guest's pages"))?;
    }
    (sampled.lz4, sampled.zstd) = (lz4.result(), zstd.result());
    Ok(sampled)
}

/// What a compressor has done so far.
#[derive(Default)]
struct Tally {
    before: usize,
    after: usize,
    time: Duration,
}

impl Tally {
    fn add(&mut self, bytes: usize, compress: impl FnOnce() -> usize) {
        let began = Instant::now();
        let compressed = compress();
        self.time += began.elapsed();
        self.before += bytes;
        self.after += compressed.min(bytes);
    }

    fn result(&self) -> Option<Compressed> {
        let pages = u32::try_from(self.before / PAGE_BYTES).ok().filter(|pages| *pages > 0)?;
        Some(Compressed { ratio: self.after as f64 / self.before as f64, time_per_page: self.time / pages })
    }
}

/// Chooses up to `count` groups of `size` neighbouring pages, evenly over all groups that have pages of the map. Each
/// comes with its pages of the map. A generator with a fixed seed draws one group from each stretch, so that a period
/// in the guest's memory does not meet a period of ours.
pub fn choose(layout: &Layout, map: &PageMap, count: usize, size: usize) -> Vec<(ChunkIndex, PageSet)> {
    let groups = || {
        map.iter()
            .filter(|(chunk, _)| layout.place(*chunk).is_some())
            .flat_map(move |(chunk, set)| split(chunk, *set, size))
    };
    let all = groups().count();
    let stretch = all.div_ceil(count.max(1)).max(1);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut wanted = 0;
    groups()
        .enumerate()
        .filter(|(index, _)| {
            if index % stretch == 0 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                wanted = index + (random % stretch as u64) as usize;
                // The last stretch may be shorter.
                wanted = wanted.min(all - 1);
            }
            *index == wanted
        })
        .map(|(_, group)| group)
        .collect()
}

fn split(chunk: ChunkIndex, set: PageSet, size: usize) -> impl Iterator<Item = (ChunkIndex, PageSet)> {
    let groups = PageSet::first(usize::MAX).len() / size;
    (0..groups).filter_map(move |group| {
        let mut part = PageSet::EMPTY;
        part.insert_run(group * size, size);
        let part = part.and(&set);
        (!part.is_empty()).then_some((chunk, part))
    })
}

/// The pages of a group.
pub fn pages_of(group: &(ChunkIndex, PageSet)) -> impl Iterator<Item = PageIndex> + use<> {
    let chunk = group.0;
    group.1.iter().map(move |page| PageIndex { chunk, page })
}

#[cfg(test)]
mod tests {
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    fn layout(mib: u64) -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes: mib << 20, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    #[test]
    fn what_is_chosen_is_bounded_in_the_map_and_spread() {
        let layout = layout(64);
        let mut map = PageMap::empty(&layout);
        layout.iter().filter(|chunk| chunk.0 % 3 == 0).for_each(|chunk| map.chunk_mut(chunk).insert_run(8, 200));
        for (count, size) in [(100, 1), (64, 16), (1, 16), (1_000_000, 1)] {
            let chosen = choose(&layout, &map, count, size);
            let groups = if size == 1 { 22 * 200 } else { 22 * 13 };
            let stretch = groups / count.min(groups);
            assert!(
                chosen.len() <= count && chosen.len() * (stretch + 1) >= groups,
                "{count} {size}: {}",
                chosen.len()
            );
            assert!(chosen.iter().all(|(chunk, set)| set.without(map.chunk(*chunk)).is_empty() && set.len() <= size));
            if count == 64 {
                assert!(chosen.iter().any(|(chunk, _)| chunk.0 < 8) && chosen.iter().any(|(chunk, _)| chunk.0 > 56));
            }
        }
        assert!(choose(&layout, &PageMap::empty(&layout), 9, 1).is_empty());
    }
}
