//! What the engine needs of the daemon it runs in: machines started and ended, and a memory that outlives a crash.

use std::sync::Arc;

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::spec::{GangSpec, Ticket, VmSpec};

use crate::destination::pool::Pool;
pub use crate::id::{DaemonId, MigrationId};
use crate::memory::{BlockFile, Memory};
use crate::paging::{Pager, PagingMeans};
use crate::split::Split;
use crate::split::onward::Handed;
use crate::store::Store;
use crate::transport::credentials::Credentials;
use crate::vmm;

/// A machine that comes while the one that it was cloned from runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clone {
    /// Its network cards are connected, because its user said to what. Else they have no link.
    pub connected: bool,
}

/// A machine prepared to receive.
pub struct Incoming {
    /// Its VMM, which is started and waits for device state.
    pub vmm: Box<dyn vmm::Destination>,
    /// Its RAM: the same ids and sizes as proposed, and nothing but holes.
    pub blocks: Vec<BlockFile>,
    /// The VMM's version.
    pub qemu_version: String,
    /// What post-copy needs here, or why post-copy is impossible; `None` where it was not asked for. A machine that is
    /// split needs it, too.
    pub paging: Option<Result<PagingMeans, Problem>>,
    /// The memory hosts of a machine that is split.
    pub split: Option<Handed>,
}

/// What the destination's daemon knows of a migration: the answer to a source that lost its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Verdict {
    /// The source gave the guest away and it runs (or may run) here: it must never run at the source again.
    Committed,
    /// It never ran here and never will: the source may let it run.
    Aborted,
}

/// The daemon at the destination.
pub trait DestinationHost: Send + Sync {
    /// The daemon's identity.
    fn identity(&self) -> DaemonId;

    /// What calls are encrypted with. With `None` only plain calls are accepted, with credentials only encrypted ones.
    fn credentials(&self) -> Option<Arc<Credentials>> {
        None
    }

    /// Whether the threads of a pause may go before all others of this host.
    fn may_haste(&self) -> bool {
        true
    }

    /// What this host lends to guests of others.
    fn store(&self) -> Option<Arc<Store>> {
        None
    }

    /// The pool of a gang that comes here from the daemon `from`: the same for all its members.
    ///
    /// # Errors
    /// A [`Problem`]: this host keeps no pools, cannot make one, or has no room for the gang.
    fn pool(&self, gang: &GangSpec, from: Option<&str>) -> Result<Arc<Pool>, Problem> {
        let _ = (gang, from);
        Err(Problem::new(Code::NoSharing, Blame::Ours, "this host keeps no pool of shared pages"))
    }

    /// Lets a gang of this trust group refer to what machines of the group have here already, where this host does
    /// that, and to what was kept of those that these tickets were given ([`Pool::offer`]). A machine that is in no
    /// group comes as a gang of one, with an empty group. It is called again for every question; what was offered
    /// stays.
    ///
    /// # Errors
    /// They cannot be looked at: nothing is offered.
    fn offer(&self, group: &str, shown: &[u128], pool: &Arc<Pool>) -> std::io::Result<()> {
        let _ = (group, shown, pool);
        Ok(())
    }

    /// Whether anything was kept of machines that were given tickets with one of these numbers when they left.
    fn keeps(&self, shown: &[u128]) -> bool {
        let _ = shown;
        false
    }

    /// Notes the tickets that a machine which is on its way here takes along.
    fn takes_along(&self, id: MigrationId, tickets: &[Ticket]) {
        let _ = (id, tickets);
    }

    /// Checks whether the machine can run here, and starts its VMM so that it waits for device state. `from` is the
    /// daemon that sends it, by its certificate. `pool` is that of the gang that it comes with: there is room for all
    /// of them. With `paging` a userfaultfd puts its pages in place, and the guest may start before all of them have
    /// come: [`Incoming::paging`]. Where it is a `clone`, the one that it was cloned from runs on.
    ///
    /// # Errors
    /// A [`Problem`] that says what this host lacks; nothing is left behind.
    fn prepare(
        &self,
        id: MigrationId,
        spec: &VmSpec,
        from: Option<&str>,
        pool: Option<&Arc<Pool>>,
        paging: bool,
        clone: Option<Clone>,
    ) -> Result<Incoming, Problem>;

