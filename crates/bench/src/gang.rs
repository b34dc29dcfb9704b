//! A gang: equal guests of one trust group that run beside each other, share what KSM has merged, and move together.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_api::{MigrateOptions, Report, Status};

use crate::baseline::{BaselineReport, BaselineVm, Method, Ram};
use crate::command::output;
use crate::error::{Context, Error, Result};
use crate::footprint;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig};
use crate::sterna::{self, SternaVm};

/// The trust group of every gang: the one whose pages the lab's hosts let KSM merge.
pub const GROUP: &str = "gang";
/// The option of `sterna migrate` that says whether shared pages stay shared.
const PRESERVE: &str = "--preserve-sharing";

/// The mover of a gang.
#[derive(Debug, Clone, PartialEq)]
pub enum Mover {
    /// QEMU by itself: all guests at once, RAM in anonymous memory that KSM may merge.
    Qemu(Method),
    /// Sterna, by one request for all guests, which are in private memory.
    Sterna {
        /// The migration's options.
        options: MigrateOptions,
        /// Whether pages that the guests share travel once and stay shared.
        sharing: bool,
    },
}

impl Mover {
    /// Its name in a table.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Qemu(method) => format!("qemu {}", method.label()),
            Self::Sterna { options, sharing } => {
                let others = sterna::arguments(options).join(" ").replace(" --", ", ").replace("--", ", ");
                format!("sterna, sharing {}{others}", if *sharing { "on" } else { "off" })
            }
        }
    }

    /// Its options, for a row's set-up.
    #[must_use]
    pub fn options(&self) -> Value {
        match self {
            Self::Qemu(method) => json!({ "method": method, "ram": Ram::Mergeable, "max_bandwidth": "unlimited" }),
            Self::Sterna { options, sharing } => json!({ "preserve_sharing": sharing, "others": options }),
        }
    }

    /// Whether this is the baseline.
    #[must_use]
    pub fn is_baseline(&self) -> bool {
        matches!(self, Self::Qemu(_))
    }
}

/// Brings up the lab of a gang: its hosts' daemons let KSM merge the gang's pages, offer what they have in pools, and
/// move `guests` at once.
///
/// # Errors
/// As [`Lab::up`].
pub fn lab(config: LabConfig, guests: usize) -> Result<Lab> {
    lab_with(config, guests, &sharing())
}

/// The same, whose hosts also keep what the memory of machines was that have left.
///
/// # Errors
/// As [`Lab::up`].
pub fn lab_that_keeps(config: LabConfig, guests: usize) -> Result<Lab> {
    lab_with(config, guests, &(sharing() + "keep_departed = \"1h\"\n"))
}

/// The settings of hosts between which a gang moves.
pub(crate) fn sharing() -> String {
    format!("ksm_group = \"{GROUP}\"\noffer_pools = true\n")
}

/// The lab of a gang of clones, whose pages nobody has to merge.
///
/// # Errors
/// As [`Lab::up`].
pub fn lab_of_clones(config: LabConfig, guests: usize) -> Result<Lab> {
    lab_with(config, guests, "")
}

/// Brings up a lab whose hosts move `guests` at once, with these settings too.
///
/// # Errors
/// As [`Lab::up`].
pub fn lab_with(config: LabConfig, guests: usize, settings: &str) -> Result<Lab> {
    let mut lab = Lab::up(LabConfig { daemons: false, ..config })?;
    let text = format!("{settings}max_outgoing = {guests}\nmax_incoming = {guests}\n");
    for name in lab.state().hosts.clone() {
        let file = lab.host(&name)?.directory.join("more.toml");
        std::fs::write(&file, &text).context(|| format!("writing {}", file.display()))?;
        lab.start_daemon(&name)?;
    }
    Ok(lab)
}

/// The guests while somebody runs them.
pub enum Gang {
    /// Sterna.
    Sterna(Vec<SternaVm>),
    /// QEMU by itself.
    Qemu(Vec<BaselineVm>),
}

/// The move of one guest of a gang.
#[derive(Debug, Clone)]
pub struct Moved {
    /// From the request to its end, milliseconds.
    pub total_ms: f64,
    /// By QEMU's events, milliseconds.
    pub downtime_ms: f64,
    /// Bytes that its mover sent.
    pub bytes_on_wire: u64,
    /// Bodies of pages that its mover sent.
    pub pages_sent: u64,
    /// Pages that went as references to bodies of pages sent before.
    pub shared_references: u64,
    /// The mover's own report.
    pub report: Value,
}

impl Gang {
    /// Starts these guests on host `a`, for this mover.
    ///
    /// # Errors
    /// Where one does not start.
    pub fn start(lab: &Lab, guests: &[Guest], qemu: &std::path::Path, mover: &Mover) -> Result<Self> {
        Ok(match mover {
            Mover::Sterna { .. } => {
                let memory = ["--memory-mode", "private", "--trust-group", GROUP];
                let start = |guest| SternaVm::start_with(lab, "a", guest, qemu, &memory);
                Self::Sterna(guests.iter().map(start).collect::<Result<_>>()?)
            }
            Mover::Qemu(_) => {
                let start = |guest| BaselineVm::start(lab, "a", guest, qemu, Ram::Mergeable);
                Self::Qemu(guests.iter().map(start).collect::<Result<_>>()?)
            }
        })
    }

    /// Their QEMU processes, where they run now.
    ///
    /// # Errors
    /// One has ended.
    pub fn pids(&self) -> Result<Vec<u32>> {
        match self {
            Self::Sterna(vms) => vms.iter().map(SternaVm::pid).collect(),
            Self::Qemu(vms) => Ok(vms.iter().map(BaselineVm::pid).collect()),
        }
    }

