//! Machines that come here: this host as the destination.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use sterna_api::{Blame, Code, MemoryMode, Problem};
use sterna_engine::destination::pool::Pool;
use sterna_engine::host::{Clone, DaemonId, DestinationHost, Incoming, MigrationId, Verdict};
use sterna_engine::paging::Pager;
use sterna_engine::split::Split;
use sterna_engine::split::room::Room;
use sterna_engine::store::Store;
use sterna_engine::transport::credentials::Credentials;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::spec::{GangSpec, Ticket, VmSpec};
use sterna_sys::huge::transparent_bytes;

use super::arriving::{Arriving, check_incoming};
use super::no_verdict::no_verdict;
use super::onward;
use super::paging::{self, Pages};
use super::pools::Pools;
use super::prechecks::{self, MARGIN_BYTES, check_room};
use super::promises::{Promise, Promises};
use super::records::{NoVerdict, Records};
use crate::care::Care;
use crate::kept::Keeper;
use crate::machines::backing::Block;
use crate::machines::claim::Reservation;
use crate::machines::control;
use crate::machines::hold::Hold;
use crate::machines::record::{GangKey, Lifecycle, Memory, Paging, VmRecord};
use crate::machines::split::{Remote, SplitRecord};
use crate::machines::start::{Launcher, Reached};
use crate::problems::host;
use crate::qemu::arguments::{self, Additions, Item};
use crate::qemu::binary::{self, Binary};
use crate::qemu::launch::{log_file, qmp_socket};
use crate::split::{self, Splits};

/// How many machines may be on their way here at a time, where one of them is a clone.
const MOST_CLONES: usize = 512;

/// This host as a destination.
#[derive(Debug, Clone)]
pub struct Destination {
    /// Its identity for sources.
    pub identity: DaemonId,
    /// The credentials for connections to other daemons, where these are encrypted.
    pub credentials: Option<Arc<Credentials>>,
    /// Its machines, and their care.
    pub care: Care,
    /// The records of what became of migrations.
    pub records: Arc<Records>,
    /// The part that starts machines.
    pub launcher: Arc<Launcher>,
    /// The pages that come after their guest.
    pub pages: Arc<Pages>,
    /// The pools of gangs that come here.
    pub pools: Arc<Pools>,
    /// The memory that is promised to what is being made here.
    pub promises: Arc<Promises>,
    /// What is kept of machines that have left.
    pub keeper: Arc<Keeper>,
    /// What is lent to guests of other hosts.
    pub lent: Arc<Store>,
    /// How many machines may be on their way here at a time.
    pub max_incoming: usize,
    /// Percent of what machines here may have in common that is kept free for them.
    pub unshare_reserve: u8,
    /// The free memory below which guests here are stopped, bytes: no machine comes that would leave less.
    pub memory_floor_bytes: u64,
    /// Whether gangs may refer to what machines of their trust group have here in pools.
    pub offer_pools: bool,
    /// Whether the threads of a pause may go before all others.
    pub may_haste: bool,
    /// The QEMU of the configuration.
    pub qemu: Option<PathBuf>,
    /// Where other daemons reach this one.
    pub listen: Option<String>,
    /// The part that brings machines together.
    pub splits: Arc<Splits>,
}

