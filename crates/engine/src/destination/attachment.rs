//! A guest's source, attached to its pager as the supplier of the pages that are still there.

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sterna_protocol::layout::PageIndex;
use sterna_protocol::message::{self, PageRequest};

use crate::paging::Pager;
use crate::paging::supplier::{Supplier, Whose};
use crate::transport::connection::{Connection, HangUp};

/// One session with the source.
struct Attachment {
    /// The connection for page requests; `None` once it is lost, or once no more pages are requested.
    requests: Mutex<Option<Connection>>,
    key: u64,
    /// All connections of the session, including that one.
    hang_up: Mutex<Vec<HangUp>>,
    heard: Mutex<Instant>,
}

impl Supplier for Attachment {
    fn ask(&self, page: PageIndex, thread: u32) {
        let mut requests = lock(&self.requests);
        let Some(there) = &mut *requests else { return };
        let Ok(bytes) = message::encode(&PageRequest { page, thread }, self.key) else { return };
        if let Err(error) = there.write_all(&bytes) {
            tracing::info!(%error, "the way to the source is lost: pages wait until it is there again");
            *requests = None;
        }
    }

    fn heard(&self) -> Instant {
        *lock(&self.heard)
    }

    fn hang_up(&self) {
        lock(&self.hang_up).iter().for_each(HangUp::now);
    }

    fn dismiss(&self) {
        *lock(&self.requests) = None;
        // These handles keep the connection open as well.
        lock(&self.hang_up).clear();
    }
}

/// The source of a guest's pages, from the first page request until the session ends.
pub(super) struct SourceOf<'a> {
    pager: &'a Pager,
    attachment: Arc<Attachment>,
    attached: bool,
}

impl<'a> SourceOf<'a> {
    /// A source that is connected and not asked yet. `hang_up` ends all its connections: when the source comes again by
    /// new ones, these are dead.
    pub(super) fn new(pager: &'a Pager, requests: Connection, key: u64, hang_up: Vec<HangUp>) -> Self {
        let (requests, hang_up) = (Mutex::new(Some(requests)), Mutex::new(hang_up));
        let attachment = Arc::new(Attachment { requests, key, hang_up, heard: Mutex::new(Instant::now()) });
        Self { pager, attachment, attached: false }
    }

    /// From now on this source is asked for the pages that threads wait for.
    pub(super) fn attach(&mut self) {
        if !self.attached {
            self.attached = true;
            self.heard();
            self.pager.attach(Whose::Source, &self.supplier());
        }
    }

    /// Notes that the source has said something.
    pub(super) fn heard(&self) {
        *lock(&self.attachment.heard) = Instant::now();
    }

    fn supplier(&self) -> Arc<dyn Supplier> {
        Arc::clone(&self.attachment) as _
    }
}

impl Drop for SourceOf<'_> {
    fn drop(&mut self) {
        if self.attached {
            self.pager.detach(&self.supplier());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
