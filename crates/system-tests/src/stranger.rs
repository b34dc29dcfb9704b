//! A QEMU that was not started by Sterna, on a host of the lab.

use std::path::PathBuf;
use std::process::{Child, Stdio};

use sterna_bench::command::wait_for;
use sterna_bench::lab::Host;
use sterna_bench::tools;

use crate::PATIENCE;
use crate::cli::{self, Answer};

/// A QEMU that was not started by Sterna; dropping it ends it.
pub struct Stranger {
    child: Child,
    host: Host,
    qmp: PathBuf,
}

impl Stranger {
    /// Starts QEMU 7.2 with these arguments and a QMP socket, with or without the agent.
    ///
    /// # Panics
    /// Where it does not start.
    #[must_use]
    pub fn start(host: &Host, name: &str, arguments: &[String], with_agent: bool) -> Self {
        let qmp = host.directory.join(format!("{name}.qmp"));
        let mut command = if with_agent {
            let mut command = host.command("env");
            command.arg(format!("LD_PRELOAD={}", tools::agent().expect("looked for before").display()));
            command.arg(format!("STERNA_AGENT_SOCKET={}", host.directory.join(format!("{name}.agent")).display()));
            command.arg(tools::qemu_7_2().expect("looked for before"));
            command
        } else {
            host.command(tools::qemu_7_2().expect("looked for before"))
        };
        command.args(arguments).arg("-qmp").arg(format!("unix:{},server=on,wait=off", qmp.display()));
        command.stdin(Stdio::null());
        let child = host.spawn(&mut command, name).expect("QEMU starts");
        let stranger = Self { child, host: host.clone(), qmp };
        wait_for("QEMU's answer", PATIENCE, || {
            Ok(std::os::unix::net::UnixStream::connect(&stranger.qmp).is_ok().then_some(()))
        })
        .expect("QEMU answers");
        stranger
    }

    /// Runs `sterna adopt NAME` for it.
    #[must_use]
    pub fn adopt(&self, name: &str) -> Answer {
        let (pid, qmp) = (self.child.id().to_string(), self.qmp.display().to_string());
        cli::ask(&self.host, &["adopt", name, "--pid", &pid, "--qmp", &qmp])
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
