//! A machine whose pages arrive: the state that the destination's phases share until the guest runs here.

use std::time::Duration;

use sterna_protocol::message::{MAX_SUSPECTS, Reply, Request};
use sterna_protocol::spec::VmSpec;

use super::attachment::SourceOf;
use super::devices::HeldDevices;
use super::guard::Guard;
use super::place::Placer;
use super::receive::Arrivals;
use super::session::Session;
use crate::error::MigrateError;
use crate::haste::{Crew, Haste, VmmThreads};
use crate::split::onward::Elsewhere;

/// How long no page may arrive after the source has sent all pages of a round, before the wait fails.
pub(super) const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);

/// A machine on its way here, with receivers at work.
pub(super) struct Landing<'a, 'h> {
    /// The session with the source.
    pub(super) session: &'a mut Session<'h>,
    /// The machine, which is given back where anything fails.
    pub(super) guard: &'a mut Guard<'h>,
    /// The machine as it was proposed.
    pub(super) spec: &'a VmSpec,
    /// What puts its pages in their place.
    pub(super) placer: &'a Placer<'a>,
    /// What has arrived, and what failed.
    pub(super) arrivals: &'a Arrivals,
    /// The devices' state on its way into the VMM.
    pub(super) held: &'a HeldDevices,
    /// Its receivers.
    pub(super) receivers: &'a Crew,
    /// The haste of the pause.
    pub(super) haste: Haste,
    /// The VMM's threads, once the haste has begun.
    pub(super) vmm_threads: Option<VmmThreads>,
    /// The source of pages that follow the guest, where post-copy was agreed on.
    pub(super) source: Option<SourceOf<'a>>,
    /// Whether both sides are compared once the guest runs, also where no page follows it.
    pub(super) verify_after: bool,
    /// Whether all pages have come before the guest's start, but those that are at memory hosts.
    pub(super) whole: bool,
    /// Which those are, once all have been named.
    pub(super) elsewhere: Option<Elsewhere>,
    /// Whether the source knows of each page that did not arrive as it was.
    pub(super) told: bool,
}

impl Landing<'_, '_> {
    /// Begins the haste of the pause for the threads that do nothing until then: the source cannot tell that the guest
    /// is about to stop.
    pub(super) fn be_ready(&mut self) {
        self.haste = Haste::begin(self.session.host.may_haste());
        self.haste.crew(self.held.crew());
        let vmm = &mut self.guard.incoming().vmm;
        self.vmm_threads = VmmThreads::of(vmm.process(), vmm.processor_threads());
        self.haste.vmm(self.vmm_threads.as_ref());
        self.haste.stands_still(self.vmm_threads.as_ref());
    }

    /// The guest has stopped: the haste is for all threads now, and no longer than a pause.
    pub(super) fn hurry(&self) {
        self.haste.limit();
        self.haste.crew(self.receivers);
        if let Some(pager) = &self.guard.pager {
            self.haste.crew(pager.crew());
        }
    }

    /// The next request. [`Request::Abort`] is answered here.
    ///
    /// # Errors
    /// The link broke, or [`MigrateError::Cancelled`].
    pub(super) fn next_request(&mut self) -> Result<Request, MigrateError> {
        let request = self.session.control.next_request()?;
        if request != Request::Abort {
            return Ok(request);
        }
        self.haste = Haste::none();
        // The VMM here ends before the source's VMM runs on: both lock the guest's disks.
        self.guard.end();
        self.session.control.answer(&request, &Reply::Aborted { problem: self.arrivals.failure() })?;
        Err(MigrateError::Cancelled)
    }

    /// Answers a request; a failure ends the migration, and the machine is given back first.
    ///
    /// # Errors
    /// The failure, or the link broke.
    pub(super) fn answer(&mut self, request: &Request, reply: Result<Reply, MigrateError>) -> Result<(), MigrateError> {
        match reply {
            Ok(reply) => self.session.control.answer(request, &reply),
            Err(error) => {
                self.haste = Haste::none();
                self.guard.end();
                self.session.control.answer(request, &Reply::Failed(error.problem()))?;
                Err(error)
            }
        }
    }

    /// Waits for a round's pages. The reply names the pages to send again.
    ///
    /// # Errors
    /// They do not come, or could not be placed.
    pub(super) fn arrived(&mut self, round: u32) -> Result<Reply, MigrateError> {
        self.arrivals.wait(round, ARRIVAL_TIMEOUT)?;
        self.placer.settle();
        let (suspects, told) = self.placer.suspects(MAX_SUSPECTS);
        self.told = told;
        Ok(Reply::Arrived { suspects })
    }
}
