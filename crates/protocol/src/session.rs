//! Which message may come when, and who owns the guest when the link is lost: one state machine for each side.
//!
//! Both are `step(state, event) -> state`, without time or I/O. The drivers step them before they send and after they
//! receive, so an order that is not in these tables never reaches a guest.
//!
//! ```text
//!   source        Begun ──Propose/Accepted──▶ Copying ──Stopped/Holding──▶ Stopped ──FinalRoundEnd/Arrived──▶ Placed
//!                 Placed ──Load/Loaded──▶ Loaded ──Commit (point of no return)──▶ Committing ──Running──▶ HandedOver
//!   --verify      HandedOver ──ChunkDigests, PageDigests, GivenBack──▶ HandedOver ──Release/Released──▶ Finished
//!   post-copy     Stopped ──LoadPostcopy/Loaded──▶ LoadedPostcopy ──Commit (point of no return)──▶ CommittingPostcopy
//!                 ──Running──▶ Paging ──Complete/Completed──▶ Completed ──Release/Released──▶ Finished
//!   after a break Begun ──Resume/Resumed──▶ Paging
//! ```
//!
//! In post-copy, too, the destination owns the guest from `Commit` on. The source still holds pages of it: until
//! `Completed` it keeps them and serves them, whatever breaks, and never lets the guest run.
//!
//! The point of no return is `Commit` and not the VMM's own switchover. Up to `Commit` the destination holds a guest
//! that is loaded and does not run, and the source holds one that is stopped and can be let run again. So every failure
//! before it, also a refused device state, leaves the guest at the source. Once the source has sent `Commit`, it cannot
//! know whether the message arrived: it must ask ([`Request::Verdict`](crate::message::Request::Verdict)), and the
//! answer binds the destination for ever.

use crate::message::{Reply, Request};

/// The state of a session, at either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Nothing is agreed yet.
    Begun,
    /// The destination waits; pages travel in rounds while the guest runs.
    Copying,
    /// The guest is stopped at the source; the last pages travel.
    Stopped,
    /// The destination's RAM equals the source's.
    Placed,
    /// The destination's devices are loaded; its guest is stopped.
    Loaded,
    /// `Commit` was sent, and the answer is not known yet. At the destination: `Commit` was received.
    Committing,
    /// The guest runs at the destination. Both sides may still be compared.
    HandedOver,
    /// The destination's devices are loaded, and it knows which pages are missing; its guest is stopped.
    LoadedPostcopy,
    /// As `Committing`, with pages missing.
    CommittingPostcopy,
    /// The guest runs at the destination, and the missing pages follow.
    Paging,
    /// All missing pages have arrived.
    Completed,
    /// The source is no longer needed.
    Finished,
    /// The session ended before the point of no return.
    Aborted,
}

/// The side that the guest belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The source may let it run; the destination must not.
    Source,
    /// Only the destination knows: the source must ask before it does anything.
    AskDestination,
    /// The destination may let it run; the source must not.
    Destination,
}

/// A message out of turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{said}' does not belong where the session is {state:?}")]
pub struct Violation {
    /// Where the session stood.
    pub state: State,
    /// The name of the message.
    pub said: &'static str,
}

/// The state after a request: the source steps before it sends, the destination after it received.
///
/// # Errors
/// [`Violation`]: the source has a bug, or the destination's peer is no source.
pub fn request(state: State, request: &Request) -> Result<State, Violation> {
    use State::*;
    match (state, request) {
        (
            Begun,
            Request::Identify
            | Request::Tickets { .. }
            | Request::Join { .. }
            | Request::Offers { .. }
            | Request::Kin(_)
            | Request::Clone { .. }
            | Request::Split(_)
            | Request::SplitParity(_)
            | Request::SmallPages
            | Request::Propose { .. },
        ) => Ok(Begun),
        (Begun | Copying, Request::Clock) => Ok(state),
        (Copying, Request::RoundEnd { .. }) => Ok(Copying),
        (Copying, Request::Stopped) => Ok(Stopped),
        // Pages may still come when some were suspect, and when the VMM wrote RAM while it saved its devices.
        (Stopped | Placed | Loaded, Request::FinalRoundEnd { .. }) => Ok(state),
        (Placed | Loaded, Request::ChunkDigests { .. } | Request::PageDigests { .. }) => Ok(state),
        (Placed, Request::Load) => Ok(Placed),
        (Loaded, Request::Commit) => Ok(Committing),
        (Stopped, Request::Residue(_) | Request::LoadPostcopy(_)) => Ok(Stopped),
        (Stopped, Request::Away { .. } | Request::AwayEnd { .. }) => Ok(Stopped),
        (LoadedPostcopy, Request::Commit) => Ok(CommittingPostcopy),
        (Begun, Request::Resume { .. }) => Ok(Begun),
        (Paging, Request::Paging | Request::Straight { .. }) => Ok(Paging),
        (Paging, Request::Missing { .. } | Request::Complete { .. }) => Ok(Paging),
        (HandedOver | Completed, Request::ChunkDigests { .. } | Request::PageDigests { .. }) => Ok(state),
        (HandedOver | Completed, Request::GivenBack { .. } | Request::Release) => Ok(state),
        (Begun | Copying | Stopped | Placed | Loaded | LoadedPostcopy, Request::Abort) => Ok(Aborted),
        _ => Err(Violation { state, said: request.name() }),
    }
}

