//! One error type: what was being done, and what the kernel said.

use std::borrow::Cow;
use std::io;

/// A call to the kernel that failed.
///
/// It displays what was being done; the reason is its [source](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct Error {
    doing: Cow<'static, str>,
    source: io::Error,
}

/// The result of most functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `doing` completes the sentence "cannot …".
    pub(crate) fn new(doing: impl Into<Cow<'static, str>>, source: impl Into<io::Error>) -> Self {
        Self { doing: doing.into(), source: source.into() }
    }

    /// An error for a file's content that this crate does not understand.
    pub(crate) fn malformed(doing: impl Into<Cow<'static, str>>, what: impl Into<String>) -> Self {
        Self::new(doing, io::Error::new(io::ErrorKind::InvalidData, what.into()))
    }

    /// The kernel's error number, where it was the kernel that refused.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// The kind of the kernel's error.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

impl From<Error> for io::Error {
    /// Keeps the kind; the text says both what failed and why.
    fn from(error: Error) -> Self {
        io::Error::new(error.kind(), error)
    }
}
