//! Stopping machines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_api::{Blame, Code, Phase, Problem};
use sterna_engine::monitor::Monitor;

use crate::machines::control::{Control, end_qemu};
use crate::machines::hold::Hold;
use crate::machines::record::VmRecord;
use crate::machines::split;
use crate::machines::table::{Entry, Machines};
use crate::migration::leaving::Leaving;
use crate::migration::paging;
use crate::migration::resuming::Resuming;
use crate::migration::waiting::Question;
use crate::problems::busy;

/// How long a guest may take to switch itself off.
const POWERDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a migration that was given up may take to end.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(30);

/// Stops a machine: asks the guest to switch itself off, or with `force` ends QEMU at once. Where the guest runs
/// elsewhere and still needs pages from here, only `force` ends the remains of the machine.
///
/// # Errors
/// A [`Problem`]: the machine is unknown or busy, or the guest does not react.
pub fn stop(machines: &Machines, name: &str, force: bool) -> Result<(), Problem> {
    if let Some((to, monitor)) = serves_pages(machines, name) {
        return give_up(machines, name, force, &to, &monitor);
    }
    let record = claim(machines, name, force)?;
    if force {
        end_qemu(&record);
    } else if let Err(problem) = power_down(&record) {
        machines.give_back(&record);
        return Err(match waits_for_pages(machines, name) {
            Some(why) => problem.hint(format!("{why}; 'sterna stop --force' ends it at once")),
            None => problem,
        });
    }
    machines.forget(name, record.process);
    Ok(())
}

/// Why a machine with missing pages waits, where their host is away.
fn waits_for_pages(machines: &Machines, name: &str) -> Option<String> {
    let table = machines.table();
    let entry = table.get(name)?;
    if let Some((arriving, why)) = paging::describe(entry) {
        return arriving.waiting_ms.map(|_| why);
    }
    let shown = entry.remote.as_ref()?.show(entry.record.as_ref()?.split.as_ref()?);
    (!shown.waiting.is_empty()).then(|| split::describe(&shown))
}

/// The host where a machine's guest runs, if it runs elsewhere and still needs pages from here, and the migration that
/// sends them.
fn serves_pages(machines: &Machines, name: &str) -> Option<(String, Arc<Monitor>)> {
    let (to, monitor) = {
        let table = machines.table();
        let leaving: &Leaving = table.get(name)?.hold.activity()?;
        (leaving.to.clone(), Arc::clone(&leaving.monitor))
    };
    (monitor.progress().phase == Phase::Postcopy).then_some((to, monitor))
}

/// Ends the remains of a machine whose guest runs elsewhere and still needs pages from here.
fn give_up(machines: &Machines, name: &str, force: bool, to: &str, monitor: &Monitor) -> Result<(), Problem> {
    let pages = monitor.progress().pages_left;
    let process = |entry: &Entry| entry.record.as_ref().map(|record| record.process);
    let before = machines.table().get(name).and_then(process);
    if !force {
        let message = format!("'{name}' runs at {to} and needs {pages} pages that only this host has");
        let hint = format!(
            "stop it there. '--force' here gives them up: the guest at {to} loses its missing pages, and waits for \
             them for ever"
        );
        return Err(Problem::new(Code::ServingPages, Blame::Request, message).hint(hint));
    }
    tracing::warn!(vm = name, to, pages, "its user gives up the pages that its guest there still needs");
    monitor.give_up();
    let deadline = Instant::now() + GIVE_UP_TIMEOUT;
    while machines.table().get(name).is_some_and(|entry| process(entry) == before) {
        if Instant::now() > deadline {
            let message = format!("the pages of '{name}' are given up, but its migration has not ended yet");
            let hint = format!("'sterna show {name}' says how far it is");
            return Err(Problem::new(Code::StillEnding, Blame::Ours, message).hint(hint));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Claims a machine to stop it. One whose peer never answers can be given up by force: that is the user's decision
/// alone.
fn claim(machines: &Machines, name: &str, force: bool) -> Result<VmRecord, Problem> {
    let entry = machines.entry(name)?;
    let stays = entry.hold.is::<Resuming>();
    let waiting = if stays || entry.hold.is::<Question>() { entry.record } else { None };
    match waiting {
        Some(record) if force => Ok(record),
        Some(_) if stays => Err(busy(name, entry.hold.describe()).hint(format!(
            "'sterna show {name}' says why that has not worked yet; 'stop --force' ends the guest as it is"
        ))),
        Some(_) => Err(busy(name, entry.hold.describe()).hint(
            "ask there first; 'stop --force' gives this side up, and with it pages that the guest there may still need",
        )),
        None => machines.claim(name, Hold::Stopping),
    }
}

fn power_down(record: &VmRecord) -> Result<(), Problem> {
    let Some(process) = record.process.open() else { return Ok(()) };
    let mut control = Control::connect(&record.qmp)?;
    let status = control.status()?;
    if status != "running" {
        return Err(Problem::new(
            Code::NotRunning,
            Blame::Guest,
            format!("'{}' cannot switch itself off: QEMU says '{status}'", record.name),
        )
        .hint("'sterna stop --force' ends it at once"));
    }
    control.send("system_powerdown")?;
    if process.wait(Some(POWERDOWN_TIMEOUT)) {
        return Ok(());
    }
    let seconds = POWERDOWN_TIMEOUT.as_secs();
    Err(Problem::new(
        Code::GuestIgnoresPowerdown,
        Blame::Guest,
        format!("'{}' did not switch itself off within {seconds} s", record.name),
    )
    .hint("it may still do so; 'sterna stop --force' ends it at once"))
}
