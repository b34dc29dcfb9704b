//! Options and outcomes.

use sterna_api::MigrateOptions;
use sterna_engine::monitor::Monitor;
use sterna_engine::source::{Outcome, Outgoing, migrate};

use crate::pair::source::Source;

pub const MIB: u64 = 1 << 20;

pub fn verified(streams: u32) -> MigrateOptions {
    MigrateOptions { streams, verify: true, ..MigrateOptions::default() }
}

pub fn run(outgoing: Outgoing, peer: &str, options: &MigrateOptions) -> Outcome {
    migrate(outgoing, peer, options, &Source::default(), &Monitor::new("guest"))
}

pub fn code(outcome: &Outcome) -> &str {
    outcome.report.error.as_ref().map_or("none", |problem| problem.code.as_str())
}
