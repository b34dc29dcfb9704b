//! The destination's side of a migration, phase by phase: connect, prepare, precopy, switchover, finish.

/// Takes calls and brings the connections of a session together.
pub mod listen;

/// Frames off the connections that carry pages.
pub mod receive;

/// Pages out of blocks of their own encodings.
pub mod decode;

/// Pages that cannot be made of what arrived.
pub mod undecodable;

/// Arrivals: pages off the wire that are not in their place yet.
pub mod arrival;

/// Pages into RAM.
pub mod place;

/// What is said while they come.
mod paging;

/// The devices' state into the VMM, held back until the last pages are in place.
pub mod devices;

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_protocol::frame::{Digester, FrameReader};
use sterna_protocol::hello::{Features, Role, Version};
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::message::{MAX_DIGEST_CHUNKS, MAX_SUSPECTS, Reply, Request};
use sterna_protocol::pages::PageMap;
use sterna_protocol::spec::VmSpec;
use sterna_sys::map::Access;

use self::devices::HeldDevices;
use self::paging::{SourceOf, note_part};
use self::place::Placer;
use self::receive::Arrivals;
use crate::error::MigrateError;
use crate::host::{DestinationHost, Incoming, MigrationId, Verdict};
use crate::memory::Memory;
use crate::memory::shared::SharedMemory;
use crate::paging::Pager;
use crate::transport::SessionKey;
use crate::transport::connection::{Connection, HangUp};
use crate::transport::control::Answering;
use crate::vmm::EventTime;

/// How long the session's other connections may take to come after the proposal was accepted.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is looked meanwhile whether the source is still there.
const CONNECT_LOOK: Duration = Duration::from_millis(100);
/// How long the VMM may take to load its devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the pages of a round may take to arrive after the source has sent them all, without one arriving.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);
/// The most connections a session may have for its pages.
const MAX_STREAMS: u16 = sterna_api::options::MAX_STREAMS as u16;

/// A connection of a session, as the listener hands it on.
pub(crate) type Call = (Role, Connection);

/// What both sides of a session agreed on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agreed {
    /// The version that both speak.
    pub version: Version,
    /// What both can do.
    pub features: Features,
}

/// A session's connections but the control connection.
struct Connections {
    /// Those that carry pages, in order.
    pages: Vec<Connection>,
    /// The devices' one, where the guest is still to come.
    devices: Option<Connection>,
    /// Where pages are asked for, and where those come: where the guest may run before all its pages are here.
    faults: Option<(Connection, Connection)>,
}

impl Connections {
    /// What ends all of them from elsewhere.
    fn hang_up(&self) -> Result<Vec<HangUp>, MigrateError> {
        let faults = self.faults.iter().flat_map(|(requests, urgent)| [requests, urgent]);
        let all = self.pages.iter().chain(&self.devices).chain(faults).map(Connection::hang_up);
        all.collect::<Result<_, _>>().map_err(MigrateError::host("setting up the pages' way into RAM"))
    }
}

/// A machine on its way here.
struct Session<'a> {
    id: MigrationId,
    key: SessionKey,
    agreed: Agreed,
    host: &'a dyn DestinationHost,
    control: Answering,
    calls: Receiver<Call>,
}

