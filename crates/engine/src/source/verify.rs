//! The comparison of both sides, with the guest stopped.

use sterna_api::report::Verify;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::message::{MAX_DIGEST_CHUNKS, Reply, Request};

use super::link::Link;
use crate::error::MigrateError;
use crate::ram::Ram;
use crate::transport::control::REPLY_TIMEOUT;

/// Chunks compared per request: 16 GiB, a fraction of a second on each side.
const BATCH: u32 = 16_384;
const _: () = assert!(BATCH <= MAX_DIGEST_CHUNKS);

/// Compares every page of both sides. Both compute their digests at the same time.
///
/// # Errors
/// [`MigrateError::Mismatch`] where a page differs; else what went wrong on the way.
pub fn compare(link: &mut Link, ram: &Ram) -> Result<Verify, MigrateError> {
    let digesting = || MigrateError::host("reading the guest's RAM to compare it");
    let (chunks, mut mismatches) = (ram.layout().chunks(), 0);
    for first in (0..chunks).step_by(BATCH as usize) {
        let count = BATCH.min(chunks - first);
        let request = Request::ChunkDigests { first: ChunkIndex(first), count };
        link.control.send(&request)?;
        let ours: Vec<u64> = (first..first + count)
            .map(|chunk| ram.chunk_digest(ChunkIndex(chunk)))
            .collect::<Result<_, _>>()
            .map_err(digesting())?;
        let theirs = digests(link.control.receive(&request, REPLY_TIMEOUT)?, ours.len())?;
        for (chunk, _) in (first..).zip(ours.iter().zip(&theirs)).filter(|(_, (ours, theirs))| ours != theirs) {
            let chunk = ChunkIndex(chunk);
            let ours = ram.page_digests(chunk).map_err(digesting())?;
            let theirs = digests(link.control.ask(&Request::PageDigests { chunk }, REPLY_TIMEOUT)?, ours.len())?;
            let differing: Vec<usize> = (0..ours.len()).filter(|&page| ours[page] != theirs[page]).collect();
            tracing::error!(chunk = chunk.0, pages = ?differing, "pages differ");
            mismatches += differing.len() as u64;
        }
    }
    let pages = ram.layout().pages();
    if mismatches > 0 {
        return Err(MigrateError::Mismatch { mismatches, pages });
    }
    Ok(Verify { checked: true, pages, excluded_free_pages: 0, mismatches: 0 })
}

fn digests(reply: Reply, expected: usize) -> Result<Vec<u64>, MigrateError> {
    match reply {
        Reply::Digests(digests) if digests.len() == expected => Ok(digests),
        _ => Err(MigrateError::Reply("another number of digests than was asked for")),
    }
}
