//! The point of no return at the source: the guest is given away, and the source asks what became of it until it knows.

use std::time::{Duration, Instant};

use sterna_api::problem::Whereabouts;
use sterna_protocol::hello::{Features, Role};
use sterna_protocol::message::{Reply, Request};

use super::departure::Departure;
use super::fate::Fate;
use super::link::Link;
use super::loaded::Loaded;
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, Verdict};
use crate::transport::clock::now_us;
use crate::transport::control::{self, REPLY_TIMEOUT};
use crate::transport::credentials::Credentials;
use crate::transport::{SessionKey, call};

/// How long this thread asks who has the guest; afterwards the daemon asks.
const ASK_FOR: Duration = Duration::from_secs(3);
/// The pause between two questions.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// How giving the guest away ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// The migration has ended.
    Ended(Fate),
    /// The guest runs at the destination while pages are missing.
    Postcopy {
        /// Whether the session's connections still stand.
        stands: bool,
    },
}

/// Gives the guest away.
///
/// Before the message goes, the record says that it may have gone, and the migration is past cancelling. After that the
/// guest may run here again only when the destination says that it never ran there.
///
/// # Errors
/// The guest is still the source's: nothing was sent, or the destination has said that it never ran there.
pub fn commit(
    departure: &mut Departure,
    link: &mut Link,
    loaded: &Loaded,
    clock_offset_us: i64,
) -> Result<Given, MigrateError> {
    departure.monitor.commit()?;
    // In post-copy the record was made while the devices were loaded.
    if loaded.residue.is_none() {
        departure.record(false)?;
    }
    let reply = link.control.ask(&Request::Commit, REPLY_TIMEOUT);
    departure.account.answered();
    let lost = match reply {
        Ok(Reply::Running { start_us, cpu_us }) => {
            tracing::debug!("the guest runs there");
            let started_us = start_us.saturating_add_signed(-clock_offset_us).min(now_us());
            departure.account.started(loaded, started_us, cpu_us, departure.spec.running);
            if loaded.residue.is_some() {
                return Ok(Given::Postcopy { stands: true });
            }
            departure.account.completed();
            return Ok(Given::Ended(Fate::There));
        }
        Ok(_) => MigrateError::Reply("another reply than that the guest runs"),
        Err(error) => error,
    };
    match find_out(departure, lost)? {
        Fate::There if loaded.residue.is_some() => Ok(Given::Postcopy { stands: false }),
        fate => Ok(Given::Ended(fate)),
    }
}

/// Asks for a while whether the destination took the guest.
fn find_out(departure: &mut Departure, lost: MigrateError) -> Result<Fate, MigrateError> {
    let deadline = Instant::now() + ASK_FOR;
    departure
        .monitor
        .update(|progress| progress.waiting_for = Some("the destination's word on who has the guest".into()));
    loop {
        let credentials = departure.host.credentials();
        match ask_verdict(departure.id, departure.peer, departure.daemon, credentials.as_deref()) {
            Ok(Verdict::Aborted) => return Err(lost),
            Ok(Verdict::Committed) => {
                // Where the destination itself reported the error, the guest belongs to it and does not run there.
                match lost {
                    MigrateError::Peer(problem) => departure.account.failed(problem),
                    _ => departure.account.completed(),
                }
                return Ok(Fate::There);
            }
            Err(error) if Instant::now() > deadline => {
                let mut problem = lost.problem_at_source().guest(Whereabouts::Paused);
                problem.cause.push(error.to_string());
                problem.hint = Some(format!(
                    "the guest is stopped here until {} answers; bring its daemon back, and it goes on by itself",
                    departure.peer
                ));
                departure.account.failed(problem);
                return Ok(Fate::Unknown);
            }
            Err(_) => std::thread::sleep(ASK_AGAIN),
        }
    }
}

/// Asks a peer what became of a migration; only the daemon that accepted it, where that is known.
///
/// # Errors
/// The peer does not answer, is [another daemon](MigrateError::AnotherDaemon), or does not know the migration: nothing
/// is settled, so ask again later.
pub fn ask_verdict(
    id: MigrationId,
    peer: &str,
    daemon: Option<DaemonId>,
    credentials: Option<&Credentials>,
) -> Result<Verdict, MigrateError> {
    let session = SessionKey { session: id.0, key: id.0 as u64, needed: Features::NONE };
    let stream = call(peer, session, Role::Control, credentials)?;
    let committed = control::ask_verdict(stream, session.key, id.0, daemon)?;
    Ok(if committed { Verdict::Committed } else { Verdict::Aborted })
}
