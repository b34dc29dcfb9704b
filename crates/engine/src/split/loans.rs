//! Loans: what a guest may use of its memory hosts, asked for before anything leaves and given back in the end.

use sterna_protocol::store::{Claim, Refusal};

use super::SplitError;
use super::lender::Lender;
use crate::store::client::{MemoryHost, StoreError};

/// Asks one memory host, not its mirror, for what a guest of so many chunks is to have of it.
///
/// # Errors
/// It refuses, or is not to be reached; where its answer was lost, it may have granted it.
pub fn borrow(lender: &Lender, claim: Claim, chunks: u32) -> Result<(), SplitError> {
    let failed = |error| SplitError::Host { peer: lender.peer.clone(), source: Box::new(error) };
    lender.borrow(claim, chunks).map(drop).map_err(failed)
}

/// Gives everything back that one memory host, not its mirror, has lent to a guest, and its pages with it. More than
/// once does no harm.
///
/// # Errors
/// It is not to be reached, or its own files fail: it may still have what it lent.
pub fn give_back(lender: &Lender, claim: Claim, chunks: u32) -> Result<(), StoreError> {
    match lender.reach(claim, chunks).and_then(MemoryHost::close) {
        // One that does not know the guest refuses as it does to any stranger: then there is nothing to give back.
        Err(StoreError::Refused(
            Refusal::LendsNothing
            | Refusal::Budget { .. }
            | Refusal::Closed
            | Refusal::Stranger
            | Refusal::Fenced { .. },
        )) => Ok(()),
        other => other,
    }
}
