//! QEMU processes without Sterna, and the migration they do by themselves.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::method::Method;
use super::qmp::{Qmp, event_us};
use crate::Lab;
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::Host;

/// The port of the first destination; each machine adds its number.
const PORT: u16 = 4400;
/// How long a migration that was given up may take to give the guest back.
const CANCEL: Duration = PATIENCE;
/// How often a migration is asked whether its first pass over RAM is done.
const POLL: Duration = Duration::from_millis(20);

/// How QEMU keeps guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ram {
    /// `-m`, as most users run it.
    Plain,
    /// `memory-backend-file,share=on` on tmpfs, as Sterna runs it.
    SharedFile,
    /// `memory-backend-ram,merge=on`: anonymous memory that KSM may merge.
    Mergeable,
}

/// What QEMU's own migration did.
#[derive(Debug, Clone, Serialize)]
pub struct BaselineReport {
    /// QEMU's version.
    pub qemu: String,
    /// `total-time` of `query-migrate`: without the destination's start.
    pub total_ms: f64,
    /// From the command to the completed migration, as we saw it; the destination's start is included. Until it was
    /// given up, where it was.
    pub with_start_ms: f64,
    /// `ram.transferred` of `query-migrate`.
    pub bytes_on_wire: u64,
    /// Whether the migration had not ended at its limit and was given up.
    pub given_up: bool,
    /// The guest's pause; absent where it never paused: it then runs on at the source.
    pub pause: Option<Pause>,
    /// How long the guest's processors waited for pages after the switchover, milliseconds, as the destination counted
    /// it: the time in which all of them waited at once. Absent without post-copy.
    pub blocktime_ms: Option<f64>,
    /// The whole of the source's `query-migrate`, as it was at the end or when it was given up.
    pub query_migrate: Value,
}

/// When the guest stood still.
#[derive(Debug, Clone, Serialize)]
pub struct Pause {
    /// From the source's STOP to the destination's RESUME event.
    pub downtime_ms: f64,
    /// `downtime` of `query-migrate`: QEMU's own figure, known at the end only.
    pub own_downtime_ms: Option<f64>,
    /// When the guest stopped, microseconds since 1970.
    pub stop_us: i64,
    /// When it ran again, microseconds since 1970.
    pub resume_us: i64,
}

/// A machine that QEMU runs by itself.
pub struct BaselineVm {
    guest: Guest,
    pub(super) binary: PathBuf,
    pub(super) ram: Ram,
    pub(super) host: Host,
    child: Child,
    pub(super) qmp: Qmp,
    /// The number of this guest's process, which names its files.
    pub(super) generation: u32,
    ram_file: Option<PathBuf>,
}

impl BaselineVm {
    /// Starts a guest on a host of the lab.
    ///
    /// # Errors
    /// Where QEMU does not start.
    pub fn start(lab: &Lab, host: &str, guest: &Guest, binary: &Path, ram: Ram) -> Result<Self> {
        let host = lab.host(host)?;
        Self::launch(lab, host, guest, binary, ram, (0, ram_file(host, guest, ram, 0)?))
    }

