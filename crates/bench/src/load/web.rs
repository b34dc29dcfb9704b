//! wrk: requests for the files of a guest's web server, at random, over connections that stay.

use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{Context, Result};
use crate::lab::Host;
use crate::tools;

/// The number of connections.
const CONNECTIONS: u32 = 8;

/// wrk at work, started again and again: one that finds no guest ends, and the next guest finds another. Dropping it
/// ends it.
pub struct WebClients {
    child: Child,
}

impl WebClients {
    /// Starts wrk on a host of the lab, for the files `0` to `FILES - 1` of the web server at `guest`, now and whenever
    /// one is there.
    ///
    /// # Errors
    /// Where wrk is not installed or does not start.
    pub fn start(host: &Host, guest: Ipv4Addr, files: u32) -> Result<Self> {
        let script = host.directory.join("wrk.lua");
        let text = format!(
            "math.randomseed(1)\nrequest = function() return wrk.format('GET', '/' .. math.random(0, {})) end\n",
            files.saturating_sub(1)
        );
        std::fs::write(&script, text).context(|| format!("writing {}", script.display()))?;
        let again = "while :; do \"$@\" || true; sleep 0.2; done";
        let mut command = host.command("setsid");
        command.args(["sh", "-c", again, "sh"]).arg(tools::wrk()?);
        command.args(["--threads", "1", "--connections", &CONNECTIONS.to_string(), "--duration", "20s", "--script"]);
        command.arg(&script).arg(format!("http://{guest}/"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn().context(|| "starting wrk".into())? })
    }
}

impl Drop for WebClients {
    fn drop(&mut self) {
        // `setsid` made the child the leader of a group: wrk and its shell end together.
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(-pid), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
