//! Running programs and waiting for things to happen.

use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};

/// Runs `command` to its end and returns what it wrote to standard output.
///
/// # Errors
/// [`Error::Command`] with its standard error where it failed, [`Error::Io`] where it could not be started.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.stdin(Stdio::null()).output().context(|| format!("starting `{shown}`"))?;
    succeeded(shown, output)
}

/// As [`output`], within `limit`.
///
/// # Errors
/// As [`output`], and [`Error::Timeout`] where it was ended.
pub fn output_within(command: &mut Command, limit: Duration) -> Result<String> {
    let output = finish_within(command, limit)?;
    succeeded(show(command), output)
}

fn succeeded(shown: String, output: Output) -> Result<String> {
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

/// Runs `command` to its end, whatever that is, and ends it where it takes longer than `limit`.
///
/// # Errors
/// [`Error::Timeout`] where it was ended, [`Error::Io`] where it could not be started.
pub fn finish_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let shown = show(command);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context(|| format!("starting `{shown}`"))?;
    let (stdout, stderr) = (child.stdout.take().map(collect), child.stderr.take().map(collect));
    let ended = wait_for(&format!("the end of `{shown}`"), limit, || {
        child.try_wait().context(|| format!("waiting for `{shown}`"))
    });
    if ended.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    // A process that has inherited the output of an ended command is not waited for.
    let status = ended?;
    let text = |thread: Option<JoinHandle<Vec<u8>>>| thread.and_then(|thread| thread.join().ok()).unwrap_or_default();
    Ok(Output { status, stdout: text(stdout), stderr: text(stderr) })
}

/// Reads all that comes, on a thread of its own.
fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        // What was read before a failure is kept.
        let _ = from.read_to_end(&mut text);
        text
    })
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

/// The limit of a hopeless wait: no result depends on it, however slow the machine is. A guest whose processors are
/// emulated, and that has a fifteenth of a machine's time, has needed more than 300 s to fill its memory.
pub const PATIENCE: Duration = Duration::from_secs(1200);

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
    fn a_program_that_does_not_end_is_ended_and_one_that_does_is_heard() {
        let limit = Duration::from_millis(50);
        let error = finish_within(Command::new("sleep").arg("60"), limit).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        let mut command = Command::new("sh");
        let output = finish_within(command.args(["-c", "seq 100000; exit 3"]), Duration::from_secs(20)).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 588_895));
    }

    #[test]
    fn waiting_ends_at_the_limit() {
        let error = wait_for::<()>("rain", Duration::from_millis(20), || Ok(None)).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }));
    }
}
