//! Phase *connect*: what a source wants of this daemon, and the connections of its session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::Problem;
use sterna_protocol::frame::shared::MAX_MEMBERS;
use sterna_protocol::hello::{Features, Role};
use sterna_protocol::message::{MAX_OFFERS, Reply, Request};
use sterna_protocol::spec::{GangSpec, MAX_TICKETS, Ticket, VmSpec};

use super::offers::MAX_PAGES;
use super::pool::Pool;
use super::session::Session;
use crate::error::MigrateError;
use crate::host::{Clone, MigrationId, Verdict};
use crate::name::{Key, Name};
use crate::transport::connection::{Connection, HangUp};

/// How long the session's other connections may take to come after the proposal was accepted.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often this wait checks whether the source is still there.
const CONNECT_LOOK: Duration = Duration::from_millis(100);
/// The most connections a session may have for its pages.
const MAX_STREAMS: u16 = sterna_api::options::MAX_STREAMS as u16;

/// A machine that a source wants to move here.
pub(super) struct Proposal {
    /// The request, which is still to be answered.
    pub(super) request: Request,
    /// The machine.
    pub(super) spec: VmSpec,
    /// The number of connections for its pages.
    pub(super) streams: u16,
    /// Whether the two sides' pages are compared at the end.
    pub(super) verify: bool,
    /// Whether the guest may start before all its pages are here.
    pub(super) postcopy: bool,
    /// The gang that the machine shares pages with.
    pub(super) joining: Option<Joining>,
    /// The tickets that it takes along.
    pub(super) tickets: Vec<Ticket>,
    /// What it is, where it is a clone.
    pub(super) clone: Option<Clone>,
}

/// A machine's place in a gang that comes here.
#[derive(Debug, Clone)]
pub(super) struct Joining {
    /// The gang's pool.
    pub(super) pool: Arc<Pool>,
    /// The trust group of all members.
    pub(super) group: String,
    /// Which member the machine is.
    pub(super) member: u16,
    /// The numbers of tickets that were shown.
    shown: Vec<u128>,
    /// Whether it comes alone, to what was kept of it.
    pub(super) returns: bool,
}

/// How often a session may ask for offered pages.
const MAX_QUESTIONS: u64 = MAX_PAGES / MAX_OFFERS as u64 + 2;

/// Takes the first requests. It says who this daemon is or what became of a migration, resumes a migration, or returns
/// a proposal.
///
/// # Errors
/// The link broke, or the session does not begin as it should.
pub(super) fn connect(session: &mut Session) -> Result<Option<Proposal>, MigrateError> {
    let mut request = session.control.next_request()?;
    if request == Request::Identify {
        session.control.answer(&request, &Reply::Identity { identity: session.host.identity().0 })?;
        request = session.control.next_request()?;
    }
    let (mut tickets, mut returning) = (Vec::new(), None);
    if let Request::Tickets { given, shown } = &request {
        if given.len() > MAX_TICKETS || shown.len() > MAX_MEMBERS {
            return Err(MigrateError::Request("more tickets than machines can have"));
        }
        let kept = session.host.keeps(shown);
        (tickets, returning) = (given.clone(), kept.then(|| shown.clone()));
        session.control.answer(&request, &Reply::Ticketed { kept })?;
        request = session.control.next_request()?;
    }
    let mut clone = None;
    if let Request::Clone { connected } = request {
        clone = Some(Clone { connected });
        request = session.noted(&request, Features::CLONES, "a clone, which was not agreed on")?;
    }
    let mut joining = None;
    if let Request::Join { gang, member } = &request {
        let pool = match session.join(gang) {
            Ok(pool) => pool,
            Err(problem) => return session.control.answer(&request, &Reply::Failed(problem)).map(|()| None),
        };
        let numbered = session.agreed.features.contains(Features::POOLS);
        let joined = if numbered { Reply::JoinedPool { pool: pool.number() } } else { Reply::Joined };
        let returns = returning.is_some() && gang.group.is_empty() && gang.members == 1;
        let (group, shown) = (gang.group.clone(), returning.unwrap_or_default());
        joining = Some(Joining { pool, group, member: *member, shown, returns });
        session.control.answer(&request, &joined)?;
        request = session.control.next_request()?;
        let mut asked = 0;
        while let (Request::Offers { key, first }, Some(joining)) = (&request, &joining) {
            asked += 1;
            if asked > MAX_QUESTIONS {
                return Err(MigrateError::Request("more questions for offered pages than there can be"));
            }
            let names = session.offered(joining, key, *first);
            session.control.answer(&request, &Reply::Offered(names))?;
            request = session.control.next_request()?;
        }
    }
    let mut kin = None;
    if let Request::Kin(theirs) = &request {
        kin = Some(theirs.clone());
        request = session.noted(&request, Features::FAMILIES, "a family, which this session does not know")?;
    }
    let mut split = None;
    if let Request::Split(theirs) = &request {
        split = Some((**theirs).clone());
        request = session.noted(&request, Features::SPLIT, "a split machine, which this session does not know")?;
    }
    if let (Request::SplitParity(parity), Some(split)) = (&request, &mut split) {
        split.parity = Some(*parity);
        let unknown = "parity of a split machine, which this session does not know";
        request = session.noted(&request, Features::SPLIT_PARITY, unknown)?;
    }
    let small_pages = matches!(request, Request::SmallPages);
    if small_pages {
        request = session.noted(&request, Features::SMALL_PAGES, "small pages, which this session does not know")?;
    }
    match &request {
        Request::Propose { id, spec, streams, postcopy, verify }
            if *id == session.id.0 && (1..=MAX_STREAMS).contains(streams) =>
        {
            let postcopy = *postcopy && session.agreed.features.contains(Features::POSTCOPY);
            let (spec, streams, verify) = (VmSpec { kin, split, small_pages, ..(**spec).clone() }, *streams, *verify);
            Ok(Some(Proposal { request, spec, streams, verify, postcopy, joining, tickets, clone }))
        }
        Request::Resume { id, streams } if (1..=MAX_STREAMS).contains(streams) => {
            session.resume(MigrationId(*id), *streams, &request).map(|()| None)
        }
        Request::Verdict { id } => {
            let reply = match session.host.verdict(MigrationId(*id), session.control.peer()) {
                Ok(verdict) => Reply::Verdict { committed: verdict == Verdict::Committed },
                Err(problem) => Reply::Failed(problem),
            };
            session.control.answer(&request, &reply).map(|()| None)
        }
        _ => Err(MigrateError::Request("a session begins with a proposal")),
    }
}

