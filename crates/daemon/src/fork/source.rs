//! The machine that is forked.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_api::{Blame, Code, ForkRequest, MemoryMode, Problem};
use sterna_engine::agent::{AddressRange, Advice, Agent, AgentError, UnderWay};
use sterna_engine::error::MigrateError;
use sterna_engine::fork::layer::{Draft, Layer, MOST_PIECES};
use sterna_engine::fork::{Image, NotSaved, Saved, save};
use sterna_engine::inside::{InsideQemu, under_way};
use sterna_engine::memory::kind;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::vmm::qemu::{Disk, Inspection, QemuSource, SharedQmp, lock, writable_disks};
use sterna_engine::vmm::{Source as _, Untracked};
use sterna_protocol::spec::VmSpec;
use sterna_sys::file;
use sterna_sys::map::Access;
use sterna_sys::process::{descriptors_of, maps};

use super::overlays::{Made, Opened, Overlays, as_they_are};
use crate::machines::agent;
use crate::machines::backing::{Block, is_shared};
use crate::machines::control::{self, Control};
use crate::machines::overlay::Overlay;
use crate::machines::reach::{check_disks, check_movable};
use crate::machines::record::VmRecord;
use crate::machines::start::Launcher;
use crate::problems::host;
use crate::qemu::arguments;
use crate::qemu::launch::make_ram_file;

/// How many mappings an image takes at most where it goes: its pieces, and what lies between them.
pub const MOST_MAPPINGS: u64 = 2 * MOST_PIECES as u64;

/// So much RAM is taken out of page tables in one call, bytes. QEMU cannot change what it has mapped meanwhile.
const EMPTIED_AT_ONCE: u64 = 16 << 20;

/// The machine that is forked, reached, with all that is needed in its pause.
pub struct Source {
    driver: QemuSource,
    freezing: Freezing,
    about: Inspection,
    qmp: SharedQmp,
    /// Its disks that can be written.
    disks: Vec<Disk>,
    /// The overlays of its disks.
    overlays: Option<Opened>,
    /// Whether the guest runs.
    pub running: bool,
}

/// What makes of its RAM what others can begin as.
pub struct Freezing {
    record: VmRecord,
    agent: Agent,
    /// Where QEMU has its RAM.
    ram: Vec<Range<u64>>,
    /// Its RAM as it is once it is private.
    private: Vec<Block>,
    /// Of shared RAM, what stands for it afterwards.
    stand_ins: Vec<StandIn>,
    /// And what its page tables are still to be emptied of.
    mapped: Vec<AddressRange>,
    /// Of private RAM, the file that its own pages become, once they are copied.
    draft: Option<Draft>,
    /// A directory on the file system of machines' RAM.
    dir: PathBuf,
    /// Its disks read past the page tables, and its agent tells of it.
    past: bool,
    /// Its pause has begun: what becomes of its files is asked afterwards.
    begun: bool,
}

/// The empty file that takes the place of a RAM file inside QEMU.
struct StandIn {
    file: File,
    /// The numbers of QEMU's descriptors of the RAM file.
    numbers: Vec<u32>,
    /// Data that is nearer than this becomes one piece, bytes; `None` until the file was looked at.
    bridged: Option<u64>,
}

/// RAM that nobody writes.
pub struct Frozen {
    /// What it is.
    pub image: Arc<Image>,
    /// The file that it became now, open for reading only.
    pub latest: File,
    /// What of it was copied, bytes.
    pub copied_bytes: u64,
    /// What of that was copied in the pause.
    pub late_bytes: u64,
}

/// Checks by what is on record of a machine that it can be forked.
///
/// # Errors
/// A [`Problem`]: what is in the way.
pub fn check(record: &VmRecord) -> Result<(), Problem> {
    let name = &record.name;
    if !record.managed_ram {
        return Err(refused(name, "its RAM was not made by Sterna", "start it with 'sterna run'"));
    }
    if let Some((item, reason)) = arguments::unfit_for_private(&arguments::parse(&record.arguments)) {
        let why = format!("it was started with '-{}': {reason}", item.option);
        return Err(refused(name, &why, "start it without"));
    }
    record.check_settled()?;
    record.check_template()
}

