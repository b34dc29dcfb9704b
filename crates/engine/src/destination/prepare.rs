//! Phase *prepare*: the machine is checked, its VMM is started, its RAM is mapped.

use std::sync::Arc;

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::hello::Features;
use sterna_protocol::layout::Layout;
use sterna_protocol::message::{Reply, Request};
use sterna_sys::map::Access;

use super::awaited::Membership;
use super::connect::{Connections, Joining, Proposal};
use super::devices::HeldDevices;
use super::guard::Guard;
use super::pool::PoolError;
use super::session::Session;
use crate::error::MigrateError;
use crate::host::{DestinationHost, Incoming};
use crate::memory::{Memory, kind};
use crate::paging::Pager;

/// A machine that waits for its pages.
pub(super) struct Prepared<'a> {
    /// The machine, which is given back where the migration ends early.
    pub(super) guard: Guard<'a>,
    /// Its RAM.
    pub(super) ram: Arc<dyn Memory>,
    /// The connections that bring its pages.
    pub(super) connections: Connections,
    /// The devices' state on its way into the VMM.
    pub(super) held: HeldDevices,
    /// Its membership of a gang.
    pub(super) membership: Option<Membership>,
    /// Whether both sides are compared once the guest runs, also where no page follows it.
    pub(super) verify_after: bool,
}

/// Prepares the machine, tells the source, and waits for the session's other connections; `None` where the machine is
/// refused.
///
/// # Errors
/// The link broke, or what the machine needs is not there. The source has been told.
pub(super) fn prepare<'a>(
    session: &mut Session,
    host: &'a dyn DestinationHost,
    proposal: &Proposal,
) -> Result<Option<Prepared<'a>>, MigrateError> {
    let Proposal { request, streams, verify, postcopy, joining, tickets, .. } = proposal;
    if let Some(problem) = joining.as_ref().and_then(|joining| outsider(proposal, joining)) {
        return refuse(session, request, problem);
    }
    let split = proposal.spec.split.is_some();
    let verify_after = *verify && session.agreed.features.contains(Features::VERIFY_AFTER);
    // By its userfaultfd a page of private memory is put in place for two fifths of the processor time.
    let paging = *postcopy || verify_after || split || proposal.spec.private;
    let (incoming, ram) = match start(session, proposal, paging) {
        Ok(started) => started,
        Err(problem) => return refuse(session, request, problem),
    };
    let mut guard = Guard::new(host, session.id, incoming);
    host.takes_along(session.id, tickets);
    // Of a split guest there is no other comparison than the one afterwards.
    let noted = verify_after || *verify && !split;
    let no_pager = guard.open_pager(&ram, noted.then(|| session.digester()));
    if let Some(problem) = no_pager.as_ref().filter(|_| split) {
        guard.end();
        return refuse(session, request, problem.clone());
    }
    let membership = match joining.as_ref().map(|joining| enter(joining, &ram, guard.pager.as_ref())).transpose() {
        Ok(membership) => membership,
        Err(problem) => {
            guard.end();
            return refuse(session, request, problem);
        }
    };
    let accepted = Reply::Accepted {
        host: sterna_sys::host::name(),
        qemu: guard.incoming().qemu_version.clone(),
        sterna: env!("CARGO_PKG_VERSION").into(),
        layout: ram.layout().digest(),
        no_postcopy: no_pager,
    };
    session.control.answer(request, &accepted)?;
    match set_up(session, &mut guard, *streams, *postcopy) {
        Ok((connections, held)) => {
            let verify_after = verify_after && guard.pager.is_some();
            Ok(Some(Prepared { guard, ram, connections, held, membership, verify_after }))
        }
        Err(error) => {
            // The source has been told yes already: the answer to its next request tells it of this.
            guard.end();
            let request = session.control.next_request()?;
            session.control.answer(&request, &Reply::Failed(error.problem()))?;
            Err(error)
        }
    }
}

fn refuse<T>(session: &mut Session, request: &Request, problem: Problem) -> Result<Option<T>, MigrateError> {
    session.control.answer(request, &Reply::Failed(problem)).map(|()| None)
}

/// Why a machine cannot be a member of the gang that it names.
///
/// A machine in no trust group shares with its clones, which are a gang by themselves: one of no group.
fn outsider(Proposal { spec, clone, .. }: &Proposal, joining: &Joining) -> Option<Problem> {
    let group = spec.trust_group.as_deref().or(clone.map(|_| ""));
    let trusted = spec.private && group == Some(joining.group.as_str());
    (!trusted && !joining.returns)
        .then(|| MigrateError::Request("a machine of another trust group or memory mode than its gang").problem())
}

/// Makes the machine a member of its gang.
fn enter(joining: &Joining, ram: &Arc<dyn Memory>, pager: Option<&Arc<Pager>>) -> Result<Membership, Problem> {
    let Joining { pool, member, .. } = joining;
    pool.enter(*member, ram.layout()).map_err(|error| match error {
        PoolError::Peer(why) => MigrateError::Request(why).problem(),
        PoolError::File(source) => MigrateError::host("making room in the gang's pool")(source).problem(),
    })?;
    let membership = Membership::new(Arc::clone(pool), *member, Arc::clone(ram), pager.cloned());
    membership.map_err(|error| error.problem())
}

/// Checks the machine, starts its VMM, and maps its RAM.
fn start(session: &Session, proposal: &Proposal, paging: bool) -> Result<(Incoming, Arc<dyn Memory>), Problem> {
    let Proposal { spec, joining, clone, .. } = proposal;
    let pool = joining.as_ref().map(|joining| &joining.pool);
    Layout::new(&spec.blocks).map_err(|error| MigrateError::from(error).problem())?;
    let incoming = session.host.prepare(session.id, spec, session.control.peer(), pool, paging, *clone)?;
    let same = incoming.blocks.len() == spec.blocks.len()
        && incoming
            .blocks
            .iter()
            .zip(&spec.blocks)
            .all(|(ours, theirs)| ours.spec.id == theirs.id && ours.spec.bytes == theirs.bytes);
    let ram = if same {
        kind::open(&incoming.blocks, Access::ReadWrite).map_err(|error| MigrateError::from(error).problem())
    } else {
        let why = "the guest's RAM as it was made here is not what was proposed";
        Err(Problem::new(Code::RamLayout, Blame::Ours, why))
    };
    match ram {
        Ok(ram) => Ok((incoming, ram)),
        Err(problem) => {
            session.host.abort(session.id, Some(incoming));
            Err(problem)
        }
    }
}

/// Waits for the session's connections, and starts the thread that carries the devices' state into the VMM.
fn set_up(
    session: &mut Session,
    guard: &mut Guard,
    streams: u16,
    postcopy: bool,
) -> Result<(Connections, HeldDevices), MigrateError> {
    let mut connections = Connections::wait(session, streams, true, postcopy && guard.pager.is_some())?;
    let devices = connections.devices.take().ok_or(MigrateError::Bug("the devices' connection was not waited for"))?;
    let vmm_stream = guard.incoming().vmm.prepare()?;
    Ok((connections, HeldDevices::start(devices, vmm_stream)?))
}