    /// The guests' RAM, where they run now.
    ///
    /// # Errors
    /// One has ended.
    pub fn rams(&self, memory_bytes: u64) -> Result<Vec<footprint::Ram>> {
        self.pids()?.into_iter().map(|pid| footprint::Ram::of(pid, memory_bytes)).collect()
    }

    /// Moves all guests to another host, and returns them where they are then, with what was measured, in their order.
    ///
    /// # Errors
    /// The first guest that did not move; none is left then.
    pub fn migrate(self, lab: &Lab, to: &str, mover: &Mover, limit: Duration) -> Result<(Self, Vec<Moved>)> {
        match (self, mover) {
            (Self::Sterna(vms), Mover::Sterna { options, sharing }) => {
                move_by_sterna(vms, (lab, to), options, *sharing, limit)
            }
            (Self::Qemu(vms), Mover::Qemu(method)) => move_by_qemu(vms, (lab, to), *method, limit),
            _ => Err(Error::Usage("a gang can be moved only by the program that runs it".into())),
        }
    }
}

fn move_by_sterna(
    mut vms: Vec<SternaVm>,
    (lab, to): (&Lab, &str),
    options: &MigrateOptions,
    sharing: bool,
    limit: Duration,
) -> Result<(Gang, Vec<Moved>)> {
    let mut options = options.clone();
    options.timeout_ms.get_or_insert(limit.as_secs_f64() * 1e3);
    // A command line that does not know the option shares nothing, and need not be told so.
    let words: &[&str] = match sharing {
        true => &[PRESERVE, "on"],
        false if knows_sharing()? => &[PRESERVE, "off"],
        false => &[],
    };
    let reports = sterna::migrate_together(&mut vms, lab, to, &options, words)?;
    let moved = reports.iter().map(of_sterna).collect::<Result<_>>()?;
    Ok((Gang::Sterna(vms), moved))
}

/// Whether this command line can keep shared pages shared.
fn knows_sharing() -> Result<bool> {
    let mut command = std::process::Command::new(crate::tools::sterna()?);
    Ok(output(command.args(["migrate", "--help"]))?.contains(PRESERVE))
}

fn of_sterna(report: &Report) -> Result<Moved> {
    if report.status != Status::Completed {
        let reason = report.error.as_ref().map_or("it was given up", |problem| problem.message.as_str()).to_owned();
        let status = if report.status == Status::Failed { "failed" } else { "was cancelled" };
        return Err(Error::Migration { vm: report.vm.clone(), status: status.into(), reason });
    }
    Ok(Moved {
        total_ms: report.total_ms,
        downtime_ms: report.downtime_ms,
        bytes_on_wire: report.bytes_on_wire,
        pages_sent: report.pages.sent,
        shared_references: report.pages.shared_reference,
        report: json!(report),
    })
}

fn move_by_qemu(
    vms: Vec<BaselineVm>,
    (lab, to): (&Lab, &str),
    method: Method,
    limit: Duration,
) -> Result<(Gang, Vec<Moved>)> {
    let begin = Instant::now();
    let ended: Vec<Result<(BaselineVm, BaselineReport, Duration)>> = std::thread::scope(|scope| {
        let move_one = |vm: BaselineVm| {
            let (vm, report) = vm.migrate(lab, to, method, limit)?;
            Ok((vm, report, begin.elapsed()))
        };
        let threads: Vec<_> = vms.into_iter().map(|vm| scope.spawn(move || move_one(vm))).collect();
        let lost = |_| Err(Error::Usage("a thread that moved a guest has panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
    });
    let (mut there, mut moved) = (Vec::new(), Vec::new());
    for one in ended {
        let (vm, report, took) = one?;
        moved.push(of_qemu(&report, took)?);
        there.push(vm);
    }
    Ok((Gang::Qemu(there), moved))
}

fn of_qemu(report: &BaselineReport, took: Duration) -> Result<Moved> {
    let given_up = || Error::Migration {
        vm: "a guest".into(),
        status: "was given up".into(),
        reason: "it had not ended in time".into(),
    };
    let pause = report.pause.as_ref().filter(|_| !report.given_up).ok_or_else(given_up)?;
    Ok(Moved {
        total_ms: took.as_secs_f64() * 1e3,
        downtime_ms: pause.downtime_ms,
        bytes_on_wire: report.bytes_on_wire,
        pages_sent: report.query_migrate["ram"]["normal"].as_u64().unwrap_or(0),
        shared_references: 0,
        report: json!(report),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_movers_label_says_what_makes_its_row() {
        let sterna = |text: &str, sharing| Mover::Sterna { options: sterna::options(text).unwrap(), sharing }.label();
        assert_eq!(sterna("--mode precopy", true), "sterna, sharing on, mode precopy");
        assert_eq!(sterna("", false), "sterna, sharing off");
        assert_eq!(Mover::Qemu(Method::Vanilla).label(), "qemu precopy");
    }

    #[test]
    fn a_guest_that_did_not_move_is_an_error_with_its_reason() {
        let report = Report { vm: "g".into(), status: Status::Cancelled, ..Report::default() };
        assert!(of_sterna(&report).unwrap_err().to_string().contains("migration of g was cancelled"));
        let report = Report { status: Status::Completed, total_ms: 5.0, ..report };
        assert_eq!(of_sterna(&report).unwrap().total_ms, 5.0);
    }
}
