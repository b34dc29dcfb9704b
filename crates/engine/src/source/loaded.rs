//! A guest that is stopped here, with its devices loaded at the destination.

use std::time::Duration;

use sterna_api::report;

use crate::vmm::EventTime;

/// A guest that is stopped, with its devices at the destination, and its RAM or the residue: `Commit` lets it run
/// there.
pub struct Loaded {
    /// The moment of its stop, by the VMM's event.
    pub stop: EventTime,
    /// The parts of the downtime so far.
    pub downtime: report::Downtime,
    /// The comparison of both sides' pages.
    pub verify: report::Verify,
    /// The residue, where pages are still to come.
    pub residue: Option<Residue>,
    /// The moment when the destination had loaded the devices, by this host's clock, microseconds.
    pub loaded_us: u64,
}

/// The residue, for the report.
#[derive(Debug, Clone, Copy)]
pub struct Residue {
    /// Its pages.
    pub pages: u64,
    /// The bytes of its map.
    pub bytes: u64,
    /// The time for making and sending the map.
    pub took: Duration,
}
