//! A guest that is stopped here, with its devices loaded at the destination.

use std::time::Duration;

use sterna_api::report;

use crate::vmm::EventTime;

/// A guest that is stopped, with its devices at the destination, and its RAM or the map of what is to come of it: one
/// word lets it run there.
pub struct Loaded {
    /// When it stopped, by the VMM's event.
    pub stop: EventTime,
    /// The parts of the downtime so far.
    pub downtime: report::Downtime,
    /// The comparison of both sides.
    pub verify: report::Verify,
    /// Pages that are still to come, their map's bytes and what it took.
    pub residue: Option<Residue>,
    /// When the destination had loaded the devices, by this host's clock, microseconds.
    pub loaded_us: u64,
}

/// The map of what is still to come, for the report.
#[derive(Debug, Clone, Copy)]
pub struct Residue {
    /// Its pages.
    pub pages: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The time for making and sending it.
    pub took: Duration,
}