impl DestinationHost for Destination {
    fn identity(&self) -> DaemonId {
        self.identity
    }

    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.credentials.clone()
    }

    fn may_haste(&self) -> bool {
        self.may_haste
    }

    fn store(&self) -> Option<Arc<Store>> {
        Some(Arc::clone(&self.lent))
    }

    fn prepare(
        &self,
        id: MigrationId,
        spec: &VmSpec,
        from: Option<&str>,
        pool: Option<&Arc<Pool>>,
        paging: bool,
        clone: Option<Clone>,
    ) -> Result<Incoming, Problem> {
        if self.records.stage(id).is_some() {
            return Err(stale(id));
        }
        self.start(id, spec, from, pool, (paging, clone)).inspect_err(|problem| {
            if problem.code == Code::TooManyIncoming {
                // Nothing was begun, and the source asks again under another number: there is nothing to remember.
                return tracing::debug!(vm = %spec.name, %id, "put off: {}", problem.message);
            }
            // The source learns of the refusal by this answer. A source that does not get the answer was never told
            // yes, and never asks: no record is kept.
            tracing::info!(vm = %spec.name, %id, code = %problem.code, "refused: {}", problem.message);
        })
    }

    fn pool(&self, gang: &GangSpec, from: Option<&str>) -> Result<Arc<Pool>, Problem> {
        self.promises.beside(|promised| {
            let room = |names: &_| self.free_bytes(*promised, names);
            self.pools.of(gang, from, &room, &|name| self.taken_bytes(name), &|key| self.came_with(key))
        })
    }

    fn offer(&self, group: &str, shown: &[u128], pool: &Arc<Pool>) -> std::io::Result<()> {
        if pool.offers().is_some() {
            return Ok(());
        }
        // The gang is promised its memory by now: what is kept stays for it only where there is memory for both.
        let promised = [self.promised_bytes(&HashSet::new()), self.promised_to_gangs(), self.promises.bytes()];
        let promised = promised.into_iter().fold(0, u64::saturating_add);
        let has_room = self.keeper.room_beside_bytes() >= promised;
        let kept = if has_room { self.keeper.offer(group, shown, self.offer_pools, pool) } else { Vec::new() };
        if kept.is_empty() && !self.offer_pools {
            return Ok(());
        }
        let processes: Vec<u32> = if self.offer_pools {
            let table = self.care.machines.table();
            let records = table.values().filter_map(|entry| entry.record.as_ref());
            let of_group = |record: &&VmRecord| {
                record.memory_mode == MemoryMode::Private && record.trust_group.as_deref() == Some(group)
            };
            records.filter(of_group).map(|record| record.process.pid).collect()
        } else {
            Vec::new()
        };
        self.pools.offer(pool, &processes, &kept)
    }

    fn keeps(&self, shown: &[u128]) -> bool {
        self.keeper.keeps(shown)
    }

    fn takes_along(&self, id: MigrationId, tickets: &[Ticket]) {
        let Some(record) = self.arriving(id).filter(|_| !tickets.is_empty()) else { return };
        let along = VmRecord { tickets: tickets.to_vec(), ..record };
        if let Err(error) = self.care.machines.store_for_daemon(&along) {
            tracing::warn!(vm = %along.name, %error, "its tickets are lost: no host will know it when it comes back");
        }
    }

    fn room_bytes(&self) -> u64 {
        self.keeper.room_bytes()
    }

    fn commit(&self, id: MigrationId, postcopy: bool) -> Result<(), Problem> {
        self.records
            .commit(id, postcopy)
            .map_err(|error| host("the destination cannot write down that the guest is its own", &error))
    }

    fn took_over(&self, id: MigrationId, split: Arc<Split>) {
        let Some(record) = self.arriving(id) else { return };
        if let Err(error) = split.keep_to(record.split.as_ref().map_or(Room::ALL, SplitRecord::room)) {
            let problem = error.problem();
            tracing::error!(vm = %record.name, "no more of its pages leave: {}", problem.with_causes());
        }
        if let Some(entry) = self.care.machines.table().get_mut(&record.name) {
            entry.remote = Some(Remote::begun(split));
        }
        if record.split.as_ref().is_some_and(|split| split.merging) {
            split::recover::come_together(&self.splits, &record);
        }
    }

    fn started(&self, id: MigrationId, incoming: Incoming, pager: Option<Arc<Pager>>, failed: Option<&Problem>) {
        // The migration's connection to QEMU ends: from now on each question makes its own.
        drop(incoming);
        if let Some(record) = self.arriving(id) {
            tracing::info!(vm = %record.name, %id, "it belongs here now");
            self.keeper.came(&record.name);
            self.pages.take_in(&record, pager, failed);
        }
    }

    fn pager(&self, id: MigrationId, from: Option<&str>) -> Result<Arc<Pager>, Problem> {
        if !self.records.may_ask(id, from) {
            return Err(no_verdict(id, from, NoVerdict::AnotherDaemons));
        }
        self.pages.pager_of(id)
    }

    fn paged(&self, id: MigrationId) {
        self.pages.paged(id);
    }

    fn abort(&self, id: MigrationId, incoming: Option<Incoming>) {
        let verdict = self.records.abort(id);
        let Some(record) = self.arriving(id) else { return };
        if verdict == Verdict::Committed {
            tracing::error!(vm = %record.name, %id, "asked to abort a committed migration: the guest stays");
            drop(incoming);
            return self.care.settle(&record);
        }
        if let Some(mut incoming) = incoming {
            incoming.vmm.quit();
        }
        if let Some(process) = record.process.open() {
            process.kill();
        }
        self.care.machines.forget(&record.name, record.process);
        tracing::info!(vm = %record.name, %id, "aborted, nothing is left of it here");
    }

    fn verdict(&self, id: MigrationId, from: Option<&str>) -> Result<Verdict, Problem> {
        let verdict = self.records.verdict_for(id, from).map_err(|why| no_verdict(id, from, why))?;
        if verdict == Verdict::Aborted {
            self.end_arriving(id)?;
        }
        Ok(verdict)
    }
}

