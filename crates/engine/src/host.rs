//! What the engine needs of the daemon it runs in: machines started and ended, and a memory that outlives a crash.

use std::sync::Arc;

use sterna_api::Problem;
use sterna_protocol::spec::VmSpec;

pub use crate::id::{DaemonId, MigrationId};
use crate::memory::BlockFile;
use crate::paging::{Pager, PagingMeans};
use crate::transport::credentials::Credentials;
use crate::vmm;

/// A machine prepared to receive.
pub struct Incoming {
    /// Its VMM, started, waiting for device state.
    pub vmm: Box<dyn vmm::Destination>,
    /// Its RAM: the same ids and sizes as proposed, holes all over.
    pub blocks: Vec<BlockFile>,
    /// The VMM's version.
    pub qemu_version: String,
    /// What it takes to let the guest run before all its pages are there, or why that cannot be; `None` where it was
    /// not asked for.
    pub paging: Option<Result<PagingMeans, Problem>>,
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
    /// Who it is.
    fn identity(&self) -> DaemonId;

    /// What calls are encrypted with; without it they are taken plain, and with it never.
    fn credentials(&self) -> Option<Arc<Credentials>> {
        None
    }

    /// Checks whether the machine can run here, and starts its VMM so that it waits for device state. `from` is the
    /// daemon that sends it, by its certificate. With `postcopy` the guest may come to run before all its pages are
    /// here: [`Incoming::paging`].
    ///
    /// # Errors
    /// A [`Problem`] that says what is missing here; nothing is left behind.
    fn prepare(&self, id: MigrationId, spec: &VmSpec, from: Option<&str>, postcopy: bool) -> Result<Incoming, Problem>;

    /// How much more memory this host can give before it runs out, bytes.
    fn room_bytes(&self) -> u64;

    /// Records that the guest belongs here now. Called before it runs, and must survive the daemon's sudden death. The
    /// point of no return: after `Ok` the verdict is [`Verdict::Committed`] for ever. With `postcopy` pages are still
    /// to come, and must come also after this daemon's sudden death: until [`paged`](Self::paged) the agent's
    /// userfaultfd must stay open.
    ///
    /// # Errors
    /// A [`Problem`]; then the guest must not run here and the migration is aborted.
    fn commit(&self, id: MigrationId, postcopy: bool) -> Result<(), Problem>;

    /// The guest belongs here: from now on the daemon looks after it as after any other. Gives the VMM back. Where
    /// pages are still to come, `pager` brings them: the host keeps it until [`paged`](Self::paged). Where it was to
    /// run and does not, `failed` says why.
    fn started(&self, id: MigrationId, incoming: Incoming, pager: Option<Arc<Pager>>, failed: Option<&Problem>);

    /// What brings the pages of a guest that runs here before all of them are here, for the daemon that asks; of a
    /// migration that was begun before this daemon was started, too.
    ///
    /// # Errors
    /// A [`Problem`]: all pages are here (`paged`), the guest has ended (`guest-gone`: only where that is on record),
    /// the migration is another daemon's, or nothing is known of it.
    fn pager(&self, id: MigrationId, from: Option<&str>) -> Result<Arc<Pager>, Problem>;

    /// Every page is here: the source is needed no more.
    fn paged(&self, id: MigrationId);

    /// It never runs here: ends the VMM, removes its files, and remembers [`Verdict::Aborted`].
    fn abort(&self, id: MigrationId, incoming: Option<Incoming>);

    /// What became of a migration, for the daemon that asks. The answer binds, and where it is [`Verdict::Aborted`] the
    /// VMM has ended.
    ///
    /// # Errors
    /// A [`Problem`] where the migration is another daemon's, or was never heard of: nothing is settled by such a
    /// question, and nothing kept.
    fn verdict(&self, id: MigrationId, from: Option<&str>) -> Result<Verdict, Problem>;
}

/// The daemon at the source.
pub trait SourceHost: Send + Sync {
    /// What connections to peers are encrypted with; without it they are plain.
    fn credentials(&self) -> Option<Arc<Credentials>> {
        None
    }

    /// The destination has accepted the machine: the migration waits for its turn no more.
    fn accepted(&self);

    /// Records that the guest may run at `peer` from now on, whatever happens here. Must survive the daemon's sudden
    /// death. Called just before the commit message is sent: until the peer's [`Verdict`] is known the guest must not
    /// run here. With `postcopy` this host's RAM holds pages that the guest there still needs, until the migration has
    /// ended: also a daemon started anew must serve them. `daemon` is who accepted the guest, where it could say so:
    /// from now on only its word counts.
    ///
    /// # Errors
    /// A [`Problem`]; then nothing was sent and the guest is given back.
    fn handing_over(
        &self,
        id: MigrationId,
        peer: &str,
        daemon: Option<DaemonId>,
        postcopy: bool,
    ) -> Result<(), Problem>;

    /// Where the destination is to be found now, if its user said that it is elsewhere than where the migration began.
    fn peer_now(&self, _id: MigrationId) -> Option<String> {
        None
    }

    /// The destination has not answered for some seconds, and its guest runs there: until
    /// [`destination_back`](Self::destination_back) the migration only waits, perhaps for long.
    fn destination_lost(&self) {}

    /// It answers again: pages go on at once.
    fn destination_back(&self) {}
}
