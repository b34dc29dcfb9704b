//! Why pages did not go to memory hosts, or come from them, and what a person may do about it.

use sterna_api::{Blame, Code, Problem};
use sterna_protocol::store::Refusal;

use crate::error::MigrateError;
use crate::store::client::StoreError;

/// Why pages did not go or come.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// A memory host refused, or is not to be reached. What it has stays there.
    #[error("memory host {peer}")]
    Host {
        /// Where it listens.
        peer: String,
        /// What failed.
        source: Box<StoreError>,
    },
    /// A memory host does not have pages that it alone had.
    #[error("memory host {peer} has lost {pages} pages of the guest: whoever touches them waits for ever")]
    Lost {
        /// Where it listens.
        peer: String,
        /// How many.
        pages: u64,
    },
    /// Of two memory hosts that have the same pages one alone has some, and cannot be done without.
    #[error("memory host {peer} alone has {pages} pages of the guest, and no other can take its place")]
    Alone {
        /// Where it listens.
        peer: String,
        /// How many.
        pages: u64,
    },
    /// This host, or the VMM.
    #[error(transparent)]
    Here(#[from] MigrateError),
}

impl SplitError {
    /// The problem that this is for a request.
    #[must_use]
    pub fn problem(&self) -> Problem {
        match self {
            Self::Here(error) => error.problem(),
            Self::Lost { .. } => Problem::new(Code::PagesLost, Blame::Peer, self.to_string()).hint(
                "has that host been restarted, or has a person taken back what it lent? Its daemon's log says so",
            ),
            Self::Alone { .. } => Problem::new(Code::PagesLost, Blame::Peer, self.to_string())
                .hint("start its daemon, or the host, again: what it alone has is copied to the other one then"),
            Self::Host { peer, source } => match source.as_ref() {
                StoreError::Connection(error) => {
                    let problem = error.problem();
                    Problem { message: format!("memory host {peer}: {}", problem.message), ..problem }
                }
                StoreError::Refused(refusal) => refused(peer, refusal),
            },
        }
    }
}

fn refused(peer: &str, refusal: &Refusal) -> Problem {
    let problem = Problem::new(Code::LoanRefused, Blame::Peer, format!("memory host {peer} refused: {refusal}"));
    // Some refusals are in the memory host's own words.
    let problem = problem.from_outside();
    match refusal {
        Refusal::LendsNothing => problem.hint("'lend_memory' in its sternad.toml is what it lends"),
        Refusal::Budget { .. } | Refusal::Full { .. } => {
            problem.hint("'sterna lent' there shows what it lends, and to whom")
        }
        Refusal::Closed => problem.hint("a person has taken back what it lent ('sterna lent --take-back')"),
        _ => problem,
    }
}
