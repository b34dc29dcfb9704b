//! The log of discards.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use libc::{c_int, off_t};
use sterna_agent_protocol::log::{Discard, Log};
use sterna_agent_protocol::message::Block;

use crate::blocks::BLOCKS;
use crate::private;
use crate::raw;

/// The log, which stays mapped; null until the server has made it. A discard before that comes before any daemon.
static LOG: AtomicPtr<Log> = AtomicPtr::new(ptr::null_mut());

/// The log's memfd, which stays open; -1 until the server has made it.
static MEMORY: AtomicI32 = AtomicI32::new(-1);

/// Whether some guest RAM was mapped private on the daemon's request: `MADV_DONTNEED` loses what is written there.
static PRIVATE_PAGES: AtomicBool = AtomicBool::new(false);

/// Makes the log. The error is an `errno`.
pub fn create_log() -> Result<(), c_int> {
    // SAFETY: a Log is made of atomics, for which all-zero is valid.
    let (log, memory) = unsafe { raw::shared_memory::<Log>(c"sterna-discards")? };
    log.initialise();
    MEMORY.store(memory, Ordering::Relaxed);
    LOG.store(ptr::from_ref(log).cast_mut(), Ordering::Release);
    Ok(())
}

/// The log's memfd.
pub fn log_memory() -> Option<c_int> {
    Some(MEMORY.load(Ordering::Relaxed)).filter(|number| *number >= 0)
}

/// Says that guest RAM may be mapped private from now on.
pub fn expect_private_pages() {
    PRIVATE_PAGES.store(true, Ordering::Relaxed);
}

/// Logs the pages that an `madvise` has discarded, or may have discarded before it failed.
pub fn after_madvise(address: u64, length: u64, advice: c_int, succeeded: bool) {
    let Some(log) = log() else { return };
    let private_pages = PRIVATE_PAGES.load(Ordering::Relaxed);
    for block in BLOCKS.touching(address, length).filter(|block| discards(block, advice, succeeded, private_pages)) {
        log.append(discard_in(&block, address, length));
    }
}

/// Whether this advice discards pages of the block; `private_pages` says whether the daemon may have made pages of any
/// block private.
fn discards(block: &Block, advice: c_int, succeeded: bool, private_pages: bool) -> bool {
    match advice {
        // In private RAM there is nothing that it could remove: no page there is a shared file's. The call fails at the
        // first page, so what it names is still there, and must not be taken for discarded while it is to come.
        libc::MADV_REMOVE => succeeded || !private::is_anonymous(block),
        // A shared mapping's pages stay in the file.
        _ if drops(advice) => block.flags.get() as c_int & libc::MAP_PRIVATE != 0 || private_pages,
        _ => false,
    }
}

/// Whether this advice drops pages: private memory reads as zeros then, or as the file behind it.
pub fn drops(advice: c_int) -> bool {
    matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED)
}

/// Logs the pages that a successful `fallocate` has discarded.
///
/// In private RAM the file has nothing to discard. QEMU punches it before it calls `madvise` all the same, and then the
/// range is logged twice: before its pages are gone, and after. The second entry is the one that counts; the first does
/// no harm, because the guest has given the pages up already.
pub fn after_fallocate(fd: c_int, mode: c_int, offset: off_t, length: off_t) {
    let Some(log) = log() else { return };
    if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) == 0 {
        return;
    }
    // SAFETY: all-zero is a valid stat.
    let mut status: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: writes `status` only.
    if unsafe { libc::fstat(fd, &mut status) } != 0 {
        return;
    }
    if BLOCKS.all().any(|block| block.device.get() == status.st_dev && block.inode.get() == status.st_ino) {
        log.append(Discard {
            device: status.st_dev,
            inode: status.st_ino,
            offset: offset as u64,
            length: length as u64,
        });
    }
}

/// `MADV_DONTNEED_LOCKED`, which not every libc has.
const MADV_DONTNEED_LOCKED: c_int = 24;

fn log() -> Option<&'static Log> {
    // SAFETY: null, or a log that stays mapped.
    unsafe { LOG.load(Ordering::Acquire).as_ref() }
}

/// The part of the block's file behind these addresses.
fn discard_in(block: &Block, address: u64, length: u64) -> Discard {
    let (block_start, block_end) = (block.address.get(), block.address.get().saturating_add(block.length.get()));
    let start = address.max(block_start);
    let end = address.saturating_add(length).min(block_end);
    Discard {
        device: block.device.get(),
        inode: block.inode.get(),
        offset: block.offset.get().saturating_add(start - block_start),
        length: end.saturating_sub(start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn dropping_pages_discards_private_ones_and_a_refused_removal_discards_none() {
        let with = |flags: c_int| Block { flags: flags.unsigned_abs().into(), ..Block::new_zeroed() };
        let shared = with(libc::MAP_SHARED);
        let of_a_file = with(libc::MAP_PRIVATE);
        let anonymous = with(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        for succeeded in [true, false] {
            for advice in [libc::MADV_DONTNEED, libc::MADV_FREE, MADV_DONTNEED_LOCKED] {
                let done = [&shared, &of_a_file, &anonymous].map(|block| discards(block, advice, succeeded, false));
                assert_eq!(done, [false, true, true]);
                assert!(discards(&shared, advice, succeeded, true));
            }
            for block in [&shared, &of_a_file] {
                assert!(discards(block, libc::MADV_REMOVE, succeeded, false));
            }
            assert_eq!(discards(&anonymous, libc::MADV_REMOVE, succeeded, true), succeeded);
            assert!(!discards(&anonymous, libc::MADV_MERGEABLE, succeeded, true));
        }
    }

    #[test]
    fn a_discard_is_told_by_the_part_of_the_file_inside_the_block() {
        let block = Block {
            address: 0x10_0000.into(),
            length: 0x10_0000.into(),
            offset: 0x5000.into(),
            device: 3.into(),
            inode: 4.into(),
            ..Block::new_zeroed()
        };
        let told = |address, length| discard_in(&block, address, length);
        assert_eq!(told(0x10_1000, 0x2000), Discard { device: 3, inode: 4, offset: 0x6000, length: 0x2000 });
        assert_eq!(told(0, 0x10_1000), Discard { device: 3, inode: 4, offset: 0x5000, length: 0x1000 });
        assert_eq!(told(0x1f_f000, 0x9000), Discard { device: 3, inode: 4, offset: 0x10_4000, length: 0x1000 });
    }
}
