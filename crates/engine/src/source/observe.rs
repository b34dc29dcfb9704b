//! A short observation of a guest that runs on: how many pages it writes in which time, and their content.
//!
//! The observation has two halves. In each half, looks that change nothing ([`Watch`](crate::source::track::Watch))
//! show how the working set grows. Between the halves the written pages are collected and watched anew. So the second
//! half shows how many of the first half's pages are written *again*, and both together the working set over the whole
//! time. The cost to the guest is a write fault for each page that it writes in a half.
//!
//! No page that is sent depends on an observation, so a look may miss a write: the estimate is then a little wrong.
//! Watching always ends with the observation, however that ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_protocol::estimate::{Curve, Guest};
use sterna_protocol::pages::PageMap;

use super::sample::{Sampled, sample};
use super::silent::Held;
use super::track::{Tracker, Watch};
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::monitor::Monitor;

/// The times of the looks, milliseconds after watching begins anew.
const LOOKS_MS: [u64; 11] = [10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000];
/// How often a wait asks whether it should go on.
const ASK: Duration = Duration::from_millis(50);

/// The result of an observation.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// The guest, for [`predict`](sterna_protocol::estimate::predict).
    pub guest: Guest,
    /// The sampled content of its pages.
    pub sampled: Sampled,
    /// The number of pages of its RAM.
    pub total_pages: u64,
    /// Pages that the host has given memory for.
    pub allocated_pages: u64,
    /// Those of them that the guest holds free.
    pub free_pages: u64,
    /// Chunks that have pages which would travel.
    pub chunks: u64,
    /// Different pages written since a look, by seconds.
    pub written: Vec<(f64, u64)>,
    /// How long writes were watched.
    pub duration: Duration,
    /// The number of looks at the page tables.
    pub looks: u64,
    /// The time they took.
    pub look_time: Duration,
    /// The write faults that the guest took.
    pub write_faults: u64,
}

/// Observes a guest for about `duration`, which `monitor` can cut short. Afterwards nothing is watched. Pages in `free`
/// would not travel.
///
/// # Errors
/// [`MigrateError::Cancelled`], or what tracking needs is not there.
pub fn observe(
    ram: &dyn Memory,
    tracker: &mut dyn Tracker,
    free: &PageMap,
    duration: Duration,
    monitor: &Monitor,
) -> Result<Observation, MigrateError> {
    let seen = watch(ram, tracker, duration, monitor);
    tracker.disarm();
    let seen = seen?;
    // Sampling comes only now: watching has ended, so its time costs the guest nothing.
    monitor.check()?;
    let allocated = ram.allocated().map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
    let mut used = allocated.clone();
    used.take_out(free);
    let sampled = sample(ram, &used)?;
    let (total_pages, allocated_pages, used_pages) = (ram.layout().pages(), allocated.len(), used.len());
    Ok(Observation {
        guest: Guest {
            used_pages,
            zero_share: sampled.zero_share,
            written: Curve::new(seen.written.iter().map(|(t, pages)| (*t, *pages as f64)), total_pages as f64),
            again: Curve::new(seen.again, 1.0),
            silent_share: seen.silent_share,
        },
        sampled: Sampled { pages: sampled.pages + seen.compared, ..sampled },
        total_pages,
        allocated_pages,
        free_pages: allocated_pages - used_pages,
        chunks: used.iter().count() as u64,
        written: seen.written,
        duration: seen.duration,
        looks: seen.looks,
        look_time: seen.look_time,
        write_faults: seen.write_faults,
    })
}

/// The result of watching.
struct Seen {
    written: Vec<(f64, u64)>,
    again: Vec<(f64, f64)>,
    silent_share: f64,
    compared: u64,
    duration: Duration,
    looks: u64,
    look_time: Duration,
    write_faults: u64,
}

