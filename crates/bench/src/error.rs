//! What can go wrong in the lab and in experiments.

use std::path::PathBuf;
use std::time::Duration;

/// An error of the lab, a baseline, a load generator or an experiment.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused something.
    #[error("{what}")]
    Io {
        /// What was being done.
        what: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A program ended with a failure.
    #[error("`{command}` failed ({status}): {stderr}")]
    Command {
        /// The program with its arguments.
        command: String,
        /// Its exit status.
        status: String,
        /// What it wrote to standard error.
        stderr: String,
    },
    /// A file or program that the work needs is absent.
    #[error("{what} is not at {}: run `./x build`, or set {variable}", .path.display())]
    Missing {
        /// What the file is.
        what: &'static str,
        /// The path at which it was looked for.
        path: PathBuf,
        /// The environment variable that names another place.
        variable: &'static str,
    },
    /// Something that should have happened did not.
    #[error("{what} did not happen within {} s{detail}", .limit.as_secs())]
    Timeout {
        /// What was waited for.
        what: String,
        /// The time for which it was waited for.
        limit: Duration,
        /// What was seen instead; begins with punctuation, or empty.
        detail: String,
    },
    /// A QEMU answered a command with an error, or not at all.
    #[error("QEMU refused {command}: {reason}")]
    Qmp {
        /// The QMP command.
        command: String,
        /// QEMU's error message.
        reason: String,
    },
    /// A migration did not complete.
    #[error("the migration of {vm} {status}: {reason}")]
    Migration {
        /// The machine.
        vm: String,
        /// `failed` or `cancelled`.
        status: String,
        /// The reason.
        reason: String,
    },
    /// A memory host did not do what it was asked to.
    #[error("the memory host at {peer}: {reason}")]
    MemoryHost {
        /// Its address.
        peer: String,
        /// The reason.
        reason: String,
    },
    /// A request that is invalid.
    #[error("{0}")]
    Usage(String),
    /// A program's output has not the agreed form.
    #[error("{what}: {reason}")]
    Form {
        /// The program whose output it is.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Says what was tried when the operating system refused it.
pub trait Context<T> {
    /// Turns an I/O error into [`Error::Io`] with `what` was tried.
    ///
    /// # Errors
    /// The same failure, with its context.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| {
            let source: std::io::Error = error.into();
            Error::Io { what: format!("{}: {source}", what()), source }
        })
    }
}
