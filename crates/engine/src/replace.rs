//! Another VMM takes a guest over on the same host. Both have mapped the same RAM, and no page is moved.
//!
//! ```text
//!   former VMM                                 its successor
//!   the guest runs                             waits for device state; has touched none of the guest's RAM
//!   stop the guest, drain its I/O
//!                                              still none? Then nothing but the guest has written its RAM
//!   save the devices ────────────────────────▶ load them; the guest is stopped
//!   commit: on record ══ the point of no return
//!                                              the guest runs
//! ```
//!
//! Private RAM is its VMM's own. The successor maps the files that the guest's RAM consists of, and a file with copies
//! of the guest's own pages ([`fork::layer`](crate::fork::layer)), which is whole once the devices are saved. The
//! former VMM's RAM is as it was, so that the guest can go back.
//!
//! The guest's shared RAM is one file, so whatever the successor writes before it has the guest is written under a
//! guest that runs. QEMU writes none while it waits: its firmware and its devices leave RAM alone until their state is
//! there. That is not taken on trust. A page that a process has touched is in its page tables, and stays there: so a
//! successor whose page tables hold none of the RAM, when the guest has stopped, has neither read nor written any of
//! it. From the load on the pages are the successor's to use.
//!
//! Up to `commit` any failure leaves the guest to its former VMM: the successor ends first, and only then does the
//! former one go on. A load that fails half-way may have written RAM, as devices are put to work: no device of QEMU's
//! was seen to do so, and `verify` compares.

use std::io::{self, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use sterna_api::report::Verify;
use sterna_protocol::frame::Digester;
use sterna_protocol::hello::VERSION;
use sterna_protocol::layout::ChunkIndex;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};

use crate::error::MigrateError;
use crate::fork::read_all;
use crate::haste::{Haste, VmmThreads};
use crate::memory::Memory;
use crate::vmm::{Destination, EventTime, Source, Stopped, VmmError, wait_until_stopped};

/// How long the VMM may take to save or to load its devices, which takes milliseconds. The guest stands still then.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a successor that has broken the way of the devices' state may take to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What the replacement needs of the daemon it runs in.
pub trait Keeper {
    /// Whether the threads of a pause may go before all others of this host.
    fn may_haste(&self) -> bool {
        true
    }

    /// The guest has stopped: what both VMMs cannot have at the same time changes hands.
    ///
    /// # Errors
    /// The guest stays where it was.
    fn stopped(&mut self) -> Result<(), MigrateError>;

    /// Whether the successor has not all of the guest's RAM until [`move_ram`](Self::move_ram).
    fn moves_ram(&self) -> bool {
        false
    }

    /// Has the successor's RAM be what the guest's is. The devices are saved, and the successor has nothing of them.
    ///
    /// # Errors
    /// The guest stays where it was.
    fn move_ram(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    /// Writes down that the guest is the successor's from now on.
    ///
    /// # Errors
    /// It is not on record: the guest stays where it was.
    fn commit(&mut self) -> Result<(), MigrateError>;

    /// Ends the successor, which has not got the guest; it is gone when this returns. The guest may stand still
    /// meanwhile, and the successor hang: it is not asked.
    fn end_successor(&mut self);
}

/// The RAM of a VMM, as addresses of its process.
#[derive(Debug)]
pub struct Untouched {
    pagemap: Pagemap,
    ram: Vec<Range<u64>>,
}

impl Untouched {
    /// Watches these parts of a process's memory.
    ///
    /// # Errors
    /// There is no such process, or this one may not look into it.
    pub fn of(pid: u32, ram: Vec<Range<u64>>) -> Result<Self, MigrateError> {
        let pagemap = Pagemap::open(pid).map_err(MigrateError::vmm_process("looking at QEMU's page tables"))?;
        Ok(Self { pagemap, ram })
    }

