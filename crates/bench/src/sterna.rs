//! Machines that Sterna runs and moves, through its command line, as a user would.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sterna_api::{Estimate, Forked, MigrateOptions, Reclaimed, Replaced, Report, SplitReport, Status, Vm, units};

use crate::command::{finish_within, output_within, show};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Host;
use crate::{Lab, tools};

/// The longest that anything but a migration may take, on a machine that has other work too.
const ANSWER: Duration = Duration::from_secs(60);
/// The longest that a migration without a timeout may take.
const MIGRATION: Duration = Duration::from_secs(600);

/// A machine that Sterna runs.
pub struct SternaVm {
    name: String,
    host: Host,
    /// The destination of its last migration, if that failed: the machine, or a part of it, may be there.
    elsewhere: Option<Box<Host>>,
}

/// The words for memory hosts, and what each lends.
fn lent(memory: &[(String, u64)]) -> impl Iterator<Item = String> {
    memory.iter().flat_map(|(peer, bytes)| ["--memory".to_owned(), format!("{peer}={bytes}B")])
}

impl SternaVm {
    /// Starts a guest on a host of the lab through `sterna run`.
    ///
    /// # Errors
    /// The error that `sterna` reported.
    pub fn start(lab: &Lab, host: &str, guest: &Guest, qemu: &Path) -> Result<Self> {
        Self::start_with(lab, host, guest, qemu, &[])
    }

    /// Starts a guest on a host of the lab through `sterna run` with these options beside.
    ///
    /// # Errors
    /// The error that `sterna` reported.
    pub fn start_with(lab: &Lab, host: &str, guest: &Guest, qemu: &Path, options: &[&str]) -> Result<Self> {
        let host = lab.host(host)?;
        let mut command = sterna(host)?;
        command.args([
            "run",
            &guest.name,
            "--memory",
            &format!("{}K", guest.memory_bytes / 1024),
            "--detach",
            "--qemu",
        ]);
        command.arg(qemu).args(options).arg("--").args(guest.arguments(lab)?);
        output_within(&mut command, ANSWER)?;
        Ok(Self { name: guest.name.clone(), host: host.clone(), elsewhere: None })
    }

    /// The host it is on.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// QEMU's process.
    ///
    /// # Errors
    /// Where the daemon does not know the machine.
    pub fn pid(&self) -> Result<u32> {
        self.show().map(|vm| vm.pid)
    }

    /// The machine as its daemon shows it.
    ///
    /// # Errors
    /// Where the daemon does not know it.
    pub fn show(&self) -> Result<Vm> {
        let text = output_within(sterna(&self.host)?.args(["show", &self.name, "--json"]), ANSWER)?;
        told("sterna show --json", &text)
    }

    /// Changes how its balloon is handled, as `sterna balloon NAME` does with these words.
    ///
    /// # Errors
    /// The error that `sterna` reported.
    pub fn balloon(&self, words: &[&str]) -> Result<()> {
        output_within(sterna(&self.host)?.args(["balloon", &self.name]).args(words), ANSWER).map(drop)
    }

    /// Gives its guest's free memory back to the host, by `sterna reclaim --method METHOD`.
    ///
    /// # Errors
    /// Where the daemon refuses, or the reclaim did not complete.
    pub fn reclaim(&self, method: &str) -> Result<Reclaimed> {
        let words = ["reclaim", &self.name, "--method", method, "--json", "-"];
        let text = output_within(sterna(&self.host)?.args(words), MIGRATION)?;
        told("sterna reclaim --json", &text)
    }

    /// The estimate of its migration at this rate, bytes per second, by `sterna estimate`.
    ///
    /// # Errors
    /// Where the daemon refuses.
    pub fn estimate(&self, bytes_per_s: u64) -> Result<Estimate> {
        let rate = format!("{bytes_per_s}B");
        let words = ["estimate", &self.name, "--json", "--bandwidth", &rate];
        let text = output_within(sterna(&self.host)?.args(words), ANSWER)?;
        told("sterna estimate --json", &text)
    }

