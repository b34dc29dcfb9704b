//! The steps of a pause, on one clock: guests move between two hosts of a lab, whose daemons tell each step at
//! `debug`. Both are on this machine, so their logs have the same clock.

use std::path::Path;
use std::time::Duration;

use crate::accelerator;
use crate::command::PATIENCE;
use crate::error::{Context, Result};
use crate::footprint;
use crate::gang;
use crate::guest::{Guest, plugged};
use crate::ksm::Ksm;
use crate::lab::{Host, LabConfig, METER};
use crate::load::now_us;
use crate::meter::{Meter, longest_gap};
use crate::sterna::{self, SternaVm};
use crate::tools;

/// What each guest does where nothing is merged. One alone writes, the others hold memory.
const JOBS: [&str; 2] = ["dirtier:--mib,32,--rate,20,--pattern,random", "idle:--mib,64"];
/// What a guest's system needs of its memory, MiB; of the rest, what a program fills where pages are merged, and how
/// much of that is the same in all guests, percent.
const SYSTEM_MIB: u64 = 160;
const FILLED_PERCENT: u64 = 85;
const ALIKE_PERCENT: u64 = 70;
/// How long KSM may merge.
const MERGING: Duration = Duration::from_secs(600);
/// How long guests run before they move.
const REST: Duration = Duration::from_secs(2);
/// The words of the step that each pause begins with, and of the last one.
const FIRST: &str = "the guest has stopped";
const LAST: &str = "the guest runs there";

/// The guests that move.
#[derive(Debug, Clone, Copy)]
pub struct Gang {
    /// How many there are.
    pub guests: u8,
    /// The memory of each, MiB.
    pub memory_mib: u64,
    /// Whether KSM has merged most of their pages before they move. Then all of them rest.
    pub merged: bool,
}

impl Gang {
    /// What the guest with this number does.
    fn jobs(self, number: u8) -> String {
        if !self.merged {
            return JOBS[usize::from(number != 1)].into();
        }
        let filled = self.memory_mib.saturating_sub(SYSTEM_MIB) * FILLED_PERCENT / 100;
        let alike = filled * ALIKE_PERCENT / 100;
        format!("idle:--mib,{alike},--own-mib,{},--seed,{number}", filled - alike)
    }

    /// Lets KSM merge what it can. It is put back as it was once what is returned is dropped.
    fn merge(self, guests: &[Guest], vms: &[SternaVm]) -> Result<Ksm> {
        let ksm = Ksm::take()?;
        guests.iter().try_for_each(|guest| guest.wait_until_says("IDLE ready", PATIENCE))?;
        let rams = vms.iter().map(|vm| footprint::Ram::of(vm.pid()?, self.memory_mib << 20));
        let rams = rams.collect::<Result<Vec<_>>>()?;
        let frames = ksm.settle(MERGING, || Ok(footprint::of(&rams)?.frames))?;
        println!("merged: {} MiB of {}", frames >> 8, u64::from(self.guests) * self.memory_mib);
        Ok(ksm)
    }
}

/// A line of a daemon's log.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    /// Microseconds of its day.
    at_us: i64,
    /// The side that wrote it.
    side: &'static str,
    /// What it says.
    text: String,
}

/// Moves so many guests together with these options of `sterna migrate`, and prints the steps of their pauses.
///
/// # Errors
/// What failed, of the lab or of a migration.
pub fn run(moving: Gang, options: &str, settings: &str) -> Result<()> {
    let options = sterna::options(options)?;
    let name = format!("pause{}", std::process::id());
    let merging = if moving.merged { gang::sharing() } else { String::new() };
    let settings = format!("log = \"debug\"\n{merging}{settings}\n");
    let lab = gang::lab_with(LabConfig::pair(&name), usize::from(moving.guests).max(4), &settings)?;
    let guest = |number: u8| {
        let mut guest = Guest::new(&lab, &format!("g{number}"), number, &moving.jobs(number));
        guest.memory_bytes = moving.memory_mib << 20;
        guest.beat = Duration::from_millis(10);
        guest
    };
    let guests: Vec<Guest> = (1..=moving.guests).map(guest).collect();
    println!("guests run under {}", accelerator::chosen().name());
    plugged(&lab, &guests, || {
        let qemu = match std::env::var_os("PAUSE_QEMU") {
            Some(p) => p.into(),
            None => tools::qemu_7_2()?,
        };
        let private = ["--memory-mode", "private", "--trust-group", gang::GROUP];
        let words: &[&str] = if moving.merged { &private } else { &[] };
        let start = |guest: &Guest| SternaVm::start_with(&lab, "a", guest, &qemu, words);
        let mut vms = guests.iter().map(start).collect::<Result<Vec<_>>>()?;
        guests.iter().try_for_each(|guest| guest.wait_until_up(PATIENCE))?;
        let _ksm = moving.merged.then(|| moving.merge(&guests, &vms)).transpose()?;
        std::thread::sleep(REST);
        let meter = Meter::start(lab.host(METER)?)?;
        std::thread::sleep(REST);
        let begin_us = now_us();
        let reports = sterna::migrate_together(&mut vms, &lab, "b", &options, &[])?;
        let total_ms = reports.iter().map(|report| report.total_ms).fold(0.0, f64::max);
        println!("moved in {:.1} s", total_ms / 1e3);
        std::thread::sleep(REST);
        for (report, guest) in reports.iter().zip(&guests) {
            let gap = longest_gap(&meter.arrivals(guest.address()), begin_us, now_us());
            let gap = gap.map_or("no heartbeats".into(), |gap| {
                format!("{:.0} ms, of which its clock saw {:.0}; {} beats were lost", gap.ms, gap.guest_ms, gap.lost)
            });
            println!(
                "{}: stopped for {:.1} ms, by QEMU's events; silent at the meter: {gap}",
                report.vm, report.downtime_ms
            );
        }
        let mut steps = read(lab.host("a")?, "source")?;
        steps.extend(read(lab.host("b")?, "destination")?);
        print!("{}", show(steps));
        Ok(())
    })
}

