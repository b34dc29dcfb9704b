//! A clone: started while its source runs, and brought to life when that has run on.

use std::io::Write;
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sterna_api::units::milliseconds;
use sterna_api::{Cloned, ForkRequest, MemoryMode, Problem};
use sterna_engine::agent::Agent;
use sterna_engine::fork::Image;
use sterna_engine::vmm::qemu::QemuDestination;
use sterna_engine::vmm::{Destination, VmmError};

use super::overlays::{Made, Overlays};
use crate::care::Care;
use crate::link::{self, new_mac};
use crate::machines::claim::Reservation;
use crate::machines::control;
use crate::machines::held::{Held, Ready};
use crate::machines::hold::Hold;
use crate::machines::record::{Memory, VmRecord};
use crate::machines::start::{Launcher, Reached, Started};
use crate::problems;
use crate::qemu::arguments::{self, Additions, Item};
use crate::qemu::launch::{log_file, qmp_socket};
use crate::qemu::{clone, files, vmgenid};

/// The memory that a QEMU needs beside its guest's RAM, bytes.
pub const QEMU_BYTES: u64 = 64 << 20;
/// How long a clone's QEMU may take to read and load its devices.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);

/// What all clones of one request are to be.
pub struct Plan<'a> {
    source: &'a VmRecord,
    /// Its arguments.
    own: Vec<Item>,
    machine: &'a str,
    items: Vec<Item>,
    /// Its user gave the arguments, and with them its network.
    given: bool,
    paused: bool,
    new_mac: bool,
    held: Option<Held>,
}

impl<'a> Plan<'a> {
    /// Clones of this machine, which is exactly of this type.
    ///
    /// # Errors
    /// A [`Problem`]: arguments that a clone cannot have.
    pub fn new(source: &'a VmRecord, machine: &'a str, request: &ForkRequest) -> Result<Self, Problem> {
        let own = arguments::parse(&source.arguments);
        let items = match &request.arguments {
            Some(given) => arguments::parse(given),
            None => clone::of(&own)?,
        };
        arguments::check_for_run(&items, false)?;
        if let Some((item, reason)) = arguments::unfit_for_private(&items) {
            return Err(clone::refused(item, reason).hint("give the clones' arguments without it"));
        }
        files::check_absolute(&items)?;
        clone::check(&items, &own)?;
        let (given, paused, new_mac) = (request.arguments.is_some(), request.paused, request.new_mac);
        Ok(Self { source, own, machine, items, given, paused, new_mac, held: None })
    }

    /// The same clones, held ready where there is something that they are held for.
    pub fn holding(self, held: Option<Held>) -> Self {
        Self { held, ..self }
    }

    /// The arguments of a clone: with overlays of its own, and a generation ID.
    ///
    /// # Errors
    /// As [`Overlays::onto`].
    pub fn items(&self, overlays: &Overlays, name: &str) -> Result<Vec<Item>, Problem> {
        let items = overlays.onto(&self.items, &self.source.name, name)?;
        Ok(vmgenid::renewed(&items, &self.own))
    }

    /// Whether the clones' network is their user's.
    pub fn is_connected(&self) -> bool {
        self.given
    }

    /// Whether the clones run.
    pub fn runs(&self) -> bool {
        !self.paused
    }

    /// Checks that these overlays can be the clones' disks.
    ///
    /// # Errors
    /// As [`Overlays::onto`].
    pub fn check(&self, overlays: &Overlays) -> Result<(), Problem> {
        let name = &self.source.name;
        overlays.onto(&self.items, name, name).map(drop)
    }

