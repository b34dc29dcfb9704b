//! Rounds of pages: the outstanding pages, their sending, and the collection of what the guest wrote meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use sterna_api::options::HotPages as HotPagesOption;
use sterna_api::{MigrateOptions, report};
use sterna_introspect::PageTables;
use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex};
use sterna_protocol::message::MAX_SUSPECTS;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::throughput::{Sample, Throughput};

use super::encode::Encoding;
use super::fake_dirty::FakeDirtyPages;
use super::free::FreePages;
use super::gang::Member;
use super::hot::HotPages;
use super::left_out::{Going, LeftOut};
use super::link::Link;
use super::outbound::Making;
use super::round::{Round, Sent, send_round};
use super::select::{Counts, changed_untracked};
use super::sent::SentTable;
use super::skip::Skips;
use super::stays::Stays;
use super::stream::Stream;
use super::track::Tracker;
use super::untracked::UntrackedWrites;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::split::onward::Elsewhere;
use crate::transport::pacer::Pacer;
use crate::vmm::{self, Untracked};

/// How many times pages that arrive damaged are sent again with the guest stopped.
const REPEATS: u32 = 3;
/// How long a guest that could be stopped waits for what other migrations have begun to send.
const HUSH: Duration = Duration::from_millis(200);
/// The fewest bytes of a round that tells the link's speed.
const MEASURABLE_BYTES: u64 = 4 << 20;

/// What a collection yielded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collected {
    /// Different pages written since the collection before it.
    pub pages: u64,
    /// The writes that were seen.
    pub write_faults: u64,
    /// The time since the collection before it.
    pub after: Duration,
}

impl Collected {
    /// The writes that were seen, per second.
    #[must_use]
    pub fn per_s(&self) -> f64 {
        self.write_faults as f64 / self.after.as_secs_f64().max(1e-6)
    }
}

/// How a round ended.
struct Arrived {
    /// Pages whose bodies did not arrive as they were digested.
    suspects: usize,
    /// Whether the turn of all its pages came.
    complete: bool,
}

/// The pages on their way, over all rounds.
pub struct Rounds<'a> {
    /// The guest's RAM.
    pub ram: &'a dyn Memory,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
    /// The connections that carry pages.
    pub streams: Vec<Stream>,
    /// What each round did.
    pub done: Vec<report::Round>,
    /// Where all pages went.
    pub counts: Counts,
    /// Pages found changed although no tracker saw the write.
    pub untracked_writes: u64,
    /// Who writes RAM past the page tables, or may, and where.
    pub untracked: UntrackedWrites,
    /// The gang that the machine shares pages with: what they share goes once, while the guest runs.
    pub member: Option<Arc<Member>>,
    /// What of a split guest does not travel.
    pub stays: Option<Stays>,
    /// The speed at which pages went.
    pub throughput: Throughput,
    pacer: Pacer,
    sent: SentTable,
    skips: Skips,
    encoding: Encoding,
    outstanding: PageMap,
    written: PageMap,
    /// Pages that the round which goes on now, after collections in its middle, leaves to the next one.
    later: PageMap,
    discarded: PageMap,
    left_out: LeftOut,
    collected: Instant,
    /// Whether every page had its turn once.
    swept: bool,
    /// Whether the destination may lack more pages than it could name: another round has to go before others follow.
    pub untold: bool,
}

impl<'a> Rounds<'a> {
    /// The beginning: nothing is sent or outstanding. The tracker is armed.
    ///
    /// # Errors
    /// No thread left.
    pub fn new(
        ram: &'a dyn Memory,
        monitor: &'a Monitor,
        streams: Vec<Stream>,
        tracker: &dyn Tracker,
        options: &MigrateOptions,
        pacer: Pacer,
        free_pages: FreePages,
    ) -> Result<Self, MigrateError> {
        let layout = ram.layout();
        // All connections of a session have the same digester.
        let digester = streams.first().map_or(Digester::UNSEEDED, Stream::digester);
        let hot = HotPages::new(layout, options.hot_pages == HotPagesOption::Hold);
        let fake_dirty = FakeDirtyPages::new(options, layout, tracker.watch())?;
        Ok(Self {
            ram,
            monitor,
            streams,
            done: Vec::new(),
            counts: Counts::default(),
            untracked_writes: 0,
            untracked: UntrackedWrites::by(Untracked::Nobody, layout),
            throughput: Throughput::default(),
            pacer,
            sent: SentTable::new(layout, digester),
            skips: Skips::of(vec![Box::new(hot), Box::new(fake_dirty)]),
            encoding: Encoding::new(options, layout),
            member: None,
            stays: None,
            outstanding: PageMap::empty(layout),
            written: PageMap::empty(layout),
            later: PageMap::empty(layout),
            discarded: PageMap::empty(layout),
            left_out: LeftOut::none(free_pages, layout),
            collected: Instant::now(),
            swept: false,
            untold: false,
        })
    }