    /// Starts the guest's QEMU of this number, on this file.
    pub(super) fn launch(
        lab: &Lab,
        host: &Host,
        guest: &Guest,
        binary: &Path,
        ram: Ram,
        (generation, ram_file): (u32, Option<PathBuf>),
    ) -> Result<Self> {
        let stem = stem(guest, generation);
        let socket = host.directory.join(format!("{stem}.qmp"));
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
        if ram == Ram::Mergeable {
            command.args(["-object", &format!("memory-backend-ram,id=ram,size={},merge=on", guest.memory_bytes)]);
            command.args(["-machine", "memory-backend=ram,mem-merge=on"]);
        }
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
        if generation > 0 {
            command.args(["-incoming", "defer"]);
        }
        let mut child = Reaped(Some(host.spawn(&mut command, &stem)?));
        let qmp = child.wait_for(&socket).and_then(|()| Qmp::connect(&socket));
        let qmp = qmp.map_err(|error| explain(error, host, &stem))?;
        let child = child.0.take().ok_or_else(|| Error::Usage("QEMU has ended".into()))?;
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

    /// Starts a second QEMU on `to` and lets the first move the guest there. Returns the QEMU that has the guest
    /// afterwards; the other is ended.
    ///
    /// A migration that has not ended after `limit` is given up. The first QEMU then has the guest; or the second,
    /// where pages were already following a guest that runs there. Such a migration cannot be cancelled, and the guest
    /// waits for its missing pages for ever: it can only be dropped.
    ///
    /// # Errors
    /// Where QEMU refuses or the migration fails; this machine is then gone.
    pub fn migrate(mut self, lab: &Lab, to: &str, method: Method, limit: Duration) -> Result<(Self, BaselineReport)> {
        let begin = Instant::now();
        let host = lab.host(to)?;
        let generation = self.generation + 1;
        let file = ram_file(host, &self.guest, self.ram, generation)?;
        let mut destination = Self::launch(lab, host, &self.guest, &self.binary, self.ram, (generation, file))?;
        for qmp in [&mut self.qmp, &mut destination.qmp] {
            method.prepare(qmp)?;
        }
        let port = PORT + u16::from(self.guest.number);
        destination.qmp.execute("migrate-incoming", json!({ "uri": format!("tcp:0.0.0.0:{port}") }))?;
        self.qmp.forget_events();
        self.qmp.execute("migrate", json!({ "uri": format!("tcp:{}:{port}", host.address) }))?;
        let until = Instant::now() + limit;
        if let Some(after_pass) = method.postcopy_after_pass()
            && (!after_pass || self.first_pass_is_done(until)?)
        {
            self.qmp.execute("migrate-start-postcopy", json!({}))?;
        }
        let left = until.saturating_duration_since(Instant::now());
        let end = match self.qmp.wait_for_event("the end of QEMU's migration", left, is_end) {
            Ok(end) => end,
            Err(Error::Timeout { .. }) => return self.give_up(destination, begin),
            Err(error) => return Err(error),
        };
        let query = self.query_ended()?;
        if end["data"]["status"] != "completed" {
            let reason = query["error-desc"].as_str().unwrap_or("QEMU gave no reason").to_owned();
            return Err(Error::Migration { vm: self.guest.name.clone(), status: "failed".into(), reason });
        }
        let resume =
            destination.qmp.wait_for_event("the guest's start", PATIENCE, |event| event["event"] == "RESUME")?;
        let with_start_ms = begin.elapsed().as_secs_f64() * 1e3;
        let blocktime_ms = match method.postcopy_after_pass() {
            Some(_) => destination.qmp.execute("query-migrate", json!({}))?["postcopy-blocktime"].as_f64(),
            None => None,
        };
        let pause = Some(self.pause(&resume, &query)?);
        let report = BaselineReport { blocktime_ms, ..self.report(with_start_ms, pause, query) };
        Ok((destination, report))
    }

    /// Starts another QEMU on the same host and the same memory, which waits for the guest. The guest has no tap, which
    /// only one QEMU can have, and its memory is a shared file.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn successor(&self, lab: &Lab, binary: &Path) -> Result<Self> {
        let number = (self.generation + 1, self.ram_file.clone());
        let mut next = Self::launch(lab, &self.host, &self.guest, binary, self.ram, number)?;
        // The file goes with the one that has the guest.
        next.ram_file = None;
        for name in ["x-ignore-shared", "events"] {
            next.qmp.execute("migrate-set-capabilities", on(name))?;
        }
        next.qmp.execute("migrate-incoming", json!({ "uri": next.devices_uri() }))?;
        Ok(next)
    }

