//! The answer to a daemon that may learn nothing of a migration.

use sterna_api::{Blame, Code, Problem};
use sterna_engine::host::MigrationId;

use super::records::NoVerdict;

/// The problem that tells a daemon why it learns nothing of a migration.
pub fn no_verdict(id: MigrationId, asks: Option<&str>, why: NoVerdict) -> Problem {
    let asks = asks.unwrap_or("somebody without a certificate");
    tracing::warn!(%id, asks, ?why, "asked for a migration and told nothing");
    match why {
        NoVerdict::AnotherDaemons => {
            Problem::new(Code::TlsNotYours, Blame::Request, format!("migration {id} was begun by another daemon"))
                .hint("give this host's certificate the first DNS name that it had when the migration began")
        }
        NoVerdict::BegunHere => {
            let message = format!("the daemon that answers there is the source of migration {id}, not its destination");
            Problem::new(Code::NotYours, Blame::Request, message)
                .hint("say where the destination is: 'sterna resume NAME --to HOST:PORT'")
        }
        NoVerdict::Unknown => {
            let message = format!("the daemon that answers there has never heard of migration {id}");
            Problem::new(Code::NotKnownHere, Blame::Request, message).hint(
                "is it the right host, and has its daemon the state directory it had? Where its records are lost \
                 nobody can tell by asking: \
                 look with your own eyes whether the guest runs there",
            )
        }
    }
}
