//! Machines that run here while pages are missing.
//!
//! The agent inside QEMU keeps the userfaultfd that holds missing pages back; if it were closed, they would read as
//! zeros. So from the moment a guest may run without them until the last page is here, nothing here closes it, nobody
//! else tracks the machine's writes, and a restarted daemon takes over the userfaultfd and the map of missing pages
//! before it lets any guest run.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::units::show_size;
use sterna_api::vm;
use sterna_api::{Blame, Code, Problem};
use sterna_engine::error::MigrateError;
use sterna_engine::host::MigrationId;
use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::{Memory, kind};
use sterna_engine::paging::whereabouts::Whereabouts;
use sterna_engine::paging::{Pager, PagingMeans};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::host::name;
use sterna_sys::map::Access;

use super::arriving::Arriving;
use super::no_verdict::no_verdict;
use super::records::{self, NoVerdict, Records, Stage};
use super::resuming;
use crate::care::Care;
use crate::machines::backing::Block;
use crate::machines::claim::Claimed;
use crate::machines::control::{self, Control, let_run, stop_tracking};
use crate::machines::hold::Hold;
use crate::machines::missing::{Bringer, whereabouts};
use crate::machines::record::{Lifecycle, Paging, VmRecord};
use crate::machines::table::Entry;
use crate::problems::host;

/// How often the daemon tries to let a guest run whose QEMU does not answer.
const RUN_AGAIN: Duration = Duration::from_secs(1);

/// The state of a guest's pages that an earlier daemon left.
enum Found {
    /// All pages are here.
    All,
    /// Some pages are missing: this pager brings them.
    Some(Arc<Pager>),
}

/// What it takes here to let a machine run while pages are missing, with the addresses of its RAM blocks; or why it is
/// impossible.
///
/// # Errors
/// A [`Problem`]: this kernel, the machine's RAM or its agent does not allow it.
pub fn means(record: &VmRecord, map: &Path) -> Result<(PagingMeans, Vec<u64>), Problem> {
    let lacks = sterna_sys::probe::missing_for_postcopy();
    if !lacks.is_empty() {
        return Err(Problem::new(
            Code::NoPostcopy,
            Blame::Host,
            format!("the kernel of host '{}' cannot hold missing pages back", name()),
        )
        .hint(lacks.join(" ")));
    }
    in_small_pages(&record.blocks)?;
    let (agent, addresses) = control::agent_and_addresses(&record.agent, record.process.pid, &record.blocks)?;
    let missing = open_map(map).map_err(|error| host("cannot make the map of missing pages", &error))?;
    Ok((PagingMeans { inside: Box::new(InsideQemu::new(agent)), missing }, addresses))
}

/// Checks that no block is in huge pages. Missing pages are held back and brought one by one, but the kernel holds back
/// and maps a huge page as a whole.
///
/// # Errors
/// A [`Problem`] that names the block.
pub fn in_small_pages(blocks: &[Block]) -> Result<(), Problem> {
    let Some(block) = blocks.iter().find(|block| block.page_bytes != PAGE_BYTES as u64) else { return Ok(()) };
    let why = format!(
        "RAM block '{}' is in pages of {}, and they can be held back by 4 KiB only",
        block.id,
        show_size(block.page_bytes)
    );
    Err(Problem::new(Code::HugePages, Blame::Request, why))
}

/// The pager of a machine, which `make` makes of its RAM and of what else it takes; `map` is the map of missing pages.
///
/// # Errors
/// A [`Problem`]: as [`means`], the RAM files cannot be opened, or what `make` said.
pub fn pager(
    record: &VmRecord,
    map: &Path,
    make: impl FnOnce(Arc<dyn Memory>, PagingMeans) -> Result<Arc<Pager>, MigrateError>,
) -> Result<Arc<Pager>, Problem> {
    let (means, addresses) = means(record, map)?;
    let blocks = record.block_files(&addresses).map_err(|error| host("cannot open the RAM files", &error))?;
    let ram = kind::open(&blocks, Access::ReadWrite).map_err(MigrateError::from);
    ram.and_then(|ram| make(ram, means)).map_err(|error| error.problem())
}

