//! QEMU processes without Sterna, and the migration they do by themselves.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::qmp::{Qmp, event_us};
use crate::Lab;
use crate::command::wait_for;
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::Host;

/// "No limit": far above every link here, and what every version accepts.
const UNLIMITED_BYTES_PER_S: u64 = 100_000_000_000;
/// The port of the first destination; each machine adds its number.
const PORT: u16 = 4400;
/// When a migration that does not converge is given up.
pub const LIMIT: Duration = Duration::from_secs(90);

/// How QEMU keeps guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ram {
    /// `-m`, as most users run it.
    Plain,
    /// `memory-backend-file,share=on` on tmpfs, as Sterna runs it.
    SharedFile,
}

/// How QEMU moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Pre-copy over one connection.
    Vanilla,
    /// Pre-copy over so many connections.
    Multifd(u8),
}

impl Method {
    /// Its name in a table.
    #[must_use]
    pub fn label(self) -> String {
        match self {
            Self::Vanilla => "precopy".into(),
            Self::Multifd(streams) => format!("precopy, multifd {streams}"),
        }
    }
}

/// What QEMU's own migration did.
#[derive(Debug, Clone, Serialize)]
pub struct BaselineReport {
    /// QEMU's version.
    pub qemu: String,
    /// `total-time` of `query-migrate`: without the destination's start.
    pub total_ms: f64,
    /// From the command to the completed migration, as we saw it; the destination's start is included.
    pub with_start_ms: f64,
    /// From the source's STOP to the destination's RESUME event.
    pub downtime_ms: f64,
    /// `downtime` of `query-migrate`: what QEMU itself believes.
    pub own_downtime_ms: f64,
    /// `ram.transferred` of `query-migrate`.
    pub bytes_on_wire: u64,
    /// When the guest stopped, microseconds since 1970.
    pub stop_us: i64,
    /// When it ran again.
    pub resume_us: i64,
    /// The whole of `query-migrate`.
    pub query_migrate: Value,
}

/// A machine that QEMU runs by itself.
pub struct BaselineVm {
    guest: Guest,
    binary: PathBuf,
    ram: Ram,
    host: Host,
    child: Child,
    qmp: Qmp,
    /// Which process of this guest it is: names its files.
    generation: u32,
    ram_file: Option<PathBuf>,
}

impl BaselineVm {
    /// Starts a guest on a host of the lab.
    ///
    /// # Errors
    /// Where QEMU does not start.
    pub fn start(lab: &Lab, host: &str, guest: &Guest, binary: &Path, ram: Ram) -> Result<Self> {
        Self::launch(lab, lab.host(host)?, guest, binary, ram, 0)
    }

    fn launch(lab: &Lab, host: &Host, guest: &Guest, binary: &Path, ram: Ram, generation: u32) -> Result<Self> {
        let stem = format!("{}-qemu{generation}", guest.name);
        let socket = host.directory.join(format!("{stem}.qmp"));
        let ram_file = (ram == Ram::SharedFile)
            .then(|| ram_directory(host).map(|directory| directory.join(format!("{stem}.ram"))))
            .transpose()?;
        let mut command = host.command(binary);
        command.args(guest.arguments(lab)?);
        command.args(["-m", &format!("size={}B", guest.memory_bytes)]);
        if let Some(file) = &ram_file {
            command.args([
                "-object",
                &format!("memory-backend-file,id=ram,size={},mem-path={},share=on", guest.memory_bytes, file.display()),
            ]);
            command.args(["-machine", "memory-backend=ram"]);
        }
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
        if generation > 0 {
            command.args(["-incoming", "defer"]);
        }
        let mut child = Reaped(Some(host.spawn(&mut command, &stem)?));
        let qmp = child.wait_for(&socket).and_then(|()| Qmp::connect(&socket));
        let qmp = qmp.map_err(|error| explain(error, host, &stem))?;
        let child = child.0.take().ok_or_else(|| Error::Usage("QEMU is gone".into()))?;
        Ok(Self {
            guest: guest.clone(),
            binary: binary.into(),
            ram,
            host: host.clone(),
            child,
            qmp,
            generation,
            ram_file,
        })
    }

