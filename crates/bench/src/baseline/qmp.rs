//! A small QMP client: commands one at a time, events kept until they are asked for.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};

/// The longest a command may take to answer.
const ANSWER: Duration = PATIENCE;

/// A connection to QEMU's monitor.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    /// A line that was cut off by a read timeout.
    partial: Vec<u8>,
    events: VecDeque<Value>,
    version: String,
}

impl Qmp {
    /// Connects to the monitor at `socket`, which may take a moment to be there.
    ///
    /// # Errors
    /// Where QEMU does not open it, or does not greet.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = wait_for(&format!("QEMU's monitor {}", socket.display()), PATIENCE, || {
            Ok(UnixStream::connect(socket).ok())
        })?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
            partial: Vec::new(),
            events: VecDeque::new(),
            version: String::new(),
        };
        let greeting = qmp.read(Instant::now() + ANSWER)?.ok_or_else(|| refused("connect", "no greeting"))?;
        let version = &greeting["QMP"]["version"]["qemu"];
        qmp.version = format!("{}.{}.{}", version["major"], version["minor"], version["micro"]);
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Executes a command and returns its result.
    ///
    /// # Errors
    /// [`Error::Qmp`] with QEMU's words where it refuses, ends or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.reader.get_mut().write_all(line.as_bytes()).context(|| format!("sending {command} to QEMU"))?;
        let limit = Instant::now() + ANSWER;
        loop {
            let mut message = self.read(limit)?.ok_or_else(|| refused(command, "no answer"))?;
            if message.get("event").is_some() {
                self.events.push_back(message);
            } else if let Some(error) = message.get("error") {
                return Err(refused(command, error["desc"].as_str().unwrap_or("no reason given")));
            } else {
                return Ok(message["return"].take());
            }
        }
    }

    /// Waits for the first event that `wanted` accepts and returns it; earlier others are kept.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`, [`Error::Qmp`] where QEMU ends.
    pub fn wait_for_event(&mut self, what: &str, limit: Duration, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + limit;
        let mut seen = 0;
        loop {
            if let Some(at) = self.events.iter().skip(seen).position(&wanted) {
                // The position counts from the skipped events on.
                return self.events.remove(seen + at).ok_or_else(|| refused(what, "lost event"));
            }
            seen = self.events.len();
            let message = self.read(end)?;
            let message = message.ok_or_else(|| Error::Timeout { what: what.into(), limit, detail: String::new() })?;
            self.events.push_back(message);
        }
    }

    /// Removes and returns the first kept event of that name.
    pub fn take_event(&mut self, name: &str) -> Option<Value> {
        let at = self.events.iter().position(|event| event["event"] == name)?;
        self.events.remove(at)
    }

    /// Forgets all kept events.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }

    /// Reads one message; `None` where none came until `end`.
    fn read(&mut self, end: Instant) -> Result<Option<Value>> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.reader.get_ref().set_read_timeout(Some(left)).context(|| "setting a timeout".into())?;
            match self.reader.read_until(b'\n', &mut self.partial) {
                Ok(0) => return Err(refused("the connection", "it ended")),
                Ok(_) => {
                    let line = std::mem::take(&mut self.partial);
                    let form = |error: serde_json::Error| Error::Form { what: "QMP".into(), reason: error.to_string() };
                    return serde_json::from_slice(&line).map(Some).map_err(form);
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                }
                Err(error) => return Err(error).context(|| "reading from QEMU".into()),
            }
        }
    }
}

fn refused(command: &str, reason: &str) -> Error {
    Error::Qmp { command: command.into(), reason: reason.into() }
}

/// An event's time, microseconds since 1970.
#[must_use]
pub fn event_us(event: &Value) -> Option<i64> {
    let time = &event["timestamp"];
    Some(time["seconds"].as_i64()? * 1_000_000 + time["microseconds"].as_i64()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A monitor that says `lines` and swallows what it is told.
    fn monitor(lines: &[&str]) -> (Result<Qmp>, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let text = lines.join("\n") + "\n";
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            // The thread stays until the first command came; then it acts as a QEMU that ended.
            let mut command = String::new();
            BufReader::new(stream).read_line(&mut command).unwrap();
        });
        let qmp = Qmp::connect(&path);
        drop(server.join());
        (qmp, directory)
    }

    const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22}}}}"#;

    #[test]
    fn events_between_command_and_answer_are_kept_in_order() {
        let event =
            |name: &str, us: u32| format!(r#"{{"event":"{name}","timestamp":{{"seconds":1,"microseconds":{us}}}}}"#);
        let (qmp, _directory) = monitor(&[GREETING, &event("STOP", 5), r#"{"return":{}}"#, &event("RESUME", 9)]);
        let mut qmp = qmp.unwrap();
        assert_eq!(qmp.version(), "7.2.22");
        let resume = qmp.wait_for_event("RESUME", PATIENCE, |event| event["event"] == "RESUME").unwrap();
        assert_eq!(event_us(&resume), Some(1_000_009));
        assert_eq!(event_us(&qmp.take_event("STOP").unwrap()), Some(1_000_005));
        assert!(qmp.take_event("STOP").is_none());
    }

    #[test]
    fn a_refusal_carries_qemus_words_and_a_closed_monitor_is_an_error() {
        let (qmp, _directory) = monitor(&[GREETING, r#"{"error":{"class":"GenericError","desc":"not now"}}"#]);
        assert!(qmp.err().unwrap().to_string().contains("not now"));
        let (qmp, _directory) = monitor(&[GREETING]);
        assert!(qmp.is_err());
    }
}