/// Serves one migration on its control connection, from the first request to the last.
pub(crate) fn serve_session(
    key: SessionKey,
    agreed: Agreed,
    control: Answering,
    calls: Receiver<Call>,
    host: &dyn DestinationHost,
) {
    let mut session = Session { id: MigrationId(key.session), key, agreed, host, control, calls };
    if let Err(error) = session.run() {
        tracing::info!(migration = %session.id, %error, "an incoming migration ended early");
    }
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), MigrateError> {
        let mut request = self.control.next_request()?;
        if request == Request::Identify {
            self.control.answer(&request, &Reply::Identity { identity: self.host.identity().0 })?;
            request = self.control.next_request()?;
        }
        let (spec, streams, verify, postcopy) = match &request {
            Request::Propose { id, spec, streams, postcopy, verify }
                if *id == self.id.0 && (1..=MAX_STREAMS).contains(streams) =>
            {
                (spec, *streams, *verify, *postcopy && self.agreed.features.contains(Features::POSTCOPY))
            }
            Request::Resume { id, streams } if (1..=MAX_STREAMS).contains(streams) => {
                return self.resume(MigrationId(*id), *streams, &request);
            }
            Request::Verdict { id } => {
                let reply = match self.host.verdict(MigrationId(*id), self.control.peer()) {
                    Ok(verdict) => Reply::Verdict { committed: verdict == Verdict::Committed },
                    Err(problem) => Reply::Failed(problem),
                };
                return self.control.answer(&request, &reply);
            }
            _ => return Err(MigrateError::Request("a session begins with a proposal")),
        };
        let (incoming, ram) = match self.prepare(spec, postcopy) {
            Ok(prepared) => prepared,
            Err(problem) => return self.control.answer(&request, &Reply::Failed(problem)),
        };
        let mut guard = Guard { host: self.host, id: self.id, incoming: Some(incoming), pager: None };
        let no_postcopy = guard.open_pager(&ram, verify.then(|| self.digester()));
        let accepted = Reply::Accepted {
            host: hostname(),
            qemu: guard.incoming_mut().qemu_version.clone(),
            sterna: env!("CARGO_PKG_VERSION").into(),
            layout: ram.layout().digest(),
            no_postcopy,
        };
        self.control.answer(&request, &accepted)?;
        self.receive(guard, ram.as_ref(), spec, streams)
    }

    /// Checks, starts the VMM, and maps its RAM.
    fn prepare(&self, spec: &VmSpec, postcopy: bool) -> Result<(Incoming, Arc<dyn Memory>), Problem> {
        sterna_protocol::layout::Layout::new(&spec.blocks).map_err(|error| MigrateError::from(error).problem())?;
        let incoming = self.host.prepare(self.id, spec, self.control.peer(), postcopy)?;
        let same = incoming.blocks.len() == spec.blocks.len()
            && incoming
                .blocks
                .iter()
                .zip(&spec.blocks)
                .all(|(ours, theirs)| ours.spec.id == theirs.id && ours.spec.bytes == theirs.bytes);
        let ram = if same {
            SharedMemory::open(&incoming.blocks, Access::ReadWrite).map_err(|error| MigrateError::from(error).problem())
        } else {
            let why = "the guest's RAM as it was made here is not what was proposed";
            Err(Problem::new("ram-layout", sterna_api::Blame::Ours, why))
        };
        match ram {
            Ok(ram) => Ok((incoming, Arc::new(ram))),
            Err(problem) => {
                self.host.abort(self.id, Some(incoming));
                Err(problem)
            }
        }
    }

    /// Everything between the accepted proposal and the end, with the receivers at work.
    fn receive(&mut self, mut guard: Guard, ram: &dyn Memory, spec: &VmSpec, streams: u16) -> Result<(), MigrateError> {
        let (mut connections, held) = match self.set_up(&mut guard, streams) {
            Ok(set_up) => set_up,
            Err(error) => {
                // The source has been told yes: it learns of this by the answer to whatever it asks next.
                guard.end();
                let request = self.control.next_request()?;
                self.control.answer(&request, &Reply::Failed(error.problem()))?;
                return Err(error);
            }
        };
        let pager = guard.pager.clone();
        let hang_up = self.hang_up(&connections)?;
        let (requests, urgent) = connections.faults.take().unzip();
        let source = pager.as_deref().zip(requests);
        let source = source.map(|(pager, requests)| SourceOf::new(pager, requests, self.key.key, hang_up));
        let arrivals = Arrivals::new(streams);
        let placer = Placer::new(ram, self.host, pager.as_deref(), self.digester());
        self.with_receivers(connections.pages, urgent, &placer, &arrivals, |session| {
            let result = session.converse(&mut guard, spec, &placer, &arrivals, &held, source);
            if let Err(error) = &result {
                // The source may be busy sending: it asks why when its connection fails.
                arrivals.fail(error.problem());
            }
            result
        })
    }

    /// How both sides digest the migration's pages.
    fn digester(&self) -> Digester {
        Digester::of(self.agreed.version, self.id.0)
    }

    /// What ends the session's connections from elsewhere, the control connection among them.
    fn hang_up(&self, connections: &Connections) -> Result<Vec<HangUp>, MigrateError> {
        let mut all = connections.hang_up()?;
        all.push(self.control.hang_up().map_err(MigrateError::host("setting up the pages' way into RAM"))?);
        Ok(all)
    }

    /// Does `work` while a thread for each connection takes pages in. Whatever ends the work ends them.
    fn with_receivers(
        &mut self,
        mut pages: Vec<Connection>,
        urgent: Option<Connection>,
        placer: &Placer,
        arrivals: &Arrivals,
        work: impl FnOnce(&mut Self) -> Result<(), MigrateError>,
    ) -> Result<(), MigrateError> {
        // Last: it is in no round, and no number of a round's connection is its own.
        pages.extend(urgent);
        let hang_up = pages.iter().map(Connection::hang_up).collect::<Result<_, _>>();
        let hang_up = HangUpAll(hang_up.map_err(MigrateError::host("setting up the pages' way into RAM"))?);
        std::thread::scope(|scope| {
            // They read until their connection is shut down.
            let _hang_up = hang_up;
            for (index, stream) in pages.iter_mut().enumerate() {
                let reader = FrameReader::new(self.key.key, self.agreed.features);
                scope.spawn(move || receive::receive(index, stream, reader, placer, arrivals));
            }
            work(self)
        })
    }

    /// The session's connections, and the way of the devices' state into the VMM.
    fn set_up(&mut self, guard: &mut Guard, streams: u16) -> Result<(Connections, HeldDevices), MigrateError> {
        let mut connections = self.connections(streams, true, guard.pager.is_some())?;
        let devices =
            connections.devices.take().ok_or(MigrateError::Bug("the devices' connection was not waited for"))?;
        let vmm_stream = guard.incoming_mut().vmm.prepare()?;
        Ok((connections, HeldDevices::start(devices, vmm_stream)?))
    }

    /// Waits for the session's connections.
    fn connections(&mut self, streams: u16, devices: bool, faults: bool) -> Result<Connections, MigrateError> {
        let late = || MigrateError::Link {
            doing: "waiting for the session's connections",
            source: std::io::ErrorKind::TimedOut.into(),
        };
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut wanted: Vec<Role> = (0..streams).map(Role::Pages).collect();
        wanted.extend(devices.then_some(Role::Devices));
        wanted.extend(faults.then_some([Role::Faults, Role::Urgent]).into_iter().flatten());
        let mut came: Vec<Option<Connection>> = wanted.iter().map(|_| None).collect();
        while came.iter().any(Option::is_none) {
            match self.calls.recv_timeout(CONNECT_LOOK) {
                Ok((role, stream)) => match wanted.iter().position(|wanted| *wanted == role) {
                    Some(index) if came[index].is_none() => came[index] = Some(stream),
                    _ => return Err(MigrateError::Request("a connection that this session does not have")),
                },
                // A source that is gone calls no more; until this session ends, its next attempt finds the name taken.
                Err(_) if Instant::now() > deadline || !self.control.alive() => return Err(late()),
                Err(_) => {}
            }
        }
        let mut came = came.into_iter().flatten();
        let pages = came.by_ref().take(usize::from(streams)).collect();
        let devices = if devices { came.next() } else { None };
        Ok(Connections { pages, devices, faults: came.next().zip(came.next()) })
    }

    /// Answers requests until the guest runs here or the migration has ended.
    fn converse(
        &mut self,
        guard: &mut Guard,
        spec: &VmSpec,
        placer: &Placer,
        arrivals: &Arrivals,
        held: &HeldDevices,
        mut source: Option<SourceOf>,
    ) -> Result<(), MigrateError> {
        let ram = placer.ram();
        let mut residue = PageMap::empty(ram.layout());
        loop {
            let request = self.control.next_request()?;
            let reply = match &request {
                Request::Abort => {
                    // The VMM ends before the source lets its own run on: both lock the guest's disks.
                    guard.end();
                    self.control.answer(&request, &Reply::Aborted { problem: arrivals.failure() })?;
                    return Err(MigrateError::Cancelled);
                }
                Request::Commit => {
                    let pager = self.commit(guard, spec, &request, arrivals)?;
                    return pager.map_or(Ok(()), |pager| self.page_in(&pager, arrivals));
                }
                Request::Residue(part) => note_part(part, ram, &mut residue).map(|()| Reply::Noted),
                Request::LoadPostcopy(part) => note_part(part, ram, &mut residue)
                    .and_then(|()| {
                        self.load_postcopy(
                            guard,
                            std::mem::replace(&mut residue, PageMap::empty(ram.layout())),
                            held,
                            &mut source,
                        )
                    })
                    .map(|()| Reply::Loaded),
                other => self.answer(other, guard, placer, arrivals, held),
            };
            match reply {
                Ok(reply) => self.control.answer(&request, &reply)?,
                Err(error) => {
                    guard.end();
                    self.control.answer(&request, &Reply::Failed(error.problem()))?;
                    return Err(error);
                }
            }
        }
    }

    fn answer(
        &self,
        request: &Request,
        guard: &mut Guard,
        placer: &Placer,
        arrivals: &Arrivals,
        held: &HeldDevices,
    ) -> Result<Reply, MigrateError> {
        let ram = placer.ram();
        match request {
            Request::Clock => Ok(Reply::Clock { now_us: crate::transport::clock::now_us() }),
            Request::RoundEnd { round } => {
                arrivals.wait(*round, ARRIVAL_TIMEOUT)?;
                Ok(Reply::Arrived { suspects: suspects(placer) })
            }
            Request::Stopped => {
                held.hold();
                Ok(Reply::Holding)
            }
            Request::FinalRoundEnd { round } => {
                arrivals.wait(*round, ARRIVAL_TIMEOUT)?;
                let suspects = suspects(placer);
                if suspects.is_empty() {
                    held.release();
                    // Every page is here: from now on the guest's RAM is as any process's. Beside the loading of the devices, whose faults
                    // wait no longer than this takes.
                    guard.end_pager();
                }
                Ok(Reply::Arrived { suspects })
            }
            Request::ChunkDigests { first, count } => {
                let end = u64::from(first.0) + u64::from(*count);
                if *count > MAX_DIGEST_CHUNKS || end > u64::from(ram.layout().chunks()) {
                    return Err(MigrateError::Request("digests of chunks that this machine does not have"));
                }
                let digests = (first.0..end as u32).map(|chunk| ram.chunk_digest(ChunkIndex(chunk), placer.digester()));
                let digests = digests.collect::<Result<_, _>>();
                Ok(Reply::Digests(digests.map_err(MigrateError::host("reading the guest's RAM to compare it"))?))
            }
            Request::PageDigests { chunk } => Ok(Reply::Digests(
                ram.page_digests(*chunk, placer.digester())
                    .map_err(MigrateError::host("reading the guest's RAM to compare it"))?,
            )),
            Request::Load => {
                guard.incoming_mut().vmm.loaded(LOAD_TIMEOUT)?;
                held.finish()?;
                Ok(Reply::Loaded)
            }
            _ => Err(MigrateError::Request("a request that does not belong here")),
        }
    }

    /// The guest is ours: the point of no return at the destination. It is on record before the guest runs, so that whatever
    /// happens to this daemon or to the link from here on, the answer to the source is the same. What brings the pages that are still to
    /// come, where some are.
    fn commit(
        &mut self,
        guard: &mut Guard,
        spec: &VmSpec,
        request: &Request,
        arrivals: &Arrivals,
    ) -> Result<Option<Arc<Pager>>, MigrateError> {
        let pager = guard.pager.clone();
        // It may have died since it said that it was loaded: then the guest must stay where it is. (Between this look and the record it can
        // still die; that is a QEMU that dies in its first millisecond, and no look can be late enough.)
        let alive = guard.incoming_mut().vmm.alive().map_err(|error| MigrateError::from(error).problem());
        if let Err(problem) = alive.and_then(|()| self.host.commit(self.id, pager.is_some())) {
            guard.end();
            self.control.answer(request, &Reply::Failed(problem.clone()))?;
            return Err(MigrateError::Record(problem));
        }
        let mut incoming = guard.keep();
        let started =
            if spec.running { incoming.vmm.start() } else { Ok(EventTime(crate::transport::clock::now_us())) };
        let cpu = arrivals.cpu() + sterna_sys::process::thread_cpu_time();
        let reply = match started {
            Ok(start) => Reply::Running { start_us: start.0, cpu_us: cpu.as_micros() as u64 },
            // It is ours all the same: the daemon looks after it.
            Err(error) => {
                Reply::Failed(MigrateError::from(error).problem().guest(sterna_api::problem::Whereabouts::Paused))
            }
        };
        let failed = if let Reply::Failed(problem) = &reply { Some(problem) } else { None };
        let Some(pager) = pager else {
            self.host.started(self.id, incoming, None, failed);
            return self.control.answer(request, &reply).map(|()| None);
        };
        // The guest may be waiting for a page already, and the source pushes none before it has the answer.
        let answered = self.control.answer(request, &reply);
        if let Err(error) = pager.map_ahead() {
            tracing::info!(%error, "pages are not mapped ahead");
        }
        self.host.started(self.id, incoming, Some(Arc::clone(&pager)), failed);
        answered.map(|()| Some(pager))
    }
}