fn watch(
    ram: &dyn Memory,
    tracker: &mut dyn Tracker,
    duration: Duration,
    monitor: &Monitor,
) -> Result<Seen, MigrateError> {
    tracker.arm(ram)?;
    let armed = tracker.cost();
    let mut looker = Looker { ram, watch: tracker.watch(), monitor, looks: 0, look_time: Duration::ZERO };
    let nothing = PageMap::empty(ram.layout());
    let began = Instant::now();
    let mut first = looker.looks(began, duration / 2, &nothing)?;
    let early = collect(ram, tracker)?;
    let middle = Instant::now();
    first.push(Look::new(middle - began, &early, &nothing));
    // After the pages are watched anew: a change from now on makes them written in the second half.
    let held = Held::of(ram, &early)?;

    let mut second = looker.looks(middle, duration / 2, &early)?;
    let late = collect(ram, tracker)?;
    second.push(Look::new(middle.elapsed(), &late, &early));
    let duration = began.elapsed();
    let silent_share = held.silent_share(ram, &late)?;

    // First the average of both halves at the same time after their beginnings; then both halves as one.
    let halves = first.iter().zip(&second);
    let mean = halves.map(|(one, other)| ((one.seconds + other.seconds) / 2.0, (one.pages + other.pages) / 2));
    let offset = (middle - began).as_secs_f64();
    let whole = second.iter().map(|look| (offset + look.seconds, look.together));
    let in_first = early.len().max(1) as f64;
    let cost = tracker.cost();
    Ok(Seen {
        written: mean.chain(whole).collect(),
        again: second.iter().map(|look| (look.seconds, look.again as f64 / in_first)).collect(),
        silent_share: silent_share.unwrap_or(0.0),
        compared: held.len() as u64,
        duration,
        looks: looker.looks + cost.scans - armed.scans,
        look_time: looker.look_time + cost.scan_time.saturating_sub(armed.scan_time),
        write_faults: cost.write_faults - armed.write_faults,
    })
}

/// The result of one look.
struct Look {
    /// The time since watching began anew.
    seconds: f64,
    /// Pages written since then.
    pages: u64,
    /// Those of them that were written before it, too.
    again: u64,
    /// Pages written since then or before it.
    together: u64,
}

impl Look {
    fn new(since: Duration, written: &PageMap, before: &PageMap) -> Self {
        let (pages, mut together) = (written.len(), before.clone());
        together.add(written);
        let together = together.len();
        Self { seconds: since.as_secs_f64(), pages, again: before.len() + pages - together, together }
    }
}

/// The looks, which change nothing.
struct Looker<'a> {
    ram: &'a dyn Memory,
    watch: Option<Arc<dyn Watch>>,
    monitor: &'a Monitor,
    looks: u64,
    look_time: Duration,
}

impl Looker<'_> {
    /// Looks at growing intervals until `duration` after `since`, and returns at the end of that time. Pages written
    /// `before` are counted apart.
    fn looks(&mut self, since: Instant, duration: Duration, before: &PageMap) -> Result<Vec<Look>, MigrateError> {
        let mut looks = Vec::new();
        // A look shortly before the collection at the end would show nothing more.
        let times = LOOKS_MS.map(Duration::from_millis).into_iter().filter(|time| *time * 5 <= duration * 4);
        for time in times {
            self.wait_until(since + time)?;
            let Some(watch) = &self.watch else { continue };
            let (began, mut written) = (Instant::now(), PageMap::empty(self.ram.layout()));
            watch.written(self.ram.layout(), &mut written)?;
            self.looks += 1;
            self.look_time += began.elapsed();
            looks.push(Look::new(began - since, &written, before));
        }
        self.wait_until(since + duration)?;
        Ok(looks)
    }

    fn wait_until(&self, time: Instant) -> Result<(), MigrateError> {
        loop {
            self.monitor.check()?;
            match time.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(ASK)),
                _ => return Ok(()),
            }
        }
    }
}

fn collect(ram: &dyn Memory, tracker: &mut dyn Tracker) -> Result<PageMap, MigrateError> {
    let (mut written, mut discarded) = (PageMap::empty(ram.layout()), PageMap::empty(ram.layout()));
    tracker.collect(ram, &mut written, &mut discarded)?;
    Ok(written)
}
