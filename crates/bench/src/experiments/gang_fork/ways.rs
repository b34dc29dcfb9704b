//! The ways to more guests: Sterna's forks, guests that boot, and QEMU alone.

use std::time::{Duration, Instant};

use serde_json::json;
use sterna_api::Forked;

use super::super::gang_figures::{Measured, Source, mib};
use super::super::together::{self, REST};
use super::{FIRST_MS, LAST_MS, More, PAUSE, TO_ONE, Way};
use crate::baseline::{BaselineVm, Ram};
use crate::command::{PATIENCE, wait_for};
use crate::console::Console;
use crate::error::{Error, Result};
use crate::footprint;
use crate::gang::{self, Gang};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::stats::median;
use crate::sterna::SternaVm;
use crate::warm::{self, Touched};

/// How the clones move. Twenty guests on few processors are not stopped within the pause that one guest has.
const MOVE: &str = "--mode precopy --downtime-limit 2s";
/// What a clone takes until it runs, and more: its QEMU's own memory.
const QEMU_MIB: u64 = 128;
/// When a move that does not end is given up.
const LIMIT: Duration = Duration::from_secs(120);

impl More {
    /// Clones of a guest that was just started, one each time.
    pub(super) fn first(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let mut forks = Vec::new();
        for number in 0..self.times {
            // What the one before has said must not count.
            let _ = std::fs::remove_file(&guest.console);
            let vm = self.start(lab, guest)?;
            forks.push(one_more(&vm, guest, number)?);
        }
        note(&forks, measured);
        Ok(())
    }

    /// Clones of a guest that was forked before, one after the other.
    pub(super) fn again(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let vm = self.start(lab, guest)?;
        one_more(&vm, guest, 0)?;
        let mut forks = Vec::new();
        for number in 1..=self.times {
            self.rest()?;
            forks.push(one_more(&vm, guest, number)?);
        }
        note(&forks, measured);
        Ok(())
    }

    /// Many clones by one command, their memory while they are idle, and their way to another host.
    pub(super) fn gang(&self, lab: &Lab, guest: &Guest, count: usize, measured: &mut Measured) -> Result<()> {
        let group = &lab.host("a")?.group;
        let source = self.start(lab, guest)?;
        let one = footprint::of(&[self.ram(&source)?])?.frames;
        let host_bytes = group.memory_bytes()?;
        let names: Vec<String> = (1..=count).map(|number| format!("{}c{number}", guest.name)).collect();
        self.rest()?;
        let (forked, clones) = source.fork(&names, &[])?;
        note(std::slice::from_ref(&forked), measured);
        std::thread::sleep(REST);
        let rams = std::iter::once(&source).chain(&clones).map(|vm| self.ram(vm)).collect::<Result<Vec<_>>>()?;
        note_memory(footprint::of(&rams)?.frames, one, measured);
        measured.note("host_added_mib", mib(group.memory_bytes()?.saturating_sub(host_bytes)));
        names.iter().try_for_each(|name| answers(&guest.clone_of_name(name)))?;
        let details = std::mem::take(&mut measured.details);
        let left = if self.moved { self.leave(lab, clones, measured) } else { Ok(()) };
        for (name, value) in details.as_object().into_iter().flatten() {
            measured.details[name] = value.clone();
        }
        left
    }

