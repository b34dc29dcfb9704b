//! Machines that come here: this host as the destination.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use sterna_api::{Blame, Code, MemoryMode, Problem};
use sterna_engine::host::{DaemonId, DestinationHost, Incoming, MigrationId, Verdict};
use sterna_engine::paging::Pager;
use sterna_engine::transport::credentials::Credentials;
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::spec::VmSpec;

use super::prechecks;
use super::records::NoVerdict;
use crate::problems::host;
use crate::qemu::arguments::{self, Additions, Item};
use crate::qemu::binary::{self, Binary};
use crate::qemu::launch::{agent_socket, qmp_socket};
use crate::room;
use crate::vms::control;
use crate::vms::record::{Block, Paging};
use crate::vms::run::version;
use crate::vms::{Daemon, Hold, Lifecycle, Reservation, VmRecord, paging};

/// This host as a destination.
#[derive(Debug, Clone)]
pub struct Destination(pub Arc<Daemon>);

impl DestinationHost for Destination {
    fn identity(&self) -> DaemonId {
        self.0.identity
    }

    fn credentials(&self) -> Option<Arc<Credentials>> {
        self.0.credentials.clone()
    }

    fn prepare(&self, id: MigrationId, spec: &VmSpec, from: Option<&str>, postcopy: bool) -> Result<Incoming, Problem> {
        if self.0.records.stage(id).is_some() {
            return Err(stale(id));
        }
        self.start(id, spec, from, postcopy).inspect_err(|problem| {
            if problem.code == Code::TooManyIncoming {
                // Nothing was begun, and its source asks again under another number: there is nothing to remember.
                return tracing::debug!(vm = %spec.name, %id, "put off: {}", problem.message);
            }
            // The source learns of it by this very answer. One that does not get it was never told yes, and never asks: nothing is kept.
            tracing::info!(vm = %spec.name, %id, code = %problem.code, "refused: {}", problem.message);
        })
    }

    fn room_bytes(&self) -> u64 {
        room::room_bytes(&self.0.state.ram())
    }

    fn commit(&self, id: MigrationId, postcopy: bool) -> Result<(), Problem> {
        self.0
            .records
            .commit(id, postcopy)
            .map_err(|error| host("the destination cannot write down that the guest is its own", &error))
    }

    fn started(&self, id: MigrationId, incoming: Incoming, pager: Option<Arc<Pager>>, failed: Option<&Problem>) {
        // Its connection to QEMU ends: from now on each question makes its own.
        drop(incoming);
        if let Some(record) = self.arriving(id) {
            tracing::info!(vm = %record.name, %id, "it belongs here now");
            self.0.take_in(&record, pager, failed);
        }
    }

    fn pager(&self, id: MigrationId, from: Option<&str>) -> Result<Arc<Pager>, Problem> {
        if !self.0.records.may_ask(id, from) {
            return Err(no_verdict(id, from, NoVerdict::AnotherDaemons));
        }
        self.0.pager_of(id)
    }

    fn paged(&self, id: MigrationId) {
        self.0.paged(id);
    }

    fn abort(&self, id: MigrationId, incoming: Option<Incoming>) {
        let verdict = self.0.records.abort(id);
        let Some(record) = self.arriving(id) else { return };
        if verdict == Verdict::Committed {
            tracing::error!(vm = %record.name, %id, "asked to abort what is committed: the guest stays");
            drop(incoming);
            return self.0.settle(&record);
        }
        if let Some(mut incoming) = incoming {
            incoming.vmm.quit();
        }
        if let Some(process) = record.process.open() {
            process.kill();
        }
        self.0.forget(&record.name, record.process);
        tracing::info!(vm = %record.name, %id, "aborted, nothing is left of it here");
    }

    fn verdict(&self, id: MigrationId, from: Option<&str>) -> Result<Verdict, Problem> {
        let verdict = self.0.records.verdict_for(id, from).map_err(|why| no_verdict(id, from, why))?;
        if verdict == Verdict::Aborted {
            self.end_arriving(id)?;
        }
        Ok(verdict)
    }
}

/// Something by this number is on record.
fn stale(id: MigrationId) -> Problem {
    Problem::new(Code::StaleMigration, Blame::Peer, format!("migration {id} has ended here before"))
}

/// Why a daemon that asks learns nothing of a migration.
pub fn no_verdict(id: MigrationId, asks: Option<&str>, why: NoVerdict) -> Problem {
    let asks = asks.unwrap_or("somebody without a certificate");
    tracing::warn!(%id, asks, ?why, "asked for a migration and told nothing");
    match why {
        NoVerdict::AnotherDaemons => {
            Problem::new(Code::TlsNotYours, Blame::Request, format!("migration {id} was begun by another daemon"))
                .hint("give this host's certificate the first DNS name that it had when the migration began")
        }
        NoVerdict::BegunHere => {
            let message = format!("the daemon that answers there is the source of migration {id}, not its destination");
            Problem::new(Code::NotYours, Blame::Request, message)
                .hint("say where the destination is: 'sterna resume NAME --to HOST:PORT'")
        }
        NoVerdict::Unknown => {
            let message = format!("the daemon that answers there has never heard of migration {id}");
            Problem::new(Code::NotKnownHere, Blame::Request, message).hint(
                "is it the right host, and has its daemon the state directory it had? Where its records are lost nobody can tell by asking: \
                 look with your own eyes whether the guest runs there",
            )
        }
    }
}