fn refused(name: &str, why: &str, hint: &str) -> Problem {
    Problem::new(Code::CannotFork, Blame::Request, format!("'{name}' cannot be forked: {why}")).hint(hint)
}

impl Source {
    /// Reaches a machine that was [checked](check), and checks by what its QEMU says that it can be forked. `dir` is on
    /// the file system of machines' RAM.
    ///
    /// # Errors
    /// A [`Problem`]: who does not answer, or what is in the way.
    pub fn reach(record: &VmRecord, launcher: &Launcher, dir: &Path, request: &ForkRequest) -> Result<Self, Problem> {
        let name = &record.name;
        let mut control = Control::connect(&record.qmp)?;
        let about = control.inspect()?;
        check_movable(name, "be forked", &about)?;
        check_disks(record, &about)?;
        let disks = writable_disks(control.qmp()).map_err(|error| control::refused("tell its disks", &error))?;
        if !disks.is_empty() && !request.overlay_disks {
            let list: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
            let why = format!("its clones would write the same disk ({})", list.join(", "));
            return Err(refused(name, &why, "with --overlay-disks each has an overlay of its own"));
        }
        let qmp = control.share();
        let mut driver = control::source(record, SharedQmp::clone(&qmp))?;
        let running = driver.running().map_err(|error| control::refused("tell its state", &error))?;
        let past = control::reads_past(record, &mut driver, &format!("'{}' cannot be forked", record.name))?;
        let pid = record.process.pid;
        let (agent, addresses) = control::agent_and_addresses(&record.agent, pid, &record.blocks)?;
        let ram = record.blocks.iter().zip(&addresses).map(|(block, at)| *at..*at + block.bytes).collect();
        let private = record.blocks.clone();
        let draft = match record.memory_mode {
            // What goes to other hosts must be whole in one file, which they are told of before the pause.
            MemoryMode::Private if !request.to.is_empty() => Some(draft(record, &addresses, dir, past)?.whole()),
            _ => None,
        };
        let (record, stand_ins, mapped, dir) = (record.clone(), Vec::new(), Vec::new(), dir.to_owned());
        let mut freezing = Freezing { record, agent, ram, private, stand_ins, mapped, draft, dir, past, begun: false };
        freezing.prepare(launcher).map_err(|error| host("cannot prepare the machine's RAM", &error))?;
        Ok(Self { driver, freezing, about, qmp, disks, overlays: None, running })
    }

    /// Its disks that can be written.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Makes overlays of its disks, of which it goes on with its own from its pause on.
    ///
    /// # Errors
    /// As [`Overlays::make`].
    pub fn make_overlays(&mut self, overlays: &Overlays) -> Result<(), Problem> {
        let record = &mut self.freezing.record;
        let opened = overlays.make(&self.qmp, &record.name)?;
        record.overlays.clone_from(&overlays.all);
        self.driver.onto_overlays(opened.nodes.clone());
        self.overlays = Some(opened);
        Ok(())
    }

    /// The overlays that were made of its disks, for whomever.
    pub fn overlays(&self) -> &[Overlay] {
        &self.freezing.record.overlays
    }

    /// Takes the overlays that were made for this clone.
    pub fn take_overlays(&mut self, clone: &str) -> Made {
        self.overlays.as_mut().map(|opened| opened.take(clone)).unwrap_or_default()
    }

    /// The machine as it was forked, as its disks are now.
    ///
    /// # Errors
    /// As [`as_they_are`].
    pub fn with_its_disks(&self, now: &VmRecord) -> Result<VmRecord, Problem> {
        as_they_are(now, &mut lock(&self.qmp))
    }

    /// The machine as a destination must know it.
    pub fn spec(&self) -> VmSpec {
        self.freezing.record.spec(&self.about)
    }

