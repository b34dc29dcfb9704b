//! One host of the lab: its namespace, its control group, its daemon.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::cgroup::Group;
use super::net;
use crate::command::{PATIENCE, output, show, wait_for};
use crate::error::{Context, Error, Result};
use crate::tools;

/// The port every lab's daemon listens on.
pub const DAEMON_PORT: u16 = 7878;

/// A host: `a`, `b`, …, `client` or `meter`.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its address in the lab.
    pub address: std::net::Ipv4Addr,
    /// Its network namespace.
    pub namespace: String,
    /// Its control group.
    pub group: Group,
    /// What its daemon and machines write.
    pub directory: PathBuf,
}

impl Host {
    /// The host `name` of `lab`, whose files are below `lab_directory`.
    #[must_use]
    pub fn new(lab: &str, name: &str, address: std::net::Ipv4Addr, lab_directory: &Path) -> Self {
        Self {
            name: name.to_owned(),
            address,
            namespace: net::namespace(lab, name),
            group: Group::of(lab, name),
            directory: lab_directory.join(name),
        }
    }

    /// A command that will run on this host: in its namespace and control group.
    ///
    /// `ip netns exec` would also give it mounts of its own, and a restarted daemon would not see those of the one
    /// before.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut join = String::from("set -e; ");
        for entrance in self.group.entrances() {
            join.push_str(&format!("echo $$ > {}; ", entrance.display()));
        }
        join.push_str("exec \"$@\"");
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", net::path(&self.namespace).display()));
        command.args(["sh", "-c", &join, "sh"]).arg(program.as_ref());
        command
    }

    /// Runs a program on this host to its end and returns its output.
    ///
    /// # Errors
    /// [`Error::Command`] with its standard error where it failed.
    pub fn output(&self, program: &str, arguments: &[&str]) -> Result<String> {
        output(self.command(program).args(arguments))
    }

    /// Starts `command` in the background; its output goes to `LOG.log` in the host's directory.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn spawn(&self, command: &mut Command, log: &str) -> Result<Child> {
        let path = self.directory.join(format!("{log}.log"));
        let file =
            File::options().create(true).append(true).open(&path).context(|| format!("opening {}", path.display()))?;
        let errors = file.try_clone().context(|| format!("opening {}", path.display()))?;
        let started = command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn();
        started.context(|| format!("starting `{}`", show(command)))
    }

    /// The daemon's API, as `--api` takes it.
    #[must_use]
    pub fn api(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// The address where its daemon listens for other daemons.
    #[must_use]
    pub fn listen(&self) -> String {
        format!("{}:{DAEMON_PORT}", self.address)
    }

    /// Starts the host's daemon, whose machines use `qemu` where they name none, and waits until it answers.
    ///
    /// # Errors
    /// Where it ends or does not answer; the message carries its last words.
    pub fn start_daemon(&self, qemu: Option<&Path>) -> Result<Child> {
        let mut command = self.command(tools::sternad()?);
        command.arg("--config").arg(self.configure(qemu)?);
        command.arg("--state-dir").arg(self.directory.join("state"));
        command.arg("--api").arg(self.api()).arg("--listen").arg(self.listen());
        if let Ok(level) = std::env::var("STERNA_LOG") {
            command.args(["--log", &level]);
        }
        let mut child = self.spawn(&mut command, "sternad")?;
        let socket = self.socket();
        let answers = wait_for("the daemon's answer", PATIENCE, || {
            if let Some(status) = child.try_wait().context(|| "waiting for the daemon".into())? {
                return Err(Error::Usage(format!(
                    "the daemon of host {} ended at once ({status}){}",
                    self.name,
                    self.last_words()
                )));
            }
            Ok(std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(()))
        });
        answers.map(|()| child)
    }

    /// Writes the daemon's configuration file: the settings that every daemon of a lab needs, and those of `more.toml`
    /// in the host's directory.
    fn configure(&self, qemu: Option<&Path>) -> Result<PathBuf> {
        let file = self.directory.join("sternad.toml");
        let mut text = format!("agent = {:?}\n", tools::agent()?);
        if let Some(qemu) = qemu {
            text.push_str(&format!("qemu = {qemu:?}\n"));
        }
        text.push_str(&std::fs::read_to_string(self.directory.join("more.toml")).unwrap_or_default());
        std::fs::write(&file, text).context(|| format!("writing {}", file.display()))?;
        Ok(file)
    }

    /// The end of the daemon's log, for messages.
    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(self.directory.join("sternad.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let end = lines[lines.len().saturating_sub(5)..].join("\n  ");
        if end.is_empty() { String::new() } else { format!(":\n  {end}") }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("api.sock")
    }
}
