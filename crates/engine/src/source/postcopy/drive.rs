//! One session of post-copy, from its first page to its last.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::report::Verify;
use sterna_protocol::heartbeat::{ANSWER_TIMEOUT, Heartbeat};
use sterna_protocol::message::{Reply, Request};

use super::ended::Completed;
use super::ends::Ends;
use super::pacing::Pacing;
use super::pending::Pending;
use super::push;
use super::straight::{self, Errands};
use super::urgent::Urgent;
use super::work::{Context, Work, no_thread};
use crate::error::MigrateError;
use crate::haste::Crew;
use crate::source::gang::Member;
use crate::source::link::Link;
use crate::source::stream::Stream;
use crate::source::verify::{self, AtStop, Compared};
use crate::transport::control::REPLY_TIMEOUT;

/// Where hardly a fault has come for so long, the push need not leave room for one.
const QUIET: Duration = Duration::from_millis(250);

/// A session that sends pages.
pub struct Session {
    /// The thread that serves faults. It ends first, and the control connection last.
    _urgent: Urgent,
    streams: Vec<Stream>,
    link: Link,
    pending: Arc<Pending>,
    ends: Arc<Ends>,
    member: Option<Arc<Member>>,
    /// The speed of the link before, bytes per second, where that is known.
    known: Option<u64>,
}

/// The connections of a session and the thread that serves faults, before the first page is due.
pub struct Begun {
    /// The pending pages: none yet.
    pub pending: Arc<Pending>,
    /// What the threads share.
    pub work: Arc<Work>,
    ends: Arc<Ends>,
    urgent: Urgent,
    /// The gang that the machine shares pages with, where the destination keeps what they share.
    member: Option<Arc<Member>>,
}

impl Begun {
    /// Opens the connections of faults and begins to serve the faults.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn new(link: &Link, work: &Arc<Work>, member: Option<Arc<Member>>) -> Result<Self, MigrateError> {
        let (pending, ends) = (work.nothing_pending(), Arc::new(Ends::default()));
        ends.add(link.control.hang_up().map_err(no_thread())?);
        let urgent = Urgent::start(link.faults()?, Arc::clone(&pending), Arc::clone(work), &ends, member.clone())?;
        Ok(Self { pending, work: Arc::clone(work), ends, urgent, member })
    }

    /// The threads that serve what the destination asks for.
    #[must_use]
    pub fn crew(&self) -> &Crew {
        self.urgent.crew()
    }

    /// Why it failed, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<MigrateError> {
        self.ends.failure()
    }

    /// A session on these connections.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn session(self, link: Link, streams: Vec<Stream>, known: Option<u64>) -> Result<Session, MigrateError> {
        for stream in &streams {
            self.ends.add(stream.connection().hang_up().map_err(no_thread())?);
        }
        let Self { pending, ends, urgent, member, .. } = self;
        Ok(Session { _urgent: urgent, streams, link, pending, ends, member, known })
    }
}