    /// QEMU's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> &str {
        self.qmp.version()
    }

    /// Starts a second QEMU on `to`, lets the first move the guest there, and ends the first.
    ///
    /// # Errors
    /// Where the migration fails or has not converged after [`LIMIT`]; this machine is then gone.
    pub fn migrate(mut self, lab: &Lab, to: &str, method: Method) -> Result<(Self, BaselineReport)> {
        let begin = Instant::now();
        let host = lab.host(to)?;
        let mut destination = Self::launch(lab, host, &self.guest, &self.binary, self.ram, self.generation + 1)?;
        for qmp in [&mut self.qmp, &mut destination.qmp] {
            prepare(qmp, method)?;
        }
        let port = PORT + u16::from(self.guest.number);
        destination.qmp.execute("migrate-incoming", json!({ "uri": format!("tcp:0.0.0.0:{port}") }))?;
        self.qmp.forget_events();
        self.qmp.execute("migrate", json!({ "uri": format!("tcp:{}:{port}", host.address) }))?;
        let ended = |event: &Value| {
            event["event"] == "MIGRATION"
                && matches!(event["data"]["status"].as_str(), Some("completed" | "failed" | "cancelled"))
        };
        let end = self.qmp.wait_for_event("the end of QEMU's migration", LIMIT, ended)?;
        let query = self.query_ended()?;
        if end["data"]["status"] != "completed" {
            let reason = query["error-desc"].as_str().unwrap_or("QEMU gave no reason").to_owned();
            return Err(Error::Migration { vm: self.guest.name.clone(), status: "failed".into(), reason });
        }
        let resume = destination
            .qmp
            .wait_for_event("the guest's start", Duration::from_secs(10), |event| event["event"] == "RESUME")?;
        let with_start_ms = begin.elapsed().as_secs_f64() * 1e3;
        let form = || Error::Form { what: "QMP".into(), reason: "an event without time".into() };
        let stop = self.qmp.take_event("STOP").as_ref().and_then(event_us).ok_or_else(form)?;
        let resume = event_us(&resume).ok_or_else(form)?;
        let report = BaselineReport {
            qemu: self.qmp.version().to_owned(),
            total_ms: query["total-time"].as_f64().unwrap_or(f64::NAN),
            with_start_ms,
            downtime_ms: (resume - stop) as f64 / 1e3,
            own_downtime_ms: query["downtime"].as_f64().unwrap_or(f64::NAN),
            bytes_on_wire: query["ram"]["transferred"].as_u64().unwrap_or(0),
            stop_us: stop,
            resume_us: resume,
            query_migrate: query,
        };
        Ok((destination, report))
    }
}

impl BaselineVm {
    /// `query-migrate` of an ended migration. QEMU says that it has ended a moment before it works out how long it took.
    fn query_ended(&mut self) -> Result<Value> {
        wait_for("the total time of QEMU's migration", Duration::from_secs(5), || {
            let query = self.qmp.execute("query-migrate", json!({}))?;
            let is_known = query["status"] != "completed" || query["total-time"].as_f64().is_some_and(|ms| ms > 0.0);
            Ok(is_known.then_some(query))
        })
    }
}

impl Drop for BaselineVm {
    fn drop(&mut self) {
        // SIGKILL needs no answer from a QEMU that may hang; its exit status is of no interest.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(file) = &self.ram_file {
            let _ = std::fs::remove_file(file);
        }
        let stem = format!("{}-qemu{}", self.guest.name, self.generation);
        let _ = std::fs::remove_file(self.host.directory.join(format!("{stem}.qmp")));
    }
}

/// A child that is ended unless it is taken out.
struct Reaped(Option<Child>);

impl Reaped {
    /// Waits until the process has made `socket`, or has ended.
    fn wait_for(&mut self, socket: &Path) -> Result<()> {
        wait_for(&format!("QEMU's monitor {}", socket.display()), Duration::from_secs(10), || {
            let ended = self.0.as_mut().and_then(|child| child.try_wait().ok().flatten());
            match ended {
                Some(status) => Err(Error::Usage(format!("QEMU ended at once ({status})"))),
                None => Ok(socket.exists().then_some(())),
            }
        })
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Capabilities and parameters, the same at both ends.
fn prepare(qmp: &mut Qmp, method: Method) -> Result<()> {
    let mut capabilities = vec![json!({ "capability": "events", "state": true })];
    let mut parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S });
    if let Method::Multifd(streams) = method {
        capabilities.push(json!({ "capability": "multifd", "state": true }));
        parameters["multifd-channels"] = json!(streams);
    }
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    qmp.execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// A tmpfs for RAM files below the host's directory: it goes with the lab.
fn ram_directory(host: &Host) -> Result<PathBuf> {
    let directory = host.directory.join("ram");
    if !directory.exists() {
        std::fs::create_dir(&directory).context(|| format!("making {}", directory.display()))?;
        let options = Some("huge=never,mode=0700");
        let mounted =
            nix::mount::mount(Some("sterna-bench"), &directory, Some("tmpfs"), nix::mount::MsFlags::empty(), options);
        mounted.context(|| format!("mounting a tmpfs on {}", directory.display()))?;
    }
    Ok(directory)
}

/// Adds QEMU's own words to the error that came of its end.
fn explain(error: Error, host: &Host, stem: &str) -> Error {
    let words = std::fs::read_to_string(host.directory.join(format!("{stem}.log"))).unwrap_or_default();
    if words.trim().is_empty() { error } else { Error::Qmp { command: "to start".into(), reason: words.trim().into() } }
}
