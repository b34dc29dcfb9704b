//! The push: pages that nobody has requested yet, by one thread for each connection.
//!
//! The next pages are chosen as late as possible: when the connection has room. So a fault moves the push at once, and
//! a page that is requested while it is on its way waits for a frame or two.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_sys::socket::TcpInfo;

use super::bodies::Bodies;
use super::ends::Ends;
use super::pending::{Next, Pending};
use super::work::Work;
use crate::error::MigrateError;
use crate::source::gang::Member;
use crate::source::stream::{Stream, link_broke};

/// How often a wait checks whether the session goes on.
const LOOK: Duration = Duration::from_millis(50);

/// Pushes until no page is pending or the session ends.
///
/// # Errors
/// The link broke, or this host's kernel failed.
pub fn push(
    stream: &mut Stream,
    pending: &Pending,
    work: &Work,
    ends: &Ends,
    member: Option<Arc<Member>>,
) -> Result<(), MigrateError> {
    let mut bodies = Bodies::new(stream.digester(), member);
    let pushed = push_with(&mut bodies, stream, pending, work, ends);
    work.tally.thread_ends(bodies.did());
    pushed
}

fn push_with(
    bodies: &mut Bodies,
    stream: &mut Stream,
    pending: &Pending,
    work: &Work,
    ends: &Ends,
) -> Result<(), MigrateError> {
    let goes_on = || if ends.has_ended() { Err(()) } else { Ok(()) };
    loop {
        let waiting = Instant::now();
        if work.pacer.ready(goes_on).is_err() {
            return Ok(());
        }
        while !stream.connection().wait_writable(LOOK) {
            if ends.has_ended() {
                return Ok(());
            }
        }
        let (chunk, pages) = match pending.next(Instant::now()) {
            Next::Send(chunk, pages) => (chunk, pages),
            Next::Wait(time) => {
                ends.wait_quietly(time);
                if ends.has_ended() {
                    return Ok(());
                }
                continue;
            }
            Next::End => return Ok(()),
        };
        let (waited, encoding) = (waiting.elapsed(), Instant::now());
        let method = work.compression.as_ref().map(|meter| meter.method());
        let made = bodies.make(work.ram.as_ref(), (work.round, chunk), &pages, &work.free_in(chunk), method)?;
        if let Some(meter) = &work.compression {
            // A connection that ran dry while its next frame was encoded waited for the processor.
            if TcpInfo::of(stream.connection().socket()).is_ok_and(|info| info.unsent_bytes == 0) {
                meter.sender_waited(encoding.elapsed());
            }
            meter.encoded(made.counts.full, waited);
        }
        let Ok(turn) = work.pacer.pass(made.bytes(), goes_on) else { return Ok(()) };
        pending.referred(chunk, &made.references());
        let bytes = stream.send(&made).map_err(link_broke)?;
        drop(turn);
        work.tally.sent(&made.counts, bytes, false);
        bodies.give_back(made);
    }
}
