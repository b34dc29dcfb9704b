//! The console of a guest: a shell, at which one can type.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;

/// The longest wait for more text before the time is looked at.
const STEP: Duration = Duration::from_millis(100);

/// A connection to a console. The guest waits where nobody reads what it writes, but for some 100 KiB.
pub struct Console {
    name: String,
    stream: UnixStream,
    /// What it wrote that no line was taken of yet.
    text: Vec<u8>,
}

impl Console {
    /// Connects to the console of a guest that has one to [type at](Guest::typed_at).
    ///
    /// # Errors
    /// Where its QEMU does not listen there.
    pub fn open(guest: &Guest) -> Result<Self> {
        let socket = guest.console_socket();
        let stream =
            wait_for(&format!("the console of {}", guest.name), PATIENCE, || Ok(UnixStream::connect(&socket).ok()))?;
        stream.set_read_timeout(Some(STEP)).context(|| "setting a timeout".into())?;
        Ok(Self { name: guest.name.clone(), stream, text: Vec::new() })
    }

    /// Types a text and the return key.
    ///
    /// # Errors
    /// Where QEMU has ended.
    pub fn type_line(&mut self, text: &str) -> Result<()> {
        self.stream.write_all(format!("{text}\n").as_bytes()).context(|| format!("typing at {}", self.name))
    }

    /// Reads lines until one begins with `start`, and returns that one. What was typed stands behind a prompt, and so
    /// does not begin a line.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the last line after `limit`, or where QEMU has ended.
    pub fn wait_for(&mut self, start: &str, limit: Duration) -> Result<String> {
        let end = Instant::now() + limit;
        let mut last = String::new();
        loop {
            while let Some(line) = self.take_line() {
                if line.starts_with(start) {
                    return Ok(line);
                }
                last = line;
            }
            if Instant::now() > end {
                let what = format!("a line '{start}…' on the console of {}", self.name);
                return Err(Error::Timeout { what, limit, detail: format!("; its last line: {last}") });
            }
            self.read_more()?;
        }
    }

    fn take_line(&mut self) -> Option<String> {
        let end = self.text.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.text.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim().to_owned())
    }

    fn read_more(&mut self) -> Result<()> {
        let mut more = [0; 4096];
        match self.stream.read(&mut more) {
            Ok(0) => Err(Error::Usage(format!("the console of {} has gone", self.name))),
            Ok(count) => {
                self.text.extend_from_slice(&more[..count]);
                Ok(())
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            Err(error) => Err(error).context(|| format!("reading the console of {}", self.name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_is_waited_for_may_come_in_parts_and_what_was_typed_is_not_it() {
        let (mut far, near) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(STEP)).unwrap();
        let mut console = Console { name: "g".into(), stream: near, text: Vec::new() };
        far.write_all(b"guest# echo SUM 42\r\nSU").unwrap();
        let error = console.wait_for("SUM", Duration::from_millis(1)).unwrap_err().to_string();
        assert!(error.contains("its last line: guest# echo SUM 42"), "{error}");
        far.write_all(b"M 42\r\nrest").unwrap();
        assert_eq!(console.wait_for("SUM", PATIENCE).unwrap(), "SUM 42");
        console.type_line("next").unwrap();
        let mut typed = [0; 5];
        far.read_exact(&mut typed).unwrap();
        assert_eq!(&typed, b"next\n");
        drop(far);
        assert!(console.wait_for("SUM", PATIENCE).unwrap_err().to_string().contains("has gone"));
    }
}
