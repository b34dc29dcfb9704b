//! What may be said when, and who owns the guest when the link is lost: one state machine for each side.
//!
//! Both are `step(state, event) -> state`, without time or I/O. The drivers step them before they send and after they receive, so an
//! order that is not in these tables never reaches a guest.
//!
//! ```text
//!   source        Begun ──Propose/Accepted──▶ Copying ──Stopped/Holding──▶ Stopped ──FinalRoundEnd/Arrived──▶ Placed
//!                 Placed ──Load/Loaded──▶ Loaded ──Commit (point of no return)──▶ Committing ──Running──▶ HandedOver
//! ```
//!
//! Why the point of no return is `Commit` and not the VMM's own switchover: up to it the destination holds a guest that is loaded and
//! does not run, and the source holds one that is stopped and can be let run again; so every failure before it, a refused device
//! state included, leaves the guest at the source. From the sending of `Commit` on the source cannot know whether it arrived: it
//! must ask ([`Request::Verdict`](crate::message::Request::Verdict)), and the answer binds the destination for ever.

use crate::message::{Reply, Request};

/// Where a session stands, at either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Nothing is agreed.
    Begun,
    /// The destination waits; pages travel in rounds while the guest runs.
    Copying,
    /// The guest is stopped at the source; the last pages travel.
    Stopped,
    /// The destination's RAM is the source's.
    Placed,
    /// The destination's devices are loaded; its guest is stopped.
    Loaded,
    /// `Commit` was sent and the answer is not known (at the destination: it was received).
    Committing,
    /// The guest runs at the destination.
    HandedOver,
    /// It ended before the point of no return.
    Aborted,
}

/// Whom the guest belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The source may let it run; the destination must not.
    Source,
    /// Only the destination knows: the source must ask before it does anything.
    AskDestination,
    /// The destination may let it run; the source must not.
    Destination,
}

/// Something said out of turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{said}' does not belong where the session is {state:?}")]
pub struct Violation {
    /// Where the session stood.
    pub state: State,
    /// What was said.
    pub said: &'static str,
}

/// What a request is called.
fn name(request: &Request) -> &'static str {
    match request {
        Request::Propose { .. } => "propose",
        Request::Clock => "clock",
        Request::RoundEnd { .. } => "round end",
        Request::Stopped => "stopped",
        Request::FinalRoundEnd { .. } => "final round end",
        Request::ChunkDigests { .. } => "chunk digests",
        Request::PageDigests { .. } => "page digests",
        Request::Load => "load",
        Request::Commit => "commit",
        Request::Abort => "abort",
        Request::Verdict { .. } => "verdict",
    }
}

/// The state after a request: the source steps before it sends, the destination after it received.
///
/// # Errors
/// [`Violation`]: the source has a bug, or the destination's peer is not one.
pub fn request(state: State, request: &Request) -> Result<State, Violation> {
    use State::*;
    match (state, request) {
        (Begun, Request::Propose { .. }) => Ok(Begun),
        (Begun | Copying, Request::Clock) => Ok(state),
        (Copying, Request::RoundEnd { .. }) => Ok(Copying),
        (Copying, Request::Stopped) => Ok(Stopped),
        // Pages may still come when some were suspect, and when the VMM wrote RAM while it saved its devices.
        (Stopped | Placed | Loaded, Request::FinalRoundEnd { .. }) => Ok(state),
        (Placed | Loaded, Request::ChunkDigests { .. } | Request::PageDigests { .. }) => Ok(state),
        (Placed, Request::Load) => Ok(Placed),
        (Loaded, Request::Commit) => Ok(Committing),
        (Begun | Copying | Stopped | Placed | Loaded, Request::Abort) => Ok(Aborted),
        _ => Err(Violation { state, said: name(request) }),
    }
}

/// The state after the reply to `request`: the destination steps before it sends, the source after it received.
///
/// # Errors
/// [`Violation`]: the reply does not answer the request.
pub fn reply(state: State, request: &Request, reply: &Reply) -> Result<State, Violation> {
    use State::*;
    match (state, request, reply) {
        // Once the commit is received only its outcome counts, and it is asked for by `Verdict`.
        (Committing, Request::Commit, Reply::Failed(_)) => Ok(Committing),
        (Begun | Copying | Stopped | Placed | Loaded, _, Reply::Failed(_)) => Ok(Aborted),
        (Begun, Request::Propose { .. }, Reply::Accepted { .. }) => Ok(Copying),
        (Begun | Copying, Request::Clock, Reply::Clock { .. }) => Ok(state),
        (Copying, Request::RoundEnd { .. }, Reply::Arrived { .. }) => Ok(Copying),
        (Stopped, Request::Stopped, Reply::Holding) => Ok(Stopped),
        (Stopped, Request::FinalRoundEnd { .. }, Reply::Arrived { suspects }) if suspects.is_empty() => Ok(Placed),
        (Placed | Loaded, Request::FinalRoundEnd { .. }, Reply::Arrived { suspects }) if suspects.is_empty() => {
            Ok(state)
        }
        (Stopped | Placed, Request::FinalRoundEnd { .. }, Reply::Arrived { .. }) => Ok(Stopped),
        // Damaged on the way with the guest stopped and the devices loaded: what is loaded cannot be trusted.
        (Loaded, Request::FinalRoundEnd { .. }, Reply::Arrived { .. }) => Ok(Aborted),
        (Placed | Loaded, Request::ChunkDigests { .. } | Request::PageDigests { .. }, Reply::Digests(_)) => Ok(state),
        (Placed, Request::Load, Reply::Loaded) => Ok(Loaded),
        (Committing, Request::Commit, Reply::Running { .. }) => Ok(HandedOver),
        (Aborted, Request::Abort, Reply::Aborted { .. }) => Ok(Aborted),
        _ => Err(Violation { state, said: name(request) }),
    }
}

/// Whom the guest belongs to, seen from the source, when nothing more can be said on this connection.
#[must_use]
pub fn owner_at_source(state: State) -> Owner {
    match state {
        State::Begun | State::Copying | State::Stopped | State::Placed | State::Loaded | State::Aborted => {
            Owner::Source
        }
        State::Committing => Owner::AskDestination,
        State::HandedOver => Owner::Destination,
    }
}

/// Whom the guest belongs to, seen from the destination, when nothing more can be said on this connection. `committed` is whether the
/// commit was recorded.
#[must_use]
pub fn owner_at_destination(state: State, committed: bool) -> Owner {
    match state {
        State::Committing | State::HandedOver if committed => Owner::Destination,
        _ => Owner::Source,
    }
}

#[cfg(test)]
mod tests;
