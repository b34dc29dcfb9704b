//! The client of the library inside QEMU.
//!
//! QEMU may be in its guest's hands, and the library with it: every reply is parsed as hostile and has a time limit. A
//! wrong address of a RAM block leads to QEMU's own page tables and to nobody else's memory: that guest alone is harmed
//! by it.

/// Why a request failed.
mod error;

/// One request, one reply.
mod exchange;

/// A RAM block as the library sees it.
mod block;

/// Memory that the library shares.
mod shared;

/// The log of discards.
mod discards;

/// The table of transfers.
mod transfers;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use sterna_agent_protocol::MAX_BLOCKS;
use sterna_agent_protocol::message::{
    self, AdviseRequest, HelloReply, LookAheadRequest, MAX_ITEMS, MakePrivateRequest, MapRequest, OpenReply,
    OpenRequest, Operation, PutRequest, Range, Run, Status,
};
use zerocopy::{FromBytes, IntoBytes};

pub use block::{AgentBlock, Backing};
pub use discards::{Discard, DiscardLog, Discards};
pub use error::AgentError;
pub use exchange::Peer;
pub use sterna_agent_protocol::message::{Advice, Sharing};
pub use transfers::{TransferTable, UnderWay};

use exchange::{Exchange, Reply};

/// What the library says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentInfo {
    /// QEMU's process as it knows itself. [`Agent::peer`] is what the kernel says.
    pub pid: u32,
    /// RAM blocks mapped now.
    pub blocks: u32,
    /// RAM blocks it had no room to note, ever. Not 0: [`Agent::blocks`] is incomplete and the guest cannot be moved.
    pub blocks_lost: u64,
    /// It keeps a userfaultfd.
    pub userfaultfd: bool,
}

/// A userfaultfd of QEMU's memory.
#[derive(Debug)]
pub struct OpenedUserfaultfd {
    /// Itself: `UFFDIO_API` is done, reads do not wait.
    pub descriptor: OwnedFd,
    /// The features the kernel has (`UFFD_FEATURE_*`).
    pub features: u64,
}

/// Guest RAM, by QEMU's addresses: whole pages inside one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

/// Guest RAM and the part of a file to map there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRun {
    /// Where.
    pub at: AddressRange,
    /// Where in the file it begins, bytes.
    pub offset: u64,
}

/// A connection to the library inside one QEMU. After any error but [`AgentError::Refused`] it is of no more use:
/// connect again.
#[derive(Debug)]
pub struct Agent {
    exchange: Exchange,
}

impl Agent {
    /// Connects to the library that listens at `path`. Each request may take `timeout`.
    ///
    /// # Errors
    /// [`AgentError::NotThere`], [`AgentError::Silent`].
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, AgentError> {
        Ok(Self { exchange: Exchange::connect(path, timeout)? })
    }