    /// Starts the QEMU of a clone; it waits for its guest.
    ///
    /// # Errors
    /// A [`Problem`]; nothing of it is left.
    pub fn begin(
        &self,
        launcher: &Launcher,
        overlays: &Overlays,
        (name, reservation, disks): (String, Reservation, Made),
    ) -> Result<Begun, Problem> {
        let (source, name) = (self.source, name.as_str());
        let items = self.items(overlays, name)?;
        let blocks = launcher.blocks_like(name, &source.blocks);
        let dir = launcher.state.vm(name);
        let qmp = qmp_socket(&dir);
        let ram = blocks.first().map(|block| (source.memory_bytes, block.path.clone()));
        let ram = ram.as_ref().map(|(bytes, path)| (*bytes, path.as_path()));
        let all = arguments::for_incoming(&items, &Additions { name, qmp: &qmp, ram, huge: false }, self.machine, &[]);
        let kind = launcher.ram_kind(MemoryMode::Private, source.trust_group.as_deref());
        let (started, mut reached) = launcher.start(&source.qemu_path, &all, name, (kind, blocks), None)?;
        let memory = Memory { bytes: source.memory_bytes, blocks: started.blocks.clone(), managed: true, owned: true };
        let mut record = VmRecord {
            memory_mode: MemoryMode::Private,
            trust_group: source.trust_group.clone(),
            balloon: source.balloon,
            running: !self.paused,
            bases: overlays.bases(source, name),
            overlays: self.held.as_ref().map(|_| overlays.of(name)).unwrap_or_default(),
            held: self.held.clone(),
            forked_from: Some(source.name.clone()),
            family: source.family.clone(),
            ..VmRecord::new(name, arguments::unparse(&items), started.qemu(source.qemu_path.clone()), memory)
        };
        if self.new_mac {
            let cards = link::cards(&mut reached.control)?;
            record.new_cards = new_mac::plan(&record, &mut reached.control, &cards)?;
        }
        let inlet = Inlet::open(reached, &record, log_file(&dir), self.given)?;
        Ok(Begun { started, disks, reservation, record, inlet })
    }
}

/// A clone whose QEMU waits for its guest. Dropped, nothing of it is left.
pub struct Begun {
    // In this order: what was started ends before the name is anybody's again.
    started: Started,
    disks: Made,
    reservation: Reservation,
    record: VmRecord,
    inlet: Inlet,
}

/// What brings a clone to life, reached before its source stands still.
struct Inlet {
    agent: Agent,
    /// Where its QEMU has its RAM.
    ram: Vec<Range<u64>>,
    driver: QemuDestination,
    /// On which that waits for its devices.
    devices: UnixStream,
}

impl Inlet {
    /// Of a clone whose QEMU was just reached and writes to `log`. `connected`: its network is its user's.
    fn open(reached: Reached, record: &VmRecord, log: PathBuf, connected: bool) -> Result<Self, Problem> {
        let Reached { control, agent, addresses } = reached;
        let ram = record.blocks.iter().zip(addresses).map(|(block, at)| at..at + block.bytes).collect();
        let driver = control::destination(control, record, log)?.as_clone(connected);
        let mut driver = if record.held.is_some() { driver.staying_paused() } else { driver };
        let devices = driver.prepare().map_err(|error| not_loaded(&error))?;
        Ok(Self { agent, ram, driver, devices })
    }
}

impl Begun {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Brings it to life: with this RAM and these devices. `began`: when it was asked for.
    ///
    /// # Errors
    /// A [`Problem`]; nothing of it is left.
    pub fn load(self, care: &Care, image: &Image, devices: &[u8], began: Instant) -> Result<Cloned, Problem> {
        // The last one is dropped first: a QEMU that may run ends before its overlays are looked at.
        let Self { record, reservation, disks, inlet, started } = self;
        let Inlet { mut agent, ram, mut driver, devices: mut stream } = inlet;
        image.lay(&mut agent, &ram).map_err(|error| error.problem())?;
        tracing::debug!(vm = record.name, "the clone has its memory");
        let written = stream.set_write_timeout(Some(DEVICE_TIMEOUT)).and_then(|()| stream.write_all(devices));
        let _ = stream.shutdown(Shutdown::Write);
        // A QEMU that refuses the state breaks its way: then its reason is the one to tell.
        driver.loaded(DEVICE_TIMEOUT).map_err(|error| not_loaded(&error))?;
        written.map_err(|error| problems::host("cannot give the clone its devices", &error))?;
        tracing::debug!(vm = record.name, "the clone has its devices");
        // Its guest has done nothing until now.
        image.wait_until_nobody_writes().map_err(|error| error.problem())?;
        if record.running && record.held.is_none() {
            // Who runs writes its disks: from here on no daemon ends it for want of a record.
            reservation.note(&VmRecord { begins: true, ..record.clone() })?;
            driver.start().map_err(|error| control::refused("let the clone run", &error))?;
        }
        tracing::debug!(vm = record.name, "the clone runs");
        let ms = milliseconds(began.elapsed());
        drop(driver);
        let ready = |held: &Held| Hold::busy(Ready { template: held.template.clone() });
        reservation.keep(&record, record.held.as_ref().map_or(Hold::Free, ready))?;
        started.keep();
        disks.keep();
        if record.held.is_none() {
            care.watch(&record);
        }
        Ok(Cloned { vm: record.name, pid: record.process.pid, ms, host: None, lacks: None })
    }
}

fn not_loaded(error: &VmmError) -> Problem {
    control::refused("load the clone's devices", error)
}
