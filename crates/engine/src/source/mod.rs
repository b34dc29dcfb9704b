//! The source's side of a migration, phase by phase: connect, prepare, precopy, switchover, postcopy, finish.

/// The connections to the destination.
pub mod link;

/// Which pages the guest wrote.
pub mod track;

/// Skips: reasons to leave outstanding pages to a later round.
pub mod skip;

/// Fake dirty pages: written again before their turn.
pub mod fake_dirty;

/// Hot pages: written in each of the last rounds.
pub mod hot;

/// Free pages: which pages the guest holds for nobody.
pub mod free;

/// Free pages that are left out of rounds, from one look to the next.
pub mod left_out;

/// What the destination holds of each page.
pub mod sent;

/// Which pages' content is what was last sent.
pub mod content;

/// What of a chunk travels.
pub mod select;

/// Copies of pages' bodies, in memory that is used again.
pub mod copies;

/// How it travels: differences, compressed, or as it is.
pub mod encode;

/// Outbound: what of a chunk goes on its way, ready to be sent.
pub mod outbound;

/// Streams: the connections that carry pages.
pub mod stream;

/// Route: which of them a chunk takes.
pub mod route;

/// Queues between the threads that encode and those that send.
mod queue;

/// One round, and its threads.
pub mod round;

/// Rounds of pages, one after the other.
pub mod rounds;

/// Rounds while the guest runs.
pub mod precopy;

/// Processor time taken away from the guest.
pub mod throttle;

/// The devices' state on its way.
pub mod devices;

/// The guest stops here and starts there.
pub mod switchover;

/// The rest of its pages follow.
pub mod postcopy;

/// The comparison of both sides.
pub mod verify;

/// The guest stays, or nobody knows yet where it is.
mod rollback;

/// What a migration writes into its report.
mod account;

/// A short look at a guest that runs on.
pub mod observe;

/// What some of its pages hold.
pub mod sample;

/// What a migration would take.
pub mod estimate;

use std::sync::Arc;
use std::time::Duration;

use sterna_api::options::{Compress, Delta};
use sterna_api::report::{Host, Report, Status};
use sterna_api::{MigrateOptions, Mode, Phase};
use sterna_protocol::convergence::Because;
use sterna_protocol::hello::{Features, Role};
use sterna_protocol::session::Owner;
use sterna_protocol::spec::VmSpec;
use sterna_sys::map::Access;

use self::free::FreePages;
use self::link::{Link, Peer};
use self::postcopy::drive::Begun;
use self::postcopy::{Context, Work};
use self::precopy::{Brake, Ending};
use self::rounds::Rounds;
use self::stream::Stream;
use self::switchover::{HandOver, Switchover};
use self::throttle::Throttle;
use self::track::Tracker;
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, SourceHost, Verdict};
use crate::memory::BlockFile;
use crate::memory::Memory;
use crate::memory::shared::SharedMemory;
use crate::monitor::Monitor;
use crate::transport::connection::Connection;
use crate::transport::credentials::Credentials;
use crate::transport::pacer::Pacer;
use crate::transport::share::Share;
use crate::transport::{SessionKey, call, control};
use crate::vmm::{self, VmmError};

/// A machine to be moved away, and what is needed to move it.
pub struct Outgoing {
    /// The migration, drawn at random.
    pub id: MigrationId,
    /// The machine, for the destination.
    pub spec: VmSpec,
    /// Its VMM.
    pub vmm: Box<dyn vmm::Source>,
    /// Its RAM, in the order of `spec.blocks`, with addresses in the VMM's process.
    pub blocks: Vec<BlockFile>,
    /// What watches its writes; [`track::WriteProtect`] for QEMU.
    pub tracker: Box<dyn Tracker>,
    /// What slows it down where that is asked for; [`throttle::ProcessThrottle`] for QEMU.
    pub throttle: Box<dyn Throttle>,
    /// Whether it is known that disks write into its RAM past the page tables (direct I/O); the VMM is asked again while its pages go.
    pub direct_io: bool,
    /// For tests that show what the order of looking is for, and never in earnest: pages that were free once are left out for ever, whoever writes them.
    #[doc(hidden)]
    pub trust_first_look: bool,
    /// What all migrations away from this host may send together.
    pub bandwidth: Arc<Share>,
    /// This host, for the report.
    pub here: Host,
}

