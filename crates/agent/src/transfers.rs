//! Reads of QEMU's into guest RAM, noted for as long as they are under way.
//!
//! What is not read past the page tables is noted, too: which it is depends on the file, its file system and its mount.
//! A read that is a call (`pread(2)`, `preadv(2)`) ends with it. Requests of native AIO are queued, and end without a
//! call: QEMU takes their results out of a ring in its own memory. So the ring is looked through from where it was left
//! off, whenever QEMU queues more, and when the daemon asks. It cannot have been lapped meanwhile: it has room for all
//! that was under way.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use libc::{c_int, c_void, iovec};
use sterna_agent_protocol::transfers::{Noted, PLACES, Transfers};

use crate::blocks::BLOCKS;
use crate::raw;

/// The table, which stays mapped; null until guest RAM is mapped.
static TABLE: AtomicPtr<Transfers> = AtomicPtr::new(ptr::null_mut());

/// The table's memfd, which stays open; -1 until it is made.
static MEMORY: AtomicI32 = AtomicI32::new(-1);

/// Whether making it was begun.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Makes the table, once, before guest RAM can be read into.
pub fn create() {
    if BEGUN.swap(true, Ordering::AcqRel) {
        return;
    }
    // SAFETY: Transfers are made of atomics, for which all-zero is valid.
    match unsafe { raw::shared_memory::<Transfers>(c"sterna-transfers") } {
        Ok((table, memory)) => {
            table.initialise();
            MEMORY.store(memory, Ordering::Relaxed);
            TABLE.store(ptr::from_ref(table).cast_mut(), Ordering::Release);
        }
        // The daemon finds no table, and takes every page for one that is read into.
        Err(errno) => raw::complain("cannot make its table of transfers", errno),
    }
}

/// The table's memfd.
pub fn memory() -> Option<c_int> {
    Some(MEMORY.load(Ordering::Relaxed)).filter(|number| *number >= 0)
}

fn table() -> Option<&'static Transfers> {
    // SAFETY: null, or a table that stays mapped.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

/// A read that is a call. It ends when this is dropped.
pub struct Read(Option<Noted>);

impl Read {
    /// Notes a read into these buffers, if one of them is guest RAM.
    pub fn begin(buffers: &[iovec]) -> Self {
        Self(table().and_then(|table| begin(table, buffers, near)))
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        if let (Some(table), Some(noted)) = (table(), self.0) {
            table.end(noted);
        }
    }
}

/// Notes a read into these buffers, if one of them is guest RAM: from its first to its last byte there, and the parts
/// that it consists of. Places are tried from the one on that `home` tells for its first byte.
fn begin(table: &Transfers, buffers: &[iovec], home: impl FnOnce(u64) -> usize) -> Option<Noted> {
    let (mut extent, mut count) = (None, 0);
    each_piece(buffers, &mut |start, end| {
        let (first, last) = extent.unwrap_or((start, end));
        (extent, count) = (Some((first.min(start), last.max(end))), count + 1);
    });
    let (start, end) = extent?;
    let pieces = table.note_pieces(count, |take| each_piece(buffers, take));
    Some(table.begin(start, end, pieces, home(start)))
}

/// Tells of each part of guest RAM that these buffers are; neighbours are one.
fn each_piece(buffers: &[iovec], tell: &mut dyn FnMut(u64, u64)) {
    let mut piece: Option<(u64, u64)> = None;
    for buffer in buffers {
        let (start, length) = (buffer.iov_base as u64, buffer.iov_len as u64);
        if length == 0 || BLOCKS.touching(start, length).next().is_none() {
            continue;
        }
        let end = start.saturating_add(length);
        match &mut piece {
            Some((_, last)) if *last == start => *last = end,
            _ => {
                if let Some((first, last)) = piece.replace((start, end)) {
                    tell(first, last);
                }
            }
        }
    }
    if let Some((first, last)) = piece {
        tell(first, last);
    }
}

/// A place from which on one is searched, so that threads seldom meet.
fn near(address: u64) -> usize {
    (address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48) as usize % PLACES
}

/// A request of native AIO (`struct iocb`), as far as it matters here.
#[repr(C)]
pub struct Request {
    data: u64,
    key: u32,
    flags: u32,
    /// What is asked for.
    pub opcode: u16,
    priority: i16,
    file: u32,
    /// The buffer, or the buffers' descriptions.
    pub buffer: u64,
    /// The buffer's length, or the number of buffers.
    pub length: u64,
    offset: i64,
}

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PREADV: u16 = 7;

