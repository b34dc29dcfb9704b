//! Rounds of pages: what is outstanding, sending it, and seeing what the guest wrote meanwhile.

use std::time::{Duration, Instant};

use sterna_api::options::HotPages as HotPagesOption;
use sterna_api::{MigrateOptions, report};
use sterna_introspect::PageTables;
use sterna_protocol::frame::Digester;
use sterna_protocol::pages::PageMap;
use sterna_protocol::throughput::{Sample, Throughput};

use super::encode::Encoding;
use super::fake_dirty::FakeDirtyPages;
use super::free::FreePages;
use super::hot::HotPages;
use super::left_out::{Going, LeftOut};
use super::link::Link;
use super::outbound::Making;
use super::round::{Round, Sent, send_round};
use super::select::{Counts, changed_untracked};
use super::sent::SentTable;
use super::skip::Skips;
use super::stream::Stream;
use super::track::Tracker;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::transport::pacer::Pacer;
use crate::vmm::{self, VmmError};

/// How often pages that arrive damaged with the guest stopped are sent again.
const REPEATS: u32 = 3;

/// A round of fewer bytes says little of the link.
const MEASURABLE_BYTES: u64 = 4 << 20;

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
    /// Pages found changed though nobody saw the write.
    pub untracked_writes: u64,
    /// Whether somebody writes RAM past the page tables, or may.
    pub untracked: bool,
    /// How quickly pages went.
    pub throughput: Throughput,
    pacer: Pacer,
    sent: SentTable,
    skips: Skips,
    encoding: Encoding,
    outstanding: PageMap,
    written: PageMap,
    discarded: PageMap,
    left_out: LeftOut,
    collected: Instant,
}