impl Session {
    /// The number of pages that are still to be sent.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.pending.left()
    }

    /// Sends every pending page, and makes sure that all are there. `completed` keeps what was learned then, even if
    /// the link breaks after it.
    ///
    /// # Errors
    /// The session broke; the destination may still miss pages.
    pub fn drive(&mut self, context: &Context, completed: &mut Option<Completed>) -> Result<bool, MigrateError> {
        let driven = self.send(context).and_then(|given_up| {
            if !given_up {
                self.complete(context, completed)?;
            }
            Ok(given_up)
        });
        // The first failure is the reason; the other errors are its consequences.
        driven.map_err(|error| match (error, self.ends.failure()) {
            (error @ MigrateError::Peer(_), _) | (error, None) => error,
            (_, Some(first)) => first,
        })
    }

    /// Sends until no page is pending. Returns whether the migration was given up.
    fn send(&mut self, context: &Context) -> Result<bool, MigrateError> {
        let Self { link, streams, pending, ends, member, known, .. } = self;
        let (pending, ends, work) = (&**pending, &**ends, &*context.work);
        let mut pacing = Pacing::new(streams, context.peer, *known, work)?;
        if let Some(meter) = &work.compression {
            meter.round_begins(streams.len(), streams.len());
        }
        let errands = &Errands::default();
        std::thread::scope(|scope| {
            let guard = EndOnDrop(ends);
            let mut pushes = Vec::with_capacity(streams.len());
            for stream in streams {
                let member = member.clone();
                let push = move || {
                    if let Err(error) = push::push(stream, pending, work, ends, member) {
                        ends.fail(error);
                    }
                    ends.wake();
                };
                let thread = std::thread::Builder::new().name("push".into()).spawn_scoped(scope, push);
                pushes.push(thread.map_err(no_thread())?);
            }
            let straight = straight::possible(context.split, link);
            for host in straight.iter().copied() {
                let run = move || straight::run(host, errands, pending, work, ends);
                let thread = std::thread::Builder::new().name("straight".into()).spawn_scoped(scope, run);
                thread.map_err(no_thread())?;
            }
            // However it ends, these threads do.
            let _over = EndErrands(errands);
            let (began, mut seen) = (Instant::now(), work.tally.so_far());
            let mut heartbeat = Heartbeat::new(Duration::ZERO);
            while pushes.iter().any(|push| !push.is_finished()) {
                ends.wait(Heartbeat::sleep(pacing.window()));
                if let Some(error) = ends.failure() {
                    return Err(error);
                }
                if context.monitor.given_up() {
                    return Ok(true);
                }
                pacing.step(pending.quiet_for(QUIET, Instant::now()))?;
                progress(context, &mut seen);
                if !straight.is_empty() && errands.has_news() {
                    errands.ask(link, straight.len(), pending, work)?;
                    heartbeat.answered(began.elapsed());
                }
                if heartbeat.is_due(began.elapsed()) {
                    ask(link, context)?;
                    heartbeat.answered(began.elapsed());
                }
            }
            if let Some(error) = ends.failure() {
                return Err(error);
            }
            progress(context, &mut seen);
            std::mem::forget(guard);
            Ok(false)
        })
    }

    /// Makes sure that all pages are there, once all are sent, and compares.
    fn complete(&mut self, context: &Context, completed: &mut Option<Completed>) -> Result<(), MigrateError> {
        let control = &mut self.link.control;
        let verify = context.options.verify;
        let Reply::Completed(account) = control.ask(&Request::Complete { verify }, REPLY_TIMEOUT)? else {
            return Err(MigrateError::Reply("another reply than that every page is there"));
        };
        let at = Instant::now();
        let verifiable = verify && account.verifiable;
        let none = if verify { verify::not_done("another daemon took the pages over") } else { Verify::default() };
        let done = completed.insert(Completed { account: *account, verify: none, at });
        if verifiable {
            let work = &context.work;
            let free = work.free();
            let ours = AtStop { ram: work.ram.as_ref(), free: free.as_deref(), away: work.away.get() };
            done.verify = verify::compare(&mut self.link, ours, Compared::AsFirstSeen)?;
        }
        self.link.control.ask(&Request::Release, REPLY_TIMEOUT).map(drop)
    }
}

/// Shows the progress.
fn progress(context: &Context, seen: &mut (u64, u64)) {
    let now = context.work.tally.so_far();
    context.monitor.sent(now.0 - seen.0, now.1 - seen.1);
    *seen = now;
}

/// Asks the destination for its progress.
fn ask(link: &mut Link, context: &Context) -> Result<(), MigrateError> {
    match link.control.ask(&Request::Paging, ANSWER_TIMEOUT)? {
        Reply::Paging { faults, .. } => {
            context.monitor.update(|progress| progress.faults = Some(faults));
            Ok(())
        }
        _ => Err(MigrateError::Reply("another reply than how many pages are missing")),
    }
}

/// A guard that ends the session's connections when its scope is left early, also by a panic: threads in the scope wait
/// on these connections.
struct EndOnDrop<'a>(&'a Ends);

/// The same for errands.
struct EndErrands<'a>(&'a Errands);

impl Drop for EndErrands<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
