//! Split guests: a guest runs here, and a part of its pages is at memory hosts (`docs/design/memory-hosts.md`).
//!
//! ```text
//! out   WayOut::send      read ─▶ put ─▶ Pager::depart: fence ─▶ compare ─▶ away, on record ─▶ punch ─▶ let go
//! in    a fault ─▶ Split::ask ─▶ get ─▶ Pager::place: write ─▶ here, on record ─▶ map
//! ```
//!
//! The [pager](crate::paging) has the record, the faults and the RAM; this module has the memory hosts, and is the
//! pager's supplier. Each chunk has a lock: one request about it is under way at a time. It is held over the network,
//! so nobody takes it who settles a fault.
//!
//! **An answer that is lost** leaves it open what the memory host has. The chunk is *unsure* then: before anything else
//! is asked about it the epoch is raised, so that nothing which was sent before arrives any more, and the memory host
//! tells what it has. `sterna_protocol::split` says what follows from that.
//!
//! **A memory host that does not answer** keeps its pages, and the threads that need them wait, however long. Each
//! memory host has threads of its own, so nobody waits for another one.

/// Hosts that lend.
mod lender;

/// Connections to memory hosts.
mod lines;

/// Pages that can be had without the memory host that has them.
mod parity;

/// What the pager asks of it.
mod supplies;

/// Pages that come back.
mod fetch;

/// Which pages come along with one that is waited for.
mod ahead;

/// Whether one of two memory hosts that did not answer is there again.
mod probe;

/// Pages that one of two memory hosts alone has are copied to the other.
mod mend;

/// Pages that leave.
pub mod out;

/// Which chunk leaves next.
pub mod clock;

/// Which chunks the guest uses.
mod hotness;

/// Which of them the VMM itself uses.
mod main_thread;

/// What is known of a chunk.
mod chunk;

/// Pages that are here and at their memory host.
mod copies;

/// What has gone and come.
mod account;

/// How much of a guest may be here.
pub mod room;

/// No more of a guest is kept here than that.
mod keep;

/// Pages that go past this host.
mod straight;

/// Which of them are on their way.
mod errands;

/// What it takes anew waits for room, where it takes it faster than pages leave.
mod admit;

/// How much of it may be here at present, and the account of what waited.
mod pace;

/// Memory hosts that are exchanged under a running guest.
mod hosts;

/// Whoever looks into the guest's memory.
mod looks;

/// Pages that it gives back while they are away.
mod forget;

/// What a memory host may have that counts no more.
mod rests;

/// Why pages did not go or come.
mod error;

/// A split guest moves to another host.
pub mod onward;

/// Which of its pages need not travel.
pub mod holding;

/// Whether it stands still meanwhile.
mod still;

/// Memory hosts that do not answer.
pub mod outage;

/// Asking memory hosts for room, and giving it back.
pub mod loans;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use sterna_api::Problem;
use sterna_protocol::frame::Digester;
use sterna_protocol::hello::VERSION;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::PageSet;
use sterna_protocol::split::{Restart, Whereabouts};

pub use self::account::Account;
use self::ahead::Ahead;
use self::chunk::Chunk;
use self::clock::Clock;
use self::errands::Errands;
pub use self::error::SplitError;
use self::hotness::{DroppedMappings, Hotness};
use self::lender::Member;
pub use self::lender::{Lender, Parity, Part};
pub use self::lines::Epochs;
use self::lines::{Lenders, Lines};
use self::main_thread::MainThread;
use self::pace::Pace;
pub use self::pace::Paced;
use self::rests::Rests;
use self::room::Room;
use self::still::Still;
use crate::error::MigrateError;
use crate::paging::Pager;
use crate::paging::whereabouts::Holder;
use crate::store::client::StoreError;

