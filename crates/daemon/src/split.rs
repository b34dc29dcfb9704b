//! A part of a machine's memory leaves for memory hosts while its guest runs here, and comes back: `split` and `merge`.
//!
//! In this order, so that whoever dies leaves what the next daemon can go on with (`split/recover.rs`):
//!
//! ```text
//! split   record: memory hosts ─▶ they grant ─▶ map of missing pages ─▶ pages leave
//! merge   record: merging ─▶ all pages are here ─▶ what was lent is owed ─▶ record: not split ─▶ given back
//! ```
//!
//! What memory hosts have granted is given back in the background, also after the machine has ended
//! (`split/loans.rs`). A page that leaves while a device writes it past the page tables would lose what it writes: the
//! agent in QEMU tells what is being read into memory, and a guest is refused that has devices of which it does not.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::units::{milliseconds, show_size};
use sterna_api::{Blame, Code, Problem, SplitReport, SplitRequest, Status};
use sterna_engine::error::MigrateError;
use sterna_engine::monitor::Monitor;
use sterna_engine::paging::Pager;
use sterna_engine::split::loans::borrow;
use sterna_engine::split::room::Room;
use sterna_engine::split::{Account, Epochs, Lender, Split};
use sterna_engine::transport::credentials::Credentials;
use sterna_sys::PAGE_BYTES;
use sterna_sys::host::random_u128;

use self::hosts::{Exchange, alive, refused, too_many, until_reached, with};
use self::loans::Loans;
use crate::care::Care;
use crate::kept::Keeper;
use crate::machines::borrowed::{Borrowed, Place};
use crate::machines::claim::Claimed;
use crate::machines::hold::{Activity, Connection, Hold, Shown, cancel};
use crate::machines::record::VmRecord;
use crate::machines::split::{EpochFile, Remote, SplitRecord};
use crate::migration::paging::{pager, remove_map};
use crate::problems::host;
use crate::state::StateDir;

/// Machines that are split and move.
pub mod and_move;

/// Which machines can be split, and how.
mod checks;

/// The memory hosts of a machine that is split already: they are exchanged.
mod hosts;

/// What memory hosts have lent, and is to be given back.
pub mod loans;

/// Machines that an earlier daemon has left split.
pub mod recover;

/// Memory hosts in the place of those that are gone for good.
pub mod spares;

/// The others go on without it.
mod fewer;

/// How often it is looked how far pages have left.
const LOOK: Duration = Duration::from_millis(10);

/// A part of its memory is leaving, or comes back.
#[derive(Debug)]
struct Parting {
    what: &'static str,
    monitor: Arc<Monitor>,
}

impl Activity for Parting {
    fn describe(&self) -> &'static str {
        self.what
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        cancel(&self.monitor, name)
    }

    fn show(&self) -> Shown {
        Shown::Asked
    }

    fn connection(&self) -> Connection {
        Connection::Free
    }

    fn may_be_split(&self) -> bool {
        true
    }
}

/// The part of the daemon that splits machines and merges them.
#[derive(Debug)]
pub struct Splits {
    care: Care,
    state: Arc<StateDir>,
    keeper: Arc<Keeper>,
    credentials: Option<Arc<Credentials>>,
    /// Where other daemons reach this one.
    listen: Option<String>,
    loans: Arc<Loans>,
}

impl Splits {
    /// Begins, with the care of this host's machines.
    #[must_use]
    pub fn new(
        care: Care,
        state: Arc<StateDir>,
        keeper: Arc<Keeper>,
        (credentials, listen): (Option<Arc<Credentials>>, Option<String>),
        loans: Arc<Loans>,
    ) -> Self {
        Self { care, state, keeper, credentials, listen, loans }
    }

