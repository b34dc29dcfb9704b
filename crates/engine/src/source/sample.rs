//! Samples of a guest's pages: how many hold zeros, how well they compress, what dealing with one takes. At most a few
//! thousand pages are read, whatever the guest's size.

use std::time::{Duration, Instant};

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::error::MigrateError;
use crate::memory::{Memory, for_each_body, is_zero};

/// Single pages whose content is looked at: a share of half the pages is known to two hundredths, nineteen times in
/// twenty.
pub const SINGLE_PAGES: usize = 2048;
/// Pages compressed together, as an encoder does.
pub const BLOCK_PAGES: usize = 16;
/// Blocks that are compressed: 1,024 pages.
const BLOCKS: usize = 64;
/// The level that Zstandard is tried at.
const ZSTD_LEVEL: i32 = 1;

/// What samples showed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sampled {
    /// Pages that were read.
    pub pages: u64,
    /// Share of pages that hold zeros only.
    pub zero_share: f64,
    /// What reading and digesting a page takes here.
    pub time_per_page: Duration,
    /// LZ4, where there was something to compress.
    pub lz4: Option<Compressed>,
    /// Zstandard.
    pub zstd: Option<Compressed>,
}

/// What a compressor did with them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compressed {
    /// Compressed bytes per byte; blocks that would grow travel as they are.
    pub ratio: f64,
    /// What compressing a page takes one thread here.
    pub time_per_page: Duration,
}

/// Samples the content of these pages, which must be allocated: reading a hole fills it. (One that the guest gives back
/// after the caller looked is filled with zeros again, as if the guest had read it.)
///
/// # Errors
/// A compressor fails, for want of memory; or the RAM is not there any more.
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

/// Up to `count` groups of `size` neighbouring pages that have pages of the map, with those pages, evenly over all such
/// groups. From each stretch one is drawn by a generator that always begins alike, so that no period of the guest's
/// memory meets a period of ours.
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
                // The last stretch may be a short one.
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