    /// Hands the guest to a [`successor`](Self::successor). Its pause.
    ///
    /// # Errors
    /// Where QEMU refuses or does not hand it over; this machine is then as QEMU left it.
    pub fn hand_over(&mut self, mut next: Self) -> Result<Pause> {
        for name in ["x-ignore-shared", "events"] {
            self.qmp.execute("migrate-set-capabilities", on(name))?;
        }
        self.qmp.forget_events();
        self.qmp.execute("migrate", json!({ "uri": next.devices_uri() }))?;
        let end = self.qmp.wait_for_event("the devices' way", PATIENCE, is_end)?;
        if end["data"]["status"] != "completed" {
            let reason = "QEMU did not hand its devices over".into();
            return Err(Error::Migration { vm: self.guest.name.clone(), status: "failed".into(), reason });
        }
        let resume = next.qmp.wait_for_event("the guest's start", PATIENCE, |event| event["event"] == "RESUME")?;
        let pause = self.pause(&resume, &Value::Null)?;
        next.ram_file = self.ram_file.take();
        *self = next;
        Ok(pause)
    }

    /// Where this QEMU expects the devices' state.
    fn devices_uri(&self) -> String {
        format!("unix:{}", self.devices_socket().display())
    }

    fn devices_socket(&self) -> PathBuf {
        self.host.directory.join(format!("{}.devices", stem(&self.guest, self.generation)))
    }

    /// The guest's pause, from the source's STOP to this event of the destination.
    pub(super) fn pause(&mut self, resume: &Value, query: &Value) -> Result<Pause> {
        let form = || Error::Form { what: "QMP".into(), reason: "an event has no time".into() };
        let stop_us = self.qmp.take_event("STOP").as_ref().and_then(event_us).ok_or_else(form)?;
        let resume_us = event_us(resume).ok_or_else(form)?;
        let (downtime_ms, own_downtime_ms) = ((resume_us - stop_us) as f64 / 1e3, query["downtime"].as_f64());
        Ok(Pause { downtime_ms, own_downtime_ms, stop_us, resume_us })
    }

    fn report(&self, with_start_ms: f64, pause: Option<Pause>, query_migrate: Value) -> BaselineReport {
        BaselineReport {
            qemu: self.qmp.version().to_owned(),
            total_ms: query_migrate["total-time"].as_f64().unwrap_or(f64::NAN),
            with_start_ms,
            bytes_on_wire: query_migrate["ram"]["transferred"].as_u64().unwrap_or(0),
            given_up: false,
            pause,
            blocktime_ms: None,
            query_migrate,
        }
    }

