//! One guest on its way out: the state that all phases of the source share.

use std::sync::Arc;

use sterna_api::MigrateOptions;
use sterna_protocol::spec::VmSpec;
use sterna_sys::map::Access;

use super::account::Account;
use super::devices::DevicePump;
use super::gang::Gang;
use super::pauses::Place;
use super::throttle::Throttle;
use super::tickets::Tickets;
use super::track::Tracker;
use crate::error::MigrateError;
use crate::haste::{Crew, Haste, VmmThreads};
use crate::host::{Clone, DaemonId, MigrationId, SourceHost};
use crate::memory::{BlockFile, Memory, kind};
use crate::monitor::Monitor;
use crate::split::Split;
use crate::transport::connection::Connection;
use crate::transport::share::Share;
use crate::vmm;

/// A machine that leaves this host, from the connection to the last page.
pub struct Departure<'a> {
    /// The migration.
    pub id: MigrationId,
    /// The machine, as the destination is told.
    pub spec: &'a VmSpec,
    /// Its VMM.
    pub vmm: &'a mut dyn vmm::Source,
    /// Its RAM, in the order of `spec.blocks`.
    pub blocks: &'a [BlockFile],
    /// The tracker of its writes.
    pub tracker: &'a mut dyn Tracker,
    /// The throttle that slows it down.
    pub throttle: &'a mut dyn Throttle,
    /// As [`Outgoing::untracked`](super::Outgoing::untracked).
    pub untracked: vmm::Untracked,
    /// As [`Outgoing::trust_first_look`](super::Outgoing::trust_first_look).
    pub trust_first_look: bool,
    /// What all migrations away from this host may send together.
    pub bandwidth: Arc<Share>,
    /// As [`Outgoing::gang`](super::Outgoing::gang).
    pub gang: Option<(Arc<Gang>, u16)>,
    /// Its tickets.
    pub tickets: Tickets,
    /// Its RAM, once it is mapped.
    pub ram: Option<Arc<dyn Memory>>,
    /// As [`Outgoing::clone`](super::Outgoing::clone).
    pub clone: Option<Clone>,
    /// As [`Outgoing::split`](super::Outgoing::split).
    pub split: Option<Arc<Split>>,
    /// When its guest may be stopped.
    pub pause: Place,
    /// The haste of its pause.
    pub haste: Haste,
    /// The VMM's threads, once the haste has begun.
    pub vmm_threads: Option<VmmThreads>,
    /// The destination's address.
    pub peer: &'a str,
    /// The daemon that accepted the machine, once one has.
    pub daemon: Option<DaemonId>,
    /// How the machine is to be moved.
    pub options: &'a MigrateOptions,
    /// The daemon here.
    pub host: &'a dyn SourceHost,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
    /// What the migration did, for its report.
    pub account: Account<'a>,
}

impl Departure<'_> {
    /// Checks all that can be checked before the destination is asked, and maps the machine's RAM.
    ///
    /// # Errors
    /// The options contradict each other, the guest cannot be slowed down as they ask, or its RAM cannot be mapped.
    pub fn check(&mut self) -> Result<Arc<dyn Memory>, MigrateError> {
        self.options.check().map_err(MigrateError::Options)?;
        if self.options.throttle_percent.is_some() {
            self.throttle.try_out(&self.vmm.processor_threads()?)?;
        }
        let ram = kind::open(self.blocks, Access::Read)?;
        self.ram = Some(Arc::clone(&ram));
        Ok(ram)
    }

    /// Records that the guest may run at the destination from now on.
    ///
    /// # Errors
    /// [`MigrateError::Record`]: then the destination must not be told.
    pub fn record(&self, postcopy: bool) -> Result<(), MigrateError> {
        self.host.handing_over(self.id, self.peer, self.daemon, postcopy).map_err(MigrateError::Record)
    }

    /// Begins the haste of its pause, with these threads too, which were started before. The guest runs still.
    pub fn hurry(&mut self, crew: Option<&Crew>) {
        self.vmm_threads = VmmThreads::of(self.vmm.process(), self.vmm.processor_threads());
        self.haste = Haste::begin(self.host.may_haste());
        self.haste.limit();
        if let Some(crew) = crew {
            self.haste.crew(crew);
        }
        self.haste.vmm(self.vmm_threads.as_ref());
    }

    /// Begins the guest's stop, and the devices' way to the destination.
    ///
    /// # Errors
    /// The VMM refuses, or no descriptor or thread is left.
    pub fn begin_stop(&mut self, devices: Connection) -> Result<DevicePump, MigrateError> {
        let from = self.vmm.begin()?;
        // The VMM has a thread for this now.
        self.haste.vmm(self.vmm_threads.as_ref());
        DevicePump::start(from, devices)
    }

    /// Ends what costs the guest time: throttling and write tracking.
    pub fn let_go(&mut self) {
        self.throttle.loosen();
        self.tracker.disarm();
        self.account.tracked(self.tracker);
    }
}