    /// The one file that is the image once the machine is forked, where its clones go to other hosts.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn image_file(&self) -> io::Result<File> {
        match (&self.freezing.draft, self.freezing.record.blocks.as_slice()) {
            (Some(draft), [_]) => draft.file().try_clone(),
            (None, [block]) => block.open(self.freezing.record.process.pid),
            _ => Err(io::Error::other("its RAM is in several blocks")),
        }
    }

    /// The record of the machine while it is forked.
    pub fn on_record(&self) -> VmRecord {
        let forking = Some(self.freezing.private.clone());
        VmRecord { forking, running: self.running, ..self.freezing.record.clone() }
    }

    /// Does what the pause needs and can be done before it, which takes as long as a clone's QEMU takes to start.
    ///
    /// # Errors
    /// As [`Freezing::copy_ahead`]; or QEMU does not take its settings.
    pub fn get_ready(&mut self) -> Result<(), Problem> {
        let prepared = self.driver.prepare();
        prepared.map_err(|error| control::refused("prepare to save its devices", &error))?;
        self.copy_ahead()
    }

    /// As [`Freezing::empty_page_tables`].
    pub fn empty_page_tables(&mut self, no_time_left: &AtomicBool) {
        self.freezing.empty_page_tables(no_time_left);
    }

    /// There will be no pause: its QEMU's settings are what they were.
    pub fn called_off(&mut self) {
        let _ = self.driver.rollback();
    }

    /// As [`Freezing::copy_ahead`].
    ///
    /// # Errors
    /// As there.
    pub fn copy_ahead(&mut self) -> Result<(), Problem> {
        self.freezing.copy_ahead()
    }

    /// Ends what it costs to copy while the guest runs, which it does again, and what its pause has left to be done.
    pub fn runs_on(&mut self) {
        self.freezing.draft = None;
        if let Err(error) = self.freezing.agent.finish() {
            tracing::debug!(%error, "what its RAM was is unmapped later");
        }
    }

    /// The pause. `freeze` is called when nothing uses RAM.
    ///
    /// # Errors
    /// As [`save`].
    pub fn save(
        &mut self,
        mut freeze: impl FnMut(&mut Freezing) -> Result<(), MigrateError>,
    ) -> Result<Saved, NotSaved> {
        let freezing = &mut self.freezing;
        freezing.begun = true;
        if let Some(opened) = self.overlays.take() {
            opened.leave(&freezing.record.name);
        }
        save(&mut self.driver, &mut || freeze(freezing))
    }
}

/// Begins to watch a machine's private RAM, for the file that its own pages become. `dir` is on the file system of
/// machines' RAM. `past`: its disks read past the page tables.
///
/// # Errors
/// A [`Problem`]: no memory is left, or what does not answer.
pub fn draft(record: &VmRecord, addresses: &[u64], dir: &Path, past: bool) -> Result<Draft, Problem> {
    let pid = record.process.pid;
    let blocks = record.block_files(addresses).map_err(|error| host("cannot open the machine's RAM", &error))?;
    let file = file::unnamed(dir).map_err(|error| host("cannot make a file for the guest's own pages", &error))?;
    // A connection of its own: what the pause asks of the agent waits for nothing else.
    let agent = agent::connect(&record.agent, pid).map_err(|error| error.problem())?;
    let begin = || -> Result<Draft, MigrateError> {
        let tracker = WriteProtect::new(pid, InsideQemu::new(agent))?.for_own_pages();
        let untracked = if past { Untracked::Reads } else { Untracked::Nobody };
        Draft::begin(pid, kind::open(&blocks, Access::Read)?, Box::new(tracker), file, untracked)
    };
    begin().map_err(|error| error.problem())
}

impl Freezing {
    /// Of shared RAM: the files that take its files' place.
    fn prepare(&mut self, launcher: &Launcher) -> io::Result<()> {
        if self.record.memory_mode == MemoryMode::Private {
            return Ok(());
        }
        let pid = self.record.process.pid;
        for ((block, ram), private) in self.record.blocks.iter().zip(&self.ram).zip(&mut self.private) {
            let path = launcher.new_ram_path(&self.record.name);
            *private = Block::new(&block.id, block.bytes, block.page_bytes, &path);
            private.private = Some(ram.start);
            let file = make_ram_file(&path, block.bytes, launcher.user.as_ref())?;
            private.recall_here()?;
            let numbers = descriptors_of(pid, block.file()?)?;
            self.stand_ins.push(StandIn { file, numbers, bridged: None });
        }
        Ok(())
    }

