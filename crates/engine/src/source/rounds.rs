//! Rounds of pages: what is outstanding, sending it, and seeing what the guest wrote meanwhile.

use std::time::{Duration, Instant};

use sterna_api::report;
use sterna_protocol::pages::PageMap;

use super::link::Link;
use super::select::{Counts, changed_untracked};
use super::send::{Round, Stream, send_round};
use super::sent::SentTable;
use super::track::Tracker;
use crate::error::MigrateError;
use crate::monitor::Monitor;
use crate::ram::Ram;
use crate::transport::pacer::Pacer;

/// A round of fewer pages says nothing about the link's throughput.
const MEASURABLE_PAGES: u64 = 1024;
/// How often pages that arrive damaged with the guest stopped are sent again.
const REPEATS: u32 = 3;

/// The pages on their way, over all rounds.
pub struct Rounds<'a> {
    /// The guest's RAM.
    pub ram: &'a Ram,
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
    pacer: Pacer,
    sent: SentTable,
    outstanding: PageMap,
    discarded: PageMap,
    pages_per_s: f64,
    collected: Instant,
}

impl<'a> Rounds<'a> {
    /// Nothing sent, nothing outstanding.
    #[must_use]
    pub fn new(ram: &'a Ram, monitor: &'a Monitor, streams: Vec<Stream>, bytes_per_s: Option<u64>) -> Self {
        Self {
            ram,
            monitor,
            streams,
            done: Vec::new(),
            counts: Counts::default(),
            untracked_writes: 0,
            pacer: Pacer::new(bytes_per_s),
            sent: SentTable::new(ram.layout()),
            outstanding: PageMap::empty(ram.layout()),
            discarded: PageMap::empty(ram.layout()),
            pages_per_s: 0.0,
            collected: Instant::now(),
        }
    }

    /// Makes every allocated page outstanding; how many. The rest reads as zeros at the destination already. Called after tracking
    /// is armed: a page allocated after the look is written, and so comes with the next collection.
    ///
    /// # Errors
    /// The RAM files' holes cannot be read.
    pub fn everything(&mut self) -> Result<u64, MigrateError> {
        self.outstanding = self.ram.allocated().map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        Ok(self.outstanding.len())
    }

    /// Pages outstanding.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.outstanding.len()
    }

    /// Pages sent per second when enough was sent to tell.
    #[must_use]
    pub fn pages_per_s(&self) -> f64 {
        self.pages_per_s
    }

    /// Adds what the guest wrote or gave back since the last call; pages per second.
    ///
    /// # Errors
    /// As [`Tracker::collect`].
    pub fn collect(&mut self, tracker: &mut dyn Tracker) -> Result<f64, MigrateError> {
        let before = tracker.cost().write_faults;
        tracker.collect(self.ram, &mut self.outstanding, &mut self.discarded)?;
        let rate = (tracker.cost().write_faults - before) as f64 / self.collected.elapsed().as_secs_f64().max(1e-6);
        self.collected = Instant::now();
        Ok(rate)
    }

    /// Adds pages that were written past every tracker, found by their content. The guest is stopped and its I/O drained.
    pub fn collect_untracked(&mut self) {
        for chunk in self.ram.layout().iter() {
            let Some(place) = self.ram.layout().place(chunk) else { continue };
            let changed =
                changed_untracked(self.ram, &self.sent, chunk, place.pages).without(self.outstanding.chunk(chunk));
            self.untracked_writes += changed.len() as u64;
            let outstanding = self.outstanding.chunk_mut(chunk);
            *outstanding = outstanding.or(&changed);
        }
    }

    /// Sends what is outstanding while the guest runs, and waits until it has arrived. Pages whose bodies the guest changed on
    /// their way are outstanding again.
    ///
    /// # Errors
    /// What went wrong on the way, or [`MigrateError::Cancelled`].
    pub fn send(&mut self, link: &mut Link) -> Result<(), MigrateError> {
        self.round(link, false).map(drop)
    }

    /// Sends what is outstanding with the guest stopped: when this returns, the destination's RAM is the source's.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`MigrateError::Damaged`].
    pub fn send_last(&mut self, link: &mut Link) -> Result<(), MigrateError> {
        for _ in 0..REPEATS {
            // Bodies digested before the stop may be suspect in the first of these; nothing changes after it.
            if self.round(link, true)? == 0 {
                return Ok(());
            }
        }
        Err(MigrateError::Damaged(self.outstanding.len() as usize))
    }

    fn round(&mut self, link: &mut Link, last: bool) -> Result<usize, MigrateError> {
        let (number, dirty_pages) = (self.done.len() as u32, self.outstanding.len());
        self.monitor.begin_round(number, dirty_pages);
        let (began, before) = (Instant::now(), self.bytes());
        let round = Round {
            number,
            outstanding: &self.outstanding,
            discarded: &self.discarded,
            ram: self.ram,
            sent: &self.sent,
            pacer: &self.pacer,
            monitor: self.monitor,
        };
        let counts = send_round(&mut self.streams, &round)?;
        let suspects = link.round_end(number, last)?;
        let took = began.elapsed();
        self.outstanding.clear();
        self.discarded.clear();
        for suspect in &suspects {
            if self.ram.layout().place(suspect.chunk).is_none_or(|place| usize::from(suspect.page) >= place.pages) {
                return Err(MigrateError::Reply("it asks for pages that this machine does not have"));
            }
            self.outstanding.insert(*suspect);
            self.sent.suspect(suspect.chunk, suspect.page);
        }
        if counts.full >= MEASURABLE_PAGES {
            self.pages_per_s = dirty_pages as f64 / took.as_secs_f64();
        }
        self.counts += counts;
        self.done.push(report::Round {
            round: number,
            dirty_pages,
            sent_pages: counts.full,
            skipped_pages: counts.pages() - counts.full,
            hot_pages: 0,
            bytes_on_wire: self.bytes() - before,
            ms: took.as_secs_f64() * 1e3,
            dirty_rate_pages_per_s: 0.0,
        });
        Ok(suspects.len())
    }

    /// Bytes of frames sent on all connections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.streams.iter().map(|stream| stream.cost().0).sum()
    }

    /// Processor time of the sending threads.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        self.streams.iter().map(|stream| stream.cost().1).sum()
    }
}