impl Session<'_> {
    /// Answers what was said about the machine to be proposed. Returns what is said next.
    fn noted(&mut self, about: &Request, needs: Features, unknown: &'static str) -> Result<Request, MigrateError> {
        if !self.agreed.features.contains(needs) {
            return Err(MigrateError::Request(unknown));
        }
        self.control.answer(about, &Reply::Noted)?;
        self.control.next_request()
    }

    /// The pool of a gang that comes here.
    fn join(&self, gang: &GangSpec) -> Result<Arc<Pool>, Problem> {
        let known = self.agreed.features.contains(Features::SHARING)
            && (1..=MAX_MEMBERS as u16).contains(&gang.members)
            && gang.shared.len() <= gang.members.into();
        if !known {
            return Err(MigrateError::Request("a gang that this daemon cannot know").problem());
        }
        self.host.pool(gang, self.control.peer())
    }

    /// The names of pages that this host offers to a gang. Without them the gang sends the pages.
    fn offered(&self, joining: &Joining, key: &Key, first: u32) -> Vec<Name> {
        let names = self.host.offer(&joining.group, &joining.shown, &joining.pool).and_then(|()| {
            let offers = joining.pool.offers();
            offers.map_or(Ok(Vec::new()), |offers| offers.names(key, first.into(), MAX_OFFERS))
        });
        names.unwrap_or_else(|error| {
            tracing::warn!(%error, group = joining.group, "pages that are here cannot be offered");
            Vec::new()
        })
    }
}

/// A session's connections other than the control connection.
pub(super) struct Connections {
    /// The connections that carry pages, in order.
    pub(super) pages: Vec<Connection>,
    /// The connection of the devices' state, where the guest has not come yet.
    pub(super) devices: Option<Connection>,
    /// The connections on which pages are requested and on which those come, where the guest may start before all its
    /// pages are here.
    pub(super) faults: Option<(Connection, Connection)>,
}

impl Connections {
    /// Waits for the connections of a session.
    ///
    /// # Errors
    /// They do not come, the source has gone, or another connection comes.
    pub(super) fn wait(session: &mut Session, streams: u16, devices: bool, faults: bool) -> Result<Self, MigrateError> {
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
            match session.calls.recv_timeout(CONNECT_LOOK) {
                Ok((role, stream)) => match wanted.iter().position(|wanted| *wanted == role) {
                    Some(index) if came[index].is_none() => came[index] = Some(stream),
                    _ => return Err(MigrateError::Request("a connection that this session does not have")),
                },
                // A source that is gone does not call again; until this session ends, its next attempt finds the
                // machine's name taken.
                Err(_) if Instant::now() > deadline || !session.control.alive() => return Err(late()),
                Err(_) => {}
            }
        }
        let mut came = came.into_iter().flatten();
        let pages = came.by_ref().take(usize::from(streams)).collect();
        let devices = if devices { came.next() } else { None };
        Ok(Self { pages, devices, faults: came.next().zip(came.next()) })
    }

    /// Handles that end all of them, and the session's control connection, from other threads.
    ///
    /// # Errors
    /// No descriptor left.
    pub(super) fn hang_up(&self, session: &Session) -> Result<Vec<HangUp>, MigrateError> {
        let faults = self.faults.iter().flat_map(|(requests, urgent)| [requests, urgent]);
        let all = self.pages.iter().chain(&self.devices).chain(faults).map(Connection::hang_up);
        let all = all.chain(std::iter::once_with(|| session.control.hang_up()));
        all.collect::<Result<_, _>>().map_err(MigrateError::host("setting up the pages' way into RAM"))
    }
}
