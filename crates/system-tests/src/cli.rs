//! `sterna`, with its exit status.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sterna_api::{Report, SplitReport, Status};
use sterna_bench::command::wait_for;
use sterna_bench::lab::Host;
use sterna_bench::sterna::sterna;

use crate::PATIENCE;

/// How a command ended.
#[derive(Debug)]
pub struct Answer {
    /// Its exit status.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl From<Output> for Answer {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Answer {
    /// The report that `migrate --json -` writes.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        serde_json::from_str(&self.stdout).ok()
    }

    /// The report that `split` and `merge` write with `--json -`.
    ///
    /// # Panics
    /// Where there is none.
    #[must_use]
    pub fn split_report(&self) -> SplitReport {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no report: {error}: {self:#?}"))
    }

    /// The same of one that completed.
    ///
    /// # Panics
    /// Where it did not.
    pub fn completed_split(&self) -> SplitReport {
        self.expect(0, &[]);
        let report = self.split_report();
        assert_eq!((report.status, report.error.as_ref()), (Status::Completed, None), "{report:?}");
        report
    }

    /// The code of the problem, as the report names it.
    #[must_use]
    pub fn problem(&self) -> String {
        self.report().and_then(|report| report.error).map(|problem| problem.code.to_string()).unwrap_or_default()
    }

    /// Checks that it ended with `code` and that its standard error has all of `words`.
    ///
    /// # Panics
    /// Where it did not.
    pub fn expect(&self, code: i32, words: &[&str]) -> &Self {
        assert_eq!(self.code, code, "{self:#?}");
        let said = self.stderr.to_lowercase();
        for word in words {
            assert!(said.contains(&word.to_lowercase()), "'{word}' is not said: {self:#?}");
        }
        self
    }
}

fn command(host: &Host, arguments: &[&str]) -> Command {
    let mut command = sterna(host).expect("sterna is built");
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command against a host's daemon to its end.
///
/// # Panics
/// Where `sterna` cannot be started.
#[must_use]
pub fn ask(host: &Host, arguments: &[&str]) -> Answer {
    command(host, arguments).output().expect("sterna starts").into()
}

/// Limits what all migrations away from a host may send together from now on, bytes per second; `None` for no limit. A
/// test can so keep a migration under way, and then let it go on.
///
/// # Panics
/// Where its daemon does not take it.
pub fn limit_bandwidth(host: &Host, bytes_per_s: Option<u64>) {
    let api = host.api();
    let mut stream = UnixStream::connect(api.strip_prefix("unix:").unwrap_or(&api)).expect("the daemon listens");
    let body = serde_json::json!({ "bandwidth_bytes_per_s": bytes_per_s }).to_string();
    let head = "PUT /v1/host/bandwidth HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// A migration, or another long command, under way in a `sterna` of its own.
pub struct Attempt(Child);

impl Attempt {
    /// Begins to move `name` to the daemon at `to`.
    ///
    /// # Panics
    /// Where `sterna` cannot be started.
    #[must_use]
    pub fn begin(from: &Host, name: &str, to: &str, options: &[&str]) -> Self {
        Self::run(from, &[&["migrate", name, "--to", to, "--json", "-"], options].concat())
    }

    /// Begins to run a command against a host's daemon.
    ///
    /// # Panics
    /// Where `sterna` cannot be started.
    #[must_use]
    pub fn run(host: &Host, arguments: &[&str]) -> Self {
        let mut command = command(host, arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().expect("sterna starts"))
    }

    /// Presses Ctrl-C.
    ///
    /// # Panics
    /// Where it has ended.
    pub fn interrupt(&self) {
        let pid = i32::try_from(self.0.id()).expect("a process id");
        kill(Pid::from_raw(pid), Signal::SIGINT).expect("it still runs");
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// Where it does not end: a guest that writes faster than a slow link carries is moved for ever.
    #[must_use]
    pub fn end(mut self) -> Answer {
        let ended = wait_for("its end", PATIENCE, || Ok(self.0.try_wait().ok().flatten()));
        if ended.is_err() {
            let _ = self.0.kill();
        }
        let answer: Answer = self.0.wait_with_output().expect("its output").into();
        assert!(ended.is_ok(), "the command does not end: {answer:#?}");
        answer
    }
}
