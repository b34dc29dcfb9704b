//! What failed, whose fault it is, and what to do: the body of every API error and the `error` of a report.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::code::Code;

/// Whose fault a failure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Blame {
    /// The request: a name that does not exist, options that contradict.
    Request,
    /// Sterna itself: a bug.
    Ours,
    /// The other daemon, or the link to it.
    Peer,
    /// This host: memory, files, kernel.
    Host,
    /// QEMU.
    Qemu,
    /// The guest: it switched itself off.
    Guest,
}

/// Where a guest is after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Whereabouts {
    /// It runs on at the source.
    #[default]
    Source,
    /// It runs at the destination.
    Destination,
    /// It is paused; `cause` says where its state is.
    Paused,
    /// It is gone.
    Gone,
}

/// The most characters that are kept of a text from outside.
const MAX_WORDS: usize = 2_000;
/// The most causes that are kept from outside.
const MAX_CAUSES: usize = 16;

/// A text from outside, reduced to what is kept and shown.
#[must_use]
pub fn words(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).take(MAX_WORDS).collect()
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A stable word for programs: `unknown-vm`, `peer-unreachable`, `out-of-memory`, …
    #[schema(value_type = String)]
    pub code: Code,
    /// Whose fault it is.
    pub blame: Blame,
    /// What failed, in a sentence.
    pub message: String,
    /// The causes, from the outermost to the innermost.
    #[serde(default)]
    pub cause: Vec<String>,
    /// What to do.
    #[serde(default)]
    pub hint: Option<String>,
    /// Where the guest is.
    #[serde(default)]
    pub guest: Whereabouts,
}

impl Problem {
    /// A problem with its code, blame and sentence.
    #[must_use]
    pub fn new(code: Code, blame: Blame, message: impl Into<String>) -> Self {
        Self { code, blame, message: message.into(), cause: Vec::new(), hint: None, guest: Whereabouts::Source }
    }

    /// A problem made of an error with its chain of sources.
    #[must_use]
    pub fn from_error(code: Code, blame: Blame, error: &dyn std::error::Error) -> Self {
        let mut problem = Self::new(code, blame, error.to_string());
        let mut source = error.source();
        while let Some(cause) = source {
            problem.cause.push(cause.to_string());
            source = cause.source();
        }
        problem
    }

    /// The message and its causes, in one line.
    #[must_use]
    pub fn with_causes(&self) -> String {
        self.cause.iter().fold(self.message.clone(), |line, cause| line + ": " + cause)
    }

    /// A problem from outside, reduced to what is kept and shown: printable text that is not longer than people read. A
    /// message may be megabytes long, is repeated in every migration that waits for the same host, and terminals would
    /// interpret it.
    #[must_use]
    pub fn from_outside(self) -> Self {
        Self {
            code: match self.code {
                Code::Other(word) => Code::Other(words(&word)),
                known => known,
            },
            message: words(&self.message),
            cause: self.cause.iter().take(MAX_CAUSES).map(|cause| words(cause)).collect(),
            hint: self.hint.as_deref().map(words),
            ..self
        }
    }

    /// The problem with a hint what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The problem with the guest's whereabouts.
    #[must_use]
    pub fn guest(mut self, guest: Whereabouts) -> Self {
        self.guest = guest;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn somebody_elses_words_are_words_and_few() {
        let long = "x".repeat(1 << 20);
        let theirs = Problem {
            cause: vec![long.clone(); 1000],
            ..Problem::new(long.as_str().into(), Blame::Host, "it takes\u{1b}[2J 1\nat a time").hint(long.as_str())
        };
        let kept = theirs.from_outside();
        assert_eq!(kept.message, "it takes [2J 1\nat a time");
        let bytes = serde_json::to_vec(&kept).unwrap().len();
        assert!(bytes < 20 * (MAX_WORDS + 100), "{bytes}");
    }
}