    /// Has a part of a machine's memory leave, or of one that is split already changes how much is here. Blocks until
    /// no more of it is here than may be; `monitor` can end it before: then all is as it was.
    ///
    /// # Errors
    /// A [`Problem`]: an unknown or busy machine, one that cannot be split and why, or memory hosts that do not lend
    /// what they are asked for. Once pages may have left, how it ended is in the report.
    pub fn split(&self, name: &str, request: &SplitRequest, monitor: &Arc<Monitor>) -> Result<SplitReport, Problem> {
        checks::check_request(request, self.listen.as_ref())?;
        let what = "a part of its memory is leaving for memory hosts";
        let claimed =
            Claimed::new(&self.care.machines, name, Hold::busy(Parting { what, monitor: Arc::clone(monitor) }))?;
        let former = claimed.record.split.clone();
        let before = claimed.record.allocated_bytes();
        let (record, remote) = match &former {
            Some(split) => self.change(&claimed.record, split, request)?,
            None => self.begin(&claimed.record, request)?,
        };
        let split = remote.split()?;
        let account = former.as_ref().map_or_else(Account::default, |_| split.account());
        let room = match &record.split {
            Some(split) if !request.goes_first() => split.room(),
            _ => Room::ALL,
        };
        let mut exchange = self.exchange(&record, split);
        let check = || monitor.check().and_then(|()| alive(&record));
        let done = split.keep_to(room).map_err(|error| error.problem());
        let done = done.and_then(|()| exchange.see_off(&check));
        let done = done.and_then(|()| leave(&record, split, room, monitor));
        let mut report = report(&record, monitor, (before, account), split);
        if let Err(problem) = done {
            let undone = match &former {
                // There is nothing to be put back.
                _ if alive(&record).is_err() => Ok(()),
                Some(former) => self.put_back(&exchange.record, split, former.room()),
                None => self.unite(&record, &remote, &|| alive(&record)),
            };
            (report.status, report.error) = ended_by(problem, undone);
        }
        report.ms = milliseconds(monitor.elapsed());
        tracing::info!(
            vm = name, status = ?report.status, here_bytes = request.here_bytes, away = report.away_pages,
            "a part of its memory was to leave"
        );
        Ok(report)
    }

    /// Brings all of a machine's memory here. Blocks until it is; `monitor` can end it before: then the machine stays
    /// split. A memory host that cannot be reached is waited for.
    ///
    /// # Errors
    /// A [`Problem`]: an unknown or busy machine, one that is not split, or too little room here.
    pub fn merge(&self, name: &str, monitor: &Arc<Monitor>) -> Result<SplitReport, Problem> {
        let what = "its memory is coming back from memory hosts";
        let claimed =
            Claimed::new(&self.care.machines, name, Hold::busy(Parting { what, monitor: Arc::clone(monitor) }))?;
        let record = &claimed.record;
        let Some(split_record) = &record.split else {
            let message = format!("all of the memory of '{name}' is here");
            return Err(Problem::new(Code::NotSplit, Blame::Request, message));
        };
        let remote = self.care.machines.reach(name)?;
        let split = remote.split()?;
        self.check_room(name, &remote)?;
        let (before, account) = (record.allocated_bytes(), split.account());
        let merging = with(record, SplitRecord { merging: true, ..split_record.clone() });
        self.store(&merging)?;
        let check = || monitor.check().and_then(|()| alive(record));
        let done = self.unite(&merging, &remote, &check);
        let mut report = report(record, monitor, (before, account), split);
        if let Err(problem) = done {
            let undone = match alive(record) {
                Err(_) => Ok(()),
                Ok(()) => self.put_back(&merging, split, split_record.room()),
            };
            (report.status, report.error) = ended_by(problem, undone);
        } else {
            report.here_bytes = record.memory_bytes;
        }
        tracing::info!(vm = name, status = ?report.status, "its memory was to come back");
        Ok(report)
    }

    /// Begins to split a machine: its memory hosts have granted what they were asked for, and pages may leave.
    fn begin(&self, record: &VmRecord, request: &SplitRequest) -> Result<(VmRecord, Arc<Remote>), Problem> {
        checks::check_machine(record)?;
        let layout = record.layout().map_err(|error| host("cannot tell how the machine's RAM is laid out", &error))?;
        let chunks = layout.chunks();
        let hosts = Place::of(&request.memory, request.redundancy.unwrap_or_default())?;
        checks::check_budget(record, request.here_bytes, &hosts)?;
        let (guest, key) = (random_u128(), random_u128());
        let mut borrowed = Borrowed { guest, key, chunks, ..Borrowed::default() };
        borrowed.welcome_all(&hosts).ok_or_else(too_many)?;
        borrowed.leaving.clear();
        let map = self.state.ram().join(format!("{}-away-{:016x}", record.name, random_u128() as u64));
        let (here_bytes, unused) = (request.here_bytes, request.unused.unwrap_or_default());
        let split = SplitRecord { borrowed, here_bytes, unused, map, merging: false };
        let begun = with(record, split.clone());
        self.store(&begun)?;
        match self.open(&begun) {
            Ok(remote) => Ok((begun, remote)),
            Err(NotOpened { problem, asked }) => {
                let hosts = split.borrowed.hosts.iter().flat_map(Place::loans).take(asked).collect();
                self.loans.owe_hosts(&begun, &self.care.machines.dir(&begun.name), hosts);
                let borrowed = Borrowed { hosts: Vec::new(), ..split.borrowed.clone() };
                self.forget(&with(record, SplitRecord { borrowed, ..split }));
                Err(problem)
            }
        }
    }

