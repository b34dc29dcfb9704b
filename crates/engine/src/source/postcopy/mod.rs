//! Phase *postcopy*: the guest runs at the destination, and the rest of its pages follow.
//!
//! ```text
//!   faults connection  ──▶ urgent: asked for ─┐
//!                                             ├─ pending: each page is taken once ── frames ──▶ urgent and pages(i)
//!   pacing ──▶ push, one per connection ──────┤
//!              straight ──────────────────────┘        puts, to memory hosts of a split guest
//!   control            ◀─▶ drive: heartbeat, Complete, verify, Release
//!   whatever breaks    ──▶ everything is hung up; resume: connect anew, ask what is missing, go on
//! ```
//!
//! The source's guest never runs again, and its RAM stands still: a read finds what the guest wrote last. So a page
//! needs no second look, it only has to arrive. Where a link or a daemon fails, only time is lost, as long as this RAM
//! and the destination live.

/// Pending pages: those that are still here and not there.
pub mod pending;

/// What pages held that left before the commit.
pub mod leaving;

/// Page requests, which faults cause.
pub mod requests;

/// Bodies of the pages as they travel.
pub mod bodies;

/// Urgent pages: the requested ones, sent at once.
pub mod urgent;

/// The push of the rest, beside the urgent pages.
pub mod push;

/// Pages that go past the destination.
pub mod straight;

/// The pace of the push.
pub mod pacing;

/// The state that its threads share.
pub mod work;

/// The end of all connections together.
pub mod ends;

/// The way in which it ended.
pub mod ended;

/// The tally of what was done.
pub mod tally;

/// One session from its first page to its last.
pub mod drive;

/// Resumption over lost links and restarts.
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
    /// The connections that stand, and the thread that serves faults on one of them.
    standing: Option<Standing>,
}

struct Standing {
    begun: Begun,
    streams: Vec<Stream>,
    /// The speed of the link before, bytes per second, where that is known.
    known: Option<u64>,
}

impl Handed {
    /// Takes over from the rounds of a machine whose guest has gone, and from the thread that serves its faults.
    /// `stands` says whether the session's connections still stand.
    ///
    /// # Panics
    /// Where post-copy was not agreed on. This is no error, because an error would let the guest run on here.
    pub fn new(begun: Option<Begun>, rounds: &mut Rounds, stands: bool) -> Self {
        let begun = begun.expect("pages follow only where that was agreed");
        let (work, known) = (Arc::clone(&begun.work), rounds.fastest());
        let streams = std::mem::take(&mut rounds.streams);
        Self { work, standing: stands.then_some(Standing { begun, streams, known }) }
    }
}

/// Sends the rest of the pages after the guest, until all are there: over the connections that stand, or over new ones
/// where these are lost.
pub fn postcopy(departure: &mut Departure, link: Link, handed: Handed) {
    // In private memory the pages that are not there yet end with the VMM. (A clone's are the source's, which runs on.)
    if departure.spec.private
        && departure.clone.is_none()
        && let Some(Err(error)) = departure.vmm.process().map(sterna_sys::process::spare)
    {
        tracing::warn!(%error, "if this host runs out of memory, the guest's last pages may be lost with its former QEMU");
    }
    let Handed { work, standing } = handed;
    let session = standing.and_then(|Standing { begun, streams, known }| begun.session(link, streams, known).ok());
    let split = departure.split.as_deref();
    let Departure { id, peer, daemon, options, host, monitor, .. } = *departure;
    see_through(&Context { id, peer, daemon, options, host, monitor, work, split }, session, &mut departure.account);
}

/// Completes post-copy, with a session that stands or with none, and writes into the report how it ended.
pub fn see_through(context: &Context, first: Option<drive::Session>, account: &mut Account) {
    context.monitor.enter(Phase::Postcopy);
    resume::Journey::new(context).go(first, account);
    account.pages_after_switchover(&context.work.tally);
}
