use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use sterna_protocol::frame::Digester;
use sterna_protocol::hello::VERSION;
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Holdings, InventoryEntry, Refusal, SLOT_BYTES, Summary, Summing};
use sterna_sys::file::{punch, write_at};

use super::loan::{Loan, Number};
use super::slot::{HEADER_BYTES, Header, NOTE_BYTES, Slot, offset};

/// The ends of the names of a guest's two files.
const PAGES: &str = "pages";
const SLOTS: &str = "slots";

/// Where a put is interrupted: for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// What is replaced is forgotten; no body is written.
    Forgotten,
    /// Bodies are written; nobody knows.
    Written,
}

/// What a store has of one guest. A body lies at its place in a file as large as the guest, which has memory only where
/// there are bodies.
///
/// All of a request happens under one lock, with its pages in a buffer: a request that is let in by its epoch is done
/// before a later owner's first one, and never half after it.
#[derive(Debug)]
pub(crate) struct Shelf {
    pub(super) files: Files,
    digester: Digester,
    /// `None` where it was given back.
    holdings: Mutex<Option<Holdings>>,
    /// What is lent, as of the last request: nobody who asks waits for a request's pages.
    loan: Mutex<Loan>,
}

/// A shelf's two files.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) pages: File,
    pub(super) slots: File,
    paths: [PathBuf; 2],
}

/// The pages of a get.
#[derive(Debug)]
pub(super) struct Got {
    /// Pages with a body.
    pub full: PageSet,
    /// Pages of zeros.
    pub zero: PageSet,
    /// The digests of those with a body, in order.
    pub digests: Vec<u64>,
    /// Their bodies, in order.
    pub bodies: Vec<u8>,
}

impl Shelf {
    /// A new one, which is on record before it is used.
    ///
    /// # Errors
    /// [`Refusal::Memory`].
    pub(super) fn make(
        dir: &Path,
        claim: &Claim,
        granted_bytes: u64,
        (chunks, stripe): (u32, u32),
    ) -> Result<Self, Refusal> {
        let paths = [PAGES, SLOTS].map(|end| dir.join(format!("{}.{end}", Number(claim.guest))));
        let shelf = || -> io::Result<Self> {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            // What is there and was not understood may be what its guest needs.
            let make = |path: &Path| File::options().read(true).write(true).create_new(true).mode(0o600).open(path);
            let files = Files { pages: make(&paths[0])?, slots: make(&paths[1])?, paths: paths.clone() };
            let (pages_bytes, slots_bytes) = Files::sizes(chunks, stripe);
            files.pages.set_len(pages_bytes)?;
            files.slots.set_len(slots_bytes)?;
            write_at(&files.slots, 0, &Header { claim: *claim, granted_bytes, chunks, stripe }.encode())?;
            Ok(Self::of(files, Holdings::of_parity(*claim, granted_bytes, chunks, stripe)))
        };
        shelf().map_err(|error| {
            if error.kind() != io::ErrorKind::AlreadyExists {
                paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
            }
            failed(error)
        })
    }

    fn of(files: Files, holdings: Holdings) -> Self {
        let digester = Digester::of(VERSION, holdings.claim().key);
        let loan = Mutex::new(Loan::of(&holdings));
        Self { files, digester, holdings: Mutex::new(Some(holdings)), loan }
    }

