use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::vmm::qmp::Version;

/// How long a binary may take to say what it is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How much it may say, bytes. QEMU's list of machines has about 10 kB.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// A binary that did not say what it is.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    /// It cannot be started.
    #[error("cannot start {path}")]
    Start {
        /// The binary.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It said nothing in time.
    #[error("{path} {option} did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Silent {
        /// The binary.
        path: String,
        /// What it was asked.
        option: String,
    },
    /// It said something else.
    #[error("{path} {option} did not answer as QEMU does")]
    NotQemu {
        /// The binary.
        path: String,
        /// What it was asked.
        option: String,
    },
}

/// The version of the QEMU binary at `path`.
///
/// # Errors
/// [`BinaryError`].
pub fn binary_version(path: &Path) -> Result<Version, BinaryError> {
    parse_version(&output(path, &["--version"])?).ok_or_else(|| not_qemu(path, &["--version"]))
}

/// The machine types that the QEMU binary at `path` knows, short names (`q35`) among them.
///
/// # Errors
/// [`BinaryError`].
pub fn machine_types(path: &Path) -> Result<Vec<String>, BinaryError> {
    let arguments = ["-machine", "help"];
    let names = parse_machines(&output(path, &arguments)?);
    if names.is_empty() { Err(not_qemu(path, &arguments)) } else { Ok(names) }
}

/// Whether the QEMU binary at `path` has a device of this type.
///
/// # Errors
/// [`BinaryError`].
pub fn has_device(path: &Path, kind: &str) -> Result<bool, BinaryError> {
    let answer = output(path, &["-device", &format!("{kind},help")])?;
    Ok(answer.lines().any(|line| line.starts_with(&format!("{kind} options"))))
}

/// From `QEMU emulator version 7.2.22 (Debian …)`.
fn parse_version(text: &str) -> Option<Version> {
    let (_, rest) = text.lines().next()?.split_once(" version ")?;
    let mut parts = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut part = || parts.next()?.ok();
    Some(Version(part()?, part()?, part()?))
}

/// From lines such as `q35   Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)` under a heading.
fn parse_machines(text: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| !line.starts_with("Supported machines")).skip(1);
    lines.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
}

fn output(path: &Path, arguments: &[&str]) -> Result<String, BinaryError> {
    let shown = || path.display().to_string();
    let start = |source| BinaryError::Start { path: shown(), source };
    let mut command = Command::new(path);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Reaped(command.spawn().map_err(start)?);
    let stdout = child.0.stdout.take().ok_or_else(|| start(std::io::ErrorKind::BrokenPipe.into()))?;
    // A thread, as a pipe cannot be read with a time limit. It ends with the pipe, which ends with the child.
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.take(MAX_ANSWER_BYTES).read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    let bytes = receiver
        .recv_timeout(ANSWER_TIMEOUT)
        .map_err(|_| BinaryError::Silent { path: shown(), option: arguments.join(" ") })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A child that never outlives the question.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn not_qemu(path: &Path, arguments: &[&str]) -> BinaryError {
    BinaryError::NotQemu { path: path.display().to_string(), option: arguments.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_other_texts_are_not() {
        assert_eq!(parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2)\n"), Some(Version(7, 2, 22)));
        assert_eq!(parse_version("QEMU emulator version 10.0.2\nCopyright"), Some(Version(10, 0, 2)));
        for text in ["", "true (GNU coreutils) 9.1", "X version 7", "X version a.b.c", "X version 99999999999.1.1"] {
            assert_eq!(parse_version(text), None, "{text}");
        }
    }

    #[test]
    fn machine_names_are_the_first_words_below_the_heading() {
        let text = "Supported machines are:\nmicrovm   microvm (i386)\nq35   Standard PC (alias of pc-q35-7.2)\n";
        assert_eq!(parse_machines(text), ["microvm", "q35"]);
        assert!(parse_machines("something else\n").is_empty());
    }

    #[test]
    fn a_binary_that_is_absent_or_no_qemu_is_said_to_be_so() {
        assert!(matches!(binary_version(Path::new("/nonexistent/qemu")), Err(BinaryError::Start { .. })));
        assert!(matches!(machine_types(Path::new("/bin/true")), Err(BinaryError::NotQemu { .. })));
    }
}