/// The part of a guest that is at memory hosts. It has threads of its own until [`end`](Self::end).
pub struct Split {
    pager: Arc<Pager>,
    lenders: Lenders,
    digester: Digester,
    chunks: Vec<Mutex<Chunk>>,
    /// For each memory host the pages that somebody waits for.
    wanted: Vec<Mutex<VecDeque<PageIndex>>>,
    called: Vec<Condvar>,
    ahead: Mutex<Ahead>,
    /// The same of pages that are touched for the first time.
    touched: Mutex<Ahead>,
    clock: Clock,
    hotness: Box<dyn Hotness>,
    main_thread: MainThread,
    /// How much of the guest may be here, where that is bounded.
    room: Mutex<Option<Room>>,
    pace: Pace,
    /// Held while a chunk leaves for want of room.
    on_the_way: Mutex<()>,
    /// Why the pages that are too many do not leave, for as long as that is so.
    stuck: Mutex<Option<Problem>>,
    /// For each memory host why it brings no pages, for as long as that is so.
    failing: Vec<Mutex<Option<Problem>>>,
    /// For each memory host, and each mirror, where it may have pages that count no more.
    rests: [Mutex<Rests>; Member::MOST],
    /// It is being looked what one of two memory hosts has, that has answered again.
    looking: AtomicBool,
    still: Still,
    errands: Mutex<Errands>,
    heard: Mutex<Instant>,
    ended: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    out: AtomicU64,
    zero: AtomicU64,
    kept: AtomicU64,
    unsent: AtomicU64,
    back: AtomicU64,
}

impl Split {
    /// Begins with a guest that is all here: pages may leave from now on, to these memory hosts. `guest` is its number
    /// there, and the key of its owners.
    ///
    /// # Errors
    /// More memory hosts than a guest may have; the map cannot be written, or no thread is left.
    pub fn begin(
        pager: Arc<Pager>,
        lenders: Vec<Lender>,
        guest: (u128, u128),
        epochs: Box<dyn Epochs>,
    ) -> Result<Arc<Self>, SplitError> {
        pager.begin_split()?;
        let split = Self::new(pager, lenders, guest, epochs)?;
        Self::serve(&split)?;
        Ok(split)
    }

    /// Goes on with a guest that an earlier daemon left split, once all its memory hosts answer. Its threads wait
    /// meanwhile for what is away.
    ///
    /// # Errors
    /// A memory host does not answer, or has [lost](SplitError::Lost) pages; as [`begin`](Self::begin). Nothing has
    /// changed then, and it can be tried again.
    pub fn recover(
        pager: Arc<Pager>,
        lenders: Vec<Lender>,
        guest: (u128, u128),
        epochs: Box<dyn Epochs>,
    ) -> Result<Arc<Self>, SplitError> {
        let split = Self::new(pager, lenders, guest, epochs)?;
        split.take_stock()?;
        split.pager.take_out_what_is_away()?;
        Self::serve(&split)?;
        Ok(split)
    }

    fn new(
        pager: Arc<Pager>,
        lenders: Vec<Lender>,
        guest: (u128, u128),
        epochs: Box<dyn Epochs>,
    ) -> Result<Arc<Self>, SplitError> {
        if lenders.len() > Holder::MAX_HOSTS {
            return Err(MigrateError::Bug("a guest with more memory hosts than it may have").into());
        }
        // Each chunk of a stripe is at another one, and so is its parity.
        let fits = |lender: &Lender| lender.parity.is_none_or(|parity| parity.fits(lenders.len()));
        if !lenders.iter().all(fits) {
            return Err(MigrateError::Bug("parity over fewer memory hosts than it takes").into());
        }
        let chunks = pager.ram().layout().chunks();
        let lenders = Lenders::new(lenders, guest, chunks, epochs)?;
        let hotness = Box::new(DroppedMappings::of(&pager));
        let main_thread = MainThread::of(pager.guest_faults().inside().pid());
        let split = Self {
            pager,
            lenders,
            digester: Digester::of(VERSION, guest.1),
            chunks: (0..chunks).map(|_| Mutex::default()).collect(),
            wanted: (0..Holder::MAX_HOSTS).map(|_| Mutex::default()).collect(),
            called: (0..Holder::MAX_HOSTS).map(|_| Condvar::new()).collect(),
            ahead: Mutex::default(),
            touched: Mutex::default(),
            clock: Clock::new(chunks),
            hotness,
            main_thread,
            room: Mutex::default(),
            pace: Pace::new(),
            on_the_way: Mutex::default(),
            stuck: Mutex::default(),
            failing: (0..Holder::MAX_HOSTS).map(|_| Mutex::default()).collect(),
            rests: std::array::from_fn(|_| Mutex::default()),
            looking: AtomicBool::new(false),
            still: Still::default(),
            errands: Mutex::default(),
            heard: Mutex::new(Instant::now()),
            ended: AtomicBool::new(false),
            threads: Mutex::default(),
            out: AtomicU64::new(0),
            zero: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
            back: AtomicU64::new(0),
        };
        // Perhaps they have all that they lent back: an earlier daemon has told them, or this one is about to.
        let gone = |number: &usize| split.lenders.is_leaving(*number) && !split.has_part(*number);
        (0..split.lenders.count()).filter(gone).for_each(|number| split.see_off(number));
        Ok(Arc::new(split))
    }

