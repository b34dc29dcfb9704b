//! What all threads of a migration did after the switchover.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sterna_api::report::Report;
use sterna_protocol::layout::PAGE_BYTES;

use crate::source::encode::compress::Did;
use crate::source::select::Counts;

/// The tally of all threads.
#[derive(Debug, Default)]
pub struct Tally {
    full: AtomicU64,
    zero: AtomicU64,
    free: AtomicU64,
    reference: AtomicU64,
    faulted: AtomicU64,
    pushed: AtomicU64,
    straight: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of these that went because of faults, including neighbours.
    asked_bytes: AtomicU64,
    cpu_us: AtomicU64,
    compressed: Mutex<Did>,
}

impl Tally {
    /// Counts a frame that was sent: its pages, its bytes, and whether a fault asked for it.
    pub(super) fn sent(&self, counts: &Counts, bytes: u64, asked: bool) {
        self.full.fetch_add(counts.full, Ordering::Relaxed);
        self.zero.fetch_add(counts.zero, Ordering::Relaxed);
        self.free.fetch_add(counts.free, Ordering::Relaxed);
        self.reference.fetch_add(counts.reference, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let pages = if asked { &self.faulted } else { &self.pushed };
        pages.fetch_add(counts.pages(), Ordering::Relaxed);
    }

    /// Counts bytes that were put at a memory host.
    pub(super) fn put(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts pages that are at a memory host now.
    pub(super) fn went_straight(&self, pages: u64) {
        self.full.fetch_add(pages, Ordering::Relaxed);
        self.straight.fetch_add(pages, Ordering::Relaxed);
    }

    /// Counts this thread, which ends: its processor time, and what it compressed.
    pub(super) fn thread_ends(&self, did: Did) {
        self.cpu_us.fetch_add(sterna_sys::process::thread_cpu_time().as_micros() as u64, Ordering::Relaxed);
        *self.compressed.lock().unwrap_or_else(PoisonError::into_inner) += did;
    }

    /// Notes how many of the bytes went because of a fault.
    pub(super) fn because_of_a_fault(&self, bytes: u64) {
        self.asked_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes that went because of faults so far.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked_bytes.load(Ordering::Relaxed)
    }

    /// The pages and bytes so far.
    #[must_use]
    pub fn so_far(&self) -> (u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.faulted) + get(&self.pushed) + get(&self.straight), get(&self.bytes))
    }

    /// Adds the tally to a report.
    pub(crate) fn write(&self, report: &mut Report) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let full = get(&self.full);
        report.pages.full += full;
        report.pages.sent += full;
        report.pages.zero += get(&self.zero);
        report.pages.free += get(&self.free);
        report.pages.shared_reference += get(&self.reference);
        report.pages.faulted += get(&self.faulted);
        report.pages.pushed += get(&self.pushed);
        report.pages.straight += get(&self.straight);
        report.bytes_on_wire += get(&self.bytes);
        report.bytes_raw += full * PAGE_BYTES as u64;
        report.source.cpu_s += Duration::from_micros(get(&self.cpu_us)).as_secs_f64();
        let did = *self.compressed.lock().unwrap_or_else(PoisonError::into_inner);
        report.encoding.compression.pages += did.pages;
        report.encoding.compression.bytes += did.bytes;
        report.encoding.compression.plain_pages += did.plain_pages;
    }
}