/// A host's name by its own word, as far as people may be shown it.
fn name_of(host: &str) -> String {
    let fits = (1..=64).contains(&host.len()) && host.chars().all(|c| c.is_ascii_alphanumeric() || "._-:".contains(c));
    if fits { host.into() } else { "its source".into() }
}

impl Destination {
    fn start(&self, id: MigrationId, spec: &VmSpec, from: Option<&str>, postcopy: bool) -> Result<Incoming, Problem> {
        let daemon = &self.0;
        let items = arguments::parse(&spec.arguments);
        let room_bytes = self.room_bytes().saturating_sub(self.promised_bytes());
        // Before anything costs something: those that are put off ask every second.
        daemon.check_incoming(&daemon.table())?;
        let binary = prechecks::check(spec, &items, daemon.config.qemu.as_deref(), room_bytes)?;
        let reservation = daemon.reserve_arriving(&spec.name, id)?;
        daemon.records.prepare(id, &spec.name, from).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => stale(id),
            _ => host("the destination cannot write the migration's record", &error),
        })?;
        self.start_qemu(id, spec, postcopy, &items, binary, reservation).inspect_err(|_| daemon.records.refused(id))
    }

    fn start_qemu(
        &self,
        id: MigrationId,
        spec: &VmSpec,
        postcopy: bool,
        items: &[Item],
        binary: Binary,
        reservation: Reservation,
    ) -> Result<Incoming, Problem> {
        let daemon = &self.0;
        let dir = daemon.state.vm(&spec.name);
        let blocks: Vec<Block> = spec
            .blocks
            .iter()
            .map(|block| Block::new(&block.id, block.bytes, block.page_bytes, &daemon.new_ram_path(&spec.name)))
            .collect();
        let managed = spec.managed_ram.then(|| (spec.memory_bytes, blocks[0].path.as_path()));
        let additions = Additions { name: &spec.name, qmp: &qmp_socket(&dir), ram: managed };
        let files: Vec<(String, PathBuf)> = blocks.iter().map(|block| (block.id.clone(), block.path.clone())).collect();
        let all = arguments::for_incoming(items, &additions, &spec.machine, &files);
        let mut started = daemon.start(&binary.path, &all, &spec.name, blocks)?;
        let mut record = VmRecord {
            name: spec.name.clone(),
            memory_bytes: spec.memory_bytes,
            memory_mode: MemoryMode::Shared,
            trust_group: spec.trust_group.clone(),
            qemu_path: binary.path,
            qemu_version: version(&started.about),
            machine: started.about.machine.clone(),
            arguments: spec.arguments.clone(),
            managed_ram: spec.managed_ram,
            process: started.process,
            qmp: qmp_socket(&dir),
            agent: agent_socket(&dir),
            blocks: started.blocks.clone(),
            owns_ram_files: true,
            balloon: spec.balloon,
            lifecycle: Lifecycle::Incoming(id),
            running: spec.running,
            kept_before: None,
            paging: None,
        };
        let paging = postcopy.then(|| {
            let map = daemon.new_ram_path(&spec.name);
            started.with_file(&map);
            let (means, addresses) = paging::means(&record, &map)?;
            record.paging = Some(Paging { id, from: name_of(&spec.from), map, held_back: false });
            Ok::<_, Problem>((means, addresses))
        });
        let (paging, addresses) = match paging {
            Some(Ok((means, addresses))) => (Some(Ok(means)), addresses),
            Some(Err(problem)) => (Some(Err(problem)), Vec::new()),
            None => (None, Vec::new()),
        };
        let block_files = record.block_files(&addresses).map_err(|error| host("cannot open the RAM files", &error))?;
        let vmm = control::destination(&record, &dir)?;
        reservation.keep(&record, Hold::Arriving(id))?;
        started.keep();
        Ok(Incoming {
            vmm: Box::new(vmm),
            blocks: block_files,
            qemu_version: binary::show(record.qemu_version),
            paging,
        })
    }

    /// Ends a machine on its way here that its source is about to let run: both lock the guest's disks. (The session, which may wait for a source that
    /// is gone, sees its end.)
    ///
    /// # Errors
    /// It does not end: then the source must not be told yet that it may.
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
        self.0.forget(&record.name, record.process);
        Ok(())
    }

    /// Memory that machines on their way here will still need, and those that run here before all their pages are here: a machine promised to
    /// arrive must not starve for a later one.
    fn promised_bytes(&self) -> u64 {
        let (arriving, missing): (Vec<VmRecord>, u64) = {
            let table = self.0.table();
            let entries = table.values().filter(|entry| matches!(entry.hold, Hold::Arriving(_)));
            let missing = table.values().filter_map(|entry| entry.pager.as_ref());
            (entries.filter_map(|entry| entry.record.clone()).collect(), missing.map(|pager| pager.0.missing()).sum())
        };
        let unfilled = arriving.iter().map(|record| record.memory_bytes.saturating_sub(record.allocated_bytes()));
        unfilled.sum::<u64>() + missing.saturating_mul(PAGE_BYTES as u64)
    }

    fn arriving(&self, id: MigrationId) -> Option<VmRecord> {
        let table = self.0.table();
        let entry = table.values().find(|entry| matches!(entry.hold, Hold::Arriving(other) if other == id))?;
        entry.record.clone()
    }
}