    /// Pages that the process has touched so far: those in its page tables.
    ///
    /// # Errors
    /// The process has ended.
    pub fn touched(&self) -> Result<u64, MigrateError> {
        let (mut regions, mut pages) = (Vec::new(), 0);
        for part in &self.ram {
            let scanned = self.pagemap.scan(part.clone(), Scan::of(Categories::PRESENT), &mut regions);
            scanned.map_err(MigrateError::vmm_process("looking at QEMU's page tables"))?;
            pages += regions.iter().map(Region::pages).sum::<u64>();
        }
        Ok(pages)
    }
}

/// A guest that is in its successor.
#[derive(Debug)]
pub struct HandedOver {
    /// When it stopped.
    pub stopped: Stopped,
    /// When it ran again; `None` where its user had paused it, and where the successor has not let it run yet.
    pub start: Option<EventTime>,
    /// Why the successor has not let it run yet.
    pub waits: Option<VmmError>,
    /// What was compared.
    pub verify: Verify,
}

/// A guest that has stayed where it was.
#[derive(Debug)]
pub struct Stayed {
    /// Why.
    pub why: Box<MigrateError>,
    /// Why its VMM has not let it run again, where it has not: the guest is stopped then.
    pub stopped: Option<VmmError>,
}

/// The guest's RAM in the former VMM and in its successor, where it is to be compared before and after the devices'
/// way.
pub type Compared<'a> = Option<(&'a dyn Memory, &'a dyn Memory)>;

/// Hands a guest from one VMM to the other. `running`: the guest is to run there.
///
/// # Errors
/// [`Stayed`]; the successor has ended.
pub fn hand_over(
    (former, successor): (&mut dyn Source, &mut dyn Destination),
    untouched: &Untouched,
    keeper: &mut dyn Keeper,
    running: bool,
    verify: Compared<'_>,
) -> Result<HandedOver, Stayed> {
    let threads = (
        VmmThreads::of(former.process(), former.processor_threads()),
        VmmThreads::of(successor.process(), successor.processor_threads()),
    );
    // It lasts until the guest runs, wherever that is.
    let haste = Haste::begin(keeper.may_haste());
    haste.limit();
    haste.vmm(threads.0.as_ref());
    haste.vmm(threads.1.as_ref());
    haste.stands_still(threads.1.as_ref());
    match take((former, successor), untouched, keeper, verify, (&haste, threads.0.as_ref())) {
        Ok((stopped, verify)) => {
            haste.runs(threads.1.as_ref());
            let (start, waits) = match running.then(|| successor.start()).transpose() {
                Ok(start) => (start, None),
                Err(error) => (None, Some(error)),
            };
            Ok(HandedOver { stopped, start, waits, verify })
        }
        Err(why) => {
            // Never two: the successor is gone before the guest runs again.
            keeper.end_successor();
            haste.runs(threads.0.as_ref());
            Err(Stayed { why: Box::new(why), stopped: former.rollback().err() })
        }
    }
}

/// Up to the point of no return, which is its end.
fn take(
    (former, successor): (&mut dyn Source, &mut dyn Destination),
    untouched: &Untouched,
    keeper: &mut dyn Keeper,
    verify: Compared<'_>,
    (haste, threads): (&Haste, Option<&VmmThreads>),
) -> Result<(Stopped, Verify), MigrateError> {
    former.prepare()?;
    let to = successor.prepare()?;
    let from = former.begin()?;
    // The VMM has a thread for this now.
    haste.vmm(threads);
    std::thread::scope(|scope| {
        let _way = Way { from: &from, to: &to };
        let (load, may_load) = mpsc::channel();
        let may_load = keeper.moves_ram().then_some(may_load);
        scope.spawn(|| carry(&from, &to, may_load));
        let stopped = wait_until_stopped(former)?;
        haste.stands_still(threads);
        tracing::debug!("the guest has stopped");
        match untouched.touched()? {
            0 => {}
            pages => return Err(MigrateError::TouchedEarly(pages)),
        }
        let digester = Digester::of(VERSION, sterna_sys::host::random_u128());
        let before = verify.map(|(ram, _)| digests(ram, digester)).transpose()?;
        former.save_devices()?;
        keeper.stopped()?;
        tracing::debug!("the former QEMU saves the devices");
        if let Err(error) = former.saved(DEVICE_TIMEOUT) {
            // A successor that refuses the state breaks its way: then its reason is the one to tell.
            return Err(successor.loaded(LAST_WORDS).err().filter(is_reason).unwrap_or(error).into());
        }
        tracing::debug!("the devices are saved");
        if keeper.moves_ram() {
            keeper.move_ram()?;
            tracing::debug!("the new QEMU has the guest's RAM");
            // It cannot fail: the thread has the other end until it has written all, or its way is closed.
            let _ = load.send(());
        }
        // Nobody waits for the thread: whether all of the state has come, the successor knows best.
        successor.loaded(DEVICE_TIMEOUT)?;
        tracing::debug!("the devices are loaded");
        let verify = match verify.zip(before) {
            Some(((_, ram), before)) => {
                ram.look_at_areas().map_err(MigrateError::host("looking at the guest's RAM to compare it"))?;
                compare(&before, &digests(ram, digester)?)?
            }
            None => Verify::default(),
        };
        successor.alive()?;
        keeper.commit()?;
        tracing::debug!("on record: the guest is the new QEMU's");
        Ok((stopped, verify))
    })
}

/// The way of the devices' state. Dropped, it is closed, so that the thread on it ends, whatever the VMMs do.
struct Way<'a> {
    from: &'a UnixStream,
    to: &'a UnixStream,
}

impl Drop for Way<'_> {
    fn drop(&mut self) {
        for stream in [self.from, self.to] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Carries the devices' state until the former VMM has written all of it, or the way is closed. With `may_load`, the
/// successor gets nothing of it before that says so.
fn carry(mut from: &UnixStream, mut to: &UnixStream, may_load: Option<Receiver<()>>) {
    let carried = match may_load {
        None => io::copy(&mut from, &mut to).map(drop),
        Some(may_load) => read_all(from).and_then(|devices| match may_load.recv() {
            Ok(()) => to.write_all(&devices),
            Err(_) => Err(io::Error::other("the guest stays where it was")),
        }),
    };
    if let Err(error) = carried {
        tracing::debug!(%error, "the devices' way from QEMU to QEMU is closed");
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Whether a VMM says why it failed.
fn is_reason(error: &VmmError) -> bool {
    !matches!(error, VmmError::Silent { .. })
}

fn digests(ram: &dyn Memory, digester: Digester) -> Result<Vec<u64>, MigrateError> {
    let mut all = Vec::new();
    for chunk in 0..ram.layout().chunks() {
        let digests = ram.page_digests(ChunkIndex(chunk), digester);
        all.extend(digests.map_err(MigrateError::host("reading the guest's RAM to compare it"))?);
    }
    Ok(all)
}

fn compare(before: &[u64], after: &[u64]) -> Result<Verify, MigrateError> {
    let mismatches = before.iter().zip(after).filter(|(before, after)| before != after).count() as u64;
    let pages = before.len() as u64;
    match mismatches {
        0 => Ok(Verify { checked: true, pages, ..Verify::default() }),
        changed => Err(MigrateError::ChangedOnTheWay { changed, pages }),
    }
}

#[cfg(test)]
#[path = "replace_tests.rs"]
mod tests;