    /// Many clones on two other hosts by one command: when they run, and when each host has all of their pages.
    pub(super) fn away(&self, lab: &Lab, guest: &Guest, count: usize, measured: &mut Measured) -> Result<()> {
        let source = self.start(lab, guest)?;
        let names: Vec<String> = (1..=count).map(|number| format!("{}c{number}", guest.name)).collect();
        let hosts = [lab.host("b")?.clone(), lab.host("c")?.clone()];
        let before = [hosts[0].group.memory_bytes()?, hosts[1].group.memory_bytes()?];
        self.rest()?;
        let begin = Instant::now();
        let (forked, _clones) = source.fork_to(&names, &hosts)?;
        note(std::slice::from_ref(&forked), measured);
        let here = lab.host("a")?;
        for name in &names {
            let gone = || Ok((!SternaVm::is_known(here, name)?).then_some(()));
            wait_for("all pages are with the clones", PATIENCE, gone)?;
        }
        measured.note("all_pages_ms", begin.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(REST);
        for (name, (host, before)) in ["b_added_mib", "c_added_mib"].into_iter().zip(hosts.iter().zip(before)) {
            measured.note(name, mib(host.group.memory_bytes()?.saturating_sub(before)));
        }
        guest.wait_until_well(PATIENCE)?;
        names.iter().try_for_each(|name| guest.clone_of_name(name).wait_until_well(PATIENCE))
    }

    /// Moves clones to another host, together.
    fn leave(&self, lab: &Lab, clones: Vec<SternaVm>, measured: &mut Measured) -> Result<()> {
        let gang = Gang::Sterna(clones);
        let rams = gang.rams(self.memory_bytes())?;
        let (footprint, nonzero_frames) = (footprint::of(&rams)?, footprint::nonzero_frames(&rams)?);
        let source = Source { footprint, nonzero_frames, room_bytes: 0 };
        let (gang, moved) = gang.migrate(lab, "b", &together::sterna(MOVE, true)?, LIMIT)?;
        measured.note_moved(&moved, &source);
        measured.note_settled(footprint::of(&gang.rams(self.memory_bytes())?)?, &source);
        Ok(())
    }

    /// Guests that boot, all at once, until each has filled its memory.
    pub(super) fn boots(&self, lab: &Lab, guests: &[Guest], measured: &mut Measured) -> Result<()> {
        let begin = Instant::now();
        let boot = |guest: &Guest| {
            let vm = SternaVm::start(lab, "a", guest, &self.qemu.path)?;
            self.is_ready(guest)?;
            Ok((vm, begin.elapsed()))
        };
        let lost = |_| Err(Error::Usage("a thread that boots a guest has panicked".into()));
        let booted: Vec<Result<(SternaVm, Duration)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = guests.iter().map(|guest| scope.spawn(move || boot(guest))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
        });
        let (vms, times): (Vec<SternaVm>, Vec<Duration>) =
            booted.into_iter().collect::<Result<Vec<_>>>()?.into_iter().unzip();
        note_times(times.iter().map(|time| time.as_secs_f64() * 1e3).collect(), measured);
        std::thread::sleep(REST);
        let rams = vms.iter().map(|vm| self.ram(vm)).collect::<Result<Vec<_>>>()?;
        let one = footprint::of(&rams[..1])?.frames;
        note_memory(footprint::of(&rams)?.frames, one, measured);
        Ok(())
    }

    /// Clones by QEMU alone, one after the other. The guest has no tap: its card's state fits no other back end.
    pub(super) fn through_file(&self, lab: &Lab, guest: &Guest, measured: &mut Measured) -> Result<()> {
        let guest = Guest { wired: false, ..guest.clone() };
        let mut vm = BaselineVm::start(lab, "a", &guest, &self.qemu.path, Ram::Plain)?;
        self.is_ready(&guest)?;
        let (mut pauses, mut times, mut sizes, mut memory) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for number in 1..=self.times {
            self.rest()?;
            let clone = guest.clone_of_name(&format!("{}c{number}", guest.name));
            let (clone, copied) = vm.copy_through_file(lab, &clone)?;
            pauses.push(copied.pause_ms);
            times.push(copied.clone_ms);
            sizes.push(mib(copied.file_bytes));
            let ram = |vm: &BaselineVm| footprint::Ram::of(vm.pid(), self.memory_bytes());
            let (one, both) = (footprint::of(&[ram(&vm)?])?, footprint::of(&[ram(&vm)?, ram(&clone)?])?);
            memory.push(both.frames as f64 / one.frames.max(1) as f64);
        }
        for (name, values) in
            [(PAUSE, &pauses), (FIRST_MS, &times), (LAST_MS, &times), ("file_mib", &sizes), (TO_ONE, &memory)]
        {
            median(values).into_iter().for_each(|value| measured.note(name, value));
        }
        Ok(())
    }

    /// Starts the guest that is to be cloned, in shared memory, and leaves it alone for a while.
    pub(super) fn start(&self, lab: &Lab, guest: &Guest) -> Result<SternaVm> {
        let vm = SternaVm::start_with(lab, "a", guest, &self.qemu.path, &["--trust-group", gang::GROUP])?;
        self.is_ready(guest)?;
        self.rest()?;
        Ok(vm)
    }

    /// Leaves the guest alone for a while, and gives back memory then that is warm, as much as what follows may take.
    fn rest(&self) -> Result<()> {
        let mib = match self.way {
            Way::Gang(count) | Way::Away(count) => count as u64 * QEMU_MIB,
            Way::File => 2 * self.filled_mib + QEMU_MIB,
            _ => QEMU_MIB,
        };
        let warm = Touched::new((mib << 20).min(warm::available_bytes()? / 3))?;
        std::thread::sleep(REST);
        drop(warm);
        Ok(())
    }