    /// Gives it another QEMU, by `sterna replace --qemu PATH`.
    ///
    /// # Errors
    /// Where the daemon refuses, or the guest could not be handed over.
    pub fn replace(&self, qemu: &Path) -> Result<Replaced> {
        let mut command = sterna(&self.host)?;
        command.args(["replace", &self.name, "--json", "-", "--qemu"]).arg(qemu);
        let text = output_within(&mut command, ANSWER)?;
        told("sterna replace --json", &text)
    }

    /// Has all of its memory but so many bytes leave for these memory hosts, each of which lends so many bytes, by
    /// `sterna split` with these words beside.
    ///
    /// # Errors
    /// Where a daemon refuses, or pages stayed that were to leave.
    pub fn split(&self, here_bytes: u64, memory: &[(String, u64)], words: &[&str]) -> Result<SplitReport> {
        let mut command = sterna(&self.host)?;
        command.args(["split", &self.name, "--json", "-", "--main", &format!("here={here_bytes}B")]).args(words);
        command.args(lent(memory));
        told("sterna split --json", &output_within(&mut command, MIGRATION)?)
    }

    /// Has all of its memory but so many bytes leave for these memory hosts, and moves it to another host, by `sterna
    /// split --main` with these words beside.
    ///
    /// # Errors
    /// As [`split`](Self::split), or it did not move.
    pub fn split_to(
        &mut self,
        lab: &Lab,
        to: &str,
        bytes: u64,
        memory: &[(String, u64)],
        words: &[&str],
    ) -> Result<SplitReport> {
        let destination = lab.host(to)?;
        let mut command = sterna(&self.host)?;
        command.args(["split", &self.name, "--json", "-", "--main", &format!("{}={bytes}B", destination.listen())]);
        command.args(words).args(lent(memory));
        self.elsewhere = Some(Box::new(destination.clone()));
        let report: SplitReport = told("sterna split --json", &output_within(&mut command, MIGRATION)?)?;
        self.note_end(report.status, destination);
        Ok(report)
    }

    /// Empties a host of these machines, by `sterna evacuate`. The reports of their moves.
    ///
    /// # Errors
    /// As [`split_to`](Self::split_to).
    pub fn evacuate(vms: &mut [Self], lab: &Lab, to: &str, memory: &[(String, u64)]) -> Result<Vec<Report>> {
        let (destination, Some(first)) = (lab.host(to)?, vms.first()) else { return Ok(Vec::new()) };
        let mut command = sterna(&first.host)?;
        command.arg("evacuate").args(vms.iter().map(|vm| &vm.name)).args([
            "--json",
            "-",
            "--to",
            &destination.listen(),
        ]);
        command.args(lent(memory));
        vms.iter_mut().for_each(|vm| vm.elsewhere = Some(Box::new(destination.clone())));
        let mut evacuated: Value = told("sterna evacuate --json", &output_within(&mut command, MIGRATION)?)?;
        let reports: Vec<Report> = told("sterna evacuate --json", &evacuated["migrations"].take().to_string())?;
        vms.iter_mut().zip(&reports).for_each(|(vm, report)| vm.note_end(report.status, destination));
        Ok(reports)
    }

    /// Has its guest go on as clones of these names too, by `sterna fork` with these words beside. The report, and the
    /// clones in the order of their names.
    ///
    /// # Errors
    /// Where the daemon refuses, or one clone is not there.
    pub fn fork(&self, names: &[String], words: &[&str]) -> Result<(Forked, Vec<Self>)> {
        let mut command = sterna(&self.host)?;
        command.args(["fork", &self.name, "--json", "-"]).args(names).args(words);
        let forked = told("sterna fork --json", &output_within(&mut command, MIGRATION)?)?;
        let clone = |name: &String| Self { name: name.clone(), host: self.host.clone(), elsewhere: None };
        Ok((forked, names.iter().map(clone).collect()))
    }

    /// Has it go on as clones of these names on other hosts, in turn. Returns the report and the clones in the order of
    /// their names.
    ///
    /// # Errors
    /// As [`fork`](Self::fork).
    pub fn fork_to(&self, names: &[String], hosts: &[Host]) -> Result<(Forked, Vec<Self>)> {
        let addresses: Vec<String> = hosts.iter().map(Host::listen).collect();
        let words: Vec<&str> = addresses.iter().flat_map(|address| ["--to", address]).collect();
        let (forked, mut clones) = self.fork(names, &words)?;
        for (clone, host) in clones.iter_mut().zip(hosts.iter().cycle()) {
            clone.host = host.clone();
        }
        Ok((forked, clones))
    }