    /// Those that an earlier daemon left in a directory, if there is one.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn find(dir: &Path) -> io::Result<impl Iterator<Item = Self>> {
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            entries => entries?.collect::<io::Result<_>>()?,
        };
        // The pages' file is made first, and removed first.
        let files = entries.into_iter().map(|entry| entry.path());
        let files = files.filter(|path| path.extension().is_some_and(|end| end == SLOTS || end == PAGES));
        let guests: BTreeSet<PathBuf> = files.map(|path| path.with_extension(SLOTS)).collect();
        Ok(guests.into_iter().filter_map(|path| match Self::take_up(&path) {
            Ok(shelf) => shelf,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "left alone: memory that was lent and is not understood");
                None
            }
        }))
    }

    /// `None` where a daemon was killed when it made or removed it: then it is removed.
    fn take_up(slots: &Path) -> io::Result<Option<Self>> {
        let paths = [slots.with_extension(PAGES), slots.to_path_buf()];
        let nofollow = OFlags::NOFOLLOW.bits() as i32;
        let open = |path: &Path| File::options().read(true).write(true).custom_flags(nofollow).open(path);
        let there = |opened: io::Result<File>| match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        };
        let mut header = [0; HEADER_BYTES];
        let (pages, slots) = match (there(open(&paths[0]))?, there(open(&paths[1]))?) {
            (Some(pages), Some(slots)) if slots.read_at(&mut header, 0)? > 0 && header != [0; HEADER_BYTES] => {
                (pages, slots)
            }
            _ => {
                paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
                return Ok(None);
            }
        };
        let files = Files { pages, slots, paths };
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
        let header = Header::decode(header).ok_or_else(|| wrong("no header"))?;
        let Header { claim, granted_bytes, chunks, stripe } = header;
        if (files.pages.metadata()?.len(), files.slots.metadata()?.len()) != Files::sizes(chunks, stripe) {
            return Err(wrong("another size than its header says"));
        }
        let mut holdings = Holdings::of_parity(claim, granted_bytes, chunks, stripe);
        for chunk in (0..chunks).map(ChunkIndex) {
            holdings.note(chunk, files.slot(chunk, claim.key)?.map(|slot| slot.held).unwrap_or_default());
        }
        files.go_on(&mut holdings)?;
        Ok(Some(Self::of(files, holdings)))
    }

    /// What is lent.
    pub(super) fn loan(&self) -> Loan {
        *self.account()
    }

    /// Whether it is this owner's, or the next one's.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn may_open(&self, claim: &Claim) -> Result<(), Refusal> {
        let holdings = self.lock();
        let all = holdings.as_ref().ok_or(Refusal::Closed)?;
        all.may_open(claim, all.granted_bytes(), all.chunks()).map(drop)
    }

    /// How many chunks have a stripe of parity together; 1 where it keeps pages.
    ///
    /// # Errors
    /// [`Refusal::Closed`].
    pub(super) fn stripe(&self) -> Result<u32, Refusal> {
        self.lock().as_ref().map(Holdings::stripe).ok_or(Refusal::Closed)
    }

    /// Opens it for its owner: earlier ones are refused from now on, also after a restart.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn open(&self, claim: &Claim, bytes: u64, chunks: u32) -> Result<(), Refusal> {
        let mut holdings = self.lock();
        let all = holdings.as_mut().ok_or(Refusal::Closed)?;
        if all.may_open(claim, bytes, chunks)? {
            let header = Header { claim: *claim, granted_bytes: bytes, chunks, stripe: all.stripe() };
            write_at(&self.files.slots, 0, &header.encode()).map_err(failed)?;
            all.open(*claim, bytes);
            *self.account() = Loan::of(all);
        }
        Ok(())
    }

    /// Gives everything back.
    pub(super) fn close(&self) {
        *self.lock() = None;
        for path in &self.files.paths {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "memory that was lent cannot be removed");
            }
        }
        // Others may have the files open for as long as they answer a last request.
        for file in [&self.files.pages, &self.files.slots] {
            let _ = file.set_len(0);
        }
    }

    /// Does something for an owner whose epoch is in force.
    pub(super) fn with<T>(
        &self,
        epoch: u64,
        what: impl FnOnce(&mut Holdings) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut holdings = self.lock();
        let all = holdings.as_mut().ok_or(Refusal::Closed)?;
        all.in_force(epoch)?;
        let done = what(all);
        *self.account() = Loan::of(all);
        done
    }

    /// The digests of bodies, in order.
    pub(super) fn digests(&self, bodies: &[u8]) -> Vec<u64> {
        bodies.chunks_exact(PAGE_BYTES).map(|body| self.digester.page(body)).collect()
    }

    /// Keeps pages: `bodies` are those of `full`, in order. Returns their digests.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn put(
        &self,
        epoch: u64,
        (chunk, version, base): (ChunkIndex, u64, Option<u64>),
        (full, zero): (PageSet, PageSet),
        bodies: &[u8],
    ) -> Result<Vec<u64>, Refusal> {
        self.put_until(epoch, (chunk, version, base), (full, zero), bodies, None)
    }

    pub(super) fn put_until(
        &self,
        epoch: u64,
        (chunk, version, base): (ChunkIndex, u64, Option<u64>),
        (full, zero): (PageSet, PageSet),
        bodies: &[u8],
        until: Option<Step>,
    ) -> Result<Vec<u64>, Refusal> {
        let digests = self.digests(bodies);
        self.with(epoch, |all| {
            keeps_pages(all)?;
            let put = all.may_put(chunk, version, base, full, zero)?;
            let key = all.claim().key;
            let mut slot = self.files.slot(chunk, key).map_err(failed)?.unwrap_or(Slot::NOTHING);
            let before = slot.held.full;
            // From here on an error leaves what is noted: less than there was, and nothing wrong.
            slot.held = put.before.unwrap_or_default();
            all.note(chunk, slot.held);
            self.files.note(chunk, key, &slot).map_err(failed)?;
            if until == Some(Step::Forgotten) {
                return Ok(digests);
            }
            self.files.write(chunk, &full, bodies).map_err(failed)?;
            self.files.punch(chunk, &before.without(&put.after.full)).map_err(failed)?;
            if until == Some(Step::Written) {
                return Ok(digests);
            }
            full.iter().zip(&digests).for_each(|(page, digest)| slot.digests[usize::from(page)] = *digest);
            slot.held = put.after;
            self.files.note(chunk, key, &slot).map_err(failed)?;
            all.note(chunk, put.after);
            Ok(digests)
        })
    }

    /// Pages of a chunk.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn get(&self, epoch: u64, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<Got, Refusal> {
        self.with(epoch, |all| {
            keeps_pages(all)?;
            let (full, zero) = all.may_get(chunk, version, pages)?;
            let slot = self.files.slot(chunk, all.claim().key).map_err(failed)?;
            let slot = slot.ok_or_else(|| Refusal::Memory("the note of a chunk is damaged".into()))?;
            let bodies = self.files.read(chunk, &full).map_err(failed)?;
            Ok(Got { full, zero, digests: slot.of(&full).collect(), bodies })
        })
    }

    /// Forgets pages of a chunk, where it has not changed since.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn release(&self, epoch: u64, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<(), Refusal> {
        self.with(epoch, |all| {
            keeps_pages(all)?;
            let Some(left) = all.after_release(chunk, version, pages) else { return Ok(()) };
            let key = all.claim().key;
            let mut slot = self.files.slot(chunk, key).map_err(failed)?.unwrap_or(Slot::NOTHING);
            let gone = slot.held.full.without(&left.full);
            slot.held = left;
            self.files.note(chunk, key, &slot).map_err(failed)?;
            all.note(chunk, left);
            self.files.punch(chunk, &gone).map_err(failed)
        })
    }

    /// What there is, from a chunk on, of so many chunks at most.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn inventory(&self, epoch: u64, first: ChunkIndex, most: u32) -> Result<Vec<InventoryEntry>, Refusal> {
        self.with(epoch, |all| Ok(all.inventory(first, most)))
    }

    /// All there is, summed up. Before a guest relies on it every body is compared with its digest.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn prepare(&self, epoch: u64) -> Result<Summary, Refusal> {
        self.with(epoch, |all| {
            let key = all.claim().key;
            let mut sum = Summing::new(key);
            for (chunk, held) in all.iter() {
                let slot = self.files.slot(chunk, key).map_err(failed)?.filter(|slot| slot.held == *held);
                let slot = slot.ok_or_else(|| Refusal::Memory("the note of a chunk is damaged".into()))?;
                // What is in parity is compared when it has been folded out of it.
                let of = if all.stripe() == 1 { held.full } else { PageSet::EMPTY };
                let bodies = self.files.read(chunk, &of).map_err(failed)?;
                if !slot.of(&of).eq(self.digests(&bodies)) {
                    return Err(Refusal::Memory(format!("pages of chunk {} are damaged", chunk.0)));
                }
                sum.add(chunk, held, slot.of(&held.full));
            }
            Ok(sum.end(epoch))
        })
    }

    /// How many chunks there is anything of.
    pub(super) fn held_chunks(&self) -> u32 {
        self.lock().as_ref().map_or(0, |all| all.iter().count() as u32)
    }

    fn account(&self) -> MutexGuard<'_, Loan> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Holdings>> {
        self.holdings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Files {
    /// What is noted of a chunk; `None` where nothing is.
    pub(super) fn slot(&self, chunk: ChunkIndex, key: u128) -> io::Result<Option<Slot>> {
        let mut bytes = [0; NOTE_BYTES];
        self.slots.read_exact_at(&mut bytes, offset(chunk))?;
        Ok(Slot::decode(bytes, chunk, key))
    }

    /// Notes what there is of a chunk; a note of nothing takes no memory.
    pub(super) fn note(&self, chunk: ChunkIndex, key: u128, slot: &Slot) -> io::Result<()> {
        let at = offset(chunk);
        if slot.held.pages().is_empty() {
            return Ok(punch(&self.slots, at..at + SLOT_BYTES)?);
        }
        Ok(write_at(&self.slots, at, &slot.encode(chunk, key))?)
    }

    pub(super) fn write(&self, chunk: ChunkIndex, pages: &PageSet, mut bodies: &[u8]) -> io::Result<()> {
        for (at, bytes) in places(chunk, pages) {
            let (these, others) = bodies.split_at(bytes);
            write_at(&self.pages, at, these)?;
            bodies = others;
        }
        Ok(())
    }

    pub(super) fn read(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<Vec<u8>> {
        let mut bodies = vec![0; pages.len() * PAGE_BYTES];
        let mut rest = bodies.as_mut_slice();
        for (at, bytes) in places(chunk, pages) {
            let (these, others) = rest.split_at_mut(bytes);
            self.pages.read_exact_at(these, at)?;
            rest = others;
        }
        Ok(bodies)
    }

    pub(super) fn punch(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        for (at, bytes) in places(chunk, pages) {
            punch(&self.pages, at..at + bytes as u64)?;
        }
        Ok(())
    }
}

impl Slot {
    /// The digests of some pages, in order.
    pub(super) fn of(&self, pages: &PageSet) -> impl Iterator<Item = u64> {
        pages.iter().map(|page| self.digests[usize::from(page)])
    }
}

/// Where the bodies of pages lie: runs of bytes, in order.
fn places(chunk: ChunkIndex, pages: &PageSet) -> impl Iterator<Item = (u64, usize)> {
    let begin = u64::from(chunk.0) * CHUNK_BYTES as u64;
    pages.runs().map(move |(first, pages)| (begin + (first * PAGE_BYTES) as u64, pages * PAGE_BYTES))
}

/// Not where it has parity of them.
fn keeps_pages(all: &Holdings) -> Result<(), Refusal> {
    if all.stripe() == 1 { Ok(()) } else { Err(Refusal::Request("pages of which there is parity alone".into())) }
}

pub(super) fn failed(error: impl Into<io::Error>) -> Refusal {
    Refusal::Memory(error.into().to_string())
}

#[cfg(test)]
#[path = "shelf_tests.rs"]
mod tests;
