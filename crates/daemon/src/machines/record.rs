//! A machine's durable record: all that a restarted daemon needs to look after it again.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_api::report::Host;
use sterna_api::{BalloonSetting, MemoryMode, Problem};
use sterna_engine::host::MigrationId;
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::common::{Guest, common_bytes};
use sterna_engine::vmm::qemu::Inspection;
use sterna_protocol::layout::Layout;
use sterna_protocol::spec::{BlockSpec, Kin, Ticket, VmSpec};
use sterna_sys::file::reader;
use sterna_sys::huge::transparent_bytes;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::process::maps;
use sterna_sys::{PAGE_BYTES, host};

use super::backing::{Backing, Block, OwnFile, stretches};
use super::base::Base;
use super::card::NewCard;
use super::held::Held;
use super::holder;
use super::overlay::Overlay;
use super::split::SplitRecord;
use super::succession::Succession;
use super::template::Template;
use crate::process::Identity;
use crate::qemu::binary::{self, Version};
use crate::qemu::launch::{agent_socket, qmp_socket};

/// Where a machine is in its life on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lifecycle {
    /// It belongs here.
    Here,
    /// It is being moved away: whether it still belongs here, the migration's record says.
    Outgoing(MigrationId),
    /// It is being moved here: whether it belongs here already, the migration's record says.
    Incoming(MigrationId),
}

/// A machine of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Its name.
    pub name: String,
    /// RAM, bytes.
    pub memory_bytes: u64,
    /// How RAM is mapped.
    pub memory_mode: MemoryMode,
    /// Which machines it may share pages with.
    pub trust_group: Option<String>,
    /// The QEMU binary.
    pub qemu_path: PathBuf,
    /// Its version.
    pub qemu_version: Version,
    /// The exact machine type.
    pub machine: String,
    /// The arguments as the user gave them.
    pub arguments: Vec<String>,
    /// Sterna added the RAM back end itself.
    pub managed_ram: bool,
    /// QEMU's process.
    pub process: Identity,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// The agent's socket.
    pub agent: PathBuf,
    /// Its RAM.
    pub blocks: Vec<Block>,
    /// Sterna made the RAM files: they end with the machine.
    pub owns_ram_files: bool,
    /// How its balloon is handled; records of earlier daemons do not say.
    #[serde(default)]
    pub balloon: BalloonSetting,
    /// What its guest kept, bytes, before its balloon was inflated for a while: a daemon that finds this lets the guest
    /// have it back.
    #[serde(default)]
    pub kept_before: Option<u64>,
    /// Whether its shared memory may be in huge pages; records of earlier daemons do not say.
    #[serde(default = "yes")]
    pub huge_pages: bool,
    /// Its user wants it in small pages, on whatever host it is.
    #[serde(default)]
    pub small_pages: bool,
    /// Where it is in its life here.
    pub lifecycle: Lifecycle,
    /// Whether the guest is to run once it belongs here; of interest while it comes.
    pub running: bool,
    /// It is a clone that is whole, and perhaps does not run yet: whoever finds this lets it.
    #[serde(default)]
    pub begins: bool,
    /// The guest was stopped because this host is short of memory: it goes on when there is some again.
    #[serde(default)]
    pub waits_for_room: bool,
    /// Pages that may come after the guest's start, until all of them are here.
    #[serde(default)]
    pub paging: Option<Paging>,
    /// A part of its memory is at memory hosts, or is about to be.
    #[serde(default)]
    pub split: Option<SplitRecord>,
    /// Another QEMU beside its own, while the guest goes from the one to the other.
    #[serde(default)]
    pub succession: Option<Succession>,
    /// It is being forked, and its guest may stand still: its RAM as it is once it is private.
    #[serde(default)]
    pub forking: Option<Vec<Block>>,
    /// Its RAM is what a fork has left: files that nobody writes and others have, too. Its guest is a clone that goes
    /// to another host, or runs there.
    #[serde(default)]
    pub image: bool,
    /// Overlays that its fork has made, or is about to: its own, until it is known whether its disks are on them, and
    /// its clones'.
    #[serde(default)]
    pub overlays: Vec<Overlay>,
    /// The images under its disks' overlays that forks have left.
    #[serde(default)]
    pub bases: Vec<Base>,
    /// Network cards that are being replaced by others, which its arguments do not name yet.
    #[serde(default)]
    pub new_cards: Vec<NewCard>,
    /// What it can show hosts that it was on before, which may have kept what its memory was.
    #[serde(default)]
    pub tickets: Vec<Ticket>,
    /// It is a clone that waits for whoever takes it.
    #[serde(default)]
    pub held: Option<Held>,
    /// The name of the machine that it was forked from.
    #[serde(default)]
    pub forked_from: Option<String>,
    /// What it is related to by forks: the same word for all of them, and nobody else has it.
    #[serde(default)]
    pub family: Option<String>,
    /// The gang with which it came here.
    #[serde(default)]
    pub came_with: Option<GangKey>,
}

