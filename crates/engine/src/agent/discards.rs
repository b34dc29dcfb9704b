//! The log of discards.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

pub use sterna_agent_protocol::log::Discard;
use sterna_agent_protocol::log::{CAPACITY, LOG_MAGIC, LogEntry, LogHeader, published};
use zerocopy::{FromZeros, IntoBytes};

use super::shared::of_fixed_size;

/// How often an entry that a thread is just writing is looked at again, and after how long.
const LOOKS: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// What may have been discarded since the last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discards {
    /// These parts of files, not necessarily RAM of this guest, not necessarily on page borders: round outwards, clip
    /// to the block.
    Ranges(Vec<Discard>),
    /// The log does not say: any page of any block.
    Everything,
}

/// What QEMU discards of guest RAM (balloon, virtio-mem, …), as the library logs it after each act.
///
/// The log is read, not mapped: QEMU can write it at any moment, and must not be able to hurt this process by it.
#[derive(Debug)]
pub struct DiscardLog {
    memory: File,
    /// The number of the next entry to read.
    next: u64,
    /// Entries known to be lost.
    lost: u64,
}

impl DiscardLog {
    /// A log that begins now. `None` where the file is no log, or one that could make reading wait or shrink under it.
    pub(super) fn open(memory: OwnedFd) -> Option<Self> {
        let mut log = Self { memory: of_fixed_size(memory)?, next: 0, lost: 0 };
        let header = log.header().ok()?;
        (header.magic == LOG_MAGIC && header.capacity == CAPACITY).then_some(())?;
        (log.next, log.lost) = (header.head, header.lost);
        Some(log)
    }

    /// What was discarded since the last call, or since the log was got. Once the guest is stopped and QEMU's pending
    /// I/O is done, nothing that happened before the call is missing.
    pub fn drain(&mut self) -> Discards {
        for look in 0..LOOKS {
            if look > 0 {
                std::thread::sleep(BETWEEN_LOOKS);
            }
            match self.look() {
                Ok(Look::Complete(ranges)) => return Discards::Ranges(ranges),
                Ok(Look::BeingWritten) => {}
                Ok(Look::Lost) | Err(_) => break,
            }
        }
        // An entry not yet visible is of a discard already done: forgetting the entry is safe once everything counts as
        // discarded.
        if let Ok(header) = self.header() {
            (self.next, self.lost) = (header.head, header.lost);
        }
        Discards::Everything
    }

    fn look(&mut self) -> io::Result<Look> {
        let before = self.header()?;
        let count = before.head.wrapping_sub(self.next);
        if count > CAPACITY || before.lost != self.lost {
            return Ok(Look::Lost);
        }
        // First see that all are published, then read their fields, then see that none was overwritten meanwhile.
        if !self.all_published(&self.entries(count)?) {
            return Ok(Look::BeingWritten);
        }
        fence(Ordering::Acquire);
        let entries = self.entries(count)?;
        fence(Ordering::Acquire);
        let after = self.header()?;
        if after.head.wrapping_sub(self.next) > CAPACITY || after.lost != self.lost || !self.all_published(&entries) {
            return Ok(Look::Lost);
        }
        self.next = before.head;
        Ok(Look::Complete(entries.iter().map(discard).collect()))
    }

    fn all_published(&self, entries: &[LogEntry]) -> bool {
        (0..).zip(entries).all(|(index, entry)| entry.sequence == published(self.next.wrapping_add(index)))
    }

    fn header(&self) -> io::Result<LogHeader> {
        let mut header = LogHeader::new_zeroed();
        self.memory.read_exact_at(header.as_mut_bytes(), 0)?;
        Ok(header)
    }

    /// The next `count` entries, at most [`CAPACITY`], in the order of their numbers.
    fn entries(&self, count: u64) -> io::Result<Vec<LogEntry>> {
        let mut entries = vec![LogEntry::new_zeroed(); count as usize];
        let place = self.next % CAPACITY;
        let before_wrap = count.min(CAPACITY - place) as usize;
        let (first, second) = entries.split_at_mut(before_wrap);
        let start = size_of::<LogHeader>() as u64;
        self.memory.read_exact_at(first.as_mut_bytes(), start + place * size_of::<LogEntry>() as u64)?;
        self.memory.read_exact_at(second.as_mut_bytes(), start)?;
        Ok(entries)
    }
}

enum Look {
    Complete(Vec<Discard>),
    BeingWritten,
    Lost,
}

