//! The table of transfers.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use sterna_agent_protocol::transfers::{
    CLAIMED, MOST_PIECES, PIECES, PIECES_AT, PLACES, TRANSFERS_MAGIC, TransferPlace, TransfersHeader, unpack,
};
use zerocopy::{FromZeros, IntoBytes};

use super::shared::of_fixed_size;

/// The reads into guest RAM that are under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnderWay {
    /// Into these addresses of the VMM's, in no order.
    Ranges(Vec<Range<u64>>),
    /// Into any, for a moment.
    Anything,
    /// Into any, now and from now on: not every read was noted.
    Lost,
    /// The VMM's process does not tell.
    Untold,
}

impl UnderWay {
    /// Whether something may be read into these addresses, as far as it is told.
    #[must_use]
    pub fn may_reach(&self, addresses: &Range<u64>) -> bool {
        match self {
            Self::Ranges(ranges) => ranges.iter().any(|one| one.start < addresses.end && addresses.start < one.end),
            Self::Anything | Self::Lost => true,
            Self::Untold => false,
        }
    }
}

/// What QEMU reads into guest RAM, as the library notes it for as long as it is under way.
///
/// The table is read, not mapped: QEMU can write it at any moment, and must not be able to hurt this process by it.
#[derive(Debug)]
pub struct TransferTable(File);

impl TransferTable {
    /// `None` where the file is no such table, or one that could shrink.
    pub(super) fn open(memory: OwnedFd) -> Option<Self> {
        let table = Self(of_fixed_size(memory)?);
        let header = table.header().ok()?;
        (header.magic == TRANSFERS_MAGIC && header.places == PLACES as u64).then_some(table)
    }

