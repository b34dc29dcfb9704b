//! The table of transfers: reads into guest RAM that are under way, in a sealed memfd. QEMU's threads write it, the
//! daemon reads it, and neither waits for the other.
//!
//! A read past the page tables (direct I/O) holds the pages themselves until the kernel is done, and no page table
//! shows what lands in them. A transfer is noted *before* the kernel is asked, and taken out when the kernel is done.
//! So whoever drops pages from QEMU's page tables, and looks at the table afterwards, finds each transfer into them
//! that has begun: what begins later faults.
//!
//! A place that changes while it is read is read wrongly, which does no harm: one transfer has ended, and the other has
//! begun after the pages were dropped.
//!
//! A place is free where `end` is 0, and claimed where it is `CLAIMED`: then its transfer may be anywhere. Where no
//! place is free a transfer is counted in `beyond`, and may be anywhere, too.
//!
//! A guest's disk reads into pages all over its RAM at once. So a transfer of several pieces has them noted in a ring,
//! and its place says where. Who has read pieces looks at `noted` afterwards: pieces that so many were noted after that
//! the ring has come round are others' by then, and the transfer may be anywhere between its first and last byte.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The beginning of the table: "STRNDTR2".
pub const TRANSFERS_MAGIC: u64 = u64::from_le_bytes(*b"STRNDTR2");

/// The number of places: QEMU has at most 64 threads that read, and up to 1,024 requests in each queue of native AIO.
pub const PLACES: usize = 4096;

/// The `end` of a place whose transfer is being noted.
pub const CLAIMED: u64 = u64::MAX;

/// The number of pieces that the ring has room for: those of 512 requests of 128 pieces.
pub const PIECES: usize = 1 << 16;

/// The most pieces of one transfer that are noted; of one with more only the first and the last byte are.
pub const MOST_PIECES: u64 = 1024;

/// The table in the memfd, for its writers.
#[repr(C)]
pub struct Transfers {
    magic: AtomicU64,
    places: AtomicU64,
    /// Transfers under way that found no place.
    beyond: AtomicU64,
    /// Transfers under way that end without a call of QEMU's: they are taken out when somebody looks for their ends.
    queued: AtomicU64,
    /// Not 0: there may be transfers of which nothing is known, now and from now on.
    unknown: AtomicU64,
    /// Pieces noted so far.
    noted: AtomicU64,
    reserved: [AtomicU64; 2],
    table: [Place; PLACES],
    pieces: [AtomicU64; PIECES],
}

#[repr(C)]
struct Place {
    start: AtomicU64,
    end: AtomicU64,
    first: AtomicU64,
    count: AtomicU64,
}

/// The table's first bytes, for its reader.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TransfersHeader {
    /// [`TRANSFERS_MAGIC`].
    pub magic: u64,
    /// [`PLACES`].
    pub places: u64,
    /// Transfers under way that found no place.
    pub beyond: u64,
    /// Transfers under way whose ends have to be looked for (`Operation::EndTransfers`).
    pub queued: u64,
    /// Not 0: there may be transfers of which nothing is known.
    pub unknown: u64,
    /// Pieces noted so far.
    pub noted: u64,
    /// Reserved: 0.
    pub reserved: [u64; 2],
}

/// One place, for the table's reader. Places follow the [`TransfersHeader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TransferPlace {
    /// The first address.
    pub start: u64,
    /// The address behind the last; 0 where nothing is under way, [`CLAIMED`] where it may be anywhere.
    pub end: u64,
    /// Which of all pieces noted so far is its first.
    pub first: u64,
    /// How many pieces it has; 0 where it is one piece, or has too many.
    pub count: u64,
}

/// Where the pieces begin in the table, bytes.
pub const PIECES_AT: usize = size_of::<TransfersHeader>() + PLACES * size_of::<TransferPlace>();

/// How large the table is, bytes.
pub const TABLE_BYTES: usize = PIECES_AT + PIECES * size_of::<u64>();

const _: () = {
    assert!(TABLE_BYTES == size_of::<Transfers>());
    assert!(size_of::<Place>() == size_of::<TransferPlace>());
};

/// Bits of a piece for its number of pages.
const PAGES_BITS: u32 = 20;

