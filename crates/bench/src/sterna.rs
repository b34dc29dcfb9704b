//! Machines that Sterna runs and moves, through its command line, as a user would.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use sterna_api::{MigrateOptions, Mode, Report, Status};

use crate::command::{output, show};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::Host;
use crate::{Lab, tools};

/// A machine that Sterna runs.
pub struct SternaVm {
    name: String,
    host: Host,
}

impl SternaVm {
    /// Starts a guest on a host of the lab through `sterna run`.
    ///
    /// # Errors
    /// What `sterna` said.
    pub fn start(lab: &Lab, host: &str, guest: &Guest, qemu: &Path) -> Result<Self> {
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
        command.arg(qemu).arg("--").args(guest.arguments(lab)?);
        output(&mut command)?;
        Ok(Self { name: guest.name.clone(), host: host.clone() })
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
        let text = output(sterna(&self.host)?.args(["show", &self.name, "--json"]))?;
        let form = |reason: String| Error::Form { what: "sterna show --json".into(), reason };
        let vm: Value = serde_json::from_str(&text).map_err(|error| form(error.to_string()))?;
        vm["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).ok_or_else(|| form("no pid".into()))
    }

    /// Moves it to another host of the lab.
    ///
    /// # Errors
    /// [`Error::Migration`] where the report says that it did not complete; the machine is then still this one.
    pub fn migrate(&mut self, lab: &Lab, to: &str, options: &MigrateOptions) -> Result<Report> {
        let destination = lab.host(to)?;
        let report = migrate(&self.host, &self.name, &destination.listen(), options)?;
        if report.status != Status::Completed {
            let status = if report.status == Status::Cancelled { "was cancelled" } else { "failed" };
            let reason = report.error.map_or_else(|| "no reason given".into(), |problem| problem.message);
            return Err(Error::Migration { vm: self.name.clone(), status: status.into(), reason });
        }
        self.host = destination.clone();
        Ok(report)
    }
}

impl Drop for SternaVm {
    fn drop(&mut self) {
        // The lab's end would end it too; until then it must not keep processor and memory from what comes next.
        if let Ok(mut command) = sterna(&self.host) {
            let _ = output(command.args(["stop", &self.name, "--force"]));
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

/// Moves a machine and returns its report, whatever the end was.
///
/// # Errors
/// Where there is no report: the request itself was refused.
pub fn migrate(from: &Host, name: &str, to: &str, options: &MigrateOptions) -> Result<Report> {
    let mut command = sterna(from)?;
    command.args(["migrate", name, "--to", to, "--json", "-"]).args(arguments(options));
    let shown = show(&command);
    let output = command.stdin(Stdio::null()).output().context(|| format!("starting `{shown}`"))?;
    parse_report(&output.stdout).ok_or_else(|| Error::Command {
        command: shown,
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// The report alone, or the first of `{"migrations":[…]}`.
fn parse_report(text: &[u8]) -> Option<Report> {
    let mut value: Value = serde_json::from_slice(text).ok()?;
    let report = value.get_mut("migrations").and_then(|all| all.get_mut(0)).map(Value::take);
    serde_json::from_value(report.unwrap_or(value)).ok()
}

/// The options as `sterna migrate` takes them; defaults are left out.
fn arguments(options: &MigrateOptions) -> Vec<String> {
    let default = MigrateOptions::default();
    let mut arguments = Vec::new();
    let mut add = |option: &str, value: Option<String>| {
        arguments.push(format!("--{option}"));
        arguments.extend(value);
    };
    match options.mode {
        Mode::Auto => {}
        Mode::Precopy => add("mode", Some("precopy".into())),
        Mode::StopAndCopy => add("mode", Some("stop-and-copy".into())),
    }
    if options.streams != default.streams {
        add("streams", Some(options.streams.to_string()));
    }
    if let Some(rate) = options.bandwidth_bytes_per_s {
        add("bandwidth", Some(format!("{rate}B")));
    }
    if options.downtime_limit_ms != default.downtime_limit_ms {
        add("downtime-limit", Some(format!("{}ms", options.downtime_limit_ms)));
    }
    if let Some(timeout) = options.timeout_ms {
        add("timeout", Some(format!("{timeout}ms")));
    }
    if options.on_timeout != default.on_timeout {
        add("on-timeout", Some("force".into()));
    }
    if options.verify {
        add("verify", None);
    }
    arguments
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
        assert!(parse_report(b"error: no such machine").is_none());
    }

    #[test]
    fn only_options_that_differ_from_the_defaults_are_given() {
        assert!(arguments(&MigrateOptions::default()).is_empty());
        let options = MigrateOptions { streams: 4, verify: true, ..MigrateOptions::default() };
        assert_eq!(arguments(&options), ["--streams", "4", "--verify"]);
    }
}