/// Pages to send again, as many as one reply names.
fn suspects(placer: &Placer) -> Vec<PageIndex> {
    placer.suspects(MAX_SUSPECTS)
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A machine that never ran here, until it is kept: whatever ends the session gives it back.
struct Guard<'a> {
    host: &'a dyn DestinationHost,
    id: MigrationId,
    incoming: Option<Incoming>,
    pager: Option<Arc<Pager>>,
}

impl Guard<'_> {
    fn incoming_mut(&mut self) -> &mut Incoming {
        self.incoming.as_mut().expect("kept only at the very end")
    }

    fn keep(&mut self) -> Incoming {
        self.pager = None;
        self.incoming.take().expect("kept only once")
    }

    /// Makes ready for a guest that runs before all its pages are here, where that was asked for; why it cannot be, where it cannot.
    fn open_pager(&mut self, ram: &Arc<dyn Memory>, verify: Option<Digester>) -> Option<Problem> {
        let opened = match self.incoming_mut().paging.take()? {
            Ok(means) => Pager::open(Arc::clone(ram), means, verify).map_err(|error| error.problem()),
            Err(problem) => Err(problem),
        };
        opened.map(|pager| self.pager = Some(pager)).err()
    }

    fn end_pager(&mut self) {
        if let Some(pager) = self.pager.take() {
            pager.end();
        }
    }

    fn end(&mut self) {
        // First: a VMM that waits for a page cannot end by itself. It may read what it likes now, its guest never runs.
        self.end_pager();
        if let Some(incoming) = self.incoming.take() {
            self.host.abort(self.id, Some(incoming));
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Ends connections when dropped, which wakes whoever reads them.
struct HangUpAll(Vec<HangUp>);

impl Drop for HangUpAll {
    fn drop(&mut self) {
        self.0.iter().for_each(HangUp::now);
    }
}