/// What tells one gang from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GangKey {
    /// Its number, by its source's word.
    pub id: u128,
    /// The daemon it comes from, by its certificate.
    pub from: Option<String>,
}

fn yes() -> bool {
    true
}

/// Pages of a machine that come after its guest's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paging {
    /// The migration that brings them.
    pub id: MigrationId,
    /// The host they are at, by its own word.
    pub from: String,
    /// Which of them are missing: a file in memory, so that a daemon started anew goes on. Empty until the guest was to
    /// run without them.
    pub map: PathBuf,
    /// The guest was stopped here because nothing could bring its pages: it is to run once something can.
    #[serde(default)]
    pub held_back: bool,
}

/// A QEMU that runs, as the record of its machine begins with it.
#[derive(Debug)]
pub struct Running<'a> {
    /// Its process.
    pub process: Identity,
    /// Its binary.
    pub path: PathBuf,
    /// What it says of itself.
    pub about: &'a Inspection,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// The agent's socket.
    pub agent: PathBuf,
}

/// The RAM that a machine was started with.
#[derive(Debug)]
pub struct Memory {
    /// Its size.
    pub bytes: u64,
    /// What it is made of.
    pub blocks: Vec<Block>,
    /// Sterna added the back end itself.
    pub managed: bool,
    /// Sterna made the files.
    pub owned: bool,
}

/// The version of a running QEMU.
#[must_use]
pub fn version(about: &Inspection) -> Version {
    (about.version.0, about.version.1, about.version.2)
}

impl VmRecord {
    /// A machine that runs and belongs here, with nothing said of its balloon, its trust group and pages to come.
    #[must_use]
    pub fn new(name: &str, arguments: Vec<String>, qemu: Running<'_>, memory: Memory) -> Self {
        Self {
            name: name.into(),
            memory_bytes: memory.bytes,
            memory_mode: MemoryMode::Shared,
            trust_group: None,
            qemu_path: qemu.path,
            qemu_version: version(qemu.about),
            machine: qemu.about.machine.clone(),
            arguments,
            managed_ram: memory.managed,
            process: qemu.process,
            qmp: qemu.qmp,
            agent: qemu.agent,
            blocks: memory.blocks,
            owns_ram_files: memory.owned,
            balloon: BalloonSetting::default(),
            kept_before: None,
            huge_pages: true,
            small_pages: false,
            lifecycle: Lifecycle::Here,
            running: true,
            begins: false,
            waits_for_room: false,
            paging: None,
            split: None,
            succession: None,
            forking: None,
            image: false,
            overlays: Vec::new(),
            bases: Vec::new(),
            new_cards: Vec::new(),
            tickets: Vec::new(),
            held: None,
            forked_from: None,
            family: None,
            came_with: None,
        }
    }

    /// Checks that its arguments name the network cards and the images that it has.
    ///
    /// # Errors
    /// A [`Problem`]: a card is being replaced, or was and its guest has not let go of it; or a disk is on one of two
    /// images, and QEMU has not said on which.
    pub fn check_settled(&self) -> Result<(), Problem> {
        if self.bases.iter().any(|base| base.committing) {
            return Err(crate::problems::busy(&self.name, "QEMU has not said yet which image its disk is")
                .hint("it is asked again every few seconds"));
        }
        if self.new_cards.is_empty() {
            return Ok(());
        }
        Err(crate::problems::busy(&self.name, "a network card of it is being replaced, and is not yet")
            .hint(format!("'sterna link {} up --new-mac' goes on with that", self.name)))
    }

    /// Whether its RAM is to be in huge pages, as far as this host has them: not in private memory, where a huge page
    /// would be memory that the guest did not write.
    #[must_use]
    pub fn wants_huge_pages(&self) -> bool {
        self.huge_pages && self.memory_mode == MemoryMode::Shared && transparent_bytes().is_some()
    }