/// Where the guest is when a migration has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// At the source, as it was before.
    Here,
    /// At the source, untouched: the destination takes in as many machines as it may, and can be asked again later.
    NotYet,
    /// At the destination; the source's VMM has ended.
    There,
    /// It was given away and nobody answers: stopped here until [`ask_verdict`] tells. Where it tells [`Verdict::Aborted`],
    /// `vmm.rollback()` lets it run on here.
    Unknown,
    /// At the source, where it does not run yet: `vmm.rollback()` failed, and is to be tried again until it works.
    NotGivenBack,
}

/// A migration that has ended.
pub struct Outcome {
    /// What it did.
    pub report: Report,
    /// The VMM; ended where the fate is [`Fate::There`].
    pub vmm: Box<dyn vmm::Source>,
    /// Where the guest is.
    pub fate: Fate,
    /// Which daemon accepted it, where it got that far and that one could say so.
    pub daemon: Option<DaemonId>,
}

/// Moves a machine to `peer`. Blocks until it has ended; meanwhile `monitor` shows where it stands, and cancels it. The options' time
/// limit counts from here.
#[must_use]
pub fn migrate(
    outgoing: Outgoing,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Outcome {
    let Outgoing { id, spec, mut vmm, blocks, mut tracker, mut throttle, direct_io, trust_first_look, bandwidth, here } =
        outgoing;
    let report = Report::asked(&spec.name, options, here, peer);
    let mut migration = Migration {
        id,
        spec: &spec,
        peer,
        options,
        host,
        monitor,
        daemon: None,
        direct_io,
        trust_first_look,
        bandwidth,
        throttle: throttle.as_mut(),
        report,
        started_ms: 0.0,
        cpu_before: sterna_sys::process::thread_cpu_time(),
    };
    monitor.begin();
    migration.report.queued_ms = monitor.elapsed().as_secs_f64() * 1e3;
    let result = migration.run(vmm.as_mut(), &blocks, tracker.as_mut());
    migration.throttle.loosen();
    tracker.disarm();
    migration.account(tracker.as_ref());
    let fate = result.unwrap_or_else(|error| match error {
        // Said before anything was asked of the VMM: there is nothing to give back.
        MigrateError::Busy(problem) => {
            migration.report.error = Some(problem);
            Fate::NotYet
        }
        error => migration.give_back(vmm.as_mut(), &error),
    });
    if fate == Fate::There {
        monitor.enter(Phase::Finish);
        vmm.quit();
    }
    migration.throttle.release();
    let elapsed_ms = monitor.elapsed().as_secs_f64() * 1e3;
    if migration.report.status == Status::Completed {
        migration.report.resume_ms = elapsed_ms - migration.started_ms;
    } else {
        migration.report.total_ms = elapsed_ms;
    }
    migration.report.source.cpu_s += (sterna_sys::process::thread_cpu_time() - migration.cpu_before).as_secs_f64();
    monitor.enter(if fate == Fate::NotYet { Phase::Queued } else { Phase::Done });
    Outcome { report: migration.report, vmm, fate, daemon: migration.daemon }
}

/// Asks a peer what became of a migration; only the daemon that accepted it, where that is known.
///
/// # Errors
/// The peer does not answer, is [another daemon](MigrateError::AnotherDaemon), or knows nothing of it: nothing is settled, ask again later.
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

/// What is left here of a machine whose guest was handed over to run before all its pages had followed.
pub struct Left {
    /// The migration.
    pub id: MigrationId,
    /// The machine's name.
    pub vm: String,
    /// Which daemon took the guest, where that is known.
    pub daemon: Option<DaemonId>,
    /// Its RAM, as it stands since the switchover, in the order of its blocks.
    pub blocks: Vec<BlockFile>,
    /// What all migrations away from this host may send together.
    pub bandwidth: Arc<Share>,
    /// This host, for the report.
    pub here: Host,
}

/// Goes on with a guest that an earlier daemon handed over to `peer`, which has said that it took it: sends the pages that it misses. Blocks
/// until all are there, the guest has ended there, or [`Monitor::give_up`]; a peer that does not answer is tried for as long. Its report is
/// [partial](Report::partial): of what was done since. Whatever the report says, the guest is not this host's any more, and what is left here is of no use.
///
/// # Errors
/// The RAM cannot be mapped: nothing was done, and what is left here is needed as before.
pub fn serve(
    left: Left,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Result<Report, MigrateError> {
    let Left { id, vm, daemon, blocks, bandwidth, here } = left;
    let ram = SharedMemory::open(&blocks, Access::Read)?;
    let cpu_before = sterna_sys::process::thread_cpu_time();
    let mut report = Report::asked(&vm, options, here, peer);
    (report.mode, report.partial) = (mode_after_switchover(options).into(), true);
    monitor.begin();
    let _ = monitor.commit();
    report.ram.total_pages = ram.layout().pages();
    let work = Work::new(Arc::new(ram), options, &bandwidth, 0);
    postcopy::see_through(&Context { id, peer, daemon, options, host, monitor, work }, None, &mut report);
    report.source.cpu_s += (sterna_sys::process::thread_cpu_time() - cpu_before).as_secs_f64();
    monitor.enter(Phase::Done);
    Ok(report)
}

/// What the mode was, once pages follow after the switchover.
fn mode_after_switchover(options: &MigrateOptions) -> &'static str {
    if options.mode == Mode::Postcopy { "postcopy" } else { "hybrid" }
}

/// What the options need the destination to know.
fn needed(options: &MigrateOptions) -> Features {
    let postcopy = if options.must_postcopy() { Features::POSTCOPY } else { Features::NONE };
    encodings(options).and(postcopy)
}

fn encodings(options: &MigrateOptions) -> Features {
    let compress = match options.compress {
        Compress::Off => Features::NONE,
        Compress::Lz4 => Features::PACKED.and(Features::LZ4),
        Compress::Zstd => Features::PACKED.and(Features::ZSTD),
    };
    match options.delta {
        Delta::Off => compress,
        Delta::Xbzrle => compress.and(Features::PACKED).and(Features::XBZRLE),
    }
}

struct Migration<'a> {
    id: MigrationId,
    spec: &'a VmSpec,
    peer: &'a str,
    options: &'a MigrateOptions,
    host: &'a dyn SourceHost,
    monitor: &'a Monitor,
    /// Who accepted it, once somebody has.
    daemon: Option<DaemonId>,
    direct_io: bool,
    trust_first_look: bool,
    bandwidth: Arc<Share>,
    throttle: &'a mut dyn Throttle,
    report: Report,
    /// When the guest ran at the destination, from the accepted request.
    started_ms: f64,
    cpu_before: Duration,
}