    /// Whether there are reads whose ends QEMU's process has to look for.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn has_queued(&self) -> io::Result<bool> {
        Ok(self.header()?.queued > 0)
    }

    /// Whether it tells of all reads.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn is_complete(&self) -> io::Result<bool> {
        Ok(self.header()?.unknown == 0)
    }

    /// What is under way. A read into pages that were dropped from the page tables before this call is among it, if it
    /// has begun before they were.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn look(&self) -> io::Result<UnderWay> {
        // The pages were dropped before: what this thread reads now must not be older.
        fence(Ordering::SeqCst);
        let header = self.header()?;
        let mut places = vec![TransferPlace::new_zeroed(); PLACES];
        self.0.read_exact_at(places.as_mut_bytes(), size_of::<TransfersHeader>() as u64)?;
        let busy: Vec<TransferPlace> = places.into_iter().filter(|place| place.end != 0).collect();
        if header.unknown != 0 {
            return Ok(UnderWay::Lost);
        }
        if header.beyond != 0 || busy.iter().any(|place| place.end == CLAIMED) {
            return Ok(UnderWay::Anything);
        }
        let mut ranges = Vec::with_capacity(busy.len());
        for place in &busy {
            match self.pieces(place)? {
                Some(pieces) => ranges.extend(pieces),
                None => ranges.push(place.start..place.end),
            }
        }
        Ok(UnderWay::Ranges(ranges))
    }

    /// The pieces of a transfer, where it has several and the ring still has them.
    fn pieces(&self, place: &TransferPlace) -> io::Result<Option<Vec<Range<u64>>>> {
        if !(1..=MOST_PIECES).contains(&place.count) {
            return Ok(None);
        }
        let mut pieces = vec![0_u64; place.count as usize];
        let first = (place.first % PIECES as u64) as usize;
        // The ring's end may come in between.
        let (one, other) = pieces.split_at_mut((PIECES - first).min(place.count as usize));
        self.0.read_exact_at(one.as_mut_bytes(), (PIECES_AT + first * size_of::<u64>()) as u64)?;
        self.0.read_exact_at(other.as_mut_bytes(), PIECES_AT as u64)?;
        // Only now: what was read may have been written meanwhile.
        fence(Ordering::SeqCst);
        if self.header()?.noted.wrapping_sub(place.first) > PIECES as u64 {
            return Ok(None);
        }
        let within = |piece: &u64| {
            let (start, end) = unpack(*piece);
            start.max(place.start & !0xfff)..end.min(place.end.saturating_add(0xfff) & !0xfff)
        };
        Ok(Some(pieces.iter().map(within).filter(|range| !range.is_empty()).collect()))
    }

    fn header(&self) -> io::Result<TransfersHeader> {
        let mut header = TransfersHeader::new_zeroed();
        self.0.read_exact_at(header.as_mut_bytes(), 0)?;
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags};
    use sterna_agent_protocol::transfers::TABLE_BYTES;

    use super::*;

    fn memory(header: TransfersHeader, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = File::from(rustix::fs::memfd_create("transfers", flags).unwrap());
        memory.set_len(TABLE_BYTES as u64).unwrap();
        memory.write_all_at(header.as_bytes(), 0).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        memory.into()
    }

    fn header() -> TransfersHeader {
        TransfersHeader { magic: TRANSFERS_MAGIC, places: PLACES as u64, ..TransfersHeader::new_zeroed() }
    }

    fn fixed() -> SealFlags {
        SealFlags::SHRINK | SealFlags::GROW
    }

    /// A transfer in one piece.
    fn one(start: u64, end: u64) -> TransferPlace {
        TransferPlace { start, end, first: 0, count: 0 }
    }

    fn put(table: &TransferTable, at: usize, place: TransferPlace) {
        let offset = size_of::<TransfersHeader>() + at * size_of::<TransferPlace>();
        table.0.write_all_at(place.as_bytes(), offset as u64).unwrap();
    }

    #[test]
    fn what_is_in_the_table_is_under_way_and_reaches_what_it_touches() {
        let table = TransferTable::open(memory(header(), fixed())).expect("a table");
        assert_eq!(table.look().unwrap(), UnderWay::Ranges(Vec::new()));
        put(&table, PLACES - 1, one(0x1000, 0x3000));
        let seen = table.look().unwrap();
        let read = 0x1000..0x3000;
        assert_eq!(seen, UnderWay::Ranges(vec![read]));
        assert!(seen.may_reach(&(0x2000..0x4000)) && seen.may_reach(&(0..0x1001)));
        assert!(!seen.may_reach(&(0..0x1000)) && !seen.may_reach(&(0x3000..0x4000)));
        // One that is being noted may be anywhere.
        put(&table, 7, one(0x1000, CLAIMED));
        assert_eq!(table.look().unwrap(), UnderWay::Anything);
        assert!(UnderWay::Anything.may_reach(&(0..1)) && !UnderWay::Untold.may_reach(&(0..1)));
    }

    #[test]
    fn reads_without_a_place_and_reads_that_nobody_noted_may_be_anywhere() {
        let beyond = TransfersHeader { beyond: 1, ..header() };
        let unknown = TransfersHeader { unknown: 1, ..header() };
        for (header, seen) in [(beyond, UnderWay::Anything), (unknown, UnderWay::Lost)] {
            let table = TransferTable::open(memory(header, fixed())).expect("a table");
            assert_eq!(table.look().unwrap(), seen);
            assert_eq!(table.is_complete().unwrap(), header.unknown == 0);
            assert!(seen.may_reach(&(0..1)));
        }
        let queued = TransferTable::open(memory(TransfersHeader { queued: 3, ..header() }, fixed())).expect("a table");
        assert!(queued.has_queued().unwrap());
    }

    #[test]
    fn only_a_table_that_cannot_shrink_is_one() {
        assert!(TransferTable::open(memory(header(), SealFlags::SHRINK)).is_none());
        assert!(TransferTable::open(memory(TransfersHeader { magic: 0, ..header() }, fixed())).is_none());
        assert!(TransferTable::open(memory(TransfersHeader { places: 1, ..header() }, fixed())).is_none());
    }

    /// Fails where pieces are taken for a transfer's that another one has written since, and where what a hostile QEMU
    /// writes there is believed beyond the transfer's own addresses.
    #[test]
    fn the_pieces_of_a_transfer_are_its_own_or_all_between_its_ends() {
        let piece = |first: u64, pages: u64| first << 20 | pages;
        let seen = |noted: u64, first: u64, count: u64, pieces: &[u64]| {
            let memory = memory(TransfersHeader { noted, ..header() }, fixed());
            let table = TransferTable::open(memory).expect("a table");
            for (at, piece) in (first..).zip(pieces) {
                let offset = PIECES_AT as u64 + at % PIECES as u64 * 8;
                table.0.write_all_at(piece.as_bytes(), offset).unwrap();
            }
            put(&table, 3, TransferPlace { start: 0x10_0000, end: 0x20_0000, first, count });
            table.look().unwrap()
        };
        let all = UnderWay::Ranges(std::iter::once(0x10_0000..0x20_0000).collect());
        let ring = PIECES as u64;
        let two = UnderWay::Ranges(vec![0x10_0000..0x10_1000, 0x1f_e000..0x20_0000]);
        let pieces = [piece(0x100, 1), piece(0x1fe, 2)];
        assert_eq!(seen(2, 0, 2, &pieces), two);
        assert_eq!(seen(ring + 1, ring - 1, 2, &pieces), two, "round the ring's end");
        assert_eq!(seen(ring + 6, 6, 2, &pieces), two, "just in time");
        assert_eq!(seen(ring + 7, 6, 2, &pieces), all, "others' by now");
        assert_eq!(seen(0, 6, 2, &pieces), all, "from the future");
        assert_eq!(seen(u64::MAX, 0, u64::MAX, &[]), all);
        let beyond = [piece(0x1ff, 100), piece(0x900, 5)];
        assert_eq!(seen(2, 0, 2, &beyond), UnderWay::Ranges(std::iter::once(0x1f_f000..0x20_0000).collect()));
    }
}
