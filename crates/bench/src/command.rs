//! Running programs and waiting for things to happen.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};

/// Runs `command` to its end and returns what it wrote to standard output.
///
/// # Errors
/// [`Error::Command`] with its standard error where it failed, [`Error::Io`] where it could not be started.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.stdin(Stdio::null()).output().context(|| format!("starting `{shown}`"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Error::Command {
            command: shown,
            status: output.status.to_string(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}

/// Runs `program` with blank-separated `arguments` to its end.
///
/// # Errors
/// As [`output`].
pub fn run(program: &str, arguments: &str) -> Result<String> {
    output(Command::new(program).args(arguments.split_ascii_whitespace()))
}

/// The command as one would type it, for messages.
#[must_use]
pub fn show(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Asks `ready` again every 5 ms until it returns a value.
///
/// # Errors
/// [`Error::Timeout`] after `limit`, or what `ready` returned as an error.
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            return Err(Error::Timeout { what: what.to_owned(), limit, detail: String::new() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_program_is_reported_with_its_own_words() {
        let error = output(Command::new("sh").args(["-c", "echo no room >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("no room") && error.contains('3'), "{error}");
    }

    #[test]
    fn waiting_ends_at_the_limit() {
        let error = wait_for::<()>("rain", Duration::from_millis(20), || Ok(None)).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }));
    }
}
