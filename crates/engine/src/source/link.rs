//! The source's connections to the destination.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::problem::words;
use sterna_api::{Code, MigrateOptions, Problem};
use sterna_protocol::frame::Digester;
use sterna_protocol::hello::{Features, Role};
use sterna_protocol::layout::{ChunkIndex, Layout, PageIndex};
use sterna_protocol::message::{Reply, Request};
use sterna_protocol::pages::PageMap;
use sterna_protocol::residue;
use sterna_protocol::spec::VmSpec;

use super::gang::Gang;
use super::postcopy::requests::Requests;
use super::stream::Stream;
use super::tickets::Tickets;
use crate::error::MigrateError;
use crate::host::{Clone, DaemonId, MigrationId};
use crate::transport::clock::now_us;
use crate::transport::connection::Connection;
use crate::transport::control::{Asking, REPLY_TIMEOUT};
use crate::transport::credentials::Credentials;
use crate::transport::{SessionKey, call};

/// How long the destination may take to check the machine and to start its VMM.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(60);
/// How many times the clocks are compared; the quickest answer counts.
const CLOCK_SAMPLES: usize = 5;

/// What the destination said of itself.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Its name.
    pub host: String,
    /// Its QEMU's version.
    pub qemu: String,
    /// Its Sterna's version.
    pub sterna: String,
    /// Its clock minus ours, microseconds.
    pub clock_offset_us: i64,
    /// Why pages cannot be held back there, where post-copy or a comparison was proposed.
    pub no_postcopy: Option<Problem>,
    /// Its identity, where it is not too old to say so.
    pub identity: Option<DaemonId>,
    /// The gang that the machine comes with, where the destination keeps what that shares: a gang of one where it has
    /// kept what the machine's memory was.
    pub gang: Option<(Arc<Gang>, u16)>,
}

/// The connection that founds the session; nothing is agreed yet.
pub struct Link {
    session: SessionKey,
    address: String,
    credentials: Option<Arc<Credentials>>,
    /// The digester of both sides for the migration's pages.
    digester: Digester,
    /// Requests and replies.
    pub control: Asking,
}

/// What a machine is proposed with, beside what it is.
#[derive(Debug)]
pub struct With<'a> {
    /// The gang that it shares pages with, and which of its members it is.
    pub gang: Option<&'a (Arc<Gang>, u16)>,
    /// Its tickets.
    pub tickets: &'a Tickets,
    /// What it is, where it is a clone of a machine that runs on.
    pub clone: Option<Clone>,
}