fn discard(entry: &LogEntry) -> Discard {
    Discard { device: entry.device, inode: entry.inode, offset: entry.offset, length: entry.length }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use sterna_agent_protocol::log::claimed;

    const SIZE: u64 = size_of::<LogHeader>() as u64 + CAPACITY * size_of::<LogEntry>() as u64;

    /// The library's side, written through the file.
    struct Writer(File);

    impl Writer {
        fn new(head: u64) -> (Self, DiscardLog) {
            let memory = rustix::fs::memfd_create("log", MemfdFlags::ALLOW_SEALING).expect("memfd_create");
            rustix::fs::ftruncate(&memory, SIZE).expect("ftruncate");
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).expect("seal");
            let writer = Self(memory.try_clone().expect("dup").into());
            writer.header(head, 0);
            let log = DiscardLog::open(memory).expect("a log");
            (writer, log)
        }

        fn header(&self, head: u64, lost: u64) {
            let header = LogHeader { magic: LOG_MAGIC, capacity: CAPACITY, head, lost, reserved: [0; 4] };
            self.0.write_all_at(header.as_bytes(), 0).expect("write");
        }

        fn entry(&self, number: u64, sequence: u64) {
            let entry = LogEntry { sequence, device: 1, inode: 2, offset: number, length: 4096 };
            let place = size_of::<LogHeader>() as u64 + number % CAPACITY * size_of::<LogEntry>() as u64;
            self.0.write_all_at(entry.as_bytes(), place).expect("write");
        }

        fn publish(&self, numbers: std::ops::Range<u64>) {
            numbers.clone().for_each(|number| self.entry(number, published(number)));
            self.header(numbers.end, 0);
        }
    }

    fn offsets(discards: Discards) -> Vec<u64> {
        match discards {
            Discards::Ranges(ranges) => ranges.iter().map(|range| range.offset).collect(),
            Discards::Everything => panic!("the log was complete"),
        }
    }

    #[test]
    fn entries_come_once_and_in_order_also_around_the_end_of_the_ring() {
        let start = CAPACITY - 3;
        let (writer, mut log) = Writer::new(start);
        assert_eq!(log.drain(), Discards::Ranges(vec![]));
        writer.publish(start..start + 5);
        assert_eq!(offsets(log.drain()), (start..start + 5).collect::<Vec<_>>());
        assert_eq!(log.drain(), Discards::Ranges(vec![]));
        writer.publish(start + 5..start + 6);
        assert_eq!(offsets(log.drain()), [start + 5]);
    }

    #[test]
    fn a_full_ring_is_read_and_one_entry_more_means_everything() {
        let (writer, mut log) = Writer::new(7);
        writer.publish(7..7 + CAPACITY);
        assert_eq!(offsets(log.drain()).len() as u64, CAPACITY);
        let now = 7 + CAPACITY;
        writer.publish(now..now + CAPACITY + 1);
        assert_eq!(log.drain(), Discards::Everything);
        assert_eq!(log.drain(), Discards::Ranges(vec![]), "the next look begins after what was lost");
    }

    #[test]
    fn an_entry_never_finished_means_everything() {
        let (writer, mut log) = Writer::new(0);
        writer.publish(0..1);
        writer.entry(1, claimed(1));
        writer.header(2, 0);
        assert_eq!(log.drain(), Discards::Everything);
        assert_eq!(log.drain(), Discards::Ranges(vec![]));
    }

    #[test]
    fn a_lost_entry_means_everything() {
        let (writer, mut log) = Writer::new(0);
        writer.publish(0..1);
        writer.header(1, 1);
        assert_eq!(log.drain(), Discards::Everything);
    }

    #[test]
    fn a_counter_that_runs_backwards_means_everything() {
        let (writer, mut log) = Writer::new(10);
        writer.header(9, 0);
        assert_eq!(log.drain(), Discards::Everything);
        writer.header(u64::MAX, 0);
        assert_eq!(log.drain(), Discards::Everything);
        writer.header(1, 0);
        assert_eq!(log.drain(), Discards::Everything);
    }

    #[test]
    fn what_is_not_a_sealed_log_is_not_read() {
        let (reader, _writer) = std::io::pipe().expect("pipe");
        assert!(DiscardLog::open(reader.into()).is_none());
        let unsealed = rustix::fs::memfd_create("log", MemfdFlags::ALLOW_SEALING).expect("memfd_create");
        rustix::fs::ftruncate(&unsealed, SIZE).expect("ftruncate");
        assert!(DiscardLog::open(unsealed.try_clone().expect("dup")).is_none());
        rustix::fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK | SealFlags::GROW).expect("seal");
        assert!(DiscardLog::open(unsealed).is_none(), "its header is no log's");
    }
}
