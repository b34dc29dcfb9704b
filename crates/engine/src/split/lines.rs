//! Connections to a guest's memory hosts: each thread has its own, and opens them as it needs them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_protocol::store::{Claim, Refusal};
use sterna_sys::host::random_u128;

use crate::error::MigrateError;
use crate::store::client::{MemoryHost, StoreError};
use crate::transport::credentials::Credentials;

/// A host that lends memory to a guest.
#[derive(Debug, Clone)]
pub struct Lender {
    /// Where it listens.
    pub peer: String,
    /// Who this host is to it.
    pub credentials: Option<Arc<Credentials>>,
    /// How much it is asked for, bytes.
    pub bytes: u64,
}

impl Lender {
    /// Calls it for a guest of so many chunks.
    pub(super) fn call(&self, claim: Claim, chunks: u32) -> Result<MemoryHost, StoreError> {
        // The connection's own number and the seed of its checksums; who asks is told by the claim.
        let session = (random_u128(), random_u128() as u64);
        MemoryHost::open(&self.peer, self.credentials.as_deref(), session, claim, self.bytes, chunks)
    }
}

/// The epochs of a guest's owner, which outlive its daemon.
pub trait Epochs: Send + Sync {
    /// An epoch higher than any before. It is written down before this returns.
    ///
    /// # Errors
    /// It cannot be written down.
    fn raise(&self) -> std::io::Result<u64>;
}

/// A guest's memory hosts, and in which epoch they are asked.
pub(super) struct Lenders {
    all: Vec<Lender>,
    guest: u128,
    key: u128,
    chunks: u32,
    epochs: Box<dyn Epochs>,
    epoch: AtomicU64,
}

impl Lenders {
    /// The memory hosts of a guest of so many chunks, in a new epoch.
    pub(super) fn new(
        all: Vec<Lender>,
        (guest, key): (u128, u128),
        chunks: u32,
        epochs: Box<dyn Epochs>,
    ) -> Result<Self, MigrateError> {
        let lenders = Self { all, guest, key, chunks, epochs, epoch: AtomicU64::new(0) };
        lenders.raise()?;
        Ok(lenders)
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Where a memory host listens.
    pub(super) fn peer(&self, number: usize) -> String {
        self.all[number].peer.clone()
    }

    /// A new epoch: once a memory host has heard of it, nothing that was sent before arrives there.
    pub(super) fn raise(&self) -> Result<(), MigrateError> {
        let epoch = self.epochs.raise().map_err(MigrateError::host("writing down the epoch of a guest's owner"))?;
        // Two that raise at once: the higher one counts.
        self.epoch.fetch_max(epoch, Ordering::AcqRel);
        Ok(())
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn open(&self, number: usize, epoch: u64) -> Result<MemoryHost, StoreError> {
        self.all[number].call(Claim { guest: self.guest, key: self.key, epoch }, self.chunks)
    }
}

/// The connections of one thread.
pub(super) struct Lines<'a> {
    lenders: &'a Lenders,
    lines: Vec<Option<(u64, MemoryHost)>>,
}

impl<'a> Lines<'a> {
    /// None yet.
    pub(super) fn new(lenders: &'a Lenders) -> Self {
        Self { lenders, lines: lenders.all.iter().map(|_| None).collect() }
    }

    /// Asks a memory host, in the epoch that is in force here. A connection that fails, or that is of no use any more,
    /// is given up: the next call opens another one.
    pub(super) fn ask<T>(
        &mut self,
        number: usize,
        ask: impl FnOnce(&mut MemoryHost) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let epoch = self.lenders.epoch();
        let line = &mut self.lines[number];
        if line.as_ref().is_none_or(|(of, _)| *of != epoch) {
            *line = Some((epoch, self.lenders.open(number, epoch)?));
        }
        let (_, host) = line.as_mut().expect("it was opened");
        let answer = ask(host);
        let is_over = match &answer {
            Err(StoreError::Refused(refusal)) => matches!(refusal, Refusal::Fenced { .. } | Refusal::Closed),
            Err(StoreError::Connection(_)) => true,
            Ok(_) => false,
        };
        if is_over {
            *line = None;
        }
        answer
    }
}