impl<'a> Rounds<'a> {
    /// Nothing sent, nothing outstanding. The tracker is armed.
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
        // All connections of a session have the same.
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
            untracked: false,
            throughput: Throughput::default(),
            pacer,
            sent: SentTable::new(layout, digester),
            skips: Skips::of(vec![Box::new(hot), Box::new(fake_dirty)]),
            encoding: Encoding::new(options, layout),
            outstanding: PageMap::empty(layout),
            written: PageMap::empty(layout),
            discarded: PageMap::empty(layout),
            left_out: LeftOut::none(free_pages, layout),
            collected: Instant::now(),
        })
    }

    /// Makes every allocated page outstanding; how many. The rest reads as zeros at the destination already. Called
    /// after tracking is armed: a page allocated after the look is written, and so comes with the next collection.
    ///
    /// # Errors
    /// The RAM files' holes cannot be read.
    pub fn everything(&mut self) -> Result<u64, MigrateError> {
        self.outstanding = self.ram.allocated().map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        self.intact()?;
        Ok(self.outstanding.len())
    }

    /// The RAM is all there: what looks like a hole is one, and what was read is what the guest had.
    fn intact(&self) -> Result<(), MigrateError> {
        self.ram.intact().map_err(MigrateError::host("reading the guest's RAM"))
    }

    /// Pages outstanding.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.outstanding.len()
    }

    /// Adds what the guest wrote or gave back since the last call; pages per second.
    ///
    /// # Errors
    /// As [`Tracker::collect`].
    pub fn collect(&mut self, tracker: &mut dyn Tracker) -> Result<f64, MigrateError> {
        let before = tracker.cost().write_faults;
        self.written.clear();
        tracker.collect(self.ram, &mut self.written, &mut self.discarded)?;
        // Here and at each round's end: the last collection of a migration comes when all was read.
        self.intact()?;
        // Before anything else is done with them.
        self.left_out.collected(&self.written);
        self.skips.collected(&self.written);
        self.outstanding.add(&self.written);
        let rate = (tracker.cost().write_faults - before) as f64 / self.collected.elapsed().as_secs_f64().max(1e-6);
        self.collected = Instant::now();
        Ok(rate)
    }

    /// Looks for pages that the guest holds free ([`LeftOut::look`]). The guest runs. Called after tracking was armed,
    /// or right after a collection.
    pub fn skip_free(&mut self, vmm: &mut dyn vmm::Source) {
        let (left_out, going) = self.free_and_going();
        let dealt_with = left_out.look(vmm, going);
        self.counts.free += dealt_with;
    }

    /// What [`skip_free_stopped`](Self::skip_free_stopped) needs to know of the VMM, asked when the guest has stopped.
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

    /// The looks for them.
    #[must_use]
    pub fn free_pages(&self) -> &FreePages {
        self.left_out.looks()
    }

    /// Asks who writes RAM past the page tables, where nobody was known to: again and again, as a medium can be
    /// changed, and a guest begin to run guests of its own, while its pages go. Called between a collection and the
    /// reading of what it yielded, before each round.
    ///
    /// That is where whoever matters is found, and the pause need not wait for an answer. A write is missed where its
    /// page was mapped or pinned (which is a write that is seen) before a collection, and it lands after the page was
    /// read in the round that follows. So its writer is there over the time in between. One that comes after the last
    /// round's look pins what the last collection yields, and lands before that is read: with the guest stopped and its
    /// I/O drained.
    ///
    /// # Errors
    /// As [`writes_untracked`](vmm::Source::writes_untracked).
    pub fn look_for_untracked(&mut self, vmm: &mut dyn vmm::Source) -> Result<(), MigrateError> {
        if !self.untracked {
            self.untracked = match vmm.writes_untracked() {
                // Its main loop stands still behind a disk, say. That is no reason to end: it may be so.
                Err(VmmError::Silent { .. }) => true,
                told => told?,
            };
        }
        Ok(())
    }

    /// Adds pages that were written past every tracker, found by their content, where somebody writes so. The guest is
    /// stopped and its I/O drained.
    ///
    /// A free page holds what it likes, so those are not looked at. Nor is any the target of I/O that lands unseen:
    /// whoever has I/O under way holds its page from before it is pinned until after the I/O, and to pin it is a write
    /// fault, which takes it out of the free ones at the next collection. A look that was misled about that is made
    /// again with the guest stopped, after this ([`skip_free_stopped`](Self::skip_free_stopped)), and what is not free
    /// then goes.
    ///
    /// # Errors
    /// The RAM files' holes cannot be read.
    pub fn collect_untracked(&mut self) -> Result<(), MigrateError> {
        if !self.untracked {
            return Ok(());
        }
        for chunk in self.ram.layout().iter() {
            let known = self.outstanding.chunk(chunk).or(self.free().chunk(chunk));
            let changed = changed_untracked(self.ram, &self.sent, chunk, &known)
                .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
            self.untracked_writes += changed.len() as u64;
            self.outstanding.insert_all(chunk, &changed);
        }
        Ok(())
    }

    /// Sends what is outstanding while the guest runs, and waits until it has arrived. Pages whose bodies the guest
    /// changed on their way are outstanding again, and so are those whose turn has not come at the moment `until`,
    /// where one is given.
    ///
    /// # Errors
    /// What went wrong on the way, or [`MigrateError::Cancelled`].
    pub fn send(&mut self, link: &mut Link, until: Option<Instant>) -> Result<(), MigrateError> {
        self.round(link, false, until).map(drop)
    }

    /// Sends what is outstanding with the guest stopped: when this returns, the destination's RAM is the source's.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`MigrateError::Damaged`].
    pub fn send_last(&mut self, link: &mut Link) -> Result<(), MigrateError> {
        self.pacer.hurry();
        for _ in 0..REPEATS {
            // Bodies digested before the stop may be suspect in the first of these; nothing changes after it.
            if self.round(link, true, None)? == 0 {
                return Ok(());
            }
        }
        Err(MigrateError::Damaged(self.outstanding.len() as usize))
    }

    fn round(&mut self, link: &mut Link, last: bool, until: Option<Instant>) -> Result<usize, MigrateError> {
        // With the guest stopped everything goes: nothing is held back, nothing is left to a next round.
        let layout = self.ram.layout();
        let held = if last { PageMap::empty(layout) } else { self.skips.hold(layout, &mut self.outstanding) };
        let (number, dirty_pages) = (self.done.len() as u32, self.outstanding.len());
        self.monitor.begin_round(number, dirty_pages);
        let (began, before) = (Instant::now(), self.bytes());
        let round = Round {
            making: Making { round: number, ram: self.ram, sent: &self.sent, encoding: &self.encoding },
            outstanding: &self.outstanding,
            discarded: &self.discarded,
            free: self.left_out.pages(),
            pacer: &self.pacer,
            skips: (!last).then_some(&self.skips),
            until,
            monitor: self.monitor,
        };
        let Sent { counts, again, unsent } = send_round(&mut self.streams, &round)?;
        self.intact()?;
        let taken_bytes = || self.streams.iter().map(Stream::taken_bytes).sum();
        let suspects = link.round_end(number, last, taken_bytes)?;
        let took = began.elapsed();
        let hot_pages = held.len();
        // What is held back or left out keeps its mark as discarded: it is still to be looked up before it is touched.
        self.outstanding = held;
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
        let light = counts.zero + counts.unallocated + counts.free + counts.unchanged;
        self.throughput.add(Sample { bodies: counts.bodies(), light, rewritten: number > 0, took });
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
        Ok(suspects.len())
    }

    /// Takes out what is outstanding, for others to send: the destination holds no page of it as it is here. The guest
    /// is stopped.
    pub fn take_residue(&mut self) -> PageMap {
        std::mem::replace(&mut self.outstanding, PageMap::empty(self.ram.layout()))
    }

    /// The fastest that a round of some size went, bytes per second; `None` where there was none.
    #[must_use]
    pub fn fastest(&self) -> Option<u64> {
        let measurable = self.done.iter().filter(|round| round.bytes_on_wire >= MEASURABLE_BYTES && round.ms > 0.0);
        measurable.map(|round| (round.bytes_on_wire as f64 / round.ms * 1e3) as u64).max()
    }

    /// How many looks it took to know what to skip, and the time they took.
    #[must_use]
    pub fn looks(&self) -> (u64, Duration) {
        self.skips.looks()
    }

    /// Bytes of frames sent on all connections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.streams.iter().map(|stream| stream.cost().0).sum()
    }

    /// How pages were encoded, and what it cost.
    #[must_use]
    pub fn encoding(&self) -> report::Encoding {
        self.encoding.report()
    }

    /// Processor time of the threads that encode and send.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.streams.iter().map(|stream| stream.cost().1).sum::<Duration>() + self.encoding.cpu()
    }
}