    /// How much more memory this host can give before it runs out, bytes.
    fn room_bytes(&self) -> u64;

    /// Records that the guest belongs here now: the point of no return. It is called before the guest runs, and the
    /// record must survive the daemon's sudden death. After `Ok` the verdict is [`Verdict::Committed`] for ever. With
    /// `postcopy` pages are missing, and they must come also after this daemon's sudden death: the agent's userfaultfd
    /// must stay open until [`paged`](Self::paged).
    ///
    /// # Errors
    /// A [`Problem`]; then the guest must not run here and the migration is aborted.
    fn commit(&self, id: MigrationId, postcopy: bool) -> Result<(), Problem>;

    /// The guest belongs here, and a part of its pages is at its memory hosts. It is called before
    /// [`started`](Self::started), once the guest runs.
    fn took_over(&self, id: MigrationId, split: Arc<Split>) {
        let _ = (id, split);
    }

    /// Gives the VMM back: the guest belongs here, and the daemon looks after it as after any other. Where pages are
    /// missing, `pager` brings them, and where pages are still to be compared it notes them: the host keeps it until
    /// [`paged`](Self::paged), and lets nobody else register the RAM. Where the guest should run and
    /// does not, `failed` says why.
    fn started(&self, id: MigrationId, incoming: Incoming, pager: Option<Arc<Pager>>, failed: Option<&Problem>);

    /// The pager of a guest that runs here while pages are missing, for the daemon that asks. The migration may be
    /// older than this daemon's process.
    ///
    /// # Errors
    /// A [`Problem`]: all pages are here (`paged`), the guest has ended (`guest-gone`: only where that is on record),
    /// the migration is another daemon's, or nothing is known of it.
    fn pager(&self, id: MigrationId, from: Option<&str>) -> Result<Arc<Pager>, Problem>;

    /// Notes that every page is here: the source is not needed any more.
    fn paged(&self, id: MigrationId);

    /// Gives the machine up, which never runs here: ends the VMM, removes its files, and remembers
    /// [`Verdict::Aborted`].
    fn abort(&self, id: MigrationId, incoming: Option<Incoming>);

    /// What became of a migration, for the daemon that asks. The answer binds, and where it is [`Verdict::Aborted`] the
    /// VMM has ended.
    ///
    /// # Errors
    /// A [`Problem`] where the migration is another daemon's or is unknown: such a question settles nothing and leaves
    /// no record.
    fn verdict(&self, id: MigrationId, from: Option<&str>) -> Result<Verdict, Problem>;
}

/// The daemon at the source.
pub trait SourceHost: Send + Sync {
    /// What connections to peers are encrypted with; without it they are plain.
    fn credentials(&self) -> Option<Arc<Credentials>> {
        None
    }

    /// Whether the threads of a pause may go before all others of this host.
    fn may_haste(&self) -> bool {
        true
    }

    /// Notes that the destination has accepted the machine: the migration does not wait for its turn any more.
    fn accepted(&self);

    /// Records that the guest may run at `peer` from now on, whatever happens here. The record must survive the
    /// daemon's sudden death. It is written just before the commit message is sent: until the peer's [`Verdict`] is
    /// known the guest must not run here. With `postcopy` the guest needs pages of this host's RAM until the migration
    /// has ended: a restarted daemon must serve them too. `daemon` is the one that accepted the guest, where it could
    /// say who it is: from now on only its word counts.
    ///
    /// # Errors
    /// A [`Problem`]; then nothing was sent, and the rollback lets the guest run here.
    fn handing_over(
        &self,
        id: MigrationId,
        peer: &str,
        daemon: Option<DaemonId>,
        postcopy: bool,
    ) -> Result<(), Problem>;

    /// The destination's present address, where a user has said that it differs from the one at the beginning.
    fn peer_now(&self, _id: MigrationId) -> Option<String> {
        None
    }

    /// The guest is the destination's, and no page of it is needed here any more. Its VMM ends afterwards, and only
    /// then is its RAM gone: what is to be kept of it is kept now.
    fn gone(&self, _ram: &dyn Memory) {}

    /// Notes that the destination, where the guest runs, has not answered for some seconds: until
    /// [`destination_back`](Self::destination_back) the migration only waits, perhaps for long.
    fn destination_lost(&self) {}

    /// Notes that the destination answers again: pages go on at once.
    fn destination_back(&self) {}
}
