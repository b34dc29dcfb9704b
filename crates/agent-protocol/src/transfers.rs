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

use core::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The beginning of the table: "STRNDTRF".
pub const TRANSFERS_MAGIC: u64 = u64::from_le_bytes(*b"STRNDTRF");

/// The number of places: QEMU has at most 64 threads that read, and up to 1,024 requests in each queue of native AIO.
pub const PLACES: usize = 4096;

/// The `end` of a place whose transfer is being noted.
pub const CLAIMED: u64 = u64::MAX;

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
    reserved: [AtomicU64; 3],
    table: [Place; PLACES],
}

#[repr(C)]
struct Place {
    start: AtomicU64,
    end: AtomicU64,
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
    /// Reserved: 0.
    pub reserved: [u64; 3],
}

/// One place, for the table's reader. Places follow the [`TransfersHeader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TransferPlace {
    /// The first address.
    pub start: u64,
    /// The address behind the last; 0 where nothing is under way, [`CLAIMED`] where it may be anywhere.
    pub end: u64,
}

const _: () = {
    assert!(size_of::<TransfersHeader>() + PLACES * size_of::<TransferPlace>() == size_of::<Transfers>());
    assert!(size_of::<Place>() == size_of::<TransferPlace>());
};

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

    /// Notes a transfer into these addresses; places are tried from `near` on. Any thread may call it at any moment. It
    /// never waits. When it returns, whoever drops these addresses from the page tables and then looks sees the
    /// transfer.
    pub fn begin(&self, start: u64, end: u64, near: usize) -> Noted {
        let order = (0..PLACES).map(|step| near.wrapping_add(step) % PLACES);
        let claimed = order.filter_map(|at| Some((at, self.table.get(at)?))).find(|(_, place)| {
            place.end.load(Ordering::Relaxed) == 0
                && place.end.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let noted = match claimed {
            Some((at, place)) => {
                place.start.store(start, Ordering::Relaxed);
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

    fn at(table: &Transfers, place: usize) -> (u64, u64) {
        let place = &table.table[place];
        (place.start.load(Ordering::Acquire), place.end.load(Ordering::Acquire))
    }

    #[test]
    fn a_transfer_is_in_the_table_until_it_ends_and_another_one_has_another_place() {
        let table = table();
        let (one, other) = (table.begin(10, 20, PLACES - 1), table.begin(30, 40, PLACES - 1));
        assert_eq!((one, other), (Noted::At(PLACES - 1), Noted::At(0)), "places are tried in a circle");
        assert_eq!((at(&table, PLACES - 1), at(&table, 0)), ((10, 20), (30, 40)));
        table.end(one);
        assert_eq!((at(&table, PLACES - 1).1, at(&table, 0)), (0, (30, 40)));
        assert_eq!(table.begin(50, 60, PLACES - 1), one);
    }

    #[test]
    fn what_finds_no_place_is_counted_until_it_ends() {
        let table = table();
        let all: Vec<Noted> = (0..PLACES).map(|at| table.begin(1, 2, at)).collect();
        assert_eq!(table.begin(1, 2, 7), Noted::Beyond);
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
                        let noted = table.begin(address, address + 1, 5);
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
            let Noted::At(place) = table.begin(0, end, 0) else { panic!("there are places enough") };
            at(&table, place).1
        };
        assert_eq!((of(0), of(u64::MAX)), (1, CLAIMED - 1));
    }
}