impl Request {
    /// Notes where it reads to, if that is guest RAM. Places are tried from `home` on.
    ///
    /// # Safety
    /// It is a request as `io_submit(2)` takes it, and so are its buffers.
    unsafe fn begin(&self, table: &Transfers, home: usize) -> Option<Noted> {
        let one = [iovec { iov_base: self.buffer as *mut c_void, iov_len: self.length as usize }];
        let buffers = match self.opcode {
            IOCB_CMD_PREAD => &one[..],
            IOCB_CMD_PREADV if self.buffer != 0 && self.length <= libc::UIO_MAXIOV as u64 => {
                // SAFETY: the caller's promise.
                unsafe { core::slice::from_raw_parts(self.buffer as *const iovec, self.length as usize) }
            }
            _ => return None,
        };
        begin(table, buffers, |_| home)
    }
}

/// The ring of a context's results, as the kernel writes it (`struct aio_ring`).
#[repr(C)]
struct Ring {
    id: u32,
    size: u32,
    head: u32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header_bytes: u32,
}

/// A result in the ring (`struct io_event`).
#[repr(C)]
struct Completion {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// Contexts whose rings are looked through: one for each of QEMU's threads that have disks.
const CONTEXTS: usize = 64;

/// The requests that are under way, by place: the address of the request, 0 for none. A request without a place is not
/// here: it counts until its context is gone.
static QUEUED: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

/// A context: its id, which is the ring's address, 0 for none; and the result that is looked at next.
static WATCHED: [(AtomicU64, AtomicU32); CONTEXTS] = [const { (AtomicU64::new(0), AtomicU32::new(0)) }; CONTEXTS];

/// For each place from which on one was searched: how far away the farthest was. Requests that are not here, such as
/// writes, are so missed at once.
static FARTHEST: [AtomicU32; PLACES] = [const { AtomicU32::new(0) }; PLACES];

/// Who looks through rings or queues holds this, for a moment.
static LOCK: AtomicBool = AtomicBool::new(false);

struct Locked;

fn lock() -> Locked {
    while LOCK.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        raw::yield_now();
    }
    Locked
}

impl Drop for Locked {
    fn drop(&mut self) {
        LOCK.store(false, Ordering::Release);
    }
}

/// Notes those of these requests that read into guest RAM, has them queued by `submit`, which returns how many it has
/// taken, and takes out those that it has not.
///
/// # Safety
/// As `io_submit(2)`.
pub unsafe fn queue(context: u64, requests: &[*const Request], submit: impl FnOnce() -> c_int) -> c_int {
    let Some(table) = table() else { return submit() };
    {
        let _locked = lock();
        // SAFETY: QEMU queues to this context, so that it is there.
        if unsafe { watch(context) } {
            look_through(table);
        } else {
            table.lose_track();
        }
        for request in requests {
            let address = *request as u64;
            // SAFETY: the caller's promise.
            if let Some(noted) = unsafe { request.as_ref().and_then(|request| request.begin(table, near(address))) } {
                queued(table, address, noted);
            }
        }
    }
    let taken = submit();
    let left = requests.get(usize::try_from(taken).unwrap_or(0)..).unwrap_or_default();
    if !left.is_empty() {
        let _locked = lock();
        left.iter().for_each(|request| ended(table, *request as u64));
    }
    taken
}

/// Takes those out that have ended.
pub fn end_queued() {
    if let Some(table) = table() {
        let _locked = lock();
        look_through(table);
    }
}

/// Forgets a context that is new or gone: none of its requests is under way.
pub fn forget(context: u64) {
    let Some(table) = table() else { return };
    let _locked = lock();
    look_through(table);
    WATCHED.iter().filter(|(id, _)| id.load(Ordering::Relaxed) == context).for_each(|(id, _)| {
        id.store(0, Ordering::Relaxed);
    });
}

/// Looks a context's ring through from now on, and says whether that is possible.
///
/// # Safety
/// The context is there.
unsafe fn watch(context: u64) -> bool {
    if WATCHED.iter().any(|(id, _)| id.load(Ordering::Relaxed) == context) {
        return true;
    }
    // SAFETY: the caller's promise: a context's id is where the kernel has mapped its ring.
    let Some(ring) = (unsafe { (context as *const Ring).as_ref() }) else { return false };
    if ring.magic != RING_MAGIC || ring.incompatible != 0 || ring.size == 0 {
        return false;
    }
    let Some((id, next)) = WATCHED.iter().find(|(id, _)| id.load(Ordering::Relaxed) == 0) else { return false };
    // Nothing was queued before this, since the context was made or forgotten.
    next.store(ring.tail.load(Ordering::Acquire), Ordering::Relaxed);
    id.store(context, Ordering::Relaxed);
    true
}

/// Takes out what the rings say has ended. The lock is held.
fn look_through(table: &Transfers) {
    for (id, next) in &WATCHED {
        // SAFETY: a context that is watched is there: one that goes is forgotten before.
        let Some(ring) = (unsafe { (id.load(Ordering::Relaxed) as *const Ring).as_ref() }) else { continue };
        let (tail, mut at) = (ring.tail.load(Ordering::Acquire), next.load(Ordering::Relaxed));
        let first = (ptr::from_ref(ring) as u64 + u64::from(ring.header_bytes)) as *const Completion;
        while at != tail && tail < ring.size {
            // SAFETY: the ring has `size` results behind its header, and this one was published before `tail`.
            let request = unsafe { (*first.add(at as usize)).request };
            ended(table, request);
            at = if at.wrapping_add(1) < ring.size { at + 1 } else { 0 };
        }
        next.store(at, Ordering::Relaxed);
    }
}