    fn open(&self, record: &VmRecord) -> Result<Arc<Remote>, NotOpened> {
        let Some(SplitRecord { borrowed, map, .. }) = &record.split else {
            return Err(Problem::new(Code::Internal, Blame::Ours, "a machine without memory hosts").into());
        };
        let epochs = EpochFile::of(&self.care.machines.dir(&record.name));
        let lenders = borrowed.lenders(self.credentials.as_ref());
        let epoch = epochs.raise().map_err(|error| host("cannot write the epoch of the guest's owner", &error))?;
        for (number, lender) in lenders.iter().flat_map(Lender::members).enumerate() {
            borrow(&lender, borrowed.claim(epoch), borrowed.chunks).map_err(|error| {
                let problem = error.problem();
                // Its answer may have been lost; but where nobody was reached, nothing was granted.
                let asked = number + usize::from(problem.code != Code::PeerUnreachable);
                NotOpened { problem, asked }
            })?;
        }
        let pager = pager(record, map, |ram, means| Pager::open(ram, means, None))?;
        let begun = Split::begin(Arc::clone(&pager), lenders, (borrowed.guest, borrowed.key), Box::new(epochs));
        let split = begun.map_err(|error| {
            pager.end();
            error.problem()
        })?;
        let remote = Remote::begun(split);
        self.keep_remote(&record.name, Some(&remote));
        Ok(remote)
    }

    /// Of a machine that is split: changes how much of it may be here, and which memory hosts are given pages.
    fn change(
        &self,
        record: &VmRecord,
        split: &SplitRecord,
        request: &SplitRequest,
    ) -> Result<(VmRecord, Arc<Remote>), Problem> {
        let memory = if request.memory.is_empty() { split.borrowed.lending() } else { request.memory.clone() };
        let redundancy = request.redundancy.unwrap_or_else(|| split.borrowed.redundancy());
        let hosts = Place::of(&memory, redundancy)?;
        checks::check_budget(record, request.here_bytes, &hosts)?;
        let remote = self.care.machines.reach(&record.name)?;
        let mut exchange = self.exchange(record, remote.split()?);
        exchange.begin(&hosts)?;
        exchange.keep_here(Room::of(request.here_bytes).with(request.unused.unwrap_or(split.unused)))?;
        Ok((exchange.record, remote))
    }

    fn exchange<'a>(&'a self, record: &VmRecord, split: &'a Arc<Split>) -> Exchange<'a> {
        Exchange { machines: &self.care.machines, loans: &self.loans, split, record: record.clone() }
    }

    /// Puts back how much of a machine may be here. Memory hosts that were leaving and have something lend again.
    fn put_back(&self, record: &VmRecord, split: &Arc<Split>, room: Room) -> Result<(), Problem> {
        let mut exchange = self.exchange(record, split);
        let called_off = exchange.call_off();
        exchange.keep_here(room)?;
        split.keep_to(room).map_err(|error| error.problem())?;
        called_off
    }

    /// Brings all of a machine's memory here, and ends that it is split. A memory host that is not reached is asked
    /// again, as long as `check` agrees.
    fn unite(
        &self,
        record: &VmRecord,
        remote: &Remote,
        check: &dyn Fn() -> Result<(), MigrateError>,
    ) -> Result<(), Problem> {
        let split = remote.split()?;
        until_reached(check, &|| split.merge(check))?;
        self.forget(record);
        Ok(())
    }

