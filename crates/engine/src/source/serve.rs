//! Service for a guest that an earlier daemon handed over: the pages missing at the destination follow it.

use std::sync::Arc;

use sterna_api::MigrateOptions;
use sterna_api::Phase;
use sterna_api::report::{Host, Report};
use sterna_sys::map::Access;

use super::account::{Account, mode_after_switchover};
use super::postcopy;
use super::postcopy::work::{Context, Work};
use crate::error::MigrateError;
use crate::host::{DaemonId, MigrationId, SourceHost};
use crate::memory::{BlockFile, kind};
use crate::monitor::Monitor;
use crate::transport::share::Share;

/// The remains of a machine here, whose guest was handed over before all its pages were sent.
pub struct Left {
    /// The migration.
    pub id: MigrationId,
    /// The machine's name.
    pub vm: String,
    /// The daemon that took the guest, where that is known.
    pub daemon: Option<DaemonId>,
    /// Its RAM, as it stands since the switchover, in the order of its blocks.
    pub blocks: Vec<BlockFile>,
    /// What all migrations away from this host may send together.
    pub bandwidth: Arc<Share>,
    /// This host, for the report.
    pub here: Host,
}

/// Goes on with a guest that an earlier daemon handed over to `peer`, which has said that it took the guest: sends the
/// missing pages. Blocks until all are there, the guest has ended there, or [`Monitor::give_up`] is called; until then
/// a peer that does not answer is tried again. The report is [partial](Report::partial): it covers what was done since.
/// Whatever it says, the guest does not belong to this host any more, and the remains here are of no use.
///
/// # Errors
/// The RAM cannot be mapped: nothing was done, and the remains here are needed as before.
pub fn serve(
    left: Left,
    peer: &str,
    options: &MigrateOptions,
    host: &dyn SourceHost,
    monitor: &Monitor,
) -> Result<Report, MigrateError> {
    let Left { id, vm, daemon, blocks, bandwidth, here } = left;
    let ram = kind::open(&blocks, Access::Read)?;
    let mut report = Report::asked(&vm, options, here, peer);
    (report.mode, report.partial) = (mode_after_switchover(options).into(), true);
    report.ram.total_pages = ram.layout().pages();
    let mut account = Account::new(report, monitor);
    monitor.begin();
    let _ = monitor.commit();
    let work = Work::new(ram, options, &bandwidth, 0);
    let context = Context { id, peer, daemon, options, host, monitor, work, split: None };
    postcopy::see_through(&context, None, &mut account);
    account.thread_ends();
    monitor.enter(Phase::Done);
    Ok(account.report)
}
