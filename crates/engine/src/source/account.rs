//! What a migration writes into its report.

use sterna_protocol::convergence::Because;

use super::Migration;
use super::link::Peer;
use super::rounds::Rounds;
use super::track::Tracker;

impl Migration<'_> {
    /// Writes who the destination is into the report.
    pub(super) fn describe(&mut self, peer: &Peer) {
        let destination = &mut self.report.destination;
        destination.host.clone_from(&peer.host);
        destination.qemu.clone_from(&peer.qemu);
        destination.sterna.clone_from(&peer.sterna);
    }

    /// Writes the rounds into the report.
    pub(super) fn tally(&mut self, rounds: &Rounds) {
        let (report, counts) = (&mut self.report, rounds.counts);
        report.pages.full = counts.full;
        report.pages.delta = counts.delta;
        report.pages.sent = counts.bodies();
        report.pages.zero = counts.zero;
        report.pages.unallocated += counts.unallocated;
        report.pages.free = counts.free;
        report.introspection = rounds.free_pages().account().clone();
        report.pages.fake_dirty_content = counts.unchanged;
        report.pages.fake_dirty_tracked = counts.again;
        report.bytes_on_wire = rounds.bytes();
        report.bytes_raw = counts.bodies() * 4096;
        report.encoding = rounds.encoding();
        report.rounds.clone_from(&rounds.done);
        report.tracking.untracked_writes = rounds.untracked_writes;
        let (looks, look_time) = rounds.looks();
        (report.tracking.looks, report.tracking.look_ms) = (looks, look_time.as_secs_f64() * 1e3);
        report.source.cpu_s = rounds.cpu().as_secs_f64();
    }

    /// Writes what tracking cost into the report.
    pub(super) fn account(&mut self, tracker: &dyn Tracker) {
        let cost = tracker.cost();
        let tracking = &mut self.report.tracking;
        tracking.scans = cost.scans;
        tracking.scan_ms = cost.scan_time.as_secs_f64() * 1e3;
        tracking.write_faults = cost.write_faults;
        tracking.discarded_pages = cost.discarded_pages;
    }
    /// Why pages follow after the switchover, where that was not what was asked for.
    pub(super) fn reason(&self, because: Because) -> Option<String> {
        let limit_ms = self.report.convergence.downtime_limit_ms;
        match because {
            Because::Asked => None,
            Because::Stalled => Some(format!("the rounds did not come down to a pause of {limit_ms:.0} ms")),
            Because::TimedOut => {
                let seconds = self.options.timeout_ms.unwrap_or_default() / 1e3;
                Some(format!("the rounds did not come down to a pause of {limit_ms:.0} ms within {seconds:.0} s"))
            }
        }
    }
}