/// What comes after the switchover.
enum After {
    /// Nothing.
    Ended(Fate),
    /// The rest of the pages, over the connections that there are, where they still stand.
    Paging { stands: bool },
}

/// How the switchover ended.
enum Moved {
    /// Nothing follows.
    Ended(Fate),
    /// The guest runs at the destination and misses pages. The connections to bring them, where they stand.
    Paging(Arc<Work>, Option<(Begun, Vec<Stream>, Option<u64>)>),
}

impl Migration<'_> {
    /// The phases in their order. An error means that the guest is still the source's.
    fn run(
        &mut self,
        vmm: &mut dyn vmm::Source,
        blocks: &[BlockFile],
        tracker: &mut dyn Tracker,
    ) -> Result<Fate, MigrateError> {
        self.options.check().map_err(MigrateError::Options)?;
        if self.options.throttle_percent.is_some() {
            self.throttle.try_out(&vmm.processor_threads()?)?;
        }
        let ram: Arc<dyn Memory> = Arc::new(SharedMemory::open(blocks, Access::Read)?);

        self.monitor.enter(Phase::Connect);
        let session = SessionKey { session: self.id.0, key: self.id.0 as u64, needed: needed(self.options) };
        let mut link = Link::connect(self.peer, self.id, session, self.host.credentials())?;
        let result = self.with_link(vmm, &ram, tracker, &mut link);
        match result {
            Ok(Moved::Ended(fate)) => Ok(fate),
            Ok(Moved::Paging(work, begun)) => {
                // Where they do not stand, or not any more, new ones are made.
                let session = begun.and_then(|(begun, streams, known)| begun.session(link, streams, known).ok());
                let Self { id, peer, daemon, options, host, monitor, .. } = *self;
                let context = Context { id, peer, daemon, options, host, monitor, work };
                postcopy::see_through(&context, session, &mut self.report);
                Ok(Fate::There)
            }
            Err(error) => {
                // Where the link broke, the destination knows better why. (Once the guest was given away, its verdict was the last word.)
                let theirs = if link.control.owner() == Owner::Source { link.control.abort() } else { None };
                Err(match (error, theirs) {
                    (MigrateError::Link { .. }, Some(problem)) => MigrateError::Peer(problem),
                    // The kernel says that it is gone; it may have said itself that the guest switched itself off.
                    (MigrateError::Vmm(VmmError::Gone { guest_off: false }), _) => {
                        vmm.ended().unwrap_or(VmmError::Gone { guest_off: false }).into()
                    }
                    (error, _) => error,
                })
            }
        }
    }

    fn with_link(
        &mut self,
        vmm: &mut dyn vmm::Source,
        ram: &Arc<dyn Memory>,
        tracker: &mut dyn Tracker,
        link: &mut Link,
    ) -> Result<Moved, MigrateError> {
        self.monitor.enter(Phase::Prepare);
        self.monitor.check()?;
        let (streams, may_postcopy) = (self.options.streams as u16, self.options.may_postcopy());
        let stop_limit = Duration::try_from_secs_f64(self.options.downtime_limit_ms / 4e3).unwrap_or_default();
        let mut free_pages = FreePages::new(self.options.skip_free, vmm, ram, stop_limit);
        // The destination starts its VMM meanwhile.
        let proposed = std::thread::scope(|scope| {
            scope.spawn(|| free_pages.find());
            link.propose(self.id, self.spec, self.options, ram.layout().digest())
        });
        let mut peer = proposed?;
        if let Some(problem) = &peer.no_postcopy {
            if self.options.must_postcopy() {
                // It waits for the other connections, and would not hear an `Abort`; this it notices.
                link.control.hang_up().map_err(MigrateError::host("hanging up"))?.now();
                return Err(MigrateError::Peer(problem.clone()));
            }
            self.report.postcopy.reason = Some(format!("not after the switchover: {}", problem.message));
        }
        self.host.accepted();
        self.daemon = peer.identity;
        self.describe(&peer);
        let streams = (0..streams).map(|index| link.stream(index)).collect::<Result<_, _>>()?;
        let devices = link.devices()?;
        let work = (may_postcopy && peer.no_postcopy.is_none())
            .then(|| Work::new(Arc::clone(ram), self.options, &self.bandwidth, 0));
        let begun = work.as_ref().map(|work| Begun::new(link, work)).transpose()?;
        peer.clock_offset_us = link.compare_clocks()?;
        vmm.prepare()?;
        if self.trust_first_look {
            free_pages.trust_first_look();
        }
        tracker.arm(ram.as_ref())?;

        let pacer = Pacer::new(self.options.bandwidth_bytes_per_s, &self.bandwidth);
        let mut rounds = Rounds::new(ram.as_ref(), self.monitor, streams, tracker, self.options, pacer, free_pages)?;
        rounds.untracked = self.direct_io;
        let allocated = rounds.everything()?;
        rounds.skip_free(vmm);
        let total = ram.layout().pages();
        self.report.ram = sterna_api::report::RamPages { total_pages: total, allocated_pages: allocated };
        self.report.pages.unallocated = total - allocated;
        self.report.setup_ms = self.monitor.elapsed().as_secs_f64() * 1e3;
        let result = self.move_guest(vmm, tracker, link, &mut rounds, devices, &peer, begun.as_ref());
        self.tally(&rounds);
        let failure = begun.as_ref().and_then(Begun::failure);
        match (result, work) {
            // Where faults could not be served, that ended everything else.
            (Err(MigrateError::Link { .. }), _) if failure.is_some() => Err(failure.expect("looked at")),
            (Err(error), _) => Err(error),
            (Ok(After::Ended(fate)), _) => Ok(Moved::Ended(fate)),
            (Ok(After::Paging { stands }), Some(work)) => {
                let known = rounds.fastest();
                let streams = std::mem::take(&mut rounds.streams);
                Ok(Moved::Paging(work, begun.filter(|_| stands).map(|begun| (begun, streams, known))))
            }
            (Ok(After::Paging { .. }), None) => unreachable!("pages follow only where that was agreed"),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "each is one thing of the switchover's")]
    fn move_guest(
        &mut self,
        vmm: &mut dyn vmm::Source,
        tracker: &mut dyn Tracker,
        link: &mut Link,
        rounds: &mut Rounds,
        devices: Connection,
        peer: &Peer,
        begun: Option<&Begun>,
    ) -> Result<After, MigrateError> {
        let mut ending = Ending::Switchover;
        if self.options.mode == Mode::Postcopy {
            ending = Ending::Postcopy(Because::Asked);
        } else if self.options.has_rounds() {
            self.monitor.enter(Phase::Precopy);
            let brake = Brake::new(self.throttle, self.monitor, &mut self.report.convergence);
            // `precopy` with `--on-timeout postcopy` waits for the time to be up.
            let postcopy = begun.is_some() && self.options.mode != Mode::Precopy;
            ending = precopy::precopy(rounds, link, tracker, vmm, self.options, postcopy, brake)?;
        }
        self.monitor.enter(Phase::Switchover);
        let Self { id, peer: address, daemon, host, monitor, .. } = *self;
        let record = |postcopy| move || host.handing_over(id, address, daemon, postcopy).map_err(MigrateError::Record);
        let switchover = Switchover { verify: self.options.verify, monitor };
        let loaded = match (ending, begun) {
            (Ending::Postcopy(because), Some(begun)) => {
                self.report.mode = mode_after_switchover(self.options).into();
                self.report.postcopy.reason = self.reason(because);
                let both = (&mut *rounds, begun);
                switchover.load_postcopy(both, link, tracker, vmm, self.throttle, devices, record(true))?
            }
            _ => switchover.load(rounds, link, tracker, vmm, self.throttle, devices)?,
        };
        self.report.verify = loaded.verify.clone();
        let residue = loaded.residue;
        if let Some(residue) = residue {
            self.report.postcopy.residue_pages = residue.pages;
            self.report.postcopy.residue_bytes = residue.bytes;
            self.report.postcopy.residue_ms = residue.took.as_secs_f64() * 1e3;
        }
        let handed = switchover::hand_over(loaded, link, peer.clock_offset_us, monitor, record(false))?;
        self.started_ms = monitor.elapsed().as_secs_f64() * 1e3;
        match handed {
            HandOver::Done { downtime, downtime_ms, destination_cpu_s } => {
                self.report.total_ms = self.started_ms;
                self.report.downtime = downtime;
                self.report.downtime_ms = if self.spec.running { downtime_ms } else { 0.0 };
                self.report.destination.cpu_s = destination_cpu_s;
                if let Some(residue) = residue {
                    monitor.begin_round(rounds.done.len() as u32, residue.pages);
                    return Ok(After::Paging { stands: true });
                }
                self.report.status = Status::Completed;
                Ok(After::Ended(Fate::There))
            }
            HandOver::Unknown(error) => match self.find_out(error)? {
                Fate::There if residue.is_some() => Ok(After::Paging { stands: false }),
                fate => Ok(After::Ended(fate)),
            },
        }
    }
}