    /// Does what [`freeze`](Self::freeze) needs, as far as that can be done while the guest runs: copies its own pages,
    /// or looks where its files have data. This takes the longer the more RAM there is. To be called at least once
    /// before the pause; called again it copies what was written since.
    ///
    /// # Errors
    /// A [`Problem`]: no memory is left, or what does not answer.
    pub fn copy_ahead(&mut self) -> Result<(), Problem> {
        match (self.record.memory_mode, &mut self.draft) {
            (MemoryMode::Shared, _) => {
                self.look_ahead().map_err(|error| host("cannot look at the machine's RAM", &error))
            }
            (MemoryMode::Private, Some(draft)) => draft.copy_ahead().map_err(|error| error.problem()),
            (MemoryMode::Private, None) => {
                let addresses: Vec<_> = self.ram.iter().map(|block| block.start).collect();
                let mut draft = draft(&self.record, &addresses, &self.dir, self.past)?;
                draft.copy_ahead().map_err(|error| error.problem())?;
                self.draft = Some(draft);
                Ok(())
            }
        }
    }

    /// Looks where the files of shared RAM have data, and has the agent do so.
    fn look_ahead(&mut self) -> io::Result<()> {
        let pid = self.record.process.pid;
        let each = self.stand_ins.iter_mut().zip(&self.record.blocks).zip(&self.ram);
        for ((stand_in, block), ram) in each.filter(|((stand_in, _), _)| stand_in.bridged.is_none()) {
            let file = file::reader(block.open(pid)?)?;
            let data = file::allocated_runs(&file, 0..block.bytes).collect::<sterna_sys::Result<Vec<_>>>()?;
            let bridged = *stand_in.bridged.insert(bridged(&data));
            if let Err(error) = self.agent.look_ahead(file.as_fd(), bridged) {
                tracing::debug!(%error, "where its RAM has data is looked for in the guest's pause");
            }
            if is_shared(&maps(pid)?, ram, block.file()?) {
                self.mapped.extend(steps(ram.start, &data));
            }
        }
        Ok(())
    }

    /// Has the kernel forget where QEMU has mapped the pages of files, of which RAM is a shared mapping, until there is
    /// no time for more. They stay in the files with all that was written, and the guest, which runs, finds each again
    /// with a fault: it has to after the fork, too, in a new mapping. What is left in the page tables is unmapped after
    /// the pause, page by page, and clones wait for that: 0.2 s for 3 GiB.
    pub fn empty_page_tables(&mut self, no_time_left: &AtomicBool) {
        let steps = std::mem::take(&mut self.mapped);
        for step in steps.iter().take_while(|_| !no_time_left.load(Ordering::Relaxed)) {
            if let Err(error) = self.agent.advise(Advice::DontNeed, std::slice::from_ref(step)) {
                tracing::debug!(%error, "what its RAM was is unmapped after the guest's pause");
                return;
            }
        }
        tracing::debug!(steps = steps.len(), "page tables are empty, as far as there was time");
    }

    /// Makes the guest's RAM, which nothing uses now, what others can begin as.
    ///
    /// # Errors
    /// RAM reads as before; whether it is private by then is to be asked.
    pub fn freeze(&mut self) -> Result<Frozen, MigrateError> {
        let pid = self.record.process.pid;
        let (latest, copied_bytes, late_bytes) = match (self.record.memory_mode, &mut self.draft) {
            (MemoryMode::Shared, _) => {
                self.check_reads()?;
                (self.make_private()?, 0, 0)
            }
            (MemoryMode::Private, Some(draft)) => {
                let Layer { file, bytes, late_bytes } = draft.lay_over(&mut self.agent)?;
                (file, bytes, late_bytes)
            }
            (MemoryMode::Private, None) => return Err(MigrateError::Bug("nothing was copied ahead")),
        };
        tracing::debug!("files are in the place of its own pages");
        let image = Image::of(pid, &self.ram).map_err(MigrateError::host("looking at the guest's RAM"))?;
        Ok(Frozen { image: Arc::new(image), latest, copied_bytes, late_bytes })
    }