    /// Where the RAM is that may be in huge pages: blocks of small pages that begin where a huge page can.
    ///
    /// # Errors
    /// Its process does not say.
    pub fn huge_spans(&self) -> io::Result<Vec<(&Block, Range<u64>)>> {
        let Some(huge) = transparent_bytes().filter(|_| self.wants_huge_pages()) else { return Ok(Vec::new()) };
        let maps = maps(self.process.pid)?;
        let span = |block: &Block| {
            let stretches = stretches(&maps, block.file().ok()?);
            let mapped = stretches.into_iter().find(|stretch| stretch.length >= block.bytes)?;
            let fits = block.private.is_none() && block.page_bytes == PAGE_BYTES && mapped.address.is_multiple_of(huge);
            fits.then(|| mapped.address..mapped.address + block.bytes)
        };
        Ok(self.blocks.iter().filter_map(|block| Some((block, span(block)?))).collect())
    }

    /// How much of its RAM is mapped by huge pages, bytes; none where it cannot be looked at.
    #[must_use]
    pub fn huge_bytes(&self) -> u64 {
        let look = || -> io::Result<u64> {
            let (pagemap, mut regions, mut bytes) = (Pagemap::open(self.process.pid)?, Vec::new(), 0);
            for (_, span) in self.huge_spans()? {
                pagemap.huge(span, &mut regions)?;
                bytes += regions.iter().map(|region| region.end - region.start).sum::<u64>();
            }
            Ok(bytes)
        };
        look().unwrap_or(0)
    }

    /// The machine as it is once its directory has been renamed to `dir`, which is that of this name.
    #[must_use]
    pub fn renamed(&self, name: &str, dir: &Path) -> Self {
        Self { name: name.into(), qmp: qmp_socket(dir), agent: agent_socket(dir), ..self.clone() }
    }

    /// Whether it is being taken, and gets this name.
    #[must_use]
    pub fn is_taken_as(&self, name: &str) -> bool {
        let taking = self.held.as_ref().and_then(|held| held.taking.as_ref());
        taking.is_some_and(|taking| taking.to == name)
    }

    /// This host with the machine's QEMU, as reports name it.
    #[must_use]
    pub fn here(&self) -> Host {
        Host {
            host: host::name(),
            address: String::new(),
            sterna: env!("CARGO_PKG_VERSION").into(),
            qemu: binary::show(self.qemu_version),
            cpu_s: 0.0,
        }
    }

    /// What it is related to by forks.
    #[must_use]
    pub fn kin(&self) -> Option<Kin> {
        self.family.clone().map(|family| Kin { family, forked_from: self.forked_from.clone() })
    }

    /// How its RAM is laid out.
    ///
    /// # Errors
    /// The record is not of a machine that can be.
    pub fn layout(&self) -> io::Result<Layout> {
        let blocks: Vec<BlockSpec> = self.blocks.iter().map(Block::spec).collect();
        Layout::new(&blocks).map_err(io::Error::other)
    }

    /// The files that hold its RAM.
    pub fn backings(&self) -> impl Iterator<Item = &Backing> {
        self.blocks.iter().flat_map(|block| &block.backings)
    }

    /// The files in memory that end with the machine.
    #[must_use]
    pub fn own_files(&self) -> Vec<OwnFile> {
        let made = self.blocks.iter().filter(|_| self.owns_ram_files);
        let ram = made.flat_map(|block| {
            // Of a record that does not say which files these were, nothing but the name is known.
            let unknown = block.backings.is_empty().then(|| OwnFile { path: block.path.clone(), file: None });
            let owned = block.backings.iter().filter(|backing| backing.owned);
            owned.map(|backing| OwnFile { path: backing.path.clone(), file: Some(backing.file()) }).chain(unknown)
        });
        // Files that were to hold it after a fork, and do not yet.
        let forking = self.forking.iter().flatten().flat_map(|block| &block.backings);
        let forking = forking.map(|backing| OwnFile { path: backing.path.clone(), file: Some(backing.file()) });
        // Where pages follow a machine that is split, one map says what is at its source and what at memory hosts.
        let is_map = |split: &SplitRecord| self.paging.as_ref().is_some_and(|paging| paging.map == split.map);
        ram.chain(forking)
            .chain(self.paging.iter().map(|paging| OwnFile { path: paging.map.clone(), file: None }))
            .chain(
                self.split
                    .iter()
                    .filter(|split| !is_map(split))
                    .map(|split| OwnFile { path: split.map.clone(), file: None }),
            )
            .collect()
    }

