//! The destination's side of a migration, phase by phase: `connect` → `prepare` → `precopy` → `switchover` →
//! `postcopy` → finish (`postcopy`); what fails before the commit gives the machine back (`guard`).

/// The listener: calls become the connections of sessions.
pub mod listen;

/// A session with a source.
mod session;

/// Phase *connect*: what a source wants, and its connections.
mod connect;

/// Phase *prepare*: the machine is checked and started.
mod prepare;

/// The guard of a machine that has not run here yet.
mod guard;

/// The state that the phases share until the guest runs here.
mod landing;

/// Phase *precopy*: rounds of pages arrive.
mod precopy;

/// Reception: frames off the connections that carry pages.
pub mod receive;

/// Decoding: pages out of encoded blocks.
pub mod decode;

/// Errors of pages that cannot be decoded.
pub mod undecodable;

/// Arrivals: pages off the wire that are not in their place yet.
pub mod arrival;

/// The RAM that pages are put into.
mod target;

/// The pool: the bodies that a gang shares.
pub mod pool;

/// Pages that machines here have, and that a gang may refer to without sending them.
pub mod offers;

/// Pages whose bodies are another page's, and still to come.
pub mod awaited;

/// Placement: pages into RAM.
pub mod place;

/// Pages of a guest that stay at its memory hosts.
mod away;

/// Phase *switchover*: the guest's last pages and its devices arrive, and it runs here.
mod switchover;

/// Device state on its way into the VMM, held back until the last pages are in place.
pub mod devices;

/// A guest's source, attached to the pager as the supplier of its pages.
mod attachment;

/// Phases *postcopy* and *finish*: the rest of the pages follows.
mod postcopy;

/// A host of which only the room is asked for.
#[cfg(test)]
pub mod room_alone;

/// Gangs whose source lies, or whose pool fails.
#[cfg(test)]
mod gang_tests;

use std::sync::mpsc::Receiver;

use self::attachment::SourceOf;
use self::connect::Proposal;
use self::landing::Landing;
use self::place::Placer;
use self::prepare::Prepared;
use self::receive::Arrivals;
use self::session::Session;
pub(crate) use self::session::{Agreed, Call};
use crate::error::MigrateError;
use crate::haste::{Crew, Haste};
use crate::host::{DestinationHost, MigrationId};
use crate::transport::SessionKey;
use crate::transport::control::Answering;

/// Serves one migration on its control connection, from the first request to the last.
pub(crate) fn serve_session(
    key: SessionKey,
    agreed: Agreed,
    control: Answering,
    calls: Receiver<Call>,
    host: &dyn DestinationHost,
) {
    let mut session = Session { id: MigrationId(key.session), key, agreed, host, control, calls };
    if let Err(error) = arrive(&mut session) {
        tracing::info!(migration = %session.id, %error, "an incoming migration ended early");
    }
}

/// Runs the phases in their order.
fn arrive(session: &mut Session) -> Result<(), MigrateError> {
    let Some(proposal) = connect::connect(session)? else { return Ok(()) };
    let Some(prepared) = prepare::prepare(session, session.host, &proposal)? else { return Ok(()) };
    land(session, &proposal, prepared)
}

/// Runs the phases in which pages arrive.
fn land<'h>(session: &mut Session<'h>, proposal: &Proposal, prepared: Prepared<'h>) -> Result<(), MigrateError> {
    let Prepared { mut guard, ram, mut connections, held, membership, verify_after } = prepared;
    let _whose = tracing::debug_span!("comes", vm = %proposal.spec.name).entered();
    let pager = guard.pager.clone();
    let hang_up = connections.hang_up(session)?;
    let (requests, urgent) = connections.faults.take().unzip();
    let source = pager.as_deref().zip(requests);
    let source = source.map(|(pager, requests)| SourceOf::new(pager, requests, session.key.key, hang_up));
    let arrivals = Arrivals::new(proposal.streams);
    let placer = Placer::new(ram.as_ref(), session.host, pager.as_deref(), session.digester(), membership);
    let receivers = Crew::default();
    session.with_receivers(connections.pages, urgent, (&placer, &arrivals), &receivers, |session| {
        let (spec, guard) = (&proposal.spec, &mut guard);
        let (placer, arrivals, held) = (&placer, &arrivals, &held);
        let (haste, vmm_threads, receivers) = (Haste::none(), None, &receivers);
        let mut landing = Landing {
            session,
            guard,
            spec,
            placer,
            arrivals,
            held,
            receivers,
            haste,
            vmm_threads,
            source,
            verify_after,
            whole: false,
            elsewhere: None,
            told: true,
        };
        let arrived = precopy::precopy(&mut landing).and_then(|()| switchover::switchover(&mut landing));
        let result = arrived.and_then(|pager| {
            let Some(pager) = pager else { return Ok(()) };
            match &landing.spec.split {
                Some(_) if landing.whole => landing.session.compare(&pager),
                _ => landing.session.page_in(&pager, landing.source.as_ref(), placer, arrivals),
            }
        });
        if let Err(error) = &result {
            // The source may be busy with sending: it asks for the reason when its connection fails.
            arrivals.fail(error.problem());
        }
        result
    })
}
