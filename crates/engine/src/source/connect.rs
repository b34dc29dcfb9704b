//! Phase *connect*: the destination is reached, and both sides agree on version and features.

use sterna_api::options::{Compress, Delta};
use sterna_api::{MigrateOptions, Phase};
use sterna_protocol::hello::Features;

use super::departure::Departure;
use super::link::Link;
use crate::error::MigrateError;
use crate::transport::SessionKey;

/// Connects to the destination.
///
/// # Errors
/// The destination does not answer, is not who it should be, or cannot do what the options need.
pub fn connect(departure: &mut Departure) -> Result<Link, MigrateError> {
    let Departure { id, peer, options, host, monitor, clone, split, .. } = departure;
    monitor.enter(Phase::Connect);
    let clones = if clone.is_some() { Features::CLONES } else { Features::NONE };
    let split = match split {
        Some(split) if split.has_parity() => Features::SPLIT.and(Features::SPLIT_PARITY),
        Some(_) => Features::SPLIT,
        None => Features::NONE,
    };
    let session = SessionKey { session: id.0, key: id.0 as u64, needed: needed(options).and(clones).and(split) };
    Link::connect(peer, *id, session, host.credentials())
}

/// The features that the options need the destination to know.
pub fn needed(options: &MigrateOptions) -> Features {
    let postcopy = if options.must_postcopy() { Features::POSTCOPY } else { Features::NONE };
    encodings(options).and(postcopy)
}

fn encodings(options: &MigrateOptions) -> Features {
    let compress = match options.compress {
        Compress::Off => Features::NONE,
        Compress::Lz4 => Features::PACKED.and(Features::LZ4),
        Compress::Zstd => Features::PACKED.and(Features::ZSTD),
    };
    match options.delta {
        Delta::Off => compress,
        Delta::Xbzrle => compress.and(Features::PACKED).and(Features::XBZRLE),
    }
}