    /// The file that its private memory began as.
    #[must_use]
    pub fn template(&self) -> Option<&Template> {
        self.blocks.iter().find_map(|block| block.template.as_ref())
    }

    /// Checks that the file that its private memory began as is as it was then.
    ///
    /// # Errors
    /// A [`Problem`]: the guest's RAM may be damaged.
    pub fn check_template(&self) -> Result<(), Problem> {
        let mut begun = self.blocks.iter().filter_map(|block| Some((block, block.template.as_ref()?, block.private?)));
        begun.try_for_each(|(block, template, address)| {
            template.check(&self.name, self.process.pid, &(address..address.saturating_add(block.bytes)))
        })
    }

    /// RAM the host has given memory for, for this machine alone, bytes.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.allocated_bytes(self.process.pid)).sum()
    }

    /// RAM the host has given memory for, for this machine and those that it has it in common with, bytes.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.content_bytes(self.process.pid)).sum()
    }

    /// Its private memory.
    #[must_use]
    pub fn private_memory(&self) -> Guest {
        let part = |block: &Block| block.private.map(|address| address..address.saturating_add(block.bytes));
        Guest { pid: self.process.pid, addresses: self.blocks.iter().filter_map(part).collect() }
    }

    /// How much of its RAM other machines may have in common with it, bytes: what it takes in addition where it writes
    /// all of that. None where it cannot be looked at.
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        let private = self.memory_mode == MemoryMode::Private;
        if private { common_bytes(&self.private_memory()).unwrap_or(0) } else { 0 }
    }

    /// The machine as its destination must know it; `about`: as its QEMU is now.
    #[must_use]
    pub fn spec(&self, about: &Inspection) -> VmSpec {
        let host_cpu = about.accelerator == "kvm" && matches!(about.cpu.as_deref(), Some("host" | "max"));
        VmSpec {
            name: self.name.clone(),
            memory_bytes: self.memory_bytes,
            private: self.memory_mode == MemoryMode::Private,
            trust_group: self.trust_group.clone(),
            qemu_version: self.qemu_version,
            qemu_path: self.qemu_path.display().to_string(),
            machine: self.machine.clone(),
            arguments: self.arguments.clone(),
            managed_ram: self.managed_ram,
            blocks: self.blocks.iter().map(Block::spec).collect(),
            cpu: host_cpu.then(crate::qemu::cpu::describe).flatten(),
            // It shares with nobody there, so what it has in common with others here it needs, too.
            allocated_bytes: self.content_bytes(),
            balloon: self.balloon,
            running: about.running || self.waits_for_room,
            from: host::name(),
            kin: self.kin(),
            split: None,
            small_pages: self.small_pages,
        }
    }

    /// The RAM blocks with their files open; `addresses` in QEMU in the same order, or none. Where QEMU has ended its
    /// RAM is still in its files: they are opened by the paths they have here. Private memory ends with QEMU.
    ///
    /// # Errors
    /// Where a file is gone; of private memory, where the agent does not answer.
    pub fn block_files(&self, addresses: &[u64]) -> io::Result<Vec<BlockFile>> {
        let process = self.process.open();
        let holder = match self.blocks.iter().any(|block| block.private.is_some()) {
            true => Some(holder::holder(&self.agent, self.process.pid)?),
            false => None,
        };
        let open = |(index, block): (usize, &Block)| {
            let address = block.private.or_else(|| addresses.get(index).copied()).unwrap_or(0);
            let file = match &process {
                Some(_) => block.open(self.process.pid)?,
                None => block.open_here()?,
            };
            // Nobody may have one open for writing.
            let file = if self.image { reader(&file)? } else { file };
            Ok(BlockFile { file, address, spec: block.spec(), process: holder.clone() })
        };
        self.blocks.iter().enumerate().map(open).collect()
    }
}

#[cfg(test)]
impl VmRecord {
    /// The record of a machine `m` without RAM, as an early daemon wrote it: it knew nothing of huge pages.
    pub fn sample() -> Self {
        serde_json::from_value(serde_json::json!({
            "name": "m", "memory_bytes": 4096, "memory_mode": "shared", "trust_group": null, "qemu_path": "/q",
            "qemu_version": [7, 2, 0], "machine": "none", "arguments": [], "managed_ram": true,
            "process": { "pid": 1, "start_ticks": 0, "boot": 0 }, "qmp": "/q.sock", "agent": "/a.sock", "blocks": [],
            "owns_ram_files": true, "lifecycle": "here", "running": true
        }))
        .expect("a record")
    }
}