impl Link {
    /// Reaches the destination and agrees on version and features, for this migration.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn connect(
        address: &str,
        id: MigrationId,
        session: SessionKey,
        credentials: Option<Arc<Credentials>>,
    ) -> Result<Self, MigrateError> {
        let stream = call(address, session, Role::Control, credentials.as_deref())?;
        let (digester, control) = (Digester::of(stream.version(), id.0), Asking::new(stream, session.key));
        Ok(Self { session, address: address.into(), credentials, digester, control })
    }

    /// The digester of both sides for the migration's pages.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// Proposes the machine. Returns what the destination says of itself.
    ///
    /// # Errors
    /// [`MigrateError::Peer`] where the destination refuses, [`MigrateError::Busy`] where it refuses only for now.
    pub fn propose(
        &mut self,
        id: MigrationId,
        spec: &VmSpec,
        options: &MigrateOptions,
        layout: u64,
        With { gang, tickets, clone }: With<'_>,
    ) -> Result<Peer, MigrateError> {
        let identity = self.control.identify()?;
        let kept = identity.map_or(Ok(false), |daemon| self.show(tickets, daemon))?;
        clone.map_or(Ok(()), |Clone { connected }| self.note(&Request::Clone { connected }))?;
        let alone = tickets.alone.as_ref().filter(|_| kept).map(|gang| (Arc::clone(gang), 0));
        let mut gang = gang.cloned().or(alone);
        if let Some((joined, member)) = &gang
            && !self.join(joined, *member)?
        {
            gang = None;
        }
        let features = self.control.features();
        if let Some(kin) = spec.kin.as_ref().filter(|_| features.contains(Features::FAMILIES)) {
            self.note(&Request::Kin(kin.clone()))?;
        }
        if let Some(split) = &spec.split {
            self.note(&Request::Split(Box::new(split.clone())))?;
            split.parity.map_or(Ok(()), |parity| self.note(&Request::SplitParity(parity)))?;
        }
        if spec.small_pages && features.contains(Features::SMALL_PAGES) {
            self.note(&Request::SmallPages)?;
        }
        let request = Request::Propose {
            id: id.0,
            spec: Box::new(spec.clone()),
            streams: options.streams as u16,
            postcopy: options.may_postcopy(),
            verify: options.verify,
        };
        let reply = self.control.ask(&request, PREPARE_TIMEOUT).map_err(|error| match error {
            MigrateError::Peer(problem) if problem.code == Code::TooManyIncoming => MigrateError::Busy(problem),
            other => other,
        })?;
        let Reply::Accepted { host, qemu, sterna, layout: theirs, no_postcopy } = reply else {
            return Err(MigrateError::Reply("another reply than a yes or no to the proposal"));
        };
        if theirs != layout {
            return Err(MigrateError::Reply("the destination lays out the guest's RAM differently"));
        }
        let [host, qemu, sterna] = [host, qemu, sterna].map(|text| words(&text));
        let no_postcopy = no_postcopy.map(Problem::from_outside);
        Ok(Peer { host, qemu, sterna, clock_offset_us: 0, no_postcopy, identity, gang })
    }

    /// Says which tickets the machine takes along, and shows those of the destination. Returns whether that has kept
    /// anything; one that is too old has not.
    fn show(&mut self, tickets: &Tickets, daemon: DaemonId) -> Result<bool, MigrateError> {
        let (given, shown) = tickets.to(daemon.0);
        if !self.control.features().contains(Features::RETURNS) || given.is_empty() && shown.is_empty() {
            return Ok(false);
        }
        match self.control.ask(&Request::Tickets { given, shown }, REPLY_TIMEOUT)? {
            Reply::Ticketed { kept } => Ok(kept),
            _ => Err(MigrateError::Reply("another reply than a yes or no to tickets")),
        }
    }

    /// Says something about the machine to be proposed.
    fn note(&mut self, about: &Request) -> Result<(), MigrateError> {
        match self.control.ask(about, REPLY_TIMEOUT)? {
            Reply::Noted => Ok(()),
            _ => Err(MigrateError::Reply("another reply than that it is noted")),
        }
    }

    /// Says which gang the machine shares pages with. Returns whether the destination keeps what they share; one that
    /// is too old does not.
    fn join(&mut self, gang: &Gang, member: u16) -> Result<bool, MigrateError> {
        if !self.control.features().contains(Features::SHARING) {
            return Ok(false);
        }
        let request = Request::Join { gang: Box::new(gang.spec.clone()), member };
        match self.control.ask(&request, REPLY_TIMEOUT)? {
            Reply::Joined => {}
            Reply::JoinedPool { pool } => gang.joined(pool),
            _ => return Err(MigrateError::Reply("another reply than a yes or no to a gang")),
        }
        self.take_offers(gang).map(|()| true)
    }

    /// Asks which bodies are there already.
    fn take_offers(&mut self, gang: &Gang) -> Result<(), MigrateError> {
        if !self.control.features().contains(Features::OFFERS) {
            return Ok(());
        }
        gang.take_offers(|key, first| match self.control.ask(&Request::Offers { key: *key, first }, REPLY_TIMEOUT)? {
            Reply::Offered(names) => Ok(names),
            _ => Err(MigrateError::Reply("another reply than the pages that are offered")),
        })
    }

    /// Opens a connection that carries pages.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn stream(&self, index: u16) -> Result<Stream, MigrateError> {
        Ok(Stream::new(self.call(Role::Pages(index))?, self.session.key, self.digester))
    }

    /// Opens the connection that carries the devices' state.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn devices(&self) -> Result<Connection, MigrateError> {
        self.call(Role::Devices)
    }

    /// Opens the connections of faults: one carries page requests, the other those pages.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn faults(&self) -> Result<(Requests, Stream), MigrateError> {
        let requests = Requests::new(self.call(Role::Faults)?, self.session.key)?;
        Ok((requests, Stream::new(self.call(Role::Urgent)?, self.session.key, self.digester)))
    }

    /// Goes on with a migration whose guest runs there already, only with the daemon that took it, where that is known.
    ///
    /// # Errors
    /// [`MigrateError::Peer`] where no page is missing there any more, or the guest has ended; else the connection's
    /// error.
    pub fn resume(
        &mut self,
        id: MigrationId,
        daemon: Option<DaemonId>,
        streams: u16,
        layout: u64,
    ) -> Result<(), MigrateError> {
        self.control.expect(daemon)?;
        let request = Request::Resume { id: id.0, streams };
        match self.control.ask(&request, PREPARE_TIMEOUT)? {
            Reply::Resumed { layout: theirs } if theirs == layout => Ok(()),
            Reply::Resumed { .. } => {
                Err(MigrateError::Reply("the destination lays out the guest's RAM differently than before"))
            }
            _ => Err(MigrateError::Reply("another reply than a yes or no to the resumption")),
        }
    }

    /// The pages that are missing there.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn missing(&mut self, layout: &Layout) -> Result<PageMap, MigrateError> {
        let (mut map, mut first) = (PageMap::empty(layout), 0);
        while first < layout.chunks() {
            let part = match self.control.ask(&Request::Missing { first: ChunkIndex(first) }, REPLY_TIMEOUT)? {
                Reply::Missing(part) if part.first.0 == first => part,
                _ => return Err(MigrateError::Reply("another part of the missing pages than was asked for")),
            };
            // A part of no chunks is refused, so this loop ends.
            residue::add(&part, layout, &mut map)
                .map_err(|_| MigrateError::Reply("a part of the missing pages that is invalid"))?;
            first += part.chunks;
        }
        Ok(map)
    }

    fn call(&self, role: Role) -> Result<Connection, MigrateError> {
        call(&self.address, self.session, role, self.credentials.as_deref())
    }

    /// Waits until all of a round has arrived, for as long as the destination takes bytes, which `taken_bytes` counts.
    /// Returns the pages to send again.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn round_end(
        &mut self,
        round: u32,
        last: bool,
        taken_bytes: impl Fn() -> u64,
    ) -> Result<Vec<PageIndex>, MigrateError> {
        let request = if last { Request::FinalRoundEnd { round } } else { Request::RoundEnd { round } };
        self.control.send(&request)?;
        self.control.wait(REPLY_TIMEOUT, taken_bytes)?;
        match self.control.receive(&request, REPLY_TIMEOUT)? {
            Reply::Arrived { suspects } => Ok(suspects),
            _ => Err(MigrateError::Reply("another reply than the arrival of a round")),
        }
    }

    /// The peer's clock minus ours in microseconds, by the quickest of some answers. The error is at most half of its
    /// round trip.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn compare_clocks(&mut self) -> Result<i64, MigrateError> {
        let mut best = (u64::MAX, 0);
        for _ in 0..CLOCK_SAMPLES {
            let asked = now_us();
            let Reply::Clock { now_us: theirs } = self.control.ask(&Request::Clock, REPLY_TIMEOUT)? else {
                return Err(MigrateError::Reply("another reply than the time"));
            };
            let answered = now_us();
            let middle = asked + answered.saturating_sub(asked) / 2;
            best = best.min((answered.saturating_sub(asked), theirs as i64 - middle as i64));
        }
        Ok(best.1)
    }
}
