//! A memory host: pages of guests that run elsewhere.
//!
//! ```text
//!   owner: MemoryHost ── open, put, get, release ──▶ serve ──▶ Store ──▶ Shelf: two files for each guest
//!                                                             (budget)   pages │ slots
//! ```
//!
//! What is kept lies in files of a tmpfs, and so outlives the daemon, but not its host. The rules are
//! [`sterna_protocol::store`]'s: this module keeps the bytes.

/// The owner's end of a connection.
pub mod client;
/// What is lent to one guest.
pub mod loan;
/// What a store has of the parity of one guest's pages.
pub(crate) mod parity;
/// The store's end of a connection.
pub mod serve;
/// What a store has of one guest, in its files.
mod shelf;
/// The forms in which a shelf's notes lie in its file.
mod slot;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_protocol::layout::MAX_CHUNKS;
use sterna_protocol::store::{Claim, MAX_STRIPE, Refusal};

use self::loan::{Loan, Number};
use self::shelf::Shelf;

/// What this host lends to guests of others.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    host: String,
    budget_bytes: u64,
    shelves: Mutex<BTreeMap<u128, Arc<Shelf>>>,
}

impl Store {
    /// Lends at most so many bytes, from files in `dir`, a directory of its own on a tmpfs, which is made when
    /// something is lent. What an earlier daemon lent is there again, also where the budget is less than that; what
    /// cannot be understood is left as it is and said in the log.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn open(dir: &Path, host: String, budget_bytes: u64) -> io::Result<Self> {
        let shelves = Shelf::find(dir)?.map(|shelf| (shelf.loan().guest, Arc::new(shelf))).collect();
        Ok(Self { dir: dir.into(), host, budget_bytes, shelves: Mutex::new(shelves) })
    }

    /// Grants memory to a guest's owner, or lets it come back to what was granted. `room_bytes` is what this host could
    /// still give to anybody.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn grant(
        &self,
        claim: &Claim,
        bytes: u64,
        (chunks, stripe): (u32, u32),
        room_bytes: u64,
    ) -> Result<Arc<Shelf>, Refusal> {
        if !(1..=MAX_STRIPE).contains(&stripe) {
            return Err(Refusal::Request(format!("stripes of {stripe} chunks")));
        }
        if chunks == 0 || u64::from(chunks) > MAX_CHUNKS {
            return Err(Refusal::Request(format!("a guest of {chunks} chunks")));
        }
        let mut shelves = self.lock();
        let known = shelves.get(&claim.guest).cloned();
        let has = known.as_ref().map_or(0, |shelf| shelf.loan().granted_bytes);
        let promised: u64 = shelves.values().map(|shelf| shelf.loan().granted_bytes).sum();
        let left = self.budget_bytes.saturating_sub(promised).min(room_bytes);
        if let Some(shelf) = known {
            // Nobody but the owner learns how much there is, or that there is too little.
            shelf.may_open(claim)?;
            if bytes > has && bytes - has > left {
                return Err(Refusal::Budget { left_bytes: has + left });
            }
            if shelf.stripe()? != stripe {
                return Err(Refusal::Request("another redundancy than before".into()));
            }
            return shelf.open(claim, bytes, chunks).map(|()| shelf);
        }
        if self.budget_bytes == 0 {
            return Err(Refusal::LendsNothing);
        }
        if bytes > left {
            return Err(Refusal::Budget { left_bytes: left });
        }
        let shelf = Shelf::make(&self.dir, claim, bytes, (chunks, stripe))?;
        let shelf = Arc::new(shelf);
        shelves.insert(claim.guest, Arc::clone(&shelf));
        tracing::info!(guest = %Number(claim.guest), bytes, "memory is lent to a guest of another host");
        Ok(shelf)
    }

    /// Lets a guest's owner come back to what was granted.
    ///
    /// # Errors
    /// [`Refusal::Closed`] where nothing is, or another [`Refusal`].
    pub(crate) fn granted(&self, claim: &Claim, chunks: u32) -> Result<Arc<Shelf>, Refusal> {
        // Held throughout: what was granted is not changed meanwhile.
        let shelves = self.lock();
        let shelf = shelves.get(&claim.guest).cloned().ok_or(Refusal::Closed)?;
        let granted_bytes = shelf.loan().granted_bytes;
        shelf.open(claim, granted_bytes, chunks).map(|()| shelf)
    }

    /// Gives back what was granted to a guest, all its pages with it. Where an `owner` asks, it must be the present
    /// one; a person may always.
    ///
    /// # Errors
    /// [`Refusal::Closed`], [`Refusal::Stranger`], [`Refusal::Fenced`].
    pub fn close(&self, guest: u128, owner: Option<&Claim>) -> Result<Loan, Refusal> {
        let mut shelves = self.lock();
        let shelf = shelves.get(&guest).ok_or(Refusal::Closed)?;
        if let Some(owner) = owner {
            shelf.may_open(owner)?;
        }
        let loan = shelf.loan();
        shelf.close();
        shelves.remove(&guest);
        tracing::info!(guest = %Number(guest), "memory that was lent is back");
        Ok(loan)
    }

    /// All loans.
    #[must_use]
    pub fn loans(&self) -> Vec<Loan> {
        self.lock().values().map(|shelf| shelf.loan()).collect()
    }

    /// What may be lent in all, bytes.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// The memory that was granted and is not used yet, bytes: it is nobody else's.
    #[must_use]
    pub fn promised_bytes(&self) -> u64 {
        self.loans().iter().map(|loan| loan.granted_bytes.saturating_sub(loan.used_bytes)).sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u128, Arc<Shelf>>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