/// A piece from one address to another as it is noted: its pages.
#[must_use]
pub fn pack(start: u64, end: u64) -> u64 {
    let pages = end.div_ceil(PAGE).saturating_sub(start / PAGE);
    (start / PAGE) << PAGES_BITS | pages.min((1 << PAGES_BITS) - 1)
}

/// The addresses of a piece.
#[must_use]
pub fn unpack(piece: u64) -> (u64, u64) {
    let (page, pages) = (piece >> PAGES_BITS, piece & ((1 << PAGES_BITS) - 1));
    (page * PAGE, (page + pages) * PAGE)
}

/// A page, bytes.
const PAGE: u64 = 4096;

/// The pieces of a transfer, which were [noted](Transfers::note_pieces).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pieces {
    first: u64,
    count: u64,
}

/// Where a transfer is noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noted {
    /// In this place.
    At(usize),
    /// In none.
    Beyond,
}

impl Transfers {
    /// Turns zeroed memory into a table.
    pub fn initialise(&self) {
        self.places.store(PLACES as u64, Ordering::Relaxed);
        self.magic.store(TRANSFERS_MAGIC, Ordering::Release);
    }

    /// Notes so many pieces of a transfer that is about to begin; `write` is given what takes each. None are noted of
    /// one piece, which its transfer says by itself, and of too many.
    pub fn note_pieces(&self, count: u64, write: impl FnOnce(&mut dyn FnMut(u64, u64))) -> Pieces {
        if !(2..=MOST_PIECES).contains(&count) {
            return Pieces::default();
        }
        // Before they are written: who has read what was there before sees that it is not there any more.
        let first = self.noted.fetch_add(count, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let mut at = 0;
        write(&mut |start, end| {
            let place = self.pieces.get((first.wrapping_add(at) % PIECES as u64) as usize);
            if let Some(piece) = place.filter(|_| at < count) {
                piece.store(pack(start, end), Ordering::Relaxed);
            }
            at += 1;
        });
        Pieces { first, count }
    }

    /// Notes a transfer into these addresses, or into these pieces between them; places are tried from `near` on. Any
    /// thread may call it at any moment. It never waits. When it returns, whoever drops these addresses from the page
    /// tables and then looks sees the transfer.
    pub fn begin(&self, start: u64, end: u64, pieces: Pieces, near: usize) -> Noted {
        let order = (0..PLACES).map(|step| near.wrapping_add(step) % PLACES);
        let claimed = order.filter_map(|at| Some((at, self.table.get(at)?))).find(|(_, place)| {
            place.end.load(Ordering::Relaxed) == 0
                && place.end.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let noted = match claimed {
            Some((at, place)) => {
                place.start.store(start, Ordering::Relaxed);
                place.first.store(pieces.first, Ordering::Relaxed);
                place.count.store(pieces.count, Ordering::Relaxed);
                place.end.store(end.clamp(1, CLAIMED - 1), Ordering::Release);
                Noted::At(at)
            }
            None => {
                self.beyond.fetch_add(1, Ordering::Relaxed);
                Noted::Beyond
            }
        };
        // The kernel reads the page tables next: that must not come before the note is seen.
        fence(Ordering::SeqCst);
        noted
    }

    /// Takes a transfer out that the kernel is done with.
    pub fn end(&self, noted: Noted) {
        match noted {
            Noted::At(at) => self.table.get(at).into_iter().for_each(|place| place.end.store(0, Ordering::Release)),
            Noted::Beyond => drop(self.beyond.fetch_sub(1, Ordering::Release)),
        }
    }

    /// Counts transfers whose ends have to be looked for: more, or fewer.
    pub fn note_queued(&self, more: u64, fewer: u64) {
        self.queued.fetch_add(more, Ordering::AcqRel);
        self.queued.fetch_sub(fewer, Ordering::AcqRel);
    }

    /// Says that from now on there may be transfers of which nothing is known.
    pub fn lose_track(&self) {
        self.unknown.store(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Box<Transfers> {
        let words = vec![0u64; size_of::<Transfers>() / 8].into_boxed_slice();
        // SAFETY: Transfers consists of u64 atomics only, has the boxed slice's size and alignment, and all-zero is
        // valid for it.
        let table = unsafe { Box::from_raw(Box::into_raw(words).cast::<Transfers>()) };
        table.initialise();
        table
    }

    fn begin(table: &Transfers, start: u64, end: u64) -> Noted {
        table.begin(start, end, Pieces::default(), PLACES - 1)
    }

    fn at(table: &Transfers, place: usize) -> (u64, u64) {
        let place = &table.table[place];
        (place.start.load(Ordering::Acquire), place.end.load(Ordering::Acquire))
    }

    #[test]
    fn a_transfer_is_in_the_table_until_it_ends_and_another_one_has_another_place() {
        let table = table();
        let (one, other) = (begin(&table, 10, 20), begin(&table, 30, 40));
        assert_eq!((one, other), (Noted::At(PLACES - 1), Noted::At(0)), "places are tried in a circle");
        assert_eq!((at(&table, PLACES - 1), at(&table, 0)), ((10, 20), (30, 40)));
        table.end(one);
        assert_eq!((at(&table, PLACES - 1).1, at(&table, 0)), (0, (30, 40)));
        assert_eq!(begin(&table, 50, 60), one);
    }

    #[test]
    fn what_finds_no_place_is_counted_until_it_ends() {
        let table = table();
        let all: Vec<Noted> = (0..PLACES).map(|at| table.begin(1, 2, Pieces::default(), at)).collect();
        assert_eq!(table.begin(1, 2, Pieces::default(), 7), Noted::Beyond);
        assert_eq!(table.beyond.load(Ordering::Relaxed), 1);
        table.end(Noted::Beyond);
        all.into_iter().for_each(|noted| table.end(noted));
        assert_eq!(table.beyond.load(Ordering::Relaxed), 0);
        assert!((0..PLACES).all(|place| at(&table, place).1 == 0));
    }

    #[test]
    fn threads_that_note_at_once_never_share_a_place() {
        let table = table();
        std::thread::scope(|scope| {
            for thread in 1..=4u64 {
                let table = &table;
                scope.spawn(move || {
                    for round in 1..=20_000u64 {
                        let address = thread << 32 | round;
                        let noted = table.begin(address, address + 1, Pieces::default(), 5);
                        let Noted::At(place) = noted else { panic!("there are places enough") };
                        assert_eq!(at(table, place), (address, address + 1));
                        table.end(noted);
                    }
                });
            }
        });
        assert!((0..PLACES).all(|place| at(&table, place).1 == 0));
    }

    #[test]
    fn an_end_that_is_no_address_is_neither_free_nor_claimed() {
        let table = table();
        let of = |end| {
            let Noted::At(place) = table.begin(0, end, Pieces::default(), 0) else { panic!("there are places enough") };
            at(&table, place).1
        };
        assert_eq!((of(0), of(u64::MAX)), (1, CLAIMED - 1));
    }

    #[test]
    fn pieces_are_noted_one_after_the_other_and_the_ring_comes_round() {
        let table = table();
        let piece = |at: u64| unpack(table.pieces[at as usize % PIECES].load(Ordering::Relaxed));
        let note = |count: u64| {
            table.note_pieces(count, |take| (0..count).for_each(|at| take(at * 0x4000, at * 0x4000 + 0x1000)))
        };
        assert_eq!((note(1), note(MOST_PIECES + 1)), (Pieces::default(), Pieces::default()));
        let mut noted = 0;
        while noted < PIECES as u64 + 500 {
            assert_eq!(note(100), Pieces { first: noted, count: 100 });
            assert_eq!((piece(noted), piece(noted + 99)), ((0, 0x1000), (99 * 0x4000, 99 * 0x4000 + 0x1000)));
            noted += 100;
        }
        let Noted::At(place) = table.begin(0, 0x100_0000, note(7), 3) else { panic!("there are places enough") };
        let place = &table.table[place];
        assert_eq!((place.first.load(Ordering::Relaxed), place.count.load(Ordering::Relaxed)), (noted, 7));
    }

    #[test]
    fn a_piece_is_its_whole_pages() {
        assert_eq!(unpack(pack(0x1000, 0x2000)), (0x1000, 0x2000));
        assert_eq!(unpack(pack(0x1fff, 0x2001)), (0x1000, 0x3000));
        let high = 0x7fff_ffff_f000;
        assert_eq!(unpack(pack(high, high + 0x1000)), (high, high + 0x1000));
    }
}
