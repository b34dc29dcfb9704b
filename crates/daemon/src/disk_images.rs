//! The images of machines' disks, made fewer: forks put an overlay over an overlay, and what lies under them nobody
//! wants any more but one machine.
//!
//! Two ways, each in the background and given up at once when something else is to be done with the machine:
//!
//! * **commit**: an image that no other overlay of it is left of (`Base`) takes in what the machine's overlay has,
//!   and is its disk again; the overlay goes. It is the only way that writes an image under an overlay, so it asks for
//!   proof: nobody's file is there, no machine of this host names it, and QEMU gets it for writing.
//! * **pull**: where others use what is under it and the images have become many, the overlay takes in what lies
//!   between it and the lowest. Nobody's image is written but its own, and no file goes.
//!
//! On record before a commit ends is that it does. Who finds that asks QEMU which image the disk is.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Problem, VmState};
use sterna_engine::vmm::VmmError;
use sterna_engine::vmm::qemu::chains::{self, Chain};
use sterna_engine::vmm::qemu::jobs::{self, JobState};
use sterna_engine::vmm::qmp::Qmp;

use crate::machines::base::Base;
use crate::machines::claim::Claimed;
use crate::machines::control::{self, Control};
use crate::machines::hold::{Activity, Hold, Shown};
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::table::Machines;
use crate::problems::host;
use crate::qemu::arguments::{parse, unparse};
use crate::qemu::disks::{self, Replacement};

/// How often machines' images are looked at.
const LOOK: Duration = Duration::from_secs(5);
/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(20);
/// How long QEMU may take to give up a job.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest that a commit takes to end once all of it is written: it needs a moment in which the guest writes
/// nothing.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a machine is left alone after it did not work.
const AFTER_FAILURE: Duration = Duration::from_secs(300);
/// From so many images on they are made fewer even while others use them: half of what a disk may have.
const MANY: usize = 8;
/// The job's name in QEMU. There is one of a machine at a time.
const JOB: &str = "sterna-images";

/// What is done with a machine while its images are made fewer. Whoever wants it for something else gets it.
#[derive(Debug, Default)]
struct Joining {
    gives_way: AtomicBool,
    /// Its user has paused the guest.
    paused: AtomicBool,
    /// When it is given up in any case, if ever.
    until: Option<Instant>,
}

