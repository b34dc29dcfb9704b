//! Reclaim by the guest's balloon: it is inflated by the memory that the guest says it holds free, and deflated again.
//! The balloon's pages stay without memory until the guest touches them. This method is for comparison, and for guests
//! without introspection.

use std::time::{Duration, Instant};

use sterna_api::{BalloonMode, Blame, Code, Problem, Reclaimed};
use sterna_engine::monitor::Monitor;
use sterna_engine::vmm::qemu::{BalloonDevice, BalloonLook, resize};
use sterna_engine::vmm::qmp::Qmp;
use sterna_protocol::layout::PAGE_BYTES;

use crate::balloon::no_device;
use crate::machines::control::{Control, TIMEOUT, refused};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::problems::host;

/// How often the balloon's size is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How long a balloon may stand still before it counts as stalled.
const STALLED: Duration = Duration::from_secs(3);
/// The least free memory that the guest keeps: below that its kernel begins to look for memory.
const RESERVE_BYTES: u64 = 64 << 20;
/// The least free memory that the guest keeps, as a share of its RAM: one part of this many.
const RESERVE_SHARE: u64 = 64;
/// How long the guest's driver may take for its first report: that of a guest that is slow or busy takes seconds.
const FIRST_WORD: Duration = Duration::from_secs(15);

/// Takes the memory that the guest's driver says is free, except a reserve.
///
/// # Errors
/// A [`Problem`]: there is no balloon, Sterna looks after it already, the driver reports nothing, or `monitor` ended
/// the work. In every case the balloon is set back to its former size.
pub fn reclaim(
    machines: &Machines,
    record: &VmRecord,
    monitor: &Monitor,
    account: &mut Reclaimed,
) -> Result<(), Problem> {
    if record.balloon.mode != BalloonMode::Off {
        let why = format!("the balloon of '{}' is looked after already", record.name);
        return Err(Problem::new(Code::BalloonInUse, Blame::Request, why)
            .hint("'sterna balloon --off' gives it free; '--method vmi' needs none"));
    }
    let mut control = Control::connect(&record.qmp)?;
    let qmp = control.qmp();
    let device = BalloonDevice::find(qmp, TIMEOUT).map_err(|error| refused("tell its balloon", &error))?;
    let device = device.ok_or_else(|| no_device(&record.name))?;
    let mut balloon = Balloon { qmp, device };
    let (former, free_bytes) = balloon.first_look(monitor)?;
    let reserve = RESERVE_BYTES.max(record.memory_bytes / RESERVE_SHARE);
    let wanted = free_bytes.saturating_sub(reserve);
    account.total_pages = record.memory_bytes / PAGE_BYTES as u64;
    account.free_pages = free_bytes / PAGE_BYTES as u64;
    account.candidate_pages = wanted / PAGE_BYTES as u64;
    account.allocated_before_bytes = record.allocated_bytes();
    account.allocated_after_bytes = account.allocated_before_bytes;
    if wanted == 0 {
        return Ok(());
    }
    // The record comes first: if this daemon dies, the next one deflates the balloon.
    let inflating = VmRecord { kept_before: Some(former), ..record.clone() };
    machines.store(&inflating).map_err(|error| host("cannot write the machine's record", &error))?;
    let inflated = balloon.resize(former - wanted.min(former), monitor);
    // After every result, also a cancel, the guest gets its memory back.
    let deflated = balloon.resize(former, &Monitor::new(&record.name));
    if deflated.is_ok() {
        machines.try_store(record);
    }
    account.allocated_after_bytes = record.allocated_bytes();
    account.reclaimed_bytes = account.allocated_before_bytes.saturating_sub(account.allocated_after_bytes);
    account.reclaimed_pages = account.reclaimed_bytes / PAGE_BYTES as u64;
    account.put_back_pages = account.candidate_pages.saturating_sub(account.reclaimed_pages);
    inflated.and(deflated)
}

/// Gives a guest back the memory that an earlier daemon took by its balloon. Returns the record without that.
#[must_use]
pub fn deflate_left_over(mut record: VmRecord) -> VmRecord {
    if let Some(former) = record.kept_before.take() {
        let asked = Control::connect(&record.qmp).and_then(|mut control| {
            resize(control.qmp(), former, TIMEOUT).map_err(|error| refused("resize the balloon", &error))
        });
        match asked {
            Ok(()) => tracing::info!(vm = %record.name, "its balloon was left inflated and is deflated"),
            Err(problem) => {
                tracing::error!(vm = %record.name, problem = %problem.message, "its balloon cannot be deflated");
                record.kept_before = Some(former);
            }
        }
    }
    record
}

struct Balloon<'a> {
    qmp: &'a mut Qmp,
    device: BalloonDevice,
}

impl Balloon<'_> {
    /// The RAM that the guest keeps now, and the free memory in it, bytes.
    fn first_look(&mut self, monitor: &Monitor) -> Result<(u64, u64), Problem> {
        let asked = self.device.ask_for_reports(self.qmp, true, TIMEOUT);
        asked.map_err(|error| refused("ask for the guest's statistics", &error))?;
        let looked = self.wait_for_word(monitor);
        let quiet = self.device.ask_for_reports(self.qmp, false, TIMEOUT);
        quiet.map_err(|error| refused("ask for the guest's statistics no more", &error))?;
        looked
    }

    fn wait_for_word(&mut self, monitor: &Monitor) -> Result<(u64, u64), Problem> {
        // The report from before may be of any age.
        let stamp = self.look()?.report.map(|report| report.stamp);
        let began = Instant::now();
        loop {
            let look = self.look()?;
            let report = look.report.filter(|report| Some(report.stamp) != stamp);
            if let Some(free) = report.and_then(|report| report.free_bytes) {
                return Ok((look.guest_bytes, free));
            }
            if began.elapsed() > FIRST_WORD {
                let why = "the guest's balloon driver does not say what the guest holds free";
                return Err(Problem::new(Code::BalloonSilent, Blame::Guest, why)
                    .hint("is virtio_balloon loaded there, and does the guest run?"));
            }
            pause(monitor)?;
        }
    }

    /// Makes the guest keep this much memory, and waits until it does, or makes no more progress.
    fn resize(&mut self, guest_bytes: u64, monitor: &Monitor) -> Result<(), Problem> {
        resize(self.qmp, guest_bytes, TIMEOUT).map_err(|error| refused("resize the balloon", &error))?;
        let (mut at, mut moved) = (self.look()?.guest_bytes, Instant::now());
        while at != guest_bytes && moved.elapsed() < STALLED {
            pause(monitor)?;
            let now = self.look()?.guest_bytes;
            if now != at {
                (at, moved) = (now, Instant::now());
            }
        }
        Ok(())
    }

    fn look(&mut self) -> Result<BalloonLook, Problem> {
        self.device.look(self.qmp, TIMEOUT).map_err(|error| refused("tell the balloon's size", &error))
    }
}

fn pause(monitor: &Monitor) -> Result<(), Problem> {
    std::thread::sleep(LOOK);
    monitor.check().map_err(|error| error.problem())
}
