//! Resumption over lost links and restarts, until every page is there.
//!
//! After the switchover there is no way back: the guest runs at the destination, or waits there for a page that only
//! this host has. So after any failure all connections are hung up and a new session begins, as often as needed. It has
//! a number and a key of its own, and begins with [`Request::Resume`](sterna_protocol::message::Request::Resume): the
//! destination says which pages are missing, and those go. Pages that were on their way when the link broke are among
//! them if they did not arrive.

use std::time::{Duration, Instant};

use sterna_api::Code;
use sterna_protocol::hello::Features;
use sterna_protocol::retry::{Failed, Retry};

use super::drive::{Begun, Session};
use super::ended::{Completed, Ended};
use super::work::Context;
use crate::error::MigrateError;
use crate::source::account::Account;
use crate::source::connect::needed;
use crate::source::link::Link;
use crate::transport::SessionKey;
use crate::vmm::VmmError;

/// How often a pause checks whether the destination has another address now, or the migration was given up.
const LOOK: Duration = Duration::from_millis(100);

/// The way from the switchover to the last page.
pub struct Journey<'a> {
    context: &'a Context<'a>,
    interruptions: u32,
    interrupted: Duration,
}

impl<'a> Journey<'a> {
    /// The beginning of the way, before any failure.
    #[must_use]
    pub fn new(context: &'a Context<'a>) -> Self {
        Self { context, interruptions: 0, interrupted: Duration::ZERO }
    }

    /// Goes on to the end, with a session that stands or with none, and writes into the report how it ended.
    pub fn go(mut self, first: Option<Session>, account: &mut Account) {
        let mut completed = None;
        let ended = self.until_the_end(first, &mut completed);
        account.interrupted(self.interruptions, self.interrupted);
        account.followed(ended);
    }

    fn until_the_end(&mut self, first: Option<Session>, completed: &mut Option<Completed>) -> Ended {
        let mut session = first;
        let mut broken: Option<(Instant, MigrateError)> = None;
        if session.is_none() {
            let nobody = std::io::Error::new(std::io::ErrorKind::NotConnected, "no session stands");
            broken = Some((Instant::now(), MigrateError::link("handing the guest over")(nobody)));
        }
        loop {
            if let Some(mut standing) = session.take() {
                match standing.drive(self.context, completed) {
                    Ok(true) => return Ended::GivenUp,
                    Ok(false) => return Ended::Paged(completed.take()),
                    Err(error) => broken = Some((Instant::now(), error)),
                }
                // Everything is hung up and every thread has ended before the next attempt begins.
                drop(standing);
            }
            let Some((since, error)) = broken.take() else { return Ended::Paged(completed.take()) };
            match self.reconnect(since, error, completed.is_some()) {
                Ok(resumed) => session = Some(resumed),
                Err(ended) => {
                    return match *ended {
                        Ended::Paged(_) => Ended::Paged(completed.take()),
                        ended => ended,
                    };
                }
            }
        }
    }

    /// Tries until there is a new session, or the migration has ended in another way.
    fn reconnect(&mut self, since: Instant, mut error: MigrateError, all_there: bool) -> Result<Session, Box<Ended>> {
        let context = self.context;
        if let Some(ended) = last_word(&error) {
            return Err(Box::new(ended));
        }
        self.interruptions += 1;
        let lost = is_lost(&error);
        let what = if lost { "the memory that the pages come from" } else { "the pages' way to the destination" };
        tracing::warn!(migration = %context.id, %error, "{what} is lost");
        let mut retry = Retry::new(all_there);
        let result = loop {
            let peer = self.peer();
            let waiting_for = format!("the destination at {peer}: {error}");
            context.monitor.update(|progress| {
                progress.waiting_for = Some(waiting_for);
                progress.waiting_ms = Some(since.elapsed().as_secs_f64() * 1e3);
            });
            if context.monitor.given_up() {
                break Err(Box::new(Ended::GivenUp));
            }
            if !retry.goes_on(since.elapsed()) {
                break Err(Box::new(Ended::Paged(None)));
            }
            match self.attempt(&peer) {
                // There is nothing to send from any more. All pages may have arrived before that happened.
                Ok(session) if lost => {
                    let ended = match session.left() {
                        0 => Ended::Paged(None),
                        left => Ended::Lost(left),
                    };
                    break Err(Box::new(ended));
                }
                Ok(session) => break Ok(session),
                Err(failed) => error = failed,
            }
            if let Some(ended) = last_word(&error) {
                break Err(Box::new(ended));
            }
            let Failed { pause, newly_lost } = retry.failed(since.elapsed());
            if newly_lost {
                context.host.destination_lost();
            }
            self.pause(pause, &peer);
        };
        if retry.lost() {
            context.host.destination_back();
        }
        self.interrupted += since.elapsed();
        context.monitor.update(|progress| (progress.waiting_for, progress.waiting_ms) = (None, None));
        if result.is_ok() {
            tracing::info!(migration = %context.id, after_ms = since.elapsed().as_millis() as u64, "the pages go on");
        }
        result
    }

    /// Makes one attempt: a new session in which the pages missing there are pending.
    fn attempt(&self, peer: &str) -> Result<Session, MigrateError> {
        let Context { id, daemon, options, host, monitor, work, .. } = self.context;
        // Nobody can guess this number.
        let random = sterna_sys::host::random_u128();
        let needed = needed(options).and(Features::POSTCOPY);
        let key = SessionKey { session: random, key: (random >> 64) as u64, needed };
        let mut link = Link::connect(peer, *id, key, host.credentials())?;
        let streams = options.streams as u16;
        link.resume(*id, *daemon, streams, work.ram.layout().digest())?;
        let streams = (0..streams).map(|index| link.stream(index)).collect::<Result<_, _>>()?;
        // A gang's pool is not kept for a session that comes again: all pages go with their bodies.
        let begun = Begun::new(&link, work, None)?;
        let missing = link.missing(work.ram.layout())?;
        monitor.begin_round(work.round, missing.len());
        begun.pending.fill(missing);
        begun.session(link, streams, None)
    }

    /// The destination's present address.
    fn peer(&self) -> String {
        self.context.host.peer_now(self.context.id).unwrap_or_else(|| self.context.peer.into())
    }

    /// Waits before the next attempt; returns at once when there is news.
    fn pause(&self, pause: Duration, peer: &str) {
        let until = Instant::now() + pause;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.context.monitor.given_up() || self.peer() != peer {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

/// Whether the pages that are still here are lost: private memory ends with its process.
fn is_lost(error: &MigrateError) -> bool {
    matches!(error, MigrateError::Vmm(VmmError::Gone { .. }))
}

/// The destination's answer that ends the migration, if this error is one.
fn last_word(error: &MigrateError) -> Option<Ended> {
    match error {
        MigrateError::Peer(problem) if problem.code == Code::Paged => Some(Ended::Paged(None)),
        MigrateError::Peer(problem) if problem.code == Code::GuestGone => Some(Ended::Gone(problem.clone())),
        _ => None,
    }
}