impl Joining {
    fn is_over(&self) -> bool {
        self.gives_way.load(Ordering::Relaxed) || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

impl Activity for Joining {
    fn describe(&self) -> &'static str {
        "the images of its disks are being made fewer"
    }

    fn cancel(&self, _: &str) -> Result<(), Problem> {
        self.gives_way.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn gives_way(&self) -> bool {
        self.gives_way.store(true, Ordering::Relaxed);
        true
    }

    fn show(&self) -> Shown {
        let state = if self.paused.load(Ordering::Relaxed) { VmState::Paused } else { VmState::Running };
        Shown::As { state, note: Some(self.describe().into()), progress: None }
    }
}

/// Looks after the images of all machines, in a thread of its own, for as long as the daemon lives.
pub fn begin(machines: Arc<Machines>) {
    let work = move || {
        let mut failed: Vec<(String, Instant)> = Vec::new();
        loop {
            failed.retain(|(_, at)| at.elapsed() < AFTER_FAILURE);
            for name in candidates(&machines) {
                if failed.iter().any(|(other, _)| *other == name) {
                    continue;
                }
                if let Err(problem) = step(&machines, &name) {
                    tracing::warn!(vm = %name, "its disks' images stay as many: {}", problem.with_causes());
                    failed.push((name, Instant::now()));
                }
            }
            std::thread::sleep(LOOK);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("images".into()).spawn(work) {
        tracing::error!(%error, "the images of machines' disks are not made fewer");
    }
}

/// Machines of which something can be done, by what is on record.
fn candidates(machines: &Machines) -> Vec<String> {
    let records: Vec<VmRecord> = {
        let table = machines.table();
        let free = table.values().filter(|entry| matches!(entry.hold, Hold::Free));
        free.filter_map(|entry| entry.record.clone()).collect()
    };
    let wanted = |record: &&VmRecord| {
        let calm = record.lifecycle == Lifecycle::Here && record.paging.is_none() && record.forking.is_none();
        let ripe = |base: &Base| base.committing || is_on_top(record, base) && base.is_its_alone();
        calm && (record.bases.iter().any(ripe) || record.bases.len() + 1 >= MANY)
    };
    records.iter().filter(wanted).map(|record| record.name.clone()).collect()
}

/// Whether no other overlay of this machine lies over that of this base.
fn is_on_top(record: &VmRecord, base: &Base) -> bool {
    record.bases.iter().all(|other| other.image != base.overlay)
}

/// Makes one disk's images fewer, where one can be.
fn step(machines: &Machines, name: &str) -> Result<(), Problem> {
    let doing = Arc::new(Joining::default());
    // Somebody else has it by now: then another time.
    let Ok(claimed) = Claimed::new(machines, name, Hold::shared(&doing)) else { return Ok(()) };
    // What was begun comes first, where QEMU has not answered since.
    let record = &recover(machines, &claimed.record)?;
    let mut control = Control::connect(&record.qmp)?;
    doing.paused.store(control.status()? != "running", Ordering::Relaxed);
    let failed = |error| control::refused("tell its disks' images", &error);
    let all = chains::chains(control.qmp()).map_err(failed)?;
    let top = |chain: &&Chain, base: &Base| chain.images.first().is_some_and(|(file, _)| *file == base.overlay);
    for (index, base) in record.bases.iter().enumerate().filter(|(_, base)| is_on_top(record, base)) {
        let Some(chain) = all.iter().find(|chain| top(chain, base)) else { continue };
        let under = chain.images.get(1).is_some_and(|(file, _)| *file == base.image);
        if under && base.is_its_alone() && !is_named_by_others(machines, record, &base.image) {
            return commit(machines, record, index, chain, control.qmp(), &doing);
        }
        if chain.images.len() >= MANY {
            return pull(machines, record, chain, control.qmp(), &doing);
        }
    }
    Ok(())
}

/// Whether another machine of this host has this image, or had.
fn is_named_by_others(machines: &Machines, record: &VmRecord, image: &Path) -> bool {
    let path = image.display().to_string();
    let table = machines.table();
    let mut others = table.values().filter_map(|entry| entry.record.as_ref()).filter(|other| other.name != record.name);
    others.any(|other| {
        other.arguments.iter().any(|word| word.contains(&path))
            || other.bases.iter().any(|base| base.image == image || base.overlay == image)
            || other.overlays.iter().any(|overlay| overlay.base == image || overlay.path == image)
    })
}

/// Has the image under a machine's overlay be its disk again.
fn commit(
    machines: &Machines,
    record: &VmRecord,
    index: usize,
    chain: &Chain,
    qmp: &mut Qmp,
    doing: &Joining,
) -> Result<(), Problem> {
    let failed = |error: VmmError| control::refused("write an overlay's data into the image under it", &error);
    chains::begin_commit(qmp, JOB, chain).map_err(failed)?;
    let ready = wait(qmp, doing, &[JobState::Ready]).map_err(failed)?;
    if ready != Some(JobState::Ready) {
        return give_up(qmp, ready);
    }
    let mut ending = record.clone();
    ending.bases[index].committing = true;
    let stored = machines.store(&ending).map_err(|error| host("cannot write the machine's record", &error));
    let ended = stored.and_then(|()| {
        jobs::complete(qmp, JOB).map_err(failed)?;
        // Not given up any more, unless the guest or its disk keeps it from ending.
        let until = Some(Instant::now() + END_TIMEOUT);
        wait(qmp, &Joining { until, ..Joining::default() }, &[]).map_err(failed)
    });
    let now = settled(&ending, qmp)?;
    machines.store(&now).map_err(|error| host("cannot write the machine's record", &error))?;
    forget(&ending, &now, qmp);
    match ended? {
        Some(JobState::Ended(None)) => {
            tracing::info!(vm = %record.name, image = %ending.bases[index].image.display(), "it is the disk again");
            Ok(())
        }
        other => give_up(qmp, other),
    }
}

/// Has the machine's overlay take in what lies between it and the lowest image.
fn pull(machines: &Machines, record: &VmRecord, chain: &Chain, qmp: &mut Qmp, doing: &Joining) -> Result<(), Problem> {
    let failed = |error: VmmError| control::refused("take the images under an overlay into it", &error);
    chains::begin_pull(qmp, JOB, chain).map_err(failed)?;
    let ended = wait(qmp, doing, &[]).map_err(failed)?;
    if ended != Some(JobState::Ended(None)) {
        return give_up(qmp, ended);
    }
    let _ = jobs::dismiss(qmp, JOB);
    let now = VmRecord { bases: after_pull(&record.bases, chain), ..record.clone() };
    machines.store(&now).map_err(|error| host("cannot write the machine's record", &error))?;
    tracing::info!(vm = %record.name, images = chain.images.len(), "its disk is made of two images now");
    Ok(())
}

/// The bases of a machine whose first image lies over the last of the chain alone. What lay over that before is another
/// overlay of it now.
fn after_pull(bases: &[Base], chain: &Chain) -> Vec<Base> {
    let of_chain = |path: &PathBuf| chain.images.iter().any(|(file, _)| file == path);
    let (Some((top, _)), Some((last, _))) = (chain.images.first(), chain.images.last()) else { return bases.to_vec() };
    let (its, mut rest): (Vec<Base>, Vec<Base>) = bases.iter().cloned().partition(|base| of_chain(&base.overlay));
    if let Some(mut lowest) = its.into_iter().find(|base| base.image == *last) {
        lowest.others.push(std::mem::replace(&mut lowest.overlay, top.clone()));
        rest.push(lowest);
    }
    rest
}

/// Waits until the job has ended, or is in one of these states; none where it is to give way, and where it is gone.
fn wait(qmp: &mut Qmp, doing: &Joining, until: &[JobState]) -> Result<Option<JobState>, VmmError> {
    loop {
        match jobs::job_state(qmp, JOB)? {
            Some(state) if until.contains(&state) || matches!(state, JobState::Ended(_)) => return Ok(Some(state)),
            None => return Ok(None),
            _ if doing.is_over() => return Ok(None),
            _ => std::thread::sleep(POLL),
        }
    }
}

/// Ends a job that came to nothing, or gives way. Why it failed, where it has.
fn give_up(qmp: &mut Qmp, state: Option<JobState>) -> Result<(), Problem> {
    end_job(qmp)?;
    match state {
        Some(JobState::Ended(Some(reason))) => {
            let mut problem = Problem::new(Code::QemuError, Blame::Qemu, "a disk's images could not be made fewer");
            problem.cause.push(reason);
            Err(problem)
        }
        _ => Ok(()),
    }
}

/// Ends the job, if there is one, and what it may have left.
fn end_job(qmp: &mut Qmp) -> Result<(), Problem> {
    let failed = |error: VmmError| control::refused("end the work on its disks' images", &error);
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    loop {
        match jobs::job_state(qmp, JOB).map_err(failed)? {
            None => return chains::write_none_below(qmp).map_err(failed),
            Some(JobState::Ended(_)) => drop(jobs::dismiss(qmp, JOB)),
            Some(_) if Instant::now() >= deadline => {
                return Err(failed(VmmError::Silent {
                    waiting_for: "the end of a block job".to_owned(),
                    seconds: CANCEL_TIMEOUT.as_secs(),
                }));
            }
            Some(_) => {
                // It may end by itself meanwhile.
                let _ = jobs::cancel(qmp, JOB);
                std::thread::sleep(POLL);
            }
        }
    }
}

/// A machine as its disks are, after a commit that was to end: on the image, or on its overlay still.
///
/// # Errors
/// A [`Problem`]: QEMU does not say.
fn settled(ending: &VmRecord, qmp: &mut Qmp) -> Result<VmRecord, Problem> {
    end_job(qmp)?;
    let failed = |error| control::refused("tell its disks' images", &error);
    let all = chains::chains(qmp).map_err(failed)?;
    let mut now = ending.clone();
    now.bases.clear();
    for base in &ending.bases {
        let disk = all.iter().find_map(|chain| chain.images.first().filter(|(file, _)| *file == base.image));
        let Some((_, format)) = disk.filter(|_| base.committing) else {
            now.bases.push(Base { committing: false, ..base.clone() });
            continue;
        };
        let back = [Replacement { image: &base.overlay, by: &base.image, format }];
        now.arguments = unparse(&disks::with_others(&parse(&now.arguments), &now.name, &back)?);
    }
    Ok(now)
}

/// Removes overlays whose data is in the images that were under them. That is on record, and on disk.
fn forget(ending: &VmRecord, now: &VmRecord, qmp: &mut Qmp) {
    let gone = ending.bases.iter().filter(|base| now.bases.iter().all(|kept| kept.overlay != base.overlay));
    for base in gone {
        // Where QEMU has it open still, without a name it does no harm.
        let _ = chains::close(qmp, &base.overlay);
        if let Err(error) = std::fs::remove_file(&base.overlay) {
            tracing::warn!(path = %base.overlay.display(), %error, "cannot remove an overlay that nobody uses");
        }
    }
}

/// Ends what an earlier daemon had begun with a machine's images. The record says which they are then.
///
/// # Errors
/// A [`Problem`]: QEMU does not say which image the disk is, or the record cannot be written.
pub fn recover(machines: &Machines, record: &VmRecord) -> Result<VmRecord, Problem> {
    if record.bases.is_empty() || record.lifecycle != Lifecycle::Here {
        return Ok(record.clone());
    }
    let mut control = Control::connect(&record.qmp)?;
    let now = settled(record, control.qmp())?;
    if now != *record {
        machines.store(&now).map_err(|error| host("cannot write the machine's record", &error))?;
        forget(record, &now, control.qmp());
    }
    Ok(now)
}
