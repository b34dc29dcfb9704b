//! The parts of the daemon that move machines away, and no others.

use std::sync::Arc;

use sterna_engine::host::DaemonId;
use sterna_engine::transport::credentials::Credentials;
use sterna_engine::transport::share::Share;

use super::jobs::Jobs;
use super::records::Records;
use crate::balloon::lending::Lending;
use crate::kept::Keeper;
use crate::machines::table::Machines;
use crate::metrics::Metrics;

/// This host as a source.
#[derive(Debug)]
pub struct Departures {
    /// Its identity.
    pub identity: DaemonId,
    /// What is kept of machines that have left.
    pub keeper: Arc<Keeper>,
    /// Its machines.
    pub machines: Arc<Machines>,
    /// The records of what became of migrations.
    pub records: Arc<Records>,
    /// The migrations that it began.
    pub jobs: Arc<Jobs>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The connections to QEMU that balloons' threads may use meanwhile.
    pub lending: Arc<Lending>,
    /// The credentials for connections to other daemons, where these are encrypted.
    pub credentials: Option<Arc<Credentials>>,
    /// What all migrations away from here may send together.
    pub bandwidth: Arc<Share>,
    /// Whether pages that were free at the first look count as free for ever; only for tests.
    pub trust_first_look: bool,
    /// Whether the threads of a pause may go before all others.
    pub may_haste: bool,
}