fn read(host: &Host, side: &'static str) -> Result<Vec<Step>> {
    let path = host.directory.join("sternad.log");
    Ok(parse(&text_of(&path)?, side))
}

fn text_of(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).context(|| format!("reading {}", path.display()))
}

/// The lines of a log that begin with a moment, `2026-11-25T02:05:12.123456Z`.
fn parse(text: &str, side: &'static str) -> Vec<Step> {
    let step = |line: &str| {
        let line = without_colours(line);
        let (moment, rest) = line.trim_start().split_once(' ')?;
        let (hours, rest_of) = moment.strip_suffix('Z')?.split_once('T')?.1.split_once(':')?;
        let (minutes, seconds) = rest_of.split_once(':')?;
        let whole = hours.parse::<i64>().ok()? * 3600 + minutes.parse::<i64>().ok()? * 60;
        let at_us = whole * 1_000_000 + (seconds.parse::<f64>().ok()? * 1e6).round() as i64;
        Some(Step { at_us, side, text: rest.trim_start().to_owned() })
    };
    text.lines().filter_map(step).collect()
}

/// A line without the escape sequences for colours.
fn without_colours(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
}

/// The steps from the first stop to the last start: milliseconds since the first, and since the step before.
fn show(mut steps: Vec<Step>) -> String {
    steps.sort_by_key(|step| step.at_us);
    let first = steps.iter().position(|step| step.text.contains(FIRST));
    let last = steps.iter().rposition(|step| step.text.contains(LAST));
    let Some((first, last)) = first.zip(last).filter(|(first, last)| first <= last) else {
        return "no pause in the daemons' logs\n".into();
    };
    let (zero, mut before) = (steps[first].at_us, steps[first].at_us);
    let moment = Duration::from_micros(zero.unsigned_abs());
    let (seconds, micros) = (moment.as_secs(), moment.subsec_micros());
    let clock = format!("{:02}:{:02}:{:02}.{micros:06}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let mut text = format!("0 is {clock} UTC\n      ms    since  side         step\n");
    for step in &steps[first..=last] {
        let [at, since] = [step.at_us - zero, step.at_us - before].map(|us| us as f64 / 1e3);
        text.push_str(&format!("{at:8.2} {since:+8.2}  {:12} {}\n", step.side, step.text));
        before = step.at_us;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_both_sides_are_put_in_order_and_those_around_the_pause_left_out() {
        let source = "2026-11-25T23:59:59.000000Z  INFO sternad: begins\n\
                      \u{1b}[2m2026-11-25T23:59:59.100000Z\u{1b}[0m \u{1b}[34mDEBUG\u{1b}[0m m: the guest has stopped\n\
                      2026-11-25T23:59:59.106250Z DEBUG m: the guest runs there\n\
                      2026-11-25T23:59:59.200000Z  INFO m: ended\n";
        let destination = "nonsense\n2026-11-25T23:59:59.104000Z DEBUG m: the devices are loaded\n";
        let mut steps = parse(source, "source");
        assert_eq!(steps.len(), 4);
        steps.extend(parse(destination, "destination"));
        let shown = show(steps);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 5, "{shown}");
        assert_eq!(lines[2], "    0.00    +0.00  source       DEBUG m: the guest has stopped");
        assert_eq!(lines[3], "    4.00    +4.00  destination  DEBUG m: the devices are loaded");
        assert_eq!(lines[4], "    6.25    +2.25  source       DEBUG m: the guest runs there");
    }

    #[test]
    fn a_log_without_a_pause_is_said_to_have_none() {
        assert!(
            show(parse("2026-11-25T00:00:00.000000Z DEBUG m: the guest runs there", "source")).contains("no pause")
        );
    }
}