/// Remembers whose a transfer is, until the request [has ended](ended).
fn queued(table: &Transfers, request: u64, noted: Noted) {
    let home = near(request);
    match noted {
        Noted::At(at) => {
            if let (Some(place), Some(farthest)) = (QUEUED.get(at), FARTHEST.get(home)) {
                place.store(request, Ordering::Relaxed);
                farthest.fetch_max(((at + PLACES - home) % PLACES) as u32, Ordering::Relaxed);
            }
            table.note_queued(1, 0);
        }
        // Nothing says which of those without a place ends.
        Noted::Beyond => table.lose_track(),
    }
}

fn ended(table: &Transfers, request: u64) {
    let home = near(request);
    let farthest = FARTHEST.get(home).map_or(0, |farthest| farthest.load(Ordering::Relaxed) as usize);
    let places = (0..=farthest).map(|step| (home + step) % PLACES);
    let found =
        places.filter_map(|at| Some((at, QUEUED.get(at)?))).find(|(_, of)| of.load(Ordering::Relaxed) == request);
    if let Some((at, of)) = found.filter(|_| request != 0) {
        of.store(0, Ordering::Relaxed);
        table.end(Noted::At(at));
        table.note_queued(0, 1);
    }
}

/// Says that reads are under way of which nothing is known.
pub fn lose_track() {
    if let Some(table) = table() {
        table.lose_track();
    }
}

#[cfg(test)]
mod tests {
    use sterna_agent_protocol::transfers::Pieces;

    use super::*;

    /// A ring of four results, as the kernel lays it out.
    #[repr(C)]
    struct Four {
        ring: Ring,
        results: [Completion; 4],
    }

    fn ring() -> Four {
        let none = || Completion { data: 0, request: 0, result: 0, result2: 0 };
        let header_bytes = size_of::<Ring>() as u32;
        let (magic, tail) = (RING_MAGIC, AtomicU32::new(0));
        let ring = Ring { id: 0, size: 4, head: 0, tail, magic, compatible: 1, incompatible: 0, header_bytes };
        Four { ring, results: [none(), none(), none(), none()] }
    }

    fn note(table: &Transfers, request: u64) {
        queued(table, request, table.begin(1, 2, Pieces::default(), near(request)));
    }

    #[test]
    fn a_request_is_found_by_its_address_however_far_from_home_it_is() {
        // SAFETY: a table is made of atomics.
        let (table, _) = unsafe { raw::shared_memory::<Transfers>(c"test") }.expect("memory");
        table.initialise();
        let first = 0x1000;
        let same_home = |request: &u64| near(*request) == near(first);
        let requests: Vec<u64> = (first..).step_by(16).filter(same_home).take(3).collect();
        requests.iter().for_each(|request| note(table, *request));
        let known = |request: u64| QUEUED.iter().any(|of| of.load(Ordering::Relaxed) == request);
        for at in [1, 0, 2] {
            assert!(known(requests[at]));
            ended(table, requests[at]);
            assert!(!known(requests[at]));
        }
        // One that was never noted is missed.
        ended(table, requests[0]);
        ended(table, 0);
    }

    #[test]
    fn a_ring_is_looked_through_from_where_it_was_left_off_round_and_round() {
        // SAFETY: as above.
        let (table, _) = unsafe { raw::shared_memory::<Transfers>(c"test") }.expect("memory");
        table.initialise();
        let mut four = Box::new(ring());
        let context = ptr::from_ref(&*four) as u64;
        // SAFETY: the ring is there until the context is forgotten.
        assert!(unsafe { watch(context) } && unsafe { watch(context) });
        let request = |number: usize| 0xABC0_0000 + 64 * number as u64;
        let known = |request: u64| QUEUED.iter().any(|of| of.load(Ordering::Relaxed) == request);
        for number in 0..11 {
            note(table, request(number));
            four.results[number % 4].request = request(number);
            four.ring.tail.store((number as u32 + 1) % 4, Ordering::Release);
            look_through(table);
            assert!(!known(request(number)), "{number}");
        }
        WATCHED.iter().filter(|(id, _)| id.load(Ordering::Relaxed) == context).for_each(|(id, _)| {
            id.store(0, Ordering::Relaxed);
        });
    }

    #[test]
    fn memory_that_is_no_ring_is_not_watched() {
        let mut four = Box::new(ring());
        four.ring.magic = 0;
        // SAFETY: it is memory of a ring's size.
        assert!(!unsafe { watch(ptr::from_ref(&*four) as u64) });
        assert!(!unsafe { watch(0) });
    }
}
