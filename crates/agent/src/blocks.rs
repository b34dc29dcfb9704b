//! The table of RAM blocks: which guest RAM is mapped where.
//!
//! It is a fixed table that any thread reads and writes without a lock. Each slot has a version, which is odd while the
//! slot is written. A reader uses what it read only if the version was even and did not change meanwhile. QEMU never
//! maps and unmaps the same addresses in two threads at once, so a slot's change needs no more order than that.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use sterna_agent_protocol::MAX_BLOCKS;
use sterna_agent_protocol::message::Block;
use zerocopy::FromZeros;

use crate::raw;

/// The blocks of this process.
pub static BLOCKS: Blocks = Blocks::new();

const WORDS: usize = size_of::<Block>() / 8;
const ADDRESS: usize = core::mem::offset_of!(Block, address) / 8;
const LENGTH: usize = core::mem::offset_of!(Block, length) / 8;

/// Attempts before a slot that keeps changing counts as lost. A write takes well under a microsecond.
const ATTEMPTS: usize = 1000;

/// The table of RAM blocks.
pub struct Blocks {
    slots: [Slot; MAX_BLOCKS],
    lost: AtomicU64,
}

/// A [`Block`] as words; empty where its length is 0.
struct Slot {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Slot {
    const fn new() -> Self {
        Self { version: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }

    /// The addresses of the slot's block. They are a guess, because the slot may change at any moment.
    fn extent(&self) -> (u64, u64) {
        let address = self.words[ADDRESS].load(Ordering::Relaxed);
        (address, address.saturating_add(self.words[LENGTH].load(Ordering::Relaxed)))
    }

    /// The slot's block; `None` where it is empty.
    fn read(&self) -> Option<Block> {
        for _ in 0..ATTEMPTS {
            let before = self.version.load(Ordering::Acquire);
            let mut words = [0u64; WORDS];
            for (word, shared) in words.iter_mut().zip(&self.words) {
                *word = shared.load(Ordering::Relaxed);
            }
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before {
                let block: Block = zerocopy::transmute!(words);
                return (block.length.get() != 0).then_some(block);
            }
            raw::yield_now();
        }
        None
    }

    /// Replaces the slot's block if `wanted` accepts it, and says whether it did.
    fn replace(&self, wanted: impl Fn(&Block) -> bool, with: &Block) -> bool {
        for _ in 0..ATTEMPTS {
            let before = self.version.load(Ordering::Acquire);
            let claimed = before.is_multiple_of(2)
                && self.version.compare_exchange(before, before + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if !claimed {
                raw::yield_now();
                continue;
            }
            // The words must not become visible before the odd version that makes a reader ignore them.
            fence(Ordering::Release);
            let mut words = [0u64; WORDS];
            for (word, shared) in words.iter_mut().zip(&self.words) {
                *word = shared.load(Ordering::Relaxed);
            }
            let agreed = wanted(&zerocopy::transmute!(words));
            if agreed {
                let words: [u64; WORDS] = zerocopy::transmute!(*with);
                for (word, shared) in words.iter().zip(&self.words) {
                    shared.store(*word, Ordering::Relaxed);
                }
            }
            self.version.store(before + 2, Ordering::Release);
            return agreed;
        }
        false
    }
}

impl Blocks {
    const fn new() -> Self {
        Self { slots: [const { Slot::new() }; MAX_BLOCKS], lost: AtomicU64::new(0) }
    }

    /// Adds a block. Where there is no room, the block is counted as lost.
    pub fn add(&self, block: &Block) {
        let empty = |held: &Block| held.length.get() == 0;
        if !self.slots.iter().any(|slot| slot.extent() == (0, 0) && slot.replace(empty, block)) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes every part of a block that lies within the addresses, and says whether there was one.
    pub fn remove(&self, address: u64, length: u64) -> bool {
        let end = address.saturating_add(length);
        let mut found = false;
        for slot in &self.slots {
            let (from, to) = slot.extent();
            if from >= end || to <= address {
                continue;
            }
            let Some(block) = slot.read() else { continue };
            let (from, to) = (block.address.get(), block.address.get().saturating_add(block.length.get()));
            let before = part(&block, from, address.min(to));
            let after = part(&block, end.max(from), to);
            let same = |held: &Block| held.address == block.address && held.length == block.length;
            let removed = match (before, after) {
                (Some(before), Some(after)) => {
                    let removed = slot.replace(same, &before);
                    self.add(&after);
                    removed
                }
                (Some(rest), None) | (None, Some(rest)) => slot.replace(same, &rest),
                (None, None) => slot.replace(same, &Block::new_zeroed()),
            };
            if !removed {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
            found = true;
        }
        found
    }

    /// Puts a block in the place of another one at the same addresses, and says whether that one was there.
    pub fn change(&self, block: &Block, to: &Block) -> bool {
        let same = |held: &Block| held.address == block.address && held.length == block.length;
        let (address, length) = (block.address.get(), block.length.get());
        let extent = (address, address.saturating_add(length));
        self.slots.iter().any(|slot| slot.extent() == extent && slot.replace(same, to))
    }

    /// All blocks.
    pub fn all(&self) -> impl Iterator<Item = Block> + '_ {
        self.slots.iter().filter(|slot| slot.extent() != (0, 0)).filter_map(Slot::read)
    }

    /// The blocks that share an address with these.
    pub fn touching(&self, address: u64, length: u64) -> impl Iterator<Item = Block> + '_ {
        let end = address.saturating_add(length);
        let near = move |(from, to): (u64, u64)| from < end && address < to;
        self.slots.iter().filter(move |slot| near(slot.extent())).filter_map(Slot::read)
    }

    /// The block in which all of this lies.
    pub fn holding(&self, address: u64, length: u64) -> Option<Block> {
        let end = address.checked_add(length)?;
        self.touching(address, length).find(|block| {
            block.address.get() <= address && end <= block.address.get().saturating_add(block.length.get())
        })
    }

    /// The number of blocks that ever found no room.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// The part of a block between two addresses, if any.
fn part(block: &Block, from: u64, to: u64) -> Option<Block> {
    let length = to.checked_sub(from).filter(|length| *length > 0)?;
    let skipped = from.checked_sub(block.address.get())?;
    let offset = block.offset.get().saturating_add(skipped);
    Some(Block { address: from.into(), length: length.into(), offset: offset.into(), ..*block })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(address: u64, length: u64, offset: u64) -> Block {
        Block { address: address.into(), length: length.into(), offset: offset.into(), ..Block::new_zeroed() }
    }

    fn listed(blocks: &Blocks) -> Vec<(u64, u64, u64)> {
        let mut all: Vec<_> =
            blocks.all().map(|block| (block.address.get(), block.length.get(), block.offset.get())).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn unmapping_a_part_leaves_the_rest_with_the_right_file_offsets() {
        for (cut, rest) in [
            ((0x1000, 0x1000), vec![(0x2000, 0x3000, 0x11000)]),
            ((0x4000, 0x8000), vec![(0x1000, 0x3000, 0x10000)]),
            ((0x2000, 0x1000), vec![(0x1000, 0x1000, 0x10000), (0x3000, 0x2000, 0x12000)]),
            ((0, 0x10000), vec![]),
            ((0x5000, 0x1000), vec![(0x1000, 0x4000, 0x10000)]),
        ] {
            let blocks = Blocks::new();
            blocks.add(&block(0x1000, 0x4000, 0x10000));
            assert_eq!(blocks.remove(cut.0, cut.1), rest != [(0x1000, 0x4000, 0x10000)]);
            assert_eq!(listed(&blocks), rest);
            assert_eq!(blocks.lost(), 0);
        }
    }

    #[test]
    fn a_block_that_finds_no_room_is_counted_and_a_freed_slot_is_used_again() {
        let blocks = Blocks::new();
        for i in 0..MAX_BLOCKS as u64 + 2 {
            blocks.add(&block(i * 0x10000, 0x10000, 0));
        }
        assert_eq!(blocks.all().count(), MAX_BLOCKS);
        assert_eq!(blocks.lost(), 2);
        assert!(blocks.remove(0x30000, 0x10000));
        blocks.add(&block(0x7000_0000, 0x1000, 0));
        assert!(blocks.holding(0x7000_0000, 0x1000).is_some());
        assert_eq!(blocks.lost(), 2);
    }

    #[test]
    fn only_a_range_inside_one_block_is_held() {
        let blocks = Blocks::new();
        blocks.add(&block(0x1000, 0x1000, 0));
        blocks.add(&block(0x2000, 0x1000, 0));
        assert!(blocks.holding(0x1000, 0x1000).is_some());
        assert!(blocks.holding(0x1800, 0x1000).is_none());
        assert!(blocks.holding(0x3000, 0x10).is_none());
        assert!(blocks.holding(0x1000, u64::MAX).is_none());
    }

    #[test]
    fn a_reader_beside_writers_never_sees_half_a_block() {
        let blocks = Blocks::new();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 1..20_000u64 {
                    let at = i * 0x10_0000;
                    blocks.add(&Block { inode: at.into(), device: at.into(), ..block(at, 0x1000, at) });
                    blocks.remove(at, 0x1000);
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                for seen in blocks.all() {
                    assert_eq!([seen.offset, seen.inode, seen.device], [seen.address; 3]);
                }
            }
        });
        assert_eq!((blocks.lost(), blocks.all().count()), (0, 0));
    }
}
