//! Pages are mapped into the guest, and the threads that wait for them are woken.
//!
//! A page comes back *unarmed*: where writes are tracked it counts as written from then on. Armed, it would hide what
//! was written to it between the last collection and the moment it was taken out of the page tables.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::userfaultfd::{Stopped, Userfaultfd};

use super::Userfault;
use crate::error::MigrateError;
use crate::vmm::VmmError;

const PAGE: u64 = PAGE_BYTES as u64;
/// How long the VMM may take to change its mappings. It takes moments, unless a hostile guest controls the VMM.
const CHANGING: Duration = Duration::from_secs(5);

impl Userfault {
    /// The userfaultfd itself.
    #[must_use]
    pub fn descriptor(&self) -> &Userfaultfd {
        &self.descriptor
    }

    /// Protects these addresses, which are registered for it, entry by entry: a write is noted from now on, and none
    /// before.
    ///
    /// # Errors
    /// The VMM has ended.
    pub(crate) fn protect(&self, range: Range<u64>) -> Result<(), MigrateError> {
        let protected = self.descriptor.write_protect(range, true);
        protected.map_err(MigrateError::vmm_process("write-protecting guest RAM"))
    }

    /// Maps pages that the file holds and wakes the threads that wait for them. Holes among them stay: an access finds
    /// zeros. Fenced pages stay out. Returns whether there was none of these.
    ///
    /// # Errors
    /// No memory is left, or the VMM has ended, or changes its mappings all the time.
    pub fn show(&self, mut range: Range<u64>) -> Result<bool, MigrateError> {
        let mut all = true;
        let failed = || MigrateError::vmm_process("mapping pages that have arrived");
        // The step is one page once the kernel has found a hole: it does not say where the hole is.
        let mut step = range.end - range.start;
        let mut changing = None;
        while range.start < range.end {
            // The lock is held until the pages are mapped: the fence takes it to mark pages before it takes them out.
            let closed = self.closed();
            let open = closed.first_open(&range);
            let next = open.start..(open.start + step).min(open.end);
            all &= next.start == range.start;
            range.start = next.start;
            if next.is_empty() {
                break;
            }
            let armed = self.arm_what_returns.load(Ordering::Acquire);
            let done = self.mappings.map_written(&self.descriptor, next.clone(), armed);
            drop(closed);
            match done {
                Ok(filled) => {
                    range.start += filled.bytes;
                    match filled.stopped {
                        None => {}
                        Some(Stopped::AlreadyThere) => {
                            self.wake(range.start)?;
                            range.start += PAGE;
                        }
                        Some(Stopped::MappingsChange) => self.wait_for_mappings(&mut changing)?,
                    }
                }
                Err(error) if error.errno() == Some(libc::EFAULT) => {
                    if next.end - next.start > PAGE {
                        step = PAGE;
                    } else {
                        // A hole: the page is zeros, or was discarded. The thread that waits finds that out by another
                        // fault.
                        self.wake(range.start)?;
                        range.start += PAGE;
                    }
                }
                Err(error) => return Err(failed()(error)),
            }
        }
        Ok(all)
    }

    /// Maps a page of zeros where the file has a hole, and wakes the threads that wait for it. A fenced page stays out.
    /// Returns whether it was not fenced.
    ///
    /// # Errors
    /// As [`show`](Self::show).
    pub fn show_zero(&self, address: u64) -> Result<bool, MigrateError> {
        let mut changing = None;
        loop {
            let closed = self.closed();
            if closed.contains(address) {
                return Ok(false);
            }
            let filled = self.mappings.map_zeros(&self.descriptor, address..address + PAGE);
            drop(closed);
            let filled = filled.map_err(MigrateError::vmm_process("giving the guest a page of zeros"))?;
            match filled.stopped {
                None => return Ok(true),
                // The file has the page by now: the next fault shows it.
                Some(Stopped::AlreadyThere) => return self.wake(address).map(|()| true),
                Some(Stopped::MappingsChange) => self.wait_for_mappings(&mut changing)?,
            }
        }
    }

    /// Maps pages of zeros where the file has holes, as far as that goes at once: fenced pages stay out, and so do
    /// those that somebody has mapped by now.
    ///
    /// # Errors
    /// As [`show`](Self::show).
    pub fn show_zeros(&self, mut range: Range<u64>) -> Result<(), MigrateError> {
        while range.start < range.end {
            let closed = self.closed();
            let open = closed.first_open(&range);
            if open.is_empty() {
                break;
            }
            let filled = self.mappings.map_zeros(&self.descriptor, open.clone());
            drop(closed);
            let filled = filled.map_err(MigrateError::vmm_process("giving the guest pages of zeros"))?;
            range.start = open.start + filled.bytes;
            match filled.stopped {
                None => {}
                Some(Stopped::AlreadyThere) => range.start += PAGE,
                // Whoever touches one has it mapped then.
                Some(Stopped::MappingsChange) => break,
            }
        }
        Ok(())
    }

    /// Wakes the threads that wait for a page: their faults are raised again.
    ///
    /// # Errors
    /// None is known.
    pub fn wake(&self, address: u64) -> Result<(), MigrateError> {
        let woken = self.descriptor.wake(address..address + PAGE);
        woken.map_err(MigrateError::vmm_process("waking a thread of the guest"))
    }

    /// Wakes all waiting threads: faults that are not settled are raised again.
    ///
    /// # Errors
    /// None is known.
    pub fn wake_all(&self) -> Result<(), MigrateError> {
        let woken = self.spans.iter().try_for_each(|span| self.descriptor.wake(span.clone()));
        woken.map_err(MigrateError::vmm_process("waking the guest's waiting threads"))
    }

    /// From now on nothing waits for a VMM that is changing its mappings: a page that cannot be mapped is given up, or
    /// mapped at its next fault.
    pub fn hurry(&self) {
        self.impatient.store(true, Ordering::Release);
    }

    /// Waits a moment for a VMM that is changing its mappings. `since` keeps the time of the first of several calls.
    fn wait_for_mappings(&self, since: &mut Option<Instant>) -> Result<(), MigrateError> {
        if self.impatient.load(Ordering::Acquire) || since.get_or_insert_with(Instant::now).elapsed() > CHANGING {
            return Err(VmmError::Mappings {
                doing: "mapping pages that have arrived",
                source: ErrorKind::TimedOut.into(),
            }
            .into());
        }
        std::thread::yield_now();
        Ok(())
    }
}
