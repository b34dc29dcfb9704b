//! What only the VMM's own process can do, as the engine asks for it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use sterna_sys::userfaultfd::{self, Features, Userfaultfd};

use crate::agent::{
    AddressRange, Advice, Agent, AgentError, DiscardLog, Discards, MapRun, Sharing, TransferTable, UnderWay,
};
use crate::error::MigrateError;

/// The VMM's process, asked for what only it can do: at the source for tracking, at the destination for faults.
pub trait Inside: Send {
    /// A userfaultfd for the VMM's memory with these features, and a log of discards that begins now. The VMM's process
    /// keeps a duplicate of the descriptor: faulting threads wait, whatever becomes of this daemon. Only
    /// [`GuestFaults`](crate::faults::GuestFaults) opens one.
    ///
    /// # Errors
    /// Then there is nothing to close.
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError>;

    /// A userfaultfd for the VMM's memory with these features. Nobody keeps a duplicate: if this daemon dies, the
    /// kernel closes it, and all threads that it held up go on.
    ///
    /// # Errors
    /// The VMM does not answer, or its process cannot be told to close its own. Then there is nothing to close.
    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError>;

    /// From now on nobody keeps a duplicate of the userfaultfd that [`open`](Self::open) made: if this daemon dies,
    /// all threads that it held up go on.
    ///
    /// # Errors
    /// The VMM does not answer, or its process cannot be told to close its own.
    fn lend(&mut self) -> Result<(), MigrateError>;

    /// A log of discards that begins now.
    ///
    /// # Errors
    /// The VMM's process does not hand it out.
    fn log_discards(&mut self) -> Result<(), MigrateError>;

    /// The duplicate that the VMM's process keeps for a restarted daemon, and a log of discards that begins now; `None`
    /// where it keeps none.
    ///
    /// # Errors
    /// The VMM does not answer.
    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError>;

    /// Gives the kernel advice about these addresses of guest RAM, in the VMM's name. [`Memory`](crate::memory::Memory)
    /// chooses the advice, because its effect depends on the kind of memory.
    ///
    /// # Errors
    /// The VMM does not answer, or they are no RAM of its guest.
    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError>;

    /// Maps parts of a file over private guest RAM, copy-on-write. The file is open for reading only.
    ///
    /// # Errors
    /// As [`advise`](Self::advise).
    fn map(&mut self, _file: BorrowedFd<'_>, _runs: &[MapRun]) -> Result<(), MigrateError> {
        Err(MigrateError::Bug("this process has no RAM that a file can stand behind"))
    }

    /// Makes anonymous memory of these addresses of private guest RAM: they read as zeros, in one step for whoever
    /// reads there, and no file stands behind them any more. Only while nobody has the RAM registered with a
    /// userfaultfd.
    ///
    /// # Errors
    /// As [`advise`](Self::advise); somebody has it registered.
    fn map_own(&mut self, _ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        Err(MigrateError::Bug("this process has no RAM that a file stands behind"))
    }

    /// Makes missing pages of these addresses of private guest RAM, also while somebody has it registered: what is
    /// there and what stands behind it is gone, and so is the registration, which is the caller's to renew. The guest
    /// does not run.
    ///
    /// # Errors
    /// As [`advise`](Self::advise).
    fn map_missing(&mut self, _ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        Err(MigrateError::Bug("this process has no RAM that a file stands behind"))
    }

    /// The number of the VMM's process.
    fn pid(&self) -> u32;

    /// The guest RAM that the VMM has discarded since the last call.
    fn discards(&mut self) -> Discards;

    /// What is being read into guest RAM past the page tables. It has each read into pages that were dropped from the
    /// page tables before this call, if it has begun before.
    ///
    /// # Errors
    /// The VMM does not answer.
    fn under_way(&mut self) -> Result<UnderWay, MigrateError> {
        Ok(UnderWay::Untold)
    }

    /// Closes the userfaultfd and the log. Whoever has made a userfaultfd calls this when it is done with it: until
    /// then the VMM's process replaces no mapping of its RAM.
    fn close(&mut self);
}

/// QEMU's process, asked through the agent inside it.
pub struct InsideQemu {
    agent: Agent,
    log: Option<DiscardLog>,
    transfers: Transfers,
}

/// The table of transfers, as far as it was asked for.
enum Transfers {
    NotAsked,
    There(TransferTable),
    None,
}