    /// Whether the daemon of this host knows a machine of this name.
    ///
    /// # Errors
    /// The command line could not be run.
    pub fn is_known(host: &Host, name: &str) -> Result<bool> {
        let mut command = sterna(host)?;
        command.args(["show", name, "--json"]);
        Ok(finish_within(&mut command, MIGRATION)?.status.success())
    }

    /// Moves it to another host of the lab. A migration that was cancelled, perhaps by its timeout, is reported as
    /// such: the guest is where it was.
    ///
    /// # Errors
    /// [`Error::Migration`] where the report says that it failed; the machine is then still this one.
    pub fn migrate(&mut self, lab: &Lab, to: &str, options: &MigrateOptions) -> Result<Report> {
        let destination = lab.host(to)?;
        self.elsewhere = Some(Box::new(destination.clone()));
        let report = migrate(&self.host, &self.name, &destination.listen(), options)?;
        self.note_end(report.status, destination);
        if report.status == Status::Failed {
            let reason = report.error.map_or_else(|| "no reason given".into(), |problem| problem.message);
            return Err(Error::Migration { vm: self.name.clone(), status: "failed".into(), reason });
        }
        Ok(report)
    }

    /// Notes where it is after a migration with this end.
    fn note_end(&mut self, status: Status, destination: &Host) {
        if status != Status::Failed {
            self.elsewhere = None;
        }
        if status == Status::Completed {
            self.host = destination.clone();
        }
    }
}

impl Drop for SternaVm {
    fn drop(&mut self) {
        // The lab's end would end it too; until then it must not take processor time and memory from later trials.
        for host in [Some(&self.host), self.elsewhere.as_deref()].into_iter().flatten() {
            if let Ok(mut command) = sterna(host) {
                let _ = output_within(command.args(["stop", &self.name, "--force"]), ANSWER);
            }
        }
    }
}

/// `sterna` for the daemon of a host.
///
/// # Errors
/// Where it is not built.
pub fn sterna(host: &Host) -> Result<Command> {
    let mut command = Command::new(tools::sterna()?);
    command.args(["--api", &host.api()]);
    Ok(command)
}

/// What a command has told as JSON.
fn told<T: DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::Form { what: what.into(), reason: error.to_string() })
}

/// Moves a machine and returns its report, whatever the end was.
///
/// # Errors
/// Where there is no report, because the request was refused, or because post-copy, which no timeout ends, was not
/// complete after twice the timeout and a minute.
pub fn migrate(from: &Host, name: &str, to: &str, options: &MigrateOptions) -> Result<Report> {
    let mut command = sterna(from)?;
    command.args(["migrate", name]);
    asked(command, to, options, parse_report)
}

/// Moves machines of one host together, by one request with these words beside, and returns the report of each, in
/// their order, whatever the end was.
///
/// # Errors
/// As [`migrate`], and where there are no machines.
pub fn migrate_together(
    vms: &mut [SternaVm],
    lab: &Lab,
    to: &str,
    options: &MigrateOptions,
    words: &[&str],
) -> Result<Vec<Report>> {
    let destination = lab.host(to)?;
    let from = vms.first().ok_or_else(|| Error::Usage("a gang needs a machine".into()))?.host.clone();
    vms.iter_mut().for_each(|vm| vm.elsewhere = Some(Box::new(destination.clone())));
    let mut command = sterna(&from)?;
    command.arg("migrate").args(vms.iter().map(|vm| &vm.name)).args(words);
    let reports = asked(command, &destination.listen(), options, parse_reports)?;
    let of = |vm: &SternaVm| reports.iter().find(|report| report.vm == vm.name).cloned();
    let mut ordered = Vec::new();
    for vm in vms {
        let report = of(vm).ok_or_else(|| Error::Form {
            what: "sterna migrate --json".into(),
            reason: format!("no report of {}", vm.name),
        })?;
        vm.note_end(report.status, destination);
        ordered.push(report);
    }
    Ok(ordered)
}