    fn spawn(self: &Arc<Self>, name: &str, work: impl FnOnce(&Self) + Send + 'static) -> Result<(), SplitError> {
        let this = Arc::clone(self);
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || work(&this));
        let thread = spawned.map_err(MigrateError::host("starting a thread for the guest's pages"))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// The guest's pager.
    #[must_use]
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// What has gone and come so far.
    #[must_use]
    pub fn account(&self) -> Account {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (out_pages, zero_pages) = (load(&self.out), load(&self.zero));
        let (kept_pages, unsent_pages, in_pages) = (load(&self.kept), load(&self.unsent), load(&self.back));
        Account { out_pages, zero_pages, kept_pages, unsent_pages, in_pages, paced: self.pace.paced() }
    }

    /// Why a memory host brings no pages at present.
    #[must_use]
    pub fn failing(&self, number: usize) -> Option<Problem> {
        lock(self.failing.get(number)?).clone()
    }

    /// Memory hosts that did not answer when they were last asked, where their mirrors have the same pages.
    #[must_use]
    pub fn silent(&self) -> Vec<String> {
        let members = (0..self.lenders.count()).flat_map(|number| self.lenders.members(number));
        let silent = members.filter(|member| self.is_silent_of_two(*member) && !self.lenders.is_leaving(member.number));
        let mut silent: Vec<_> = silent.map(|member| self.lenders.peer(member)).collect();
        silent.dedup();
        silent
    }

    /// How many pages are at one of two memory hosts alone: the other one did not answer when they left, or has lost
    /// them. They are copied to it once it answers. Of one that was not asked yet what it has, they all are.
    #[must_use]
    pub fn at_one_alone(&self) -> u64 {
        let unknown = self.unknown();
        if self.pager.alone_chunks() == 0 && unknown.is_empty() {
            return self.orphans(0);
        }
        let alone = |chunk: &ChunkIndex| {
            let holder = self.pager.holder(*chunk);
            let is_unknown = || self.having(*chunk).iter().any(|member| unknown.contains(member));
            holder.and_then(Holder::alone).is_some() || is_unknown()
        };
        let chunks = self.pager.ram().layout().iter().filter(alone);
        chunks.map(|chunk| self.pager.away_in(chunk).len() as u64).sum::<u64>() + self.orphans(0)
    }

    /// Why pages that are too many here do not leave at present.
    #[must_use]
    pub fn stuck(&self) -> Option<Problem> {
        lock(&self.stuck).clone()
    }

    /// Ends it: nobody brings pages any more. Only where all are here, or the guest has ended; the pager ends, too.
    pub fn end(&self) {
        self.pager.note_all();
        self.stop();
        // Nor does whoever looks for those that are silent: what was lent is given back.
        self.see_off_all();
        self.pager.end();
    }

    /// Ends its threads, and nothing else, as when this process dies.
    #[doc(hidden)]
    pub fn stop(&self) {
        self.ended.store(true, Ordering::Release);
        for (wanted, called) in self.wanted.iter().zip(&self.called) {
            let _wanted = lock(wanted);
            called.notify_all();
        }
        self.pace.end();
        let threads = std::mem::take(&mut *lock(&self.threads));
        // A panic of a thread is a bug, and was reported.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn chunk(&self, chunk: ChunkIndex) -> MutexGuard<'_, Chunk> {
        lock(&self.chunks[chunk.index()])
    }

    /// The memory host that has pages of a chunk.
    fn host_of(&self, chunk: ChunkIndex) -> Option<usize> {
        self.pager.holder(chunk).and_then(Holder::host_number).filter(|number| *number < self.lenders.count())
    }

    /// Those that have pages of a chunk, where a memory host of this number has them: whoever answered when it was last
    /// asked comes before one that did not.
    fn members(&self, chunk: ChunkIndex, number: usize) -> Vec<Member> {
        match self.lenders.parity_at(number) {
            Some(parity) => {
                let mut members = vec![Member { number, which: 0 }, parity.parity_of(chunk)];
                members.sort_by_key(|member| self.lenders.is_silent(*member));
                members
            }
            None => self.lenders.members(number),
        }
    }