    /// The process behind the socket, by the kernel's word.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.exchange.peer()
    }

    /// Asks the library about itself; fails where it is of another version.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn hello(&mut self) -> Result<AgentInfo, AgentError> {
        let reply = self.exchange.call(Operation::Hello, &[], None)?;
        let hello = HelloReply::read_from_bytes(&reply.body).map_err(|_| self.malformed("its introduction"))?;
        Ok(AgentInfo {
            pid: hello.pid.get(),
            blocks: hello.blocks.get(),
            blocks_lost: hello.blocks_lost.get(),
            userfaultfd: hello.userfaultfd.get() != 0,
        })
    }

    /// Where guest RAM is mapped now. A file may stand there in pieces or more than once.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn blocks(&mut self) -> Result<Vec<AgentBlock>, AgentError> {
        let reply = self.exchange.call(Operation::Blocks, &[], None)?;
        let blocks = <[message::Block]>::ref_from_bytes(&reply.body)
            .ok()
            .filter(|blocks| blocks.len() <= MAX_BLOCKS)
            .ok_or_else(|| self.malformed("its list of RAM blocks"))?;
        blocks.iter().map(|block| AgentBlock::parse(block).ok_or_else(|| self.malformed("a RAM block"))).collect()
    }

    /// Makes a userfaultfd with these features (`UFFD_FEATURE_*`); the library keeps a duplicate until told otherwise,
    /// so that faulting threads wait if this process dies. `device` is `/dev/userfaultfd`, opened; without it QEMU
    /// needs privilege.
    ///
    /// # Errors
    /// [`AgentError::Refused`] with [`Status::AlreadyOpen`] where one is kept: take that, or close it.
    pub fn open_userfaultfd(
        &mut self,
        device: Option<BorrowedFd<'_>>,
        features: u64,
    ) -> Result<OpenedUserfaultfd, AgentError> {
        let request = OpenRequest { features: features.into() };
        let reply = self.exchange.call(Operation::OpenUserfaultfd, &[request.as_bytes()], device)?;
        let opened =
            OpenReply::read_from_bytes(&reply.body).map_err(|_| self.malformed("its userfaultfd's features"))?;
        Ok(OpenedUserfaultfd { descriptor: self.userfaultfd_in(reply)?, features: opened.features.get() })
    }

    /// The userfaultfd that the library keeps, once more: for a daemon that was started again. `None` where it keeps
    /// none.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn take_userfaultfd(&mut self) -> Result<Option<OwnedFd>, AgentError> {
        match self.exchange.call(Operation::TakeUserfaultfd, &[], None) {
            Ok(reply) => self.userfaultfd_in(reply).map(Some),
            Err(AgentError::Refused { status: Status::NotOpen, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Lets the library drop its duplicate. Once no other is open the kernel forgets the registrations, and pages still
    /// missing read as zero.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn close_userfaultfd(&mut self) -> Result<(), AgentError> {
        self.exchange.call(Operation::CloseUserfaultfd, &[], None).map(drop)
    }

    /// Lets the library drop its duplicate and remember that this process has one: until
    /// [`close_userfaultfd`](Self::close_userfaultfd) it replaces no mapping of guest RAM. A library of an earlier
    /// version, which never does that, is told to close it.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn lend_userfaultfd(&mut self) -> Result<(), AgentError> {
        match self.exchange.call(Operation::LendUserfaultfd, &[], None) {
            Err(AgentError::Refused { status: Status::Unknown, .. }) => self.close_userfaultfd(),
            answered => answered.map(drop),
        }
    }

    /// Advises the kernel about guest RAM, in QEMU's name.
    ///
    /// # Errors
    /// [`AgentError::Refused`] says which range failed; those before it are done.
    pub fn advise(&mut self, advice: Advice, ranges: &[AddressRange]) -> Result<(), AgentError> {
        self.batches(ranges, |exchange, batch| {
            let request = AdviseRequest { advice: (advice as u32).into(), count: (batch.len() as u32).into() };
            let items: Vec<Range> =
                batch.iter().map(|r| Range { address: r.address.into(), length: r.length.into() }).collect();
            exchange.call(Operation::Advise, &[request.as_bytes(), items.as_bytes()], None)
        })
    }

    /// Maps parts of a file over guest RAM, readable and writable. With [`Sharing::Private`] the file must be open for
    /// reading only. What was registered or advised there before is gone.
    ///
    /// # Errors
    /// [`AgentError::Refused`] says which run failed; those before it are done.
    pub fn map(&mut self, file: BorrowedFd<'_>, sharing: Sharing, runs: &[MapRun]) -> Result<(), AgentError> {
        self.map_runs(Some(file), sharing, runs)
    }

    /// As [`map`](Self::map) with [`Sharing::Private`], over memory that is registered with a userfaultfd. What was
    /// there is freed when nobody has asked for anything for a while, unless the library is of an earlier version: then
    /// at once. The guest must not run.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_over(&mut self, file: BorrowedFd<'_>, runs: &[MapRun]) -> Result<(), AgentError> {
        match self.map(file, Sharing::Over, runs) {
            Err(AgentError::Refused { status: Status::Malformed, .. }) => self.map(file, Sharing::Private, runs),
            mapped => mapped,
        }
    }

    /// Makes anonymous memory of private guest RAM: it reads as zeros, and whatever file stood behind it is gone.
    ///
    /// # Errors
    /// As [`map`](Self::map); [`Status::AlreadyOpen`] while a userfaultfd is open.
    pub fn map_own(&mut self, ranges: &[AddressRange]) -> Result<(), AgentError> {
        let runs: Vec<_> = ranges.iter().map(|at| MapRun { at: *at, offset: 0 }).collect();
        self.map_runs(None, Sharing::Own, &runs)
    }

    /// As [`map_own`](Self::map_own), also while a userfaultfd is open: the new memory is not registered with it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_missing(&mut self, ranges: &[AddressRange]) -> Result<(), AgentError> {
        let runs: Vec<_> = ranges.iter().map(|at| MapRun { at: *at, offset: 0 }).collect();
        self.map_runs(None, Sharing::Missing, &runs)
    }

    fn map_runs(&mut self, file: Option<BorrowedFd<'_>>, sharing: Sharing, runs: &[MapRun]) -> Result<(), AgentError> {
        self.batches(runs, |exchange, batch| {
            let request = MapRequest { sharing: (sharing as u32).into(), count: (batch.len() as u32).into() };
            let items: Vec<Run> = batch
                .iter()
                .map(|run| Run {
                    address: run.at.address.into(),
                    length: run.at.length.into(),
                    offset: run.offset.into(),
                })
                .collect();
            exchange.call(Operation::Map, &[request.as_bytes(), items.as_bytes()], file)
        })
    }

    /// The log of discards, from now on. Get it before arming tracking: a discard keeps a page's write protection, so
    /// tracking alone does not see it.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn discard_log(&mut self) -> Result<DiscardLog, AgentError> {
        let reply = self.exchange.call(Operation::DiscardLog, &[], None)?;
        let memory = reply.descriptor.ok_or_else(|| self.malformed("its discard log"))?;
        DiscardLog::open(memory).ok_or_else(|| self.malformed("its discard log"))
    }

    /// The table of reads into guest RAM that are under way.
    ///
    /// # Errors
    /// [`AgentError::Refused`]: its process could not make one, or its library is of an earlier version
    /// ([`Status::Unknown`]).
    pub fn transfers(&mut self) -> Result<TransferTable, AgentError> {
        let reply = self.exchange.call(Operation::Transfers, &[], None)?;
        let memory = reply.descriptor.ok_or_else(|| self.malformed("its table of transfers"))?;
        TransferTable::open(memory).ok_or_else(|| self.malformed("its table of transfers"))
    }

    /// Has the library take reads out of the table that have ended without a call of QEMU's.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn end_transfers(&mut self) -> Result<(), AgentError> {
        self.exchange.call(Operation::EndTransfers, &[], None).map(drop)
    }

    /// Puts a file in the place of one that QEMU has open, under its number.
    ///
    /// # Errors
    /// [`AgentError::Refused`]: QEMU has nothing open under this number, or its library is of an earlier version.
    pub fn put_descriptor(&mut self, number: u32, file: BorrowedFd<'_>) -> Result<(), AgentError> {
        let request = PutRequest { number: number.into() };
        self.exchange.call(Operation::PutDescriptor, &[request.as_bytes()], Some(file)).map(drop)
    }

    /// Has the library look where the file of a block has data, so that [`make_private`](Self::make_private) of that
    /// block need look only where there was none. The guest may run.
    ///
    /// # Errors
    /// [`AgentError::Refused`]: for example, the library is of an earlier version. The block can be made private all
    /// the same.
    pub fn look_ahead(&mut self, file: BorrowedFd<'_>, bridged: u64) -> Result<(), AgentError> {
        let request = LookAheadRequest { bridged: bridged.into() };
        self.exchange.call(Operation::LookAhead, &[request.as_bytes()], Some(file)).map(drop)
    }

    /// Makes private RAM of the whole shared block at these addresses. What `file`, the block's own file open for
    /// reading only, holds stays what the guest reads; what it writes is QEMU's own. Data that is nearer than `bridged`
    /// bytes is mapped in one. From then on the block is known by the device (`st_dev`) and inode `known_by`. The guest
    /// must not run.
    ///
    /// # Errors
    /// [`AgentError::Refused`]: nothing has changed. Somebody watches the RAM ([`Status::AlreadyOpen`]), it is in more
    /// pieces than QEMU may have mappings, or the library is of an earlier version.
    pub fn make_private(
        &mut self,
        file: BorrowedFd<'_>,
        at: AddressRange,
        bridged: u64,
        known_by: (u64, u64),
    ) -> Result<(), AgentError> {
        let request = MakePrivateRequest {
            address: at.address.into(),
            length: at.length.into(),
            bridged: bridged.into(),
            device: known_by.0.into(),
            inode: known_by.1.into(),
        };
        self.exchange.call(Operation::MakePrivate, &[request.as_bytes()], Some(file)).map(drop)
    }

    /// Says that the guest runs again: what [`make_private`](Self::make_private) and [`map_over`](Self::map_over) have
    /// moved out of the way is unmapped at once, and not after a while.
    ///
    /// # Errors
    /// [`AgentError::Refused`]: the library is of an earlier version, and does it after a while.
    pub fn finish(&mut self) -> Result<(), AgentError> {
        self.exchange.call(Operation::Finish, &[], None).map(drop)
    }

    /// Sends items as many at a time as a message holds; a failure names the item by its place among all.
    fn batches<T>(
        &mut self,
        items: &[T],
        mut send: impl FnMut(&mut Exchange, &[T]) -> Result<Reply, AgentError>,
    ) -> Result<(), AgentError> {
        for (index, batch) in items.chunks(MAX_ITEMS).enumerate() {
            send(&mut self.exchange, batch).map_err(|error| error.counted_from(index * MAX_ITEMS))?;
        }
        Ok(())
    }

    /// The reply's descriptor, if it is what it should be: reads and ioctls on another kind of file could wait for
    /// ever.
    fn userfaultfd_in(&self, reply: Reply) -> Result<OwnedFd, AgentError> {
        reply.descriptor.filter(exchange::is_userfaultfd).ok_or_else(|| self.malformed("its userfaultfd"))
    }

    fn malformed(&self, what: &'static str) -> AgentError {
        AgentError::Malformed { what }
    }
}