/// Opens the map's file, or makes it where there is none; for the daemon alone.
fn open_map(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// The map of the pages that an earlier daemon left missing; `None` where the guest never ran without them.
///
/// # Errors
/// It cannot be read, or is not this machine's.
pub fn read_map(record: &VmRecord, map: &Path) -> io::Result<Option<Whereabouts>> {
    let file = match File::options().read(true).write(true).open(map) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    Whereabouts::recover(file, &record.layout()?)
}

/// The progress of a machine with missing pages, and the same in words for people; `None` of any other machine.
#[must_use]
pub fn describe(entry: &Entry) -> Option<(vm::Arriving, String)> {
    let record = entry.record.as_ref()?;
    // A machine whose guest does not run yet, or whose record is only now being written, is on its way as any other
    // machine.
    let paging = record.paging.as_ref().filter(|_| !entry.hold.is::<Arriving>())?;
    let (missing, alone) = match &entry.pager {
        Some(Bringer(pager)) => (pager.to_come(), pager.alone()),
        None => (read_map(record, &paging.map).ok().flatten().map_or(0, |map| map.to_come()), None),
    };
    let mut text = whereabouts(Some(missing), &paging.from);
    if let Some(alone) = alone {
        text.push_str(&format!("; waiting for {} for {} s", paging.from, alone.as_secs()));
    }
    let waiting_ms = alone.map(|alone| alone.as_secs_f64() * 1e3);
    Some((vm::Arriving { missing_pages: missing, from: paging.from.clone(), waiting_ms }, text))
}

/// The pages that come after their guest.
#[derive(Debug)]
pub struct Pages {
    care: Care,
    records: Arc<Records>,
    /// Held while the state of missing pages changes.
    changed: Mutex<()>,
}

impl Pages {
    /// Begins, with the care of this host's machines and the records of migrations.
    #[must_use]
    pub fn new(care: Care, records: Arc<Records>) -> Self {
        Self { care, records, changed: Mutex::new(()) }
    }

    /// Takes in a guest that belongs here from now on, and runs, or has `failed` to. `pager` brings the missing pages,
    /// where there are some.
    pub fn take_in(self: &Arc<Self>, record: &VmRecord, pager: Option<Arc<Pager>>, failed: Option<&Problem>) {
        match pager {
            Some(pager) => {
                let before = if pager.to_come() > 0 { "all its pages are here" } else { "its pages are compared" };
                tracing::info!(vm = %record.name, missing = pager.to_come(), "it runs here before {before}");
                self.keep_pager(&record.name, pager);
                let record = if failed.is_some() { self.held_back(record, true) } else { record.clone() };
                self.care.settle(&record);
                self.run_if_held_back(&record);
            }
            None => {
                let whole = VmRecord { paging: None, ..record.clone() };
                match failed {
                    None => self.care.settle(&whole),
                    Some(problem) => {
                        self.care.watch(&whole);
                        resuming::let_run(&self.care.machines, &whole, problem.with_causes());
                    }
                }
                forget_map(record);
            }
        }
    }

    /// The pager of the guest of this migration. Where an earlier attempt to take over its pages failed, this tries
    /// again.
    ///
    /// # Errors
    /// A [`Problem`]: all pages are here (`paged`), the guest has ended (`guest-gone`), does not run yet (`not-yet`),
    /// nothing can bring its pages at present (`paging-lost`), or the migration is unknown, or did not come here.
    pub fn pager_of(self: &Arc<Self>, id: MigrationId) -> Result<Arc<Pager>, Problem> {
        let problem = |code, message: &str| Err(Problem::new(code, Blame::Peer, message));
        // One attempt at a time: a second one would take over the same userfaultfd.
        let _alone = self.alone_with_pages();
        let Some(entry) = self.with_pages_of(id) else {
            // The source gives up the rest of the pages when it is told that the guest has ended: so only a record may
            // say so.
            return match (self.records.pages(id), self.records.stage(id)) {
                (Some(records::Pages::Here), _) => problem(Code::Paged, "all pages of the guest are here"),
                (Some(records::Pages::Gone), _) => Err(guest_gone()),
                // The machine's record could not be read: that is no reason to say that the guest has ended.
                (Some(records::Pages::Coming), _) => {
                    problem(Code::PagingLost, "the guest cannot be found at the destination")
                }
                (None, Some(Stage::HandingOver { .. })) => Err(no_verdict(id, None, NoVerdict::BegunHere)),
                (None, Some(_)) => {
                    problem(Code::PagingLost, "the destination's record does not say what became of the guest's pages")
                }
                (None, None) => Err(no_verdict(id, None, NoVerdict::Unknown)),
            };
        };
        match (entry.pager, entry.record) {
            (Some(Bringer(pager)), _) => Ok(pager),
            (None, Some(record)) if !entry.hold.is::<Arriving>() => match self.take_over(&record)? {
                Found::Some(pager) => {
                    tracing::info!(vm = %record.name, %id, "its pages can be brought after all");
                    self.keep_pager(&record.name, Arc::clone(&pager));
                    self.run_if_held_back(&record);
                    Ok(pager)
                }
                Found::All => {
                    self.has_all(&record);
                    release_pages(&record);
                    self.run_if_held_back(&record);
                    problem(Code::Paged, "all pages of the guest are here")
                }
            },
            _ => problem(Code::NotYet, "the guest does not run at the destination yet"),
        }
    }

    /// Notes that the pages of guests that are not here any more are needed by nobody: their sources may drop them.
    pub fn forget_pages_of_nobody(&self) {
        for id in self.records.coming().into_iter().filter(|id| self.with_pages_of(*id).is_none()) {
            self.records.pages_are(id, records::Pages::Gone);
        }
    }

    /// Notes that all pages of the guest of this migration are here.
    pub fn paged(&self, id: MigrationId) {
        let _alone = self.alone_with_pages();
        let Some(record) = self.with_pages_of(id).and_then(|entry| entry.record) else { return };
        tracing::info!(vm = %record.name, %id, "all its pages are here");
        self.has_all(&record);
    }

    /// Takes over a machine that an earlier daemon let run before all its pages were here. `run` says whether the guest
    /// must still be let run.
    pub fn recover(self: &Arc<Self>, record: &VmRecord, run: bool) {
        let run = run || record.paging.as_ref().is_some_and(|paging| paging.held_back);
        match self.take_over(record) {
            Ok(Found::Some(pager)) => {
                tracing::info!(
                    vm = %record.name, missing = pager.to_come(),
                    "its pages are still to come: it waits for its source"
                );
                self.keep_pager(&record.name, pager);
                let record = self.held_back(record, run);
                self.care.settle(&record);
                self.run_if_held_back(&record);
            }
            Ok(Found::All) => {
                let record = self.has_all(record);
                release_pages(&record);
                if run && let Err(problem) = let_run(&record, &self.care.machines.dir(&record.name)) {
                    self.care
                        .machines
                        .mark(&record.name, format!("it was moved here and does not run: {}", problem.message));
                }
                self.care.settle(&record);
            }
            Err(problem) => self.hold_back(record, &problem),
        }
    }

    /// Stops a guest whose pages nothing can bring. Threads that wait for a page go on waiting. If the agent does not
    /// hold the pages back any more, the guest must not see the zeros in their place.
    fn hold_back(self: &Arc<Self>, record: &VmRecord, problem: &Problem) {
        let why = problem.with_causes();
        tracing::error!(
            vm = %record.name,
            "ITS MISSING PAGES CANNOT BE BROUGHT, it is stopped and must not be let run: {why}"
        );
        let stopped = Control::connect(&record.qmp).and_then(|mut control| control.send("stop"));
        if let Err(problem) = stopped {
            // A QEMU that waits for a missing page itself answers nobody, and its guest does not run on for long.
            tracing::error!(vm = %record.name, "nor can it be stopped: {}", problem.message);
        }
        self.care.machines.mark(&record.name, format!("stopped, its missing pages cannot be brought: {why}"));
        self.care.settle(&self.held_back(record, true));
    }

    /// Takes the userfaultfd and the map of missing pages over.
    fn take_over(&self, record: &VmRecord) -> Result<Found, Problem> {
        let Some(paging) = &record.paging else { return Ok(Found::All) };
        // Before the map: when a machine has ended, that is written down first, and its map removed afterwards.
        let pages = self.records.pages(paging.id);
        if pages == Some(records::Pages::Here) {
            return Ok(Found::All);
        }
        let map =
            read_map(record, &paging.map).map_err(|error| host("cannot read the map of missing pages", &error))?;
        if !are_missing(pages, map.map(|map| map.to_come()), &paging.map)? {
            return Ok(Found::All);
        }
        if record.split.is_some() {
            // What brings the others of its pages was taken over first.
            let remote = self.care.machines.reach(&record.name)?;
            return Ok(Found::Some(Arc::clone(&remote.pager)));
        }
        let (means, addresses) = means(record, &paging.map)?;
        let blocks = record.block_files(&addresses).map_err(|error| host("cannot open the RAM files", &error))?;
        let ram = kind::open(&blocks, Access::ReadWrite).map_err(MigrateError::from);
        ram.and_then(|ram| Pager::recover(ram, means)).map(Found::Some).map_err(|error| {
            let mut problem = error.problem();
            problem.code = Code::PagingLost;
            problem
        })
    }

    /// Lets a guest run that was held back, as soon as its QEMU answers: it may itself wait for a page.
    fn run_if_held_back(self: &Arc<Self>, record: &VmRecord) {
        if !record.paging.as_ref().is_some_and(|paging| paging.held_back) {
            return;
        }
        let (pages, record) = (Arc::clone(self), record.clone());
        let name = format!("run-{}", record.name);
        let run = move || {
            let machines = &pages.care.machines;
            let dir = machines.dir(&record.name);
            while record.process.open().is_some() {
                // The claim keeps others away from the machine. Once all its pages are here it can be moved on, stopped
                // as it is, and then it must not be let run here.
                if let Ok(claimed) = Claimed::new(machines, &record.name, Hold::Stopping) {
                    if claimed.record.process != record.process || claimed.record.lifecycle != Lifecycle::Here {
                        return;
                    }
                    match let_run(&record, &dir) {
                        Ok(()) => return pages.runs_again(&record),
                        Err(problem) => {
                            tracing::warn!(vm = %record.name, "it cannot be let run yet: {}", problem.message);
                        }
                    }
                }
                std::thread::sleep(RUN_AGAIN);
            }
        };
        if let Err(error) = std::thread::Builder::new().name(name).spawn(run) {
            tracing::error!(%error, "cannot start the thread that lets a guest run");
        }
    }

    fn runs_again(&self, record: &VmRecord) {
        let _alone = self.alone_with_pages();
        let now = {
            let mut table = self.care.machines.table();
            let entry = table.get_mut(&record.name).filter(|entry| entry.is(record));
            entry.and_then(|entry| {
                entry.note = None;
                entry.record.clone()
            })
        };
        if let Some(now) = now {
            self.care.machines.try_store(&self.held_back(&now, false));
        }
    }

    /// Notes that the machine is as any other from now on.
    fn has_all(&self, record: &VmRecord) -> VmRecord {
        if let Some(paging) = &record.paging {
            self.records.pages_are(paging.id, records::Pages::Here);
        }
        let whole = VmRecord { paging: None, ..record.clone() };
        if let Some(entry) = self.care.machines.table().get_mut(&record.name).filter(|entry| entry.is(record)) {
            entry.pager = None;
        }
        // Where the disk is full, the record still says that pages are missing, and only an empty map tells the next
        // daemon that none are.
        if self.care.machines.try_store(&whole) {
            forget_map(record);
        }
        whole
    }

    fn held_back(&self, record: &VmRecord, held_back: bool) -> VmRecord {
        let paging = record.paging.clone().map(|paging| Paging { held_back, ..paging });
        VmRecord { paging, ..record.clone() }
    }

    fn keep_pager(&self, name: &str, pager: Arc<Pager>) {
        if let Some(entry) = self.care.machines.table().get_mut(name) {
            entry.pager = Some(Bringer(pager));
        }
    }

    /// Serialises changes to the state of missing pages.
    fn alone_with_pages(&self) -> MutexGuard<'_, ()> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine whose pages this migration brings.
    fn with_pages_of(&self, id: MigrationId) -> Option<Entry> {
        let brings = |entry: &&Entry| {
            entry.record.as_ref().and_then(|record| record.paging.as_ref()).is_some_and(|paging| paging.id == id)
        };
        self.care.machines.table().values().find(brings).cloned()
    }
}

/// Whether pages of a guest are missing: by the migration's record, and by how many are on the map, where there is one.
///
/// # Errors
/// A [`Problem`]: the guest has ended (`guest-gone`), or its map is lost (`paging-lost`).
fn are_missing(pages: Option<records::Pages>, away: Option<u64>, map: &Path) -> Result<bool, Problem> {
    match (pages, away) {
        (Some(records::Pages::Gone), _) => Err(guest_gone()),
        (Some(records::Pages::Coming), None) => {
            let message = format!("the map of missing pages ({}) is gone", map.display());
            Err(Problem::new(Code::PagingLost, Blame::Host, message))
        }
        (Some(records::Pages::Here), _) | (None, None) => Ok(false),
        (_, Some(away)) => Ok(away > 0),
    }
}

/// With every page in the file no page must be held back, but those of a machine that is split.
fn release_pages(record: &VmRecord) {
    if record.split.is_none() {
        stop_tracking(record);
    }
}

/// No page follows a machine any more: its map is of no use, but where it is split.
fn forget_map(record: &VmRecord) {
    if record.split.is_none() {
        record.paging.iter().for_each(|paging| remove_map(&paging.map));
    }
}

fn guest_gone() -> Problem {
    Problem::new(Code::GuestGone, Blame::Peer, "the guest has ended at the destination")
}

/// Removes a map of missing pages, where there is one: all are here.
pub fn remove_map(map: &Path) {
    if let Err(error) = std::fs::remove_file(map)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %map.display(), %error, "cannot remove a map of missing pages");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_has_ended_is_not_one_that_has_all_its_pages() {
        let missing = |pages, away| are_missing(pages, away, Path::new("/map")).map_err(|problem| problem.code);
        let (coming, here, gone) = (records::Pages::Coming, records::Pages::Here, records::Pages::Gone);
        // Its map goes a moment after that was written down, and its machine's entry later still.
        assert_eq!(missing(Some(gone), None), Err(Code::GuestGone));
        assert_eq!(missing(Some(gone), Some(3)), Err(Code::GuestGone));
        assert_eq!(missing(Some(coming), None), Err(Code::PagingLost));
        assert_eq!((missing(Some(coming), Some(3)), missing(Some(coming), Some(0))), (Ok(true), Ok(false)));
        assert_eq!((missing(Some(here), None), missing(Some(here), Some(3))), (Ok(false), Ok(false)));
        // It was never let run before all of them were here.
        assert_eq!((missing(None, None), missing(None, Some(3))), (Ok(false), Ok(true)));
    }

    #[test]
    fn ram_in_huge_pages_is_named_with_its_page_size() {
        let block = |page_bytes| Block::new("ram0", 1 << 30, page_bytes, Path::new("/ram"));
        assert!(in_small_pages(&[block(4096), block(4096)]).is_ok());
        let problem = in_small_pages(&[block(4096), block(2 << 20)]).unwrap_err();
        assert_eq!((problem.code.as_str(), problem.blame), ("huge-pages", Blame::Request));
        assert!(problem.message.contains("'ram0' is in pages of 2"), "{}", problem.message);
    }
}