impl InsideQemu {
    /// Asks through this agent.
    #[must_use]
    pub fn new(agent: Agent) -> Self {
        Self { agent, log: None, transfers: Transfers::NotAsked }
    }
}

impl InsideQemu {
    fn make(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        // QEMU may be unprivileged: it makes its userfaultfd from the device that this daemon may open.
        let device = userfaultfd::open_device().ok();
        let device = device.as_ref().map(AsFd::as_fd);
        let opened = self.agent.open_userfaultfd(device, features.bits()).map_err(failed("making a userfaultfd"))?;
        Ok(Userfaultfd::from(opened.descriptor))
    }
}

/// Addresses as the agent is asked about them.
fn as_asked(ranges: &[Range<u64>]) -> Vec<AddressRange> {
    ranges.iter().map(|range| AddressRange { address: range.start, length: range.end - range.start }).collect()
}

/// Turns an agent's error during an operation into this module's.
fn failed(doing: &'static str) -> impl FnOnce(AgentError) -> MigrateError {
    move |source| MigrateError::Agent { doing, source: Box::new(source) }
}

impl Inside for InsideQemu {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        let userfaultfd = self.make(features)?;
        self.log_discards()?;
        Ok(userfaultfd)
    }

    fn open_alone(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        // The agent keeps a duplicate of what it makes. If this daemon dies here, the duplicate stays until the next
        // daemon closes it. Nothing is registered yet, so nobody can wait for it.
        let userfaultfd = self.make(features)?;
        self.lend()?;
        Ok(userfaultfd)
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        self.agent.lend_userfaultfd().map_err(failed("forgetting its userfaultfd"))
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        self.log = Some(self.agent.discard_log().map_err(failed("opening the log of discards"))?);
        Ok(())
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        let kept = self.agent.take_userfaultfd();
        let kept = kept.map_err(failed("taking its userfaultfd"))?;
        // Without the log nothing is known of discards; correctness does not need it.
        self.log = self.agent.discard_log().ok();
        Ok(kept.map(Userfaultfd::from))
    }

    fn advise(&mut self, advice: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.agent.advise(advice, &as_asked(ranges)).map_err(failed("advising the kernel about guest RAM"))
    }

    fn map_own(&mut self, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.agent.map_own(&as_asked(ranges)).map_err(failed("making zeros of guest RAM"))
    }

    fn map_missing(&mut self, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.agent.map_missing(&as_asked(ranges)).map_err(failed("making guest RAM missing"))
    }

    fn map(&mut self, file: BorrowedFd<'_>, runs: &[MapRun]) -> Result<(), MigrateError> {
        self.agent.map(file, Sharing::Private, runs).map_err(failed("mapping shared pages"))
    }

    fn pid(&self) -> u32 {
        self.agent.peer().pid.unsigned_abs()
    }

    fn discards(&mut self) -> Discards {
        self.log.as_mut().map_or(Discards::Everything, DiscardLog::drain)
    }

    fn under_way(&mut self) -> Result<UnderWay, MigrateError> {
        if let Transfers::NotAsked = self.transfers {
            self.transfers = match self.agent.transfers() {
                Ok(table) => Transfers::There(table),
                Err(AgentError::Refused { .. }) => Transfers::None,
                Err(error) => return Err(failed(TELLING)(error)),
            };
        }
        match &self.transfers {
            Transfers::There(table) => under_way(&mut self.agent, table),
            _ => Ok(UnderWay::Untold),
        }
    }

    fn close(&mut self) {
        self.log = None;
        if let Err(error) = self.agent.close_userfaultfd() {
            tracing::debug!(%error, "the agent could not close its userfaultfd");
        }
    }
}

const TELLING: &str = "telling what is being read into guest RAM";

/// What is being read into guest RAM past the page tables now, by this table of the agent's.
///
/// # Errors
/// The agent does not answer, or the table cannot be read.
pub fn under_way(agent: &mut Agent, table: &TransferTable) -> Result<UnderWay, MigrateError> {
    let unread = MigrateError::host("reading what is being read into guest RAM");
    match table.has_queued() {
        // Some may have ended since.
        Ok(true) => agent.end_transfers().map_err(failed(TELLING))?,
        Ok(false) => {}
        Err(error) => return Err(unread(error)),
    }
    table.look().map_err(unread)
}