/// How a machine comes here.
#[derive(Debug)]
struct How {
    /// Its guest may run before all its pages are here.
    paging: bool,
    /// As what, where it is a clone of one that runs on.
    clone: Option<Clone>,
    gang: Option<GangKey>,
}

/// The problem of a migration whose number is on record already.
fn stale(id: MigrationId) -> Problem {
    Problem::new(Code::StaleMigration, Blame::Peer, format!("migration {id} has ended here before"))
}

/// The memory, bytes, that a machine still needs whose pages follow it: of one that is split no more than may be here.
fn still_needed(record: &VmRecord, pager: &Pager) -> u64 {
    let follows = pager.to_come().saturating_mul(PAGE_BYTES as u64);
    let room = |split: &SplitRecord| split.here_bytes.saturating_sub(record.allocated_bytes());
    record.split.as_ref().map_or(follows, |split| follows.min(room(split)))
}

/// A host's name as it calls itself, reduced to what may be shown to people.
fn name_of(host: &str) -> String {
    if host.len() <= 64 && is_word(host) { host.into() } else { "its source".into() }
}

/// Whether a peer's word can be shown to people.
fn is_word(word: &str) -> bool {
    (1..=80).contains(&word.len()) && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-:".contains(c))
}

impl Destination {
    fn start(
        &self,
        id: MigrationId,
        spec: &VmSpec,
        from: Option<&str>,
        pool: Option<&Arc<Pool>>,
        (paging, clone): (bool, Option<Clone>),
    ) -> Result<Incoming, Problem> {
        let items = arguments::parse(&spec.arguments);
        let machines = &self.care.machines;
        // All clones of a fork wait for one pause: none can be put off until others have come.
        let limit = if clone.is_some() { MOST_CLONES } else { self.max_incoming };
        // This check comes before all expensive ones: sources that are put off ask every second.
        check_incoming(&machines.table(), limit)?;
        let binary = prechecks::check(spec, &items, self.qemu.as_deref())?;
        // A gang was promised what all of its machines need together. Of one alone its record will say what it needs.
        let alone = pool.is_none().then(|| self.promise(&format!("'{}'", spec.name), spec.allocated_bytes));
        let _until_then = alone.transpose()?;
        if let Some(split) = &spec.split {
            onward::check_coming(spec, split, self.listen.as_ref(), self.credentials.as_ref())?;
        }
        let has_room = |table: &_| check_incoming(table, limit);
        let reservation = Reservation::new(machines, &spec.name, Hold::busy(Arriving(id)), has_room)?;
        let gang = pool.and_then(|pool| self.pools.come(pool, &spec.name));
        self.records.prepare(id, &spec.name, from).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => stale(id),
            _ => host("the destination cannot write the migration's record", &error),
        })?;
        let how = How { paging, clone, gang };
        self.start_qemu(id, spec, how, &items, binary, reservation).inspect_err(|_| self.records.refused(id))
    }

    fn start_qemu(
        &self,
        id: MigrationId,
        spec: &VmSpec,
        How { paging, clone, gang }: How,
        items: &[Item],
        binary: Binary,
        reservation: Reservation,
    ) -> Result<Incoming, Problem> {
        let dir = self.care.machines.dir(&spec.name);
        let blocks: Vec<Block> = spec
            .blocks
            .iter()
            .map(|block| {
                let path = self.launcher.new_ram_path(&spec.name);
                Block::new(&block.id, block.bytes, block.page_bytes, &path)
            })
            .collect();
        let managed = spec.managed_ram.then(|| (spec.memory_bytes, blocks[0].path.as_path()));
        let huge_pages = self.launcher.huge_pages && !spec.small_pages;
        let huge = huge_pages && !spec.private && transparent_bytes().is_some();
        let additions = Additions { name: &spec.name, qmp: &qmp_socket(&dir), ram: managed, huge };
        let files: Vec<(String, PathBuf)> = blocks.iter().map(|block| (block.id.clone(), block.path.clone())).collect();
        let all = arguments::for_incoming(items, &additions, &spec.machine, &files);
        let memory_mode = if spec.private { MemoryMode::Private } else { MemoryMode::Shared };
        let kind = self.launcher.ram_kind(memory_mode, spec.trust_group.as_deref());
        let (mut started, Reached { control, .. }) =
            self.launcher.start(&binary.path, &all, &spec.name, (kind, blocks), None)?;
        let memory =
            Memory { bytes: spec.memory_bytes, blocks: started.blocks.clone(), managed: spec.managed_ram, owned: true };
        // Words of the source's: what is not like a name is not kept.
        let kin = spec.kin.as_ref().filter(|kin| is_word(&kin.family));
        let mut record = VmRecord {
            family: kin.map(|kin| kin.family.clone()),
            forked_from: kin.and_then(|kin| kin.forked_from.clone()).filter(|name| is_word(name)),
            memory_mode,
            trust_group: spec.trust_group.clone(),
            came_with: gang,
            balloon: spec.balloon,
            huge_pages,
            small_pages: spec.small_pages,
            lifecycle: Lifecycle::Incoming(id),
            running: spec.running,
            ..VmRecord::new(&spec.name, spec.arguments.clone(), started.qemu(binary.path), memory)
        };
        let mut handed = None;
        let paging = paging.then(|| {
            let map = self.launcher.new_ram_path(&spec.name);
            started.with_file(&map);
            let (means, addresses) = paging::means(&record, &map)?;
            if let Some(split) = &spec.split {
                let (split, needed) = onward::coming(split, map.clone(), &dir, self.credentials.as_ref())?;
                (record.split, handed) = (Some(split), Some(needed));
            }
            record.paging = Some(Paging { id, from: name_of(&spec.from), map, held_back: false });
            Ok::<_, Problem>((means, addresses))
        });
        let (paging, addresses) = match paging {
            Some(Ok((means, addresses))) => (Some(Ok(means)), addresses),
            Some(Err(problem)) => (Some(Err(problem)), Vec::new()),
            None => (None, Vec::new()),
        };
        let block_files = record.block_files(&addresses).map_err(|error| host("cannot open the RAM files", &error))?;
        let vmm = control::destination(control, &record, log_file(&dir))?;
        let vmm = match clone {
            Some(Clone { connected }) => vmm.as_clone(connected),
            None => vmm,
        };
        reservation.keep(&record, Hold::busy(Arriving(id)))?;
        started.keep();
        Ok(Incoming {
            vmm: Box::new(vmm),
            blocks: block_files,
            qemu_version: binary::show(record.qemu_version),
            paging,
            split: handed,
        })
    }

    /// Ends a machine on its way here whose source is about to let it run: both lock the guest's disks. (The session,
    /// which may wait for a source that is gone, notices that the machine has ended.)
    ///
    /// # Errors
    /// The machine does not end: then the source must not be told yet that it may let it run.
    fn end_arriving(&self, id: MigrationId) -> Result<(), Problem> {
        let Some(record) = self.arriving(id) else { return Ok(()) };
        if let Some(process) = record.process.open() {
            process.kill();
            if !process.has_ended() {
                let message =
                    format!("the QEMU of '{}' at the destination does not end: its kernel keeps it", record.name);
                return Err(Problem::new(Code::StillEnding, Blame::Host, message)
                    .hint("it waits for a device or for storage there; asked again, it says when it has ended"));
            }
        }
        self.care.machines.forget(&record.name, record.process);
        Ok(())
    }

    /// Promises `who` so much memory, bytes, until what is returned is dropped: it counts as taken until then.
    ///
    /// # Errors
    /// A [`Problem`]: there is not so much that was promised to nobody.
    pub fn promise(&self, who: &str, bytes: u64) -> Result<Promise, Problem> {
        self.promises.make(bytes, |promised| {
            let free = self.free_bytes(promised, &HashSet::new());
            check_room(who, bytes, free.saturating_sub(self.promised_to_gangs()))
        })
    }

    /// The memory, bytes, that can be given to who wants some, where so much is [promised](Promises), but for what
    /// gangs were promised, and for what machines of these names still need, which is counted with their gang.
    fn free_bytes(&self, promised: u64, names: &HashSet<String>) -> u64 {
        let records: Vec<VmRecord> = {
            let table = self.care.machines.table();
            table.values().filter_map(|entry| entry.record.clone()).collect()
        };
        let shared: u64 = records.iter().map(VmRecord::shared_bytes).sum();
        let reserve = (u128::from(shared) * u128::from(self.unshare_reserve) / 100) as u64;
        // Below the floor guests are stopped. Whoever comes leaves a margin anyway.
        let floor = self.memory_floor_bytes.saturating_sub(MARGIN_BYTES);
        let taken = [promised, self.promised_bytes(names), reserve, floor];
        taken.into_iter().fold(self.room_bytes(), u64::saturating_sub)
    }

    /// The memory, bytes, that machines on their way here and machines with missing pages will still need, but those of
    /// gangs and those of these names: a machine that was accepted must not run out of memory because of a later one.
    fn promised_bytes(&self, names: &HashSet<String>) -> u64 {
        let of_gangs = self.pools.names();
        let (arriving, missing): (Vec<VmRecord>, u64) = {
            let table = self.care.machines.table();
            let alone = |name: &String| !of_gangs.contains(name) && !names.contains(name);
            let alone = || table.iter().filter(|(name, _)| alone(name)).map(|(_, entry)| entry);
            let entries = alone().filter(|entry| entry.hold.is::<Arriving>());
            let missing =
                alone().filter_map(|entry| Some(still_needed(entry.record.as_ref()?, &entry.pager.as_ref()?.0)));
            (entries.filter_map(|entry| entry.record.clone()).collect(), missing.sum())
        };
        let stays =
            |record: &VmRecord| record.split.as_ref().filter(|split| !split.merging).map(|split| split.here_bytes);
        let most = |record: &VmRecord| stays(record).unwrap_or(record.memory_bytes);
        let unfilled = arriving.iter().map(|record| most(record).saturating_sub(record.allocated_bytes()));
        unfilled.sum::<u64>() + missing
    }

    /// The memory, bytes, that gangs on their way here will still need.
    fn promised_to_gangs(&self) -> u64 {
        self.pools.promised_bytes(&|name| self.taken_bytes(name))
    }

    /// The memory, bytes, that a machine of a gang has taken here for itself.
    fn taken_bytes(&self, name: &str) -> u64 {
        let record = self.care.machines.table().get(name).and_then(|entry| entry.record.clone());
        record.map_or(0, |record| record.allocated_bytes())
    }

    /// The machines here that came with this gang.
    fn came_with(&self, gang: &GangKey) -> HashSet<String> {
        let table = self.care.machines.table();
        let records = table.values().filter_map(|entry| entry.record.as_ref());
        records.filter(|record| record.came_with.as_ref() == Some(gang)).map(|record| record.name.clone()).collect()
    }

    fn arriving(&self, id: MigrationId) -> Option<VmRecord> {
        let table = self.care.machines.table();
        let entry =
            table.values().find(|entry| entry.hold.activity::<Arriving>().is_some_and(|arriving| arriving.0 == id))?;
        entry.record.clone()
    }
}