    /// Those that have what is away of a chunk; nobody where nothing is.
    fn having(&self, chunk: ChunkIndex) -> Vec<Member> {
        self.host_of(chunk).map_or_else(Vec::new, |number| self.members(chunk, number))
    }

    /// Whether a memory host has, or had, what is away of a chunk.
    fn concerns(&self, chunk: ChunkIndex, member: Member) -> bool {
        self.having(chunk).contains(&member)
    }

    /// Whether a memory host has copies of a chunk, or of what is in the parity.
    fn has_copies(&self, chunk: ChunkIndex, state: &Chunk, member: Member) -> bool {
        state.copies_at().is_some_and(|number| self.members(chunk, number).contains(&member))
    }

    /// Whether a memory host has not what is away of a chunk: its mirror alone is to be believed, or the parity.
    fn is_behind(&self, chunk: ChunkIndex, member: Member) -> bool {
        let holder = self.pager.holder(chunk).filter(|_| self.concerns(chunk, member));
        holder.and_then(Holder::alone).is_some_and(|which| which != member.which)
    }

    /// Finds out what a memory host has of a chunk, where that is not known.
    fn make_sure(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
    ) -> Result<(), SplitError> {
        let known = &state.members[member.which];
        if !known.unsure && !known.unasked {
            return Ok(());
        }
        // What stands still has nothing on its way that would change anything.
        if known.unsure && !self.still.is_on() {
            self.lenders.raise()?;
        }
        let has = lines.ask(member, |host| host.held(chunk)).map_err(|error| self.failed(member, error))?;
        self.settle(lines, member, chunk, state, has)?;
        (state.members[member.which].unsure, state.members[member.which].unasked) = (false, false);
        Ok(())
    }

    /// Does for a chunk what follows from what a memory host has of it.
    fn settle(
        &self,
        lines: &mut Lines<'_>,
        member: Member,
        chunk: ChunkIndex,
        state: &mut Chunk,
        has: Option<(u64, PageSet)>,
    ) -> Result<(), SplitError> {
        let mine = self.concerns(chunk, member);
        if !mine && !self.is_of(chunk, member) {
            // It is leaving, and what it has of the chunk is nobody's. What is known is of others.
            return Ok(());
        }
        let away = if mine { self.pager.away_in(chunk) } else { PageSet::EMPTY };
        let mut there = if self.is_behind(chunk, member) { PageSet::EMPTY } else { away };
        let lost = there.without(&has.map_or(PageSet::EMPTY, |(_, pages)| pages));
        if !lost.is_empty() {
            let is_alone =
                !self.lenders.has_other(member) || self.pager.holder(chunk).and_then(Holder::alone).is_some();
            let number = self.host_of(chunk).unwrap_or(member.number);
            let Some(other) = Holder::one_of(number, 1 - member.which).filter(|_| !is_alone) else {
                return Err(SplitError::Lost { peer: self.lenders.peer(member), pages: lost.len() as u64 });
            };
            // It is given all anew.
            self.pager.left_alone(chunk, other)?;
            there = PageSet::EMPTY;
        }
        if self.lenders.parity_at(member.number).is_some() {
            // What is in the parity must not be lost where it came from: both keep what is no longer away.
            state.members[member.which].at = self.found(there, has);
            // What those are is not known.
            state.copies = None;
            return Ok(());
        }
        let Restart { now, release, .. } = Whereabouts::recorded(there).restart(has);
        if let Some((version, pages)) = release.filter(|_| !self.still.is_on()) {
            let released = lines.ask(member, |host| host.release(chunk, version, &pages));
            released.map_err(|error| self.failed(member, error))?;
        }
        let had_copies = self.has_copies(chunk, state, member);
        let known = &mut state.members[member.which];
        if had_copies {
            // They were among those.
            let copied = known.at.copied();
            known.at.released(&copied);
        }
        if mine {
            known.at = now;
        } else if known.at.away().is_empty() {
            known.at.seen(now.held());
        }
        Ok(())
    }

    fn failed(&self, member: Member, source: StoreError) -> SplitError {
        SplitError::Host { peer: self.lenders.peer(member), source: Box::new(source) }
    }
}

impl std::fmt::Debug for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Split").field("away", &self.pager.missing()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
