//! Phase *prepare*: the destination accepts the machine and starts its VMM; tracking is armed; the first pages are
//! known.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::Phase;
use sterna_protocol::hello::Features;

use super::departure::Departure;
use super::free::FreePages;
use super::gang::Member;
use super::link::{Link, Peer, With};
use super::postcopy::drive::Begun;
use super::postcopy::work::Work;
use super::rounds::Rounds;
use super::stays::Stays;
use super::stream::Stream;
use super::untracked::UntrackedWrites;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::transport::connection::Connection;
use crate::transport::pacer::Pacer;

/// A machine whose first round can begin.
pub struct Prepared<'a> {
    /// Its pages; those that are allocated are outstanding.
    pub rounds: Rounds<'a>,
    /// The connection that carries the devices' state, until the switchover takes it.
    pub devices: Option<Connection>,
    /// The thread that serves faults once the guest runs at the destination; `None` where no page may follow it.
    pub begun: Option<Begun>,
    /// The destination's clock minus ours, microseconds.
    pub clock_offset_us: i64,
    /// Whether both sides are compared once the guest runs at the destination, also where no page follows it; if not,
    /// and a comparison is wanted, why.
    pub verify_after: Result<(), String>,
}

impl Prepared<'_> {
    /// The reason for an error: where faults could not be served, that failure ended everything else.
    pub fn reason(&self, error: MigrateError) -> MigrateError {
        let failure = self.begun.as_ref().and_then(Begun::failure);
        match (error, failure) {
            (MigrateError::Link { .. }, Some(failure)) => failure,
            (error, _) => error,
        }
    }
}

/// Proposes the machine, opens the session's other connections, sets up the VMM's migration and arms tracking.
///
/// # Errors
/// [`MigrateError::Peer`] where the destination refuses, [`MigrateError::Busy`] where it refuses for now, or this
/// host's error.
pub fn prepare<'a, 'd: 'a>(
    departure: &mut Departure<'d>,
    link: &mut Link,
    ram: &'a Arc<dyn Memory>,
) -> Result<Prepared<'a>, MigrateError> {
    let monitor = departure.monitor;
    monitor.enter(Phase::Prepare);
    monitor.check()?;
    let options = departure.options;
    let stop_limit = Duration::try_from_secs_f64(options.downtime_limit_ms / 4e3).unwrap_or_default();
    let mut free_pages = FreePages::new(options.skip_free, departure.vmm, ram, stop_limit);
    // The destination starts its VMM meanwhile.
    let proposed = std::thread::scope(|scope| {
        scope.spawn(|| free_pages.find());
        let Departure { id, spec, gang, tickets, clone, .. } = departure;
        let with = With { gang: gang.as_ref(), tickets, clone: *clone };
        link.propose(*id, spec, options, ram.layout().digest(), with)
    });
    let peer = proposed?;
    agree(departure, link, &peer)?;
    let streams: Vec<_> = (0..options.streams as u16).map(|index| link.stream(index)).collect::<Result<_, _>>()?;
    let devices = Some(link.devices()?);
    let member = peer.gang.as_ref().map(|(gang, member)| Arc::new(Member::new(gang, *member, ram.layout())));
    let begun = (options.may_postcopy() && peer.no_postcopy.is_none())
        .then(|| Begun::new(link, &Work::new(Arc::clone(ram), options, &departure.bandwidth, 0), member.clone()))
        .transpose()?;
    let clock_offset_us = link.compare_clocks()?;
    departure.vmm.prepare()?;
    if departure.trust_first_look {
        free_pages.trust_first_look();
    }
    departure.tracker.arm(ram.as_ref())?;

    let pacer = Pacer::new(options.bandwidth_bytes_per_s, &departure.bandwidth);
    pacer.sends_over(streams.iter().map(Stream::connection));
    let mut rounds = Rounds::new(ram.as_ref(), monitor, streams, departure.tracker, options, pacer, free_pages)?;
    rounds.untracked = UntrackedWrites::by(departure.untracked, ram.layout());
    rounds.follow_reads(departure.tracker)?;
    rounds.member = member;
    rounds.stays = departure.split.as_ref().map(|split| Stays::of(split, ram.layout()));
    let allocated = rounds.everything()?;
    rounds.skip_free(departure.vmm);
    departure.account.prepared(ram.layout().pages(), allocated);
    let verify_after = verify_after(link, &peer, departure.split.is_some());
    Ok(Prepared { rounds, devices, begun, clock_offset_us, verify_after })
}

/// Whether the destination notes each page before its guest sees it, where it is to verify; if not, why. A split guest
/// it takes only where it holds pages back, although no page may follow the guest.
fn verify_after(link: &Link, peer: &Peer, split: bool) -> Result<(), String> {
    match &peer.no_postcopy {
        _ if !link.control.features().contains(Features::VERIFY_AFTER) => {
            Err("the destination's Sterna is too old to compare later".into())
        }
        Some(problem) if !split => Err(format!("the destination cannot hold pages back: {}", problem.message)),
        _ => Ok(()),
    }
}

/// Takes the destination's answer into account: it has accepted the machine, perhaps not for every mode.
fn agree(departure: &mut Departure, link: &Link, peer: &Peer) -> Result<(), MigrateError> {
    if let Some(problem) = peer.no_postcopy.as_ref().filter(|_| departure.options.may_postcopy()) {
        if departure.options.must_postcopy() {
            // The destination waits for the other connections, and would not read an `Abort`; it notices this hang-up.
            link.control.hang_up().map_err(MigrateError::host("hanging up"))?.now();
            return Err(MigrateError::Peer(problem.clone()));
        }
        departure.account.no_postcopy(problem);
    }
    departure.host.accepted();
    departure.daemon = peer.identity;
    departure.account.destination(peer);
    Ok(())
}