    /// Makes every allocated page outstanding, and returns their number. The rest reads as zeros at the destination
    /// already. Call it after tracking is armed: a page that is allocated after the look is written, and so comes with
    /// the next collection.
    ///
    /// # Errors
    /// The RAM files' holes cannot be read.
    pub fn everything(&mut self) -> Result<u64, MigrateError> {
        self.outstanding = self.ram.allocated().map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        self.intact()?;
        Ok(self.outstanding.len())
    }

    /// Makes sure that no RAM was lost: what looks like a hole is one, and reads yielded what the guest had.
    fn intact(&self) -> Result<(), MigrateError> {
        self.ram.intact().map_err(MigrateError::host("reading the guest's RAM"))
    }

    /// The number of outstanding pages.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.outstanding.len()
    }

    /// Adds the pages that the guest wrote or discarded since the last call.
    ///
    /// # Errors
    /// As [`Tracker::collect`].
    pub fn collect(&mut self, tracker: &mut dyn Tracker) -> Result<Collected, MigrateError> {
        let before = tracker.cost().write_faults;
        self.written.clear();
        tracker.collect(self.ram, &mut self.written, &mut self.discarded)?;
        // The check is here and at each round's end: the last collection of a migration comes after all reads.
        self.intact()?;
        // This comes before anything else is done with the pages.
        self.left_out.collected(&self.written);
        self.skips.collected(&self.written);
        self.outstanding.add(&self.written);
        if let Some(stays) = &self.stays {
            stays.leave_out(&self.written, &mut self.outstanding)?;
        }
        self.follow_reads(tracker)?;
        let after = self.collected.elapsed();
        let write_faults = tracker.cost().write_faults - before;
        self.collected = Instant::now();
        Ok(Collected { pages: self.written.len(), write_faults, after })
    }

    /// The pages that the last collection yielded.
    #[must_use]
    pub fn written(&self) -> &PageMap {
        &self.written
    }

    /// Has the next call of [`send`](Self::send) go on with the round that was cut short: what collections have yielded
    /// since that round began is left to the round after it, as it would have been without them.
    pub fn go_on(&mut self) {
        self.later.add(&self.written);
    }

    /// Looks for pages that the guest holds free ([`LeftOut::look`]). The guest runs. Call it after tracking was armed,
    /// or right after a collection.
    pub fn skip_free(&mut self, vmm: &mut dyn vmm::Source) {
        let (left_out, going) = self.free_and_going();
        let dealt_with = left_out.look(vmm, going);
        self.counts.free += dealt_with;
    }

    /// The VMM's answers that [`skip_free_stopped`](Self::skip_free_stopped) needs. Call it when the guest has stopped.
    pub fn processors(&self, vmm: &mut dyn vmm::Source) -> Vec<PageTables> {
        self.left_out.looks().processors(vmm)
    }

    /// Looks once more, with the guest stopped and everything collected ([`LeftOut::look_stopped`]).
    pub fn skip_free_stopped(&mut self, processors: &[PageTables]) {
        let (left_out, going) = self.free_and_going();
        let dealt_with = left_out.look_stopped(processors, going);
        self.counts.free += dealt_with;
    }

    fn free_and_going(&mut self) -> (&mut LeftOut, Going<'_>) {
        let Self { left_out, outstanding, discarded, sent, ram, throughput, .. } = self;
        (left_out, Going { outstanding, discarded, sent, layout: ram.layout(), speed: throughput.speed() })
    }

    /// Pages that are left out because the guest holds them free.
    #[must_use]
    pub fn free(&self) -> &PageMap {
        self.left_out.pages()
    }

    /// The account of the looks for free pages.
    #[must_use]
    pub fn free_pages(&self) -> &FreePages {
        self.left_out.looks()
    }

    /// As [`Stays::end`].
    ///
    /// # Errors
    /// As [`Stays::end`].
    pub fn leave(&mut self, elsewhere: &mut Elsewhere, look: bool) -> Result<(), MigrateError> {
        let Some(stays) = &mut self.stays else { return Ok(()) };
        stays.end(elsewhere, &mut self.outstanding, self.ram.layout(), look)
    }

    /// Adds the pages that reads past the page tables have changed which were under way when pages were last watched
    /// anew ([`UntrackedWrites::landed`]).
    ///
    /// # Errors
    /// The VMM does not answer, or the RAM files' holes cannot be read.
    pub fn follow_reads(&mut self, tracker: &mut dyn Tracker) -> Result<(), MigrateError> {
        let landed = self.untracked.landed(self.ram, tracker)?;
        for chunk in self.ram.layout().iter().filter(|chunk| !landed.chunk(*chunk).is_empty()) {
            let others = PageSet::first(CHUNK_PAGES).without(landed.chunk(chunk));
            self.compare(chunk, &others)?;
        }
        Ok(())
    }

    /// Adds pages that were written past every tracker, where somebody writes in this way who was not told of. Their
    /// content shows them. The guest is stopped and its I/O drained, and that was followed by a collection.
    ///
    /// A free page may hold anything, so free pages are not compared. None of them is the target of I/O that lands
    /// unseen: the owner of such I/O holds the page from before it is pinned until after the I/O, and pinning is a
    /// write fault, which takes the page out of the free ones at the next collection. A look that was misled about that
    /// is repeated with the guest stopped, after this call ([`skip_free_stopped`](Self::skip_free_stopped)), and pages
    /// that are not free then go.
    ///
    /// # Errors
    /// The RAM files' holes cannot be read.
    pub fn collect_untracked(&mut self) -> Result<(), MigrateError> {
        if self.untracked.all_told() {
            return Ok(());
        }
        self.ram.layout().iter().try_for_each(|chunk| self.compare(chunk, &PageSet::EMPTY))
    }

    /// Makes pages outstanding whose content is not what was sent, but those that are it already, those that the guest
    /// holds free, and `others`.
    fn compare(&mut self, chunk: ChunkIndex, others: &PageSet) -> Result<(), MigrateError> {
        let known = self.outstanding.chunk(chunk).or(self.free().chunk(chunk)).or(others);
        let changed = changed_untracked(self.ram, &self.sent, chunk, &known)
            .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        self.untracked_writes += changed.len() as u64;
        self.outstanding.insert_all(chunk, &changed);
        Ok(())
    }

    /// Collects, with the guest stopped, the pages that the VMM has written since the last collection; the others stay
    /// as they were. Pages in `moving` are on their way by themselves, and are collected however they look.
    ///
    /// The kernel makes pages look written, too: KSM exchanges a page's frame for another of the same content. So a
    /// page counts as written where its content is not what the destination has. Of a page that the guest holds free
    /// that cannot be told, because it was never read: there, one whose frame is merged is not written. Should the VMM
    /// have written one of these all the same, it has written memory that nobody owns: the guest stands still since the
    /// last look for free pages, so that nobody relies on what is there.
    ///
    /// # Errors
    /// As [`collect`](Self::collect); or the RAM cannot be looked at.
    pub fn collect_late(&mut self, tracker: &mut dyn Tracker, moving: &PageMap) -> Result<(), MigrateError> {
        let free = self.free().clone();
        self.collect(tracker)?;
        for chunk in self.ram.layout().iter() {
            let late = self.written.chunk(chunk).without(moving.chunk(chunk));
            if late.is_empty() {
                continue;
            }
            let other = PageSet::first(CHUNK_PAGES).without(&late);
            let changed = changed_untracked(self.ram, &self.sent, chunk, &other)
                .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
            let still_free = changed.and(free.chunk(chunk)).and(&self.merged(chunk)?);
            let outstanding = self.outstanding.chunk_mut(chunk);
            *outstanding = outstanding.without(&late).or(&changed.without(&still_free));
            self.left_out.leave_out_again(chunk, &still_free);
        }
        Ok(())
    }

    /// The pages of a chunk whose frames others have, too.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn merged(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        self.ram.shared_in(chunk).map_err(MigrateError::host("looking for merged pages of the guest's RAM"))
    }

    /// Sends the outstanding pages while the guest runs, and waits until they have arrived. Pages whose bodies the
    /// guest changed on their way are outstanding again, and so are those whose turn has not come at the moment
    /// `until`, if given, or `cut`, once the speed of the link is known. Returns whether the turn of all has come.
    ///
    /// # Errors
    /// The link's or this host's error, or [`MigrateError::Cancelled`].
    pub fn send(
        &mut self,
        link: &mut Link,
        until: Option<Instant>,
        cut: Option<Instant>,
    ) -> Result<bool, MigrateError> {
        let (until, cut) = match self.throughput.known() {
            Some(_) => ([until, cut].into_iter().flatten().min(), None),
            None => (until, cut),
        };
        self.round(link, false, until, cut).map(|round| round.complete)
    }

    /// The guest is about to stop: the host's other migrations leave it the link, until it runs again
    /// ([`calm`](Self::calm)). Waits until what they had begun to send is on its way. Returns whether there was
    /// anything: the link has it still for a moment.
    pub fn hush(&self) -> bool {
        self.pacer.hurry(HUSH)
    }

    /// The guest runs again, here or there.
    pub fn calm(&self) {
        self.pacer.calm();
    }

    /// Sends the outstanding pages with the guest stopped: when this returns, the destination's RAM equals the
    /// source's.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`MigrateError::Damaged`].
    pub fn send_last(&mut self, link: &mut Link) -> Result<(), MigrateError> {
        for _ in 0..REPEATS {
            // Bodies that were digested before the stop may be suspect in the first of these rounds; nothing changes
            // after it.
            if self.round(link, true, None, None)?.suspects == 0 {
                return Ok(());
            }
        }
        Err(MigrateError::Damaged(self.outstanding.len() as usize))
    }

    fn round(
        &mut self,
        link: &mut Link,
        last: bool,
        until: Option<Instant>,
        cut: Option<Instant>,
    ) -> Result<Arrived, MigrateError> {
        // With the guest stopped all pages go: no page is held back or left to a next round.
        let layout = self.ram.layout();
        let held = if last { PageMap::empty(layout) } else { self.skips.hold(layout, &mut self.outstanding) };
        let (number, dirty_pages) = (self.done.len() as u32, self.outstanding.len());
        self.monitor.begin_round(number, dirty_pages);
        let (began, before) = (Instant::now(), self.bytes());
        let member = self.member.as_deref().filter(|_| !last);
        let stays = self.stays.as_ref().filter(|_| !last);
        let making = Making::of(number, self.ram, &self.sent, &self.encoding);
        let round = Round {
            making: Making { member, may_leave: stays.is_some(), ..making },
            stays,
            outstanding: &self.outstanding,
            discarded: &self.discarded,
            free: self.left_out.pages(),
            pacer: &self.pacer,
            skips: (!last).then_some(&self.skips),
            later: &self.later,
            until,
            cut,
            bodies: AtomicU64::new(0),
            monitor: self.monitor,
        };
        let Sent { counts, again, unsent } = send_round(&mut self.streams, &round)?;
        self.intact()?;
        let taken_bytes = || self.streams.iter().map(Stream::taken_bytes).sum();
        let suspects = link.round_end(number, last, taken_bytes)?;
        self.untold = suspects.len() >= MAX_SUSPECTS;
        let took = began.elapsed();
        let hot_pages = held.len();
        // A page that is held back or left out keeps its mark as discarded: it must still be looked up before it is
        // touched.
        self.outstanding = held;
        let complete = unsent.is_empty();
        if complete {
            self.later.clear();
        }
        let unsent_pages: usize = unsent.iter().map(|(_, pages)| pages.len()).sum();
        let dirty_pages = dirty_pages - unsent_pages as u64;
        for (chunk, pages) in again.into_iter().chain(unsent) {
            self.outstanding.insert_all(chunk, &pages);
        }
        self.discarded.keep(&self.outstanding);
        for suspect in &suspects {
            if self.ram.layout().place(suspect.chunk).is_none_or(|place| usize::from(suspect.page) >= place.pages) {
                return Err(MigrateError::Reply("it asks for pages that this machine does not have"));
            }
            self.outstanding.insert(*suspect);
            self.sent.suspect(suspect.chunk, suspect.page);
        }
        let light = counts.reference + counts.zero + counts.unallocated + counts.free + counts.unchanged;
        self.throughput.add(Sample { bodies: counts.bodies(), light, rewritten: self.swept, took });
        self.swept |= complete;
        self.counts += counts;
        self.done.push(report::Round {
            round: number,
            dirty_pages,
            sent_pages: counts.bodies(),
            skipped_pages: counts.pages() - counts.bodies(),
            hot_pages,
            bytes_on_wire: self.bytes() - before,
            ms: took.as_secs_f64() * 1e3,
            dirty_rate_pages_per_s: 0.0,
        });
        Ok(Arrived { suspects: suspects.len(), complete })
    }

    /// Takes out the outstanding pages, for others to send: the destination lacks them or has them stale. The guest is
    /// stopped.
    pub fn take_residue(&mut self) -> PageMap {
        std::mem::replace(&mut self.outstanding, PageMap::empty(self.ram.layout()))
    }

    /// The highest speed of a round of some size, bytes per second; `None` where there was no such round.
    #[must_use]
    pub fn fastest(&self) -> Option<u64> {
        let measurable = self.done.iter().filter(|round| round.bytes_on_wire >= MEASURABLE_BYTES && round.ms > 0.0);
        measurable.map(|round| (round.bytes_on_wire as f64 / round.ms * 1e3) as u64).max()
    }

    /// The number of looks that the skips took, and their time.
    #[must_use]
    pub fn looks(&self) -> (u64, Duration) {
        self.skips.looks()
    }

    /// The bytes of frames sent on all connections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.streams.iter().map(|stream| stream.cost().0).sum()
    }

    /// The account of the encoding, and its cost.
    #[must_use]
    pub fn encoding(&self) -> report::Encoding {
        self.encoding.report()
    }

    /// The processor time of the threads that encode and send.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.streams.iter().map(|stream| stream.cost().1).sum::<Duration>() + self.encoding.cpu()
    }
}
