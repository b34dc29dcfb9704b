//! What it takes to move machines away, and nothing else of the daemon.

use std::sync::Arc;

use sterna_engine::transport::credentials::Credentials;
use sterna_engine::transport::share::Share;

use super::jobs::Jobs;
use super::records::Records;
use crate::balloon::lending::Lending;
use crate::machines::table::Machines;
use crate::metrics::Metrics;

/// This host as a source.
#[derive(Debug)]
pub struct Departures {
    /// Its machines.
    pub machines: Arc<Machines>,
    /// What became of migrations.
    pub records: Arc<Records>,
    /// The migrations that it began.
    pub jobs: Arc<Jobs>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Connections to QEMU that those who look after balloons may use meanwhile.
    pub lending: Arc<Lending>,
    /// What connections to other daemons are encrypted with, where they are.
    pub credentials: Option<Arc<Credentials>>,
    /// What all migrations away from here may send together.
    pub bandwidth: Arc<Share>,
    /// For tests alone: a page is free that was so at the first look.
    pub trust_first_look: bool,
}
