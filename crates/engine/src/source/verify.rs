//! Verification: the comparison of both sides' pages as they were when the guest stopped.
//!
//! It goes on while the guest runs at the destination. Here its RAM stands still until the VMM ends. There the pager
//! lets the guest see no page whose digest was not taken, also where every page came before the guest's start. A
//! destination that cannot do that compares in the pause.
//!
//! Of a split guest only what was here when it stopped is compared, and is no copy of what a memory host has: the map
//! that both sides have since the pause tells it apart. The memory hosts were asked for the rest before the commit
//! (`docs/design/memory-hosts.md`).

use std::io;
use std::time::Instant;

use sterna_api::report::Verify;
use sterna_api::units::milliseconds as ms;
use sterna_protocol::frame::Digester;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::message::{MAX_DIGEST_CHUNKS, Reply, Request};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::session::Owner;

use super::link::Link;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::paging::LOGGED;
use crate::transport::control::REPLY_TIMEOUT;

/// How many chunks one request compares: 16 GiB, which take a fraction of a second on each side.
const BATCH: u32 = 16_384;
const _: () = assert!(BATCH <= MAX_DIGEST_CHUNKS);

/// The time of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// The pause, when no guest runs.
    InThePause,
    /// The time after the guest's start, with the pages as the guest at the destination first saw them. A page that it
    /// saw as zeros because it had discarded it is left out.
    AsFirstSeen,
}

/// A guest's pages at the source, as they were when it stopped.
#[derive(Debug, Clone, Copy)]
pub struct AtStop<'a> {
    /// Its RAM, which stands still.
    pub ram: &'a dyn Memory,
    /// Pages that it held free. They may differ, and must be zeros at the destination. Where they are not known (the
    /// daemon was restarted since), every page of zeros there may be one of them.
    pub free: Option<&'a PageMap>,
    /// Pages that are at memory hosts, where it is split: neither side looks at them.
    pub away: Option<&'a PageMap>,
}

impl AtStop<'_> {
    /// As [`Memory::page_digests`]; a page that is not looked at counts as zeros.
    fn page_digests(&self, chunk: ChunkIndex, digester: Digester) -> io::Result<Vec<u64>> {
        let mut digests = self.ram.page_digests(chunk, digester)?;
        let away = self.away.iter().flat_map(|away| away.chunk(chunk).iter());
        away.for_each(|page| digests[usize::from(page)] = 0);
        Ok(digests)
    }
}

/// Compares the pages of both sides. Both compute their digests at the same time. The result says how many differ.
///
/// # Errors
/// The link's or this host's error.
pub fn compare(link: &mut Link, ours: AtStop<'_>, when: Compared) -> Result<Verify, MigrateError> {
    let began = Instant::now();
    let digester = link.digester();
    let digesting = || MigrateError::host("reading the guest's RAM to compare it");
    let AtStop { ram, free, away } = ours;
    let chunks = ram.layout().chunks();
    let away_pages = away.map_or(0, PageMap::len);
    let mut verify =
        Verify { checked: true, pages: ram.layout().pages() - away_pages, away_pages, ..Verify::default() };
    for first in (0..chunks).step_by(BATCH as usize) {
        let count = BATCH.min(chunks - first);
        let request = Request::ChunkDigests { first: ChunkIndex(first), count };
        link.control.send(&request)?;
        let known: Vec<u64> = (first..first + count)
            .map(|chunk| ours.page_digests(ChunkIndex(chunk), digester).map(|digests| digester.pages(&digests)))
            .collect::<Result<_, _>>()
            .map_err(digesting())?;
        let theirs = digests(link.control.receive(&request, REPLY_TIMEOUT)?, known.len())?;
        for (chunk, _) in (first..).zip(known.iter().zip(&theirs)).filter(|(_, (known, theirs))| known != theirs) {
            let chunk = ChunkIndex(chunk);
            let known = ours.page_digests(chunk, digester).map_err(digesting())?;
            let theirs = digests(link.control.ask(&Request::PageDigests { chunk }, REPLY_TIMEOUT)?, known.len())?;
            let differing = (0..known.len()).filter(|&page| known[page] != theirs[page]).map(|page| page as u8);
            let mut differing: PageSet = differing.collect();
            let zeros: PageSet = differing.iter().filter(|page| theirs[usize::from(*page)] == 0).collect();
            let excluded = free.map_or(zeros, |free| free.chunk(chunk).and(&zeros));
            differing = differing.without(&excluded);
            verify.excluded_free_pages += excluded.len() as u64;
            if when == Compared::AsFirstSeen {
                let zeros = zeros.and(&differing);
                let excluded = given_back(link, chunk, &zeros)?;
                differing = differing.without(&excluded);
                verify.excluded_free_pages += excluded.len() as u64;
            }
            if !differing.is_empty() {
                tracing::error!(chunk = chunk.0, pages = ?differing.iter().collect::<Vec<_>>(), "pages differ");
                verify.mismatches += differing.len() as u64;
            }
        }
    }
    verify.pages -= verify.excluded_free_pages;
    verify.ms = ms(began.elapsed());
    Ok(verify)
}

/// Compares the pages of both sides once the guest runs there, where no page follows it. Whatever breaks meanwhile, the
/// guest is the destination's and needs nothing of here: then the result says why it was not done.
pub fn compare_after(link: &mut Link, ours: AtStop<'_>) -> Verify {
    if link.control.owner() != Owner::Destination {
        return not_done("the link to the destination was lost before");
    }
    let compared = compare(link, ours, Compared::AsFirstSeen);
    // The destination holds no page back any more, whether it hears this or loses the link.
    let released = link.control.ask(&Request::Release, REPLY_TIMEOUT);
    if let (Ok(_), Err(error)) = (&compared, released) {
        tracing::info!(%error, "both sides are compared, and the destination did not hear that");
    }
    compared.unwrap_or_else(|error| {
        tracing::warn!(%error, "both sides could not be compared");
        let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        not_done(&format!("it broke off: {error}{source}"))
    })
}

/// A comparison that was asked for and not done.
#[must_use]
pub fn not_done(why: &str) -> Verify {
    Verify { reason: Some(why.into()), ..Verify::default() }
}

/// The pages that the destination's guest had discarded, of those that it first saw as zeros.
fn given_back(link: &mut Link, chunk: ChunkIndex, zeros: &PageSet) -> Result<PageSet, MigrateError> {
    if zeros.is_empty() {
        return Ok(PageSet::EMPTY);
    }
    let mut ask = || match link.control.ask(&Request::GivenBack { chunk }, REPLY_TIMEOUT)? {
        Reply::GivenBack(set) => Ok(PageSet::from_bytes(&set).and(zeros)),
        _ => Err(MigrateError::Reply("another reply than which pages were given back")),
    };
    let known = ask()?;
    if known == *zeros {
        return Ok(known);
    }
    // The destination is asked once more.
    std::thread::sleep(LOGGED);
    ask()
}

fn digests(reply: Reply, expected: usize) -> Result<Vec<u64>, MigrateError> {
    match reply {
        Reply::Digests(digests) if digests.len() == expected => Ok(digests),
        _ => Err(MigrateError::Reply("another number of digests than was asked for")),
    }
}