    /// A machine is as any other from now on: all of its memory is here. What it was lent is given back.
    fn forget(&self, record: &VmRecord) {
        // Nobody borrows anew what is given back. It is not ended yet: a daemon that finds the machine split needs the
        // userfaultfd that is closed then.
        let remote = self.care.machines.remote(&record.name);
        remote.iter().for_each(|remote| remote.see_off());
        // A daemon that finds the machine split and its debt knows that it must not be paid yet.
        self.loans.owe(record, &self.care.machines.dir(&record.name));
        let whole = VmRecord { split: None, ..record.clone() };
        let stored = self.care.machines.try_store(&whole);
        if let Some(remote) = remote {
            remote.end();
            self.keep_remote(&record.name, None);
        }
        // Where the disk is full the record still says that it is split, and only the map that nothing is away.
        if let Some(split) = &record.split
            && stored
        {
            remove_map(&split.map);
        }
        self.loans.pay();
    }

    fn check_room(&self, name: &str, remote: &Remote) -> Result<(), Problem> {
        let (needed, room) = (remote.pager.missing().saturating_mul(PAGE_BYTES), self.keeper.room_bytes());
        if needed <= room {
            return Ok(());
        }
        let (needed, room) = (show_size(needed), show_size(room));
        let message = format!("{needed} of '{name}' are at memory hosts, and this host has {room} left");
        Err(Problem::new(Code::OutOfMemory, Blame::Host, message)
            .hint("move or stop other machines, or end what takes memory here; the machine runs on as it is"))
    }

    fn store(&self, record: &VmRecord) -> Result<(), Problem> {
        self.care.machines.store(record).map_err(|error| host("cannot write the machine's record", &error))
    }

    fn keep_remote(&self, name: &str, remote: Option<&Arc<Remote>>) {
        if let Some(entry) = self.care.machines.table().get_mut(name) {
            entry.remote = remote.cloned();
        }
    }
}

/// Why a machine is not split.
struct NotOpened {
    problem: Problem,
    /// How many of its memory hosts may have granted what they were asked for.
    asked: usize,
}

impl From<Problem> for NotOpened {
    fn from(problem: Problem) -> Self {
        Self { problem, asked: usize::MAX }
    }
}

/// Waits until no more of a machine is here than may be.
fn leave(record: &VmRecord, split: &Split, room: Room, monitor: &Monitor) -> Result<(), Problem> {
    loop {
        monitor.check().and_then(|()| alive(record)).map_err(|error| error.problem())?;
        if split.here_bytes().map_err(|error| error.problem())? <= room.most() {
            return Ok(());
        }
        // One that cannot be reached may come back; one that refuses does so again.
        if let Some(problem) = refused(split) {
            return Err(problem);
        }
        std::thread::sleep(LOOK);
    }
}

fn report(record: &VmRecord, monitor: &Monitor, (before, account): (u64, Account), split: &Split) -> SplitReport {
    let now = split.account();
    SplitReport {
        vm: record.name.clone(),
        status: Status::Completed,
        error: None,
        ms: milliseconds(monitor.elapsed()),
        memory_bytes: record.memory_bytes,
        here_bytes: record.split.as_ref().map_or(record.memory_bytes, |split| split.here_bytes),
        allocated_before_bytes: before,
        allocated_after_bytes: record.allocated_bytes(),
        away_pages: split.pager().missing(),
        out_pages: now.out_pages - account.out_pages,
        unsent_pages: now.unsent_pages - account.unsent_pages,
        zero_pages: now.zero_pages - account.zero_pages,
        kept_pages: now.kept_pages - account.kept_pages,
        in_pages: now.in_pages - account.in_pages,
        migration: None,
    }
}

/// How work ended that came to nothing, where putting things back as they were worked, or did not.
fn ended_by(mut problem: Problem, undone: Result<(), Problem>) -> (Status, Option<Problem>) {
    let mut status = Status::Failed;
    if problem.code == Code::Cancelled {
        (status, problem.message) = (Status::Cancelled, "it was cancelled".into());
    }
    if let Err(why) = undone {
        problem.cause.push(format!("and it is not as it was before: {}", why.with_causes()));
        let merge = || "'sterna merge' brings all of it here once its memory hosts answer".to_owned();
        problem = problem.hint(why.hint.unwrap_or_else(merge));
    }
    (status, Some(problem))
}