    /// Waits until the guest's programs have their memory.
    fn is_ready(&self, guest: &Guest) -> Result<()> {
        together::is_filled(guest)?;
        let word = match self.way {
            Way::First | Way::Again | Way::Away(_) => "CHECKER ready",
            Way::Writer => "DIRTIER ready",
            Way::Gang(_) | Way::Boots(_) | Way::File => return Ok(()),
        };
        guest.wait_until_says(word, PATIENCE)
    }

    fn ram(&self, vm: &SternaVm) -> Result<footprint::Ram> {
        footprint::Ram::of(vm.pid()?, self.memory_bytes())
    }
}

/// Makes a clone, sees that source and clone are well, and ends the clone.
fn one_more(vm: &SternaVm, guest: &Guest, number: usize) -> Result<Forked> {
    let name = format!("{}c{number}", guest.name);
    let (forked, _clone) = vm.fork(std::slice::from_ref(&name), &[])?;
    [guest, &guest.clone_of_name(&name)].into_iter().try_for_each(|guest| guest.wait_until_well(PATIENCE))?;
    Ok(forked)
}

/// Has the guest's shell compute something.
fn answers(guest: &Guest) -> Result<()> {
    let mut console = Console::open(guest)?;
    console.type_line("echo SUM $((40 + 2))")?;
    console.wait_for("SUM 42", PATIENCE).map(drop)
}

/// Notes the figures of forks, each the median.
fn note(forks: &[Forked], measured: &mut Measured) {
    let middle = |value: fn(&Forked) -> f64| median(&forks.iter().map(value).collect::<Vec<_>>());
    for (name, value) in [
        (PAUSE, middle(|fork| fork.pause_ms)),
        ("prepare_ms", middle(|fork| fork.prepare_ms)),
        ("copied_mib", middle(|fork| mib(fork.copied_bytes))),
        ("copied_in_pause_mib", middle(|fork| mib(fork.copied_in_pause_bytes))),
        ("pieces", middle(|fork| fork.pieces as f64)),
        ("devices_kib", middle(|fork| fork.device_bytes as f64 / 1024.0)),
    ] {
        value.into_iter().for_each(|value| measured.note(name, value));
    }
    measured.details["forks"] = json!(forks);
    let times: Vec<f64> = forks.iter().flat_map(|fork| &fork.clones).map(|clone| clone.ms).collect();
    // The clones of one fork run one after the other; forks of one clone each are tries of the same.
    let times = if forks.len() == 1 { times } else { median(&times).into_iter().collect() };
    note_times(times, measured);
}

/// Notes when guests ran, milliseconds since the request.
fn note_times(mut times: Vec<f64>, measured: &mut Measured) {
    times.sort_by(f64::total_cmp);
    for (name, ms) in [(FIRST_MS, times.first()), (LAST_MS, times.last())] {
        ms.into_iter().for_each(|ms| measured.note(name, *ms));
    }
    measured.details["ran_ms"] = json!(times);
}

/// Notes the memory that all guests' RAM takes, beside that of one.
fn note_memory(all_frames: u64, one_frames: u64, measured: &mut Measured) {
    measured.note("one_guest_mib", mib(one_frames * 4096));
    measured.note("all_guests_mib", mib(all_frames * 4096));
    measured.note(TO_ONE, all_frames as f64 / one_frames.max(1) as f64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_api::Cloned;

    fn fork(pause_ms: f64, times: &[f64]) -> Forked {
        let clones = times.iter().map(|ms| Cloned { ms: *ms, ..Cloned::default() }).collect();
        Forked { pause_ms, clones, ..Forked::default() }
    }

    #[test]
    fn the_clones_of_one_fork_have_a_first_and_a_last_and_single_clones_a_median() {
        let mut measured = Measured::default();
        note(&[fork(5.0, &[300.0, 100.0, 200.0])], &mut measured);
        let of = |measured: &Measured, name: &str| measured.metrics[name];
        assert_eq!((of(&measured, FIRST_MS), of(&measured, LAST_MS)), (100.0, 300.0));
        assert_eq!(measured.details["ran_ms"], json!([100.0, 200.0, 300.0]));
        let mut measured = Measured::default();
        note(&[fork(5.0, &[90.0]), fork(7.0, &[110.0]), fork(30.0, &[400.0])], &mut measured);
        assert_eq!((of(&measured, FIRST_MS), of(&measured, LAST_MS), of(&measured, PAUSE)), (110.0, 110.0, 7.0));
        note_memory(300, 200, &mut measured);
        assert_eq!(of(&measured, TO_ONE), 1.5);
    }
}