/// The state after the reply to `request`: the destination steps before it sends, the source after it received.
///
/// # Errors
/// [`Violation`]: the reply does not answer the request.
pub fn reply(state: State, request: &Request, reply: &Reply) -> Result<State, Violation> {
    use State::*;
    match (state, request, reply) {
        // Once `Commit` is received only its outcome counts, and the source asks for it by `Verdict`.
        (Committing | CommittingPostcopy, Request::Commit, Reply::Failed(_)) => Ok(state),
        // Whatever is wrong with the pages or the comparison, the guest is the destination's, and its pages stay at the
        // source.
        (HandedOver | Paging | Completed, _, Reply::Failed(_)) => Ok(state),
        (Begun | Copying | Stopped | Placed | Loaded | LoadedPostcopy, _, Reply::Failed(_)) => Ok(Aborted),
        (Begun, Request::Identify, Reply::Identity { .. }) => Ok(Begun),
        (Begun, Request::Join { .. }, Reply::Joined | Reply::JoinedPool { .. }) => Ok(Begun),
        (Begun, Request::Offers { .. }, Reply::Offered(_)) => Ok(Begun),
        (Begun, Request::Kin(_) | Request::Clone { .. } | Request::Split(_), Reply::Noted) => Ok(Begun),
        (Begun, Request::SplitParity(_) | Request::SmallPages, Reply::Noted) => Ok(Begun),
        (Begun, Request::Tickets { .. }, Reply::Ticketed { .. }) => Ok(Begun),
        (Begun, Request::Propose { .. }, Reply::Accepted { .. }) => Ok(Copying),
        (Begun | Copying, Request::Clock, Reply::Clock { .. }) => Ok(state),
        (Copying, Request::RoundEnd { .. }, Reply::Arrived { .. }) => Ok(Copying),
        (Stopped, Request::Stopped, Reply::Holding) => Ok(Stopped),
        (Stopped, Request::FinalRoundEnd { .. }, Reply::Arrived { suspects }) if suspects.is_empty() => Ok(Placed),
        (Placed | Loaded, Request::FinalRoundEnd { .. }, Reply::Arrived { suspects }) if suspects.is_empty() => {
            Ok(state)
        }
        (Stopped | Placed, Request::FinalRoundEnd { .. }, Reply::Arrived { .. }) => Ok(Stopped),
        // A page was damaged on its way, with the guest stopped and the devices loaded: the loaded state is not
        // trustworthy.
        (Loaded, Request::FinalRoundEnd { .. }, Reply::Arrived { .. }) => Ok(Aborted),
        (Placed | Loaded, Request::ChunkDigests { .. } | Request::PageDigests { .. }, Reply::Digests(_)) => Ok(state),
        (Placed, Request::Load, Reply::Loaded) => Ok(Loaded),
        (Committing, Request::Commit, Reply::Running { .. }) => Ok(HandedOver),
        (Stopped, Request::Residue(_) | Request::Away { .. } | Request::AwayEnd { .. }, Reply::Noted) => Ok(Stopped),
        (Stopped, Request::LoadPostcopy(_), Reply::Loaded) => Ok(LoadedPostcopy),
        (CommittingPostcopy, Request::Commit, Reply::Running { .. }) => Ok(Paging),
        (Begun, Request::Resume { .. }, Reply::Resumed { .. }) => Ok(Paging),
        (Paging, Request::Paging, Reply::Paging { .. }) => Ok(Paging),
        (Paging, Request::Straight { .. }, Reply::Straight { .. }) => Ok(Paging),
        (Paging, Request::Missing { .. }, Reply::Missing(_)) => Ok(Paging),
        (Paging, Request::Complete { .. }, Reply::Completed(_)) => Ok(Completed),
        (HandedOver | Completed, Request::ChunkDigests { .. } | Request::PageDigests { .. }, Reply::Digests(_)) => {
            Ok(state)
        }
        (HandedOver | Completed, Request::GivenBack { .. }, Reply::GivenBack(_)) => Ok(state),
        (HandedOver | Completed, Request::Release, Reply::Released) => Ok(Finished),
        (Aborted, Request::Abort, Reply::Aborted { .. }) => Ok(Aborted),
        _ => Err(Violation { state, said: request.name() }),
    }
}

/// Whom the guest belongs to, seen from the source, when nothing more can be said on this connection.
#[must_use]
pub fn owner_at_source(state: State) -> Owner {
    match state {
        State::Begun
        | State::Copying
        | State::Stopped
        | State::Placed
        | State::Loaded
        | State::LoadedPostcopy
        | State::Aborted => Owner::Source,
        State::Committing | State::CommittingPostcopy => Owner::AskDestination,
        State::HandedOver | State::Paging | State::Completed | State::Finished => Owner::Destination,
    }
}

/// Whom the guest belongs to, seen from the destination, when nothing more can be said on this connection. `committed`
/// is whether the commit was recorded.
#[must_use]
pub fn owner_at_destination(state: State, committed: bool) -> Owner {
    match state {
        State::Committing | State::HandedOver | State::CommittingPostcopy if committed => Owner::Destination,
        State::Paging | State::Completed | State::Finished => Owner::Destination,
        _ => Owner::Source,
    }
}

#[cfg(test)]
mod tests;