/// Runs a `sterna migrate` that names its machines to its end, and returns what `parse` finds in its output.
fn asked<T>(mut command: Command, to: &str, options: &MigrateOptions, parse: impl Fn(&[u8]) -> Option<T>) -> Result<T> {
    command.args(["--to", to, "--json", "-"]).args(arguments(options));
    let shown = show(&command);
    let limit = options.timeout_ms.map(|ms| Duration::try_from_secs_f64(ms / 500.0).unwrap_or(MIGRATION) + ANSWER);
    let output = finish_within(&mut command, limit.unwrap_or(MIGRATION))?;
    parse(&output.stdout).ok_or_else(|| Error::Command {
        command: shown,
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// The report alone, or the first of `{"migrations":[…]}`.
fn parse_report(text: &[u8]) -> Option<Report> {
    parse_reports(text)?.into_iter().next()
}

/// The reports of `{"migrations":[…]}`, or the report alone.
fn parse_reports(text: &[u8]) -> Option<Vec<Report>> {
    let mut value: Value = serde_json::from_slice(text).ok()?;
    match value.get_mut("migrations").map(Value::take) {
        Some(reports) => serde_json::from_value(reports).ok(),
        None => serde_json::from_value(value).ok().map(|report| vec![report]),
    }
}

/// Options as one would type them for `sterna migrate`, such as `--fake-dirty off --compress zstd`.
///
/// # Errors
/// [`Error::Usage`] where an option or a value is unknown, or options contradict each other.
pub fn options(text: &str) -> Result<MigrateOptions> {
    let usage = |reason: String| Error::Usage(format!("'{text}' is no valid list of a migration's options: {reason}"));
    let mut words = text.split_ascii_whitespace();
    let mut fields = serde_json::Map::new();
    while let Some(word) = words.next() {
        let name = word.strip_prefix("--").ok_or_else(|| usage(format!("'{word}' does not begin with --")))?;
        if ["verify", "no-postcopy"].contains(&name) {
            fields.insert(name.replace('-', "_"), true.into());
            continue;
        }
        let value = words.next().ok_or_else(|| usage(format!("{word} has no value")))?;
        let (field, value) = field(name, value).map_err(usage)?;
        fields.insert(field, value);
    }
    let options: MigrateOptions =
        serde_json::from_value(Value::Object(fields)).map_err(|error| usage(error.to_string()))?;
    options.check().map_err(usage)?;
    Ok(options)
}

/// The API's field and value of an option of the command line.
fn field(name: &str, value: &str) -> Result<(String, Value), String> {
    let ms = |text| units::parse_duration(text).map(|time| json!(time.as_secs_f64() * 1e3)).map_err(|e| e.to_string());
    let plain = name.replace('-', "_");
    Ok(match name {
        "fake-dirty-delay" | "downtime-limit" | "downtime-ramp" | "timeout" => (format!("{plain}_ms"), ms(value)?),
        "delta-cache" => (format!("{plain}_bytes"), units::parse_size(value).map_err(|e| e.to_string())?.into()),
        "bandwidth" | "postcopy-bandwidth" => {
            (format!("{plain}_bytes_per_s"), units::parse_rate(value).map_err(|e| e.to_string())?.into())
        }
        "throttle" => ("throttle_percent".into(), value.parse::<u8>().map_err(|e| e.to_string())?.into()),
        "streams" | "compress-level" | "compress-threads" | "precopy-rounds" => {
            (plain, value.parse::<i64>().map_err(|e| e.to_string())?.into())
        }
        _ => (plain, value.into()),
    })
}

/// The options as `sterna migrate` takes them; defaults are left out.
pub(crate) fn arguments(options: &MigrateOptions) -> Vec<String> {
    let default = MigrateOptions::default();
    let mut arguments = Vec::new();
    let mut add = |option: &str, value: Option<String>| {
        if let Some(value) = value {
            arguments.extend([format!("--{option}"), value]);
        }
    };
    add("mode", name_unless(&options.mode, &default.mode));
    add("precopy-rounds", options.precopy_rounds.map(|rounds| rounds.to_string()));
    add("prepaging", name_unless(&options.prepaging, &default.prepaging));
    add("fake-dirty", name_unless(&options.fake_dirty, &default.fake_dirty));
    add("fake-dirty-delay", options.fake_dirty_delay_ms.map(|ms| format!("{ms}ms")));
    add("content-hash", name_unless(&options.content_hash, &default.content_hash));
    add("hot-pages", name_unless(&options.hot_pages, &default.hot_pages));
    add("skip-free", name_unless(&options.skip_free, &default.skip_free));
    add("delta", name_unless(&options.delta, &default.delta));
    add("delta-cache", options.delta_cache_bytes.map(|bytes| bytes.to_string()));
    add("compress", name_unless(&options.compress, &default.compress));
    add("compress-level", options.compress_level.map(|level| level.to_string()));
    add("compress-threads", options.compress_threads.map(|threads| threads.to_string()));
    add("streams", (options.streams != default.streams).then(|| options.streams.to_string()));
    add("bandwidth", options.bandwidth_bytes_per_s.map(|rate| format!("{rate}B")));
    add("postcopy-bandwidth", options.postcopy_bandwidth_bytes_per_s.map(|rate| format!("{rate}B")));
    let limit = options.downtime_limit_ms;
    add("downtime-limit", (limit != default.downtime_limit_ms).then(|| format!("{limit}ms")));
    add("downtime-ramp", options.downtime_ramp_ms.map(|ms| format!("{ms}ms")));
    add("throttle", options.throttle_percent.map(|percent| percent.to_string()));
    add("timeout", options.timeout_ms.map(|ms| format!("{ms}ms")));
    add("on-timeout", name_unless(&options.on_timeout, &default.on_timeout));
    add("gang-pauses", name_unless(&options.gang_pauses, &default.gang_pauses));
    for (option, wanted) in [("--no-postcopy", options.no_postcopy), ("--verify", options.verify)] {
        arguments.extend(wanted.then(|| option.to_owned()));
    }
    arguments
}

/// The name that the API, and so the command line, has for a value; `None` for the default.
fn name_unless<T: Serialize + PartialEq>(value: &T, default: &T) -> Option<String> {
    let name = serde_json::to_value(value).ok()?;
    (value != default).then(|| name.as_str().map(str::to_owned))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_alone_or_from_a_gangs_list() {
        let report = Report { vm: "g".into(), status: Status::Completed, ..Report::default() };
        let alone = serde_json::to_vec(&report).unwrap();
        let list = serde_json::to_vec(&serde_json::json!({ "migrations": [report] })).unwrap();
        assert_eq!(parse_report(&alone).unwrap().vm, "g");
        assert_eq!(parse_report(&list).unwrap().vm, "g");
        assert_eq!(parse_reports(&list).unwrap().len(), 1);
        assert_eq!(parse_reports(&alone).unwrap().len(), 1);
        assert!(parse_report(b"error: no such machine").is_none());
    }

    #[test]
    fn only_options_that_differ_from_the_defaults_are_given() {
        assert!(arguments(&MigrateOptions::default()).is_empty());
        let options = MigrateOptions { streams: 4, verify: true, ..MigrateOptions::default() };
        assert_eq!(arguments(&options), ["--streams", "4", "--verify"]);
    }
    #[test]
    fn options_are_read_as_they_are_written() {
        for text in [
            "",
            "--mode precopy --fake-dirty dtrack-v2 --fake-dirty-delay 5ms --content-hash off --hot-pages send",
            "--delta xbzrle --delta-cache 134217728 --compress zstd --compress-level 3 --compress-threads 2",
            "--streams 2 --bandwidth 12500000B --downtime-limit 50ms --downtime-ramp 3000ms --throttle 99",
            "--timeout 20000ms --on-timeout force --verify",
            "--mode hybrid --precopy-rounds 2 --prepaging linear --postcopy-bandwidth 50000000B",
            "--no-postcopy",
            "--skip-free off",
        ] {
            assert_eq!(arguments(&options(text).unwrap()).join(" "), text);
        }
    }

    #[test]
    fn options_that_do_not_exist_or_contradict_each_other_are_refused() {
        for text in ["--mode teleport", "--colour red", "compress zstd", "--compress", "--on-timeout force"] {
            assert!(options(text).is_err(), "{text}");
        }
    }
}