    /// Checks that nothing is being read past the page tables, into pages that are to be nobody's: QEMU has drained its
    /// disks.
    fn check_reads(&mut self) -> Result<(), MigrateError> {
        if !self.past {
            return Ok(());
        }
        let doing = "telling what is being read into guest RAM";
        let failed = |source| MigrateError::Agent { doing, source: Box::new(source) };
        let table = self.agent.transfers().map_err(failed)?;
        match under_way(&mut self.agent, &table)? {
            UnderWay::Ranges(ranges) if ranges.is_empty() => Ok(()),
            _ => Err(MigrateError::UntoldReads),
        }
    }

    /// Makes private RAM of shared RAM; its file is nobody's but root's then.
    fn make_private(&mut self) -> Result<File, MigrateError> {
        let doing = "making its guest's RAM private";
        let failed = |source| MigrateError::Agent { doing, source: Box::new(source) };
        let pid = self.record.process.pid;
        let mut latest = None;
        for (index, stand_in) in self.stand_ins.iter().enumerate() {
            let block = &self.record.blocks[index];
            let open = || -> io::Result<(File, (u64, u64))> {
                let known_by = stand_in.file.metadata()?;
                Ok((file::reader(block.open(pid)?)?, (known_by.dev(), known_by.ino())))
            };
            let (file, known_by) = open().map_err(MigrateError::host(doing))?;
            let at = AddressRange { address: self.ram[index].start, length: block.bytes };
            self.agent.make_private(file.as_fd(), at, stand_in.bridged.unwrap_or(0), known_by).map_err(failed)?;
            take_from_its_user(&file).map_err(MigrateError::host(doing))?;
            put_in_place(&mut self.agent, &stand_in.numbers, &stand_in.file).map_err(failed)?;
            latest = Some(file);
        }
        latest.ok_or(MigrateError::Bug("a machine without RAM"))
    }
}

impl Drop for Freezing {
    fn drop(&mut self) {
        if !self.begun {
            let pairs = self.record.blocks.iter().zip(&self.private);
            let made = pairs.filter(|(block, private)| block.path != private.path);
            made.for_each(|(_, private)| drop(std::fs::remove_file(&private.path)));
        }
    }
}

/// Whose file it is may open it again for writing. Who has done so by now is found before a clone runs. Not done before
/// RAM is private: a guest whose RAM stays shared keeps a file that another QEMU of its user can open.
pub(super) fn take_from_its_user(file: &File) -> io::Result<()> {
    let root = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    fchown(file, Some(root.0), Some(root.1))
}

/// What QEMU discards of its guest's RAM it punches out of the file that it has: the empty one from now on.
pub(super) fn put_in_place(agent: &mut Agent, numbers: &[u32], stand_in: &File) -> Result<(), AgentError> {
    numbers.iter().try_for_each(|number| agent.put_descriptor(*number, stand_in.as_fd()))
}

/// How near pieces of a file's data must be to become one, so that there are not too many, bytes.
fn bridged(data: &[Range<u64>]) -> u64 {
    let mut holes: Vec<u64> = data.windows(2).map(|pair| pair[1].start - pair[0].end).collect();
    holes.sort_unstable_by(|one, other| other.cmp(one));
    // Half of them: the guest runs on, and its data comes in more pieces.
    holes.get(MOST_PIECES / 2).map_or(0, |hole| hole + 1)
}

/// Data of a file that is RAM, in steps of [`EMPTIED_AT_ONCE`].
fn steps(ram: u64, data: &[Range<u64>]) -> impl Iterator<Item = AddressRange> {
    let each = data.iter().flat_map(|run| run.clone().step_by(EMPTIED_AT_ONCE as usize).map(|at| (at, run.end)));
    each.map(move |(at, end)| AddressRange { address: ram + at, length: EMPTIED_AT_ONCE.min(end - at) })
}