    /// Waits until every page has had its turn once. Returns whether that came before `until` and before the
    /// migration's end.
    fn first_pass_is_done(&mut self, until: Instant) -> Result<bool> {
        while Instant::now() < until {
            let query = self.qmp.execute("query-migrate", json!({}))?;
            // Dirty bitmaps are fetched once at the start, and again at the end of each pass.
            match query["status"].as_str() {
                Some("active") if query["ram"]["dirty-sync-count"].as_u64().is_some_and(|syncs| syncs > 1) => {
                    return Ok(true);
                }
                Some("setup" | "active") | None => std::thread::sleep(POLL),
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Gives up a migration that does not end. What it did until then is kept.
    fn give_up(mut self, mut destination: Self, begin: Instant) -> Result<(Self, BaselineReport)> {
        let query = self.qmp.execute("query-migrate", json!({}))?;
        let tried_ms = begin.elapsed().as_secs_f64() * 1e3;
        if query["status"].as_str().is_some_and(|status| status.starts_with("postcopy")) {
            let started = |event: &Value| event["event"] == "RESUME";
            let resume = destination.qmp.wait_for_event("the guest's start", Duration::from_secs(1), started);
            let pause = resume.ok().map(|resume| self.pause(&resume, &query)).transpose()?;
            let report = BaselineReport { given_up: true, ..self.report(tried_ms, pause, query) };
            return Ok((destination, report));
        }
        self.qmp.execute("migrate_cancel", json!({}))?;
        let end = self.qmp.wait_for_event("the end of a cancelled migration", CANCEL, is_end)?;
        if end["data"]["status"] == "completed" {
            // The migration ended between the two looks, and nobody watched its destination start.
            let reason = "it ended just when it was given up".into();
            return Err(Error::Migration { vm: self.guest.name.clone(), status: "timed out".into(), reason });
        }
        let report = BaselineReport { given_up: true, ..self.report(tried_ms, None, query) };
        Ok((self, report))
    }

    /// `query-migrate` of an ended migration. QEMU says that it has ended a moment before it works out how long it
    /// took.
    fn query_ended(&mut self) -> Result<Value> {
        wait_for("the total time of QEMU's migration", PATIENCE, || {
            let query = self.qmp.execute("query-migrate", json!({}))?;
            let is_known = query["status"] != "completed" || query["total-time"].as_f64().is_some_and(|ms| ms > 0.0);
            Ok(is_known.then_some(query))
        })
    }
}

pub(super) fn is_end(event: &Value) -> bool {
    // A post-copy whose destination has gone pauses for ever: nobody here would recover it.
    const ENDS: [&str; 4] = ["completed", "failed", "cancelled", "postcopy-paused"];
    event["event"] == "MIGRATION" && event["data"]["status"].as_str().is_some_and(|status| ENDS.contains(&status))
}

/// The migration capabilities that a QEMU knows, by name.
///
/// # Errors
/// Where it does not start or does not say.
pub fn capabilities(binary: &Path) -> Result<Vec<String>> {
    const ASK: &str = r#"{"execute":"qmp_capabilities"}{"execute":"query-migrate-capabilities"}{"execute":"quit"}"#;
    let context = || format!("asking {} what it can do", binary.display());
    let mut command = std::process::Command::new(binary);
    command.args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context(context)?;
    // A QEMU that ended at once has closed its input; its output tells more than this error.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(ASK.as_bytes()));
    let output = child.wait_with_output().context(context)?;
    let answers = String::from_utf8_lossy(&output.stdout);
    let answer = answers.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find_map(|mut answer| {
        let list = answer["return"].as_array_mut()?;
        Some(list.iter().filter_map(|entry| entry["capability"].as_str().map(str::to_owned)).collect())
    });
    answer.ok_or_else(|| Error::Qmp {
        command: "query-migrate-capabilities".into(),
        reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

impl Drop for BaselineVm {
    fn drop(&mut self) {
        // SIGKILL needs no answer from a QEMU that may hang; its exit status is of no interest.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(file) = &self.ram_file {
            let _ = std::fs::remove_file(file);
        }
        let stem = stem(&self.guest, self.generation);
        for socket in [self.host.directory.join(format!("{stem}.qmp")), self.devices_socket()] {
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// A child that is ended unless it is taken out.
struct Reaped(Option<Child>);

impl Reaped {
    /// Waits until the process has made `socket`, or has ended.
    fn wait_for(&mut self, socket: &Path) -> Result<()> {
        wait_for(&format!("QEMU's monitor {}", socket.display()), PATIENCE, || {
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

/// This migration capability, on.
fn on(name: &str) -> Value {
    json!({ "capabilities": [{ "capability": name, "state": true }] })
}

/// What the files of a guest's QEMU of this number begin with.
fn stem(guest: &Guest, generation: u32) -> String {
    format!("{}-qemu{generation}", guest.name)
}

/// The file that a guest's QEMU of this number has for RAM, where it has one.
fn ram_file(host: &Host, guest: &Guest, ram: Ram, generation: u32) -> Result<Option<PathBuf>> {
    let name = format!("{}.ram", stem(guest, generation));
    (ram == Ram::SharedFile).then(|| ram_directory(host).map(|directory| directory.join(name))).transpose()
}

/// A tmpfs for RAM files below the host's directory; it is removed with the lab.
pub(super) fn ram_directory(host: &Host) -> Result<PathBuf> {
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

/// Adds QEMU's own words to the error that its end caused.
fn explain(error: Error, host: &Host, stem: &str) -> Error {
    let words = std::fs::read_to_string(host.directory.join(format!("{stem}.log"))).unwrap_or_default();
    if words.trim().is_empty() { error } else { Error::Qmp { command: "to start".into(), reason: words.trim().into() } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_tells_what_it_can_do() {
        let Ok(binary) = crate::tools::qemu_7_2() else { return eprintln!("skipped: QEMU 7.2 is absent") };
        let known = capabilities(&binary).unwrap();
        assert!(["multifd", "xbzrle", "postcopy-ram"].iter().all(|name| known.iter().any(|known| known == name)));
        assert!(capabilities(Path::new("/bin/true")).is_err());
    }
}
