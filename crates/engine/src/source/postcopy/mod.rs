//! Phase *postcopy*: the guest runs at the destination, and the rest of its pages follow.
//!
//! ```text
//!   faults connection  ──▶ urgent: asked for ─┐
//!                                             ├─ pending: each page is taken once ── frames ──▶ urgent and pages(i)
//!   pacing ──▶ push, one per connection ──────┘
//!   control            ◀─▶ drive: heartbeat, Complete, verify, Release
//!   whatever breaks    ──▶ everything is hung up; resume: connect anew, ask what is missing, go on
//! ```
//!
//! The source's guest never runs again, and its RAM stands still: what is read here is what the guest wrote last. So a
//! page needs no second look, only to arrive; and where a link or a daemon fails nothing is lost but time, as long as
//! this RAM and the destination live.

/// Which pages are still here and not there.
pub mod pending;

/// What faults ask for.
pub mod requests;

/// Pages as they travel.
pub mod bodies;

/// What they ask for, sent at once.
pub mod urgent;

/// The rest, beside it.
pub mod push;

/// How fast the rest goes.
pub mod pacing;

/// What its threads share.
pub mod work;

/// What ends all of it together.
pub mod ends;

/// How it ended.
pub mod ended;

/// What was done.
pub mod tally;

/// One session from its first page to its last.
pub mod drive;

/// Over lost links and restarts.
pub mod resume;

use std::sync::Arc;

use sterna_api::Phase;

use self::drive::Begun;
use self::work::{Context, Work};
use super::account::Account;
use super::departure::Departure;
use super::link::Link;
use super::rounds::Rounds;
use super::stream::Stream;

/// What the switchover leaves to post-copy.
pub struct Handed {
    work: Arc<Work>,
    /// The connections that stand, with what serves faults on one of them.
    standing: Option<Standing>,
}

struct Standing {
    begun: Begun,
    streams: Vec<Stream>,
    /// What the link carried before, bytes per second, where that is known.
    known: Option<u64>,
}

impl Handed {
    /// From the rounds of a machine whose guest has gone, and what serves its faults; `stands` is whether the session's
    /// connections still do.
    ///
    /// # Panics
    /// It was not agreed that pages follow the guest. No error: an error would let the guest run on here.
    pub fn new(begun: Option<Begun>, rounds: &mut Rounds, stands: bool) -> Self {
        let begun = begun.expect("pages follow only where that was agreed");
        let (work, known) = (Arc::clone(&begun.work), rounds.fastest());
        let streams = std::mem::take(&mut rounds.streams);
        Self { work, standing: stands.then_some(Standing { begun, streams, known }) }
    }
}

/// Sends the rest of the pages after the guest, over the connections that stand, and where they do not, or not any
/// more, over new ones, until all are there.
pub fn postcopy(departure: &mut Departure, link: Link, handed: Handed) {
    let Handed { work, standing } = handed;
    let session = standing.and_then(|Standing { begun, streams, known }| begun.session(link, streams, known).ok());
    let Departure { id, peer, daemon, options, host, monitor, .. } = *departure;
    see_through(&Context { id, peer, daemon, options, host, monitor, work }, session, &mut departure.account);
}

/// Sees it through, from a session that stands or from none, and writes into the report what became of it.
pub fn see_through(context: &Context, first: Option<drive::Session>, account: &mut Account) {
    context.monitor.enter(Phase::Postcopy);
    resume::Journey::new(context).go(first, account);
    account.pages_after_switchover(&context.work.tally);
}
