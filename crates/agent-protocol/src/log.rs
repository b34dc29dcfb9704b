//! The log of discards: a ring in a sealed memfd. QEMU's threads append, the daemon reads, and neither waits for the
//! other.
//!
//! A discard is logged *after* it was done. So once the guest is stopped and QEMU's main loop is idle, every discard is
//! both done and logged. If it were logged first, the entry could be read while the old content is still there.
//!
//! Appending: take the next number from `head`, claim the slot `number % CAPACITY`, fill it in, publish it. The oldest
//! entries are overwritten. A reader that comes too late notices it by the distance between `head` and its own
//! position. It must then take every page as discarded, and likewise if `lost` has changed.
//!
//! A slot's `sequence` is even when it can be read and odd while a thread fills it in: `published` and `claimed`. A
//! thread whose slot is still claimed by a thread a whole lap behind does not wait; it counts its own entry as lost.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The beginning of the log: "STRNDSCL".
pub const LOG_MAGIC: u64 = u64::from_le_bytes(*b"STRNDSCL");

/// The number of entries that are kept. A balloon discards page by page: this many pages are 256 MiB.
pub const CAPACITY: u64 = 1 << 16;

/// A part of a RAM file whose content may be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Discard {
    /// The file's device (`st_dev`).
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// The offset in the file at which it begins, bytes.
    pub offset: u64,
    /// The length, bytes.
    pub length: u64,
}

/// The log in the memfd, for its writer.
#[repr(C)]
pub struct Log {
    magic: AtomicU64,
    capacity: AtomicU64,
    /// Numbers given out so far: the next entry's number.
    head: AtomicU64,
    /// Entries that found their slot busy.
    lost: AtomicU64,
    reserved: [AtomicU64; 4],
    slots: [Slot; CAPACITY as usize],
}

#[repr(C)]
struct Slot {
    sequence: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    offset: AtomicU64,
    length: AtomicU64,
}

/// The log's first bytes, for its reader.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogHeader {
    /// [`LOG_MAGIC`].
    pub magic: u64,
    /// [`CAPACITY`].
    pub capacity: u64,
    /// The next entry's number.
    pub head: u64,
    /// Entries lost so far.
    pub lost: u64,
    /// Reserved: 0.
    pub reserved: [u64; 4],
}

/// One entry, for the log's reader. Entries follow the [`LogHeader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogEntry {
    /// [`published`] of the entry's number. If it is older or odd, the entry must not be read.
    pub sequence: u64,
    /// As in [`Discard`].
    pub device: u64,
    /// As in [`Discard`].
    pub inode: u64,
    /// As in [`Discard`].
    pub offset: u64,
    /// As in [`Discard`].
    pub length: u64,
}

const _: () = {
    assert!(size_of::<LogHeader>() + CAPACITY as usize * size_of::<LogEntry>() == size_of::<Log>());
    assert!(size_of::<Slot>() == size_of::<LogEntry>());
};

/// The value of a slot's `sequence` once entry `number` can be read.
#[must_use]
pub const fn published(number: u64) -> u64 {
    number.wrapping_add(1).wrapping_mul(2)
}

/// The value of a slot's `sequence` while entry `number` is filled in.
#[must_use]
pub const fn claimed(number: u64) -> u64 {
    published(number).wrapping_sub(1)
}

impl Log {
    /// Turns zeroed memory into a log.
    pub fn initialise(&self) {
        self.capacity.store(CAPACITY, Ordering::Relaxed);
        self.magic.store(LOG_MAGIC, Ordering::Release);
    }

    /// Appends an entry. Any thread may call it at any moment, also a signal handler that interrupted another call. It
    /// never waits.
    pub fn append(&self, discard: Discard) {
        let number = self.head.fetch_add(1, Ordering::AcqRel);
        let Some(slot) = self.slots.get((number % CAPACITY) as usize) else { return };
        let before = slot.sequence.load(Ordering::Relaxed);
        let free = before.is_multiple_of(2) && before < published(number);
        if !free
            || slot.sequence.compare_exchange(before, claimed(number), Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            self.lost.fetch_add(1, Ordering::Release);
            return;
        }
        // The fields must not become visible before the claim that makes a reader ignore them.
        fence(Ordering::Release);
        slot.device.store(discard.device, Ordering::Relaxed);
        slot.inode.store(discard.inode, Ordering::Relaxed);
        slot.offset.store(discard.offset, Ordering::Relaxed);
        slot.length.store(discard.length, Ordering::Relaxed);
        slot.sequence.store(published(number), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_log() -> Box<Log> {
        let words = vec![0u64; size_of::<Log>() / 8].into_boxed_slice();
        // SAFETY: Log consists of u64 atomics only, has the boxed slice's size and alignment, and all-zero is valid for
        // it.
        let log = unsafe { Box::from_raw(Box::into_raw(words).cast::<Log>()) };
        log.initialise();
        log
    }

    fn entry(log: &Log, number: u64) -> (u64, u64, u64) {
        let slot = &log.slots[(number % CAPACITY) as usize];
        let read = |word: &AtomicU64| word.load(Ordering::Acquire);
        (read(&slot.sequence), read(&slot.offset), read(&slot.length))
    }

    fn discard(offset: u64) -> Discard {
        Discard { device: 1, inode: 2, offset, length: offset + 1 }
    }

    #[test]
    fn entries_stand_in_the_order_they_were_appended_and_the_oldest_give_way() {
        let log = new_log();
        for number in 0..CAPACITY + 10 {
            log.append(discard(number));
        }
        assert_eq!(log.head.load(Ordering::Relaxed), CAPACITY + 10);
        assert_eq!(log.lost.load(Ordering::Relaxed), 0);
        for number in 10..CAPACITY + 10 {
            assert_eq!(entry(&log, number), (published(number), number, number + 1));
        }
    }

    #[test]
    fn threads_appending_at_once_lose_nothing_and_mix_nothing() {
        let log = new_log();
        let (threads, each) = (4, CAPACITY / 4);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let log = &log;
                scope.spawn(move || (0..each).for_each(|i| log.append(discard(thread * each + i))));
            }
        });
        let mut seen = vec![false; CAPACITY as usize];
        for number in 0..CAPACITY {
            let (sequence, offset, length) = entry(&log, number);
            assert_eq!(sequence, published(number));
            assert_eq!(length, offset + 1);
            assert!(!std::mem::replace(&mut seen[offset as usize], true));
        }
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn a_slot_still_being_filled_in_a_lap_later_counts_as_lost() {
        let log = new_log();
        log.slots[3].sequence.store(claimed(3), Ordering::Relaxed);
        log.head.store(CAPACITY + 3, Ordering::Relaxed);
        log.append(discard(7));
        assert_eq!(log.lost.load(Ordering::Relaxed), 1);
        assert_eq!(entry(&log, 3), (claimed(3), 0, 0));
    }

    #[test]
    fn a_thread_a_whole_lap_late_does_not_overwrite_what_is_newer() {
        let log = new_log();
        log.slots[0].sequence.store(published(CAPACITY), Ordering::Relaxed);
        log.append(discard(7));
        assert_eq!(log.lost.load(Ordering::Relaxed), 1);
        assert_eq!(entry(&log, CAPACITY).0, published(CAPACITY));
    }
}
