//! The account of a migration: it alone writes the report.

use std::time::Duration;

use sterna_api::problem::Whereabouts;
use sterna_api::report::{self, RamPages, Report, Status, Verify};
use sterna_api::units::milliseconds as ms;
use sterna_api::{Blame, Code, MigrateOptions, Mode, Problem};
use sterna_protocol::convergence::Because;
use sterna_protocol::layout::PAGE_BYTES;

use super::link::Peer;
use super::loaded::Loaded;
use super::postcopy::ended::{Completed, Ended};
use super::postcopy::tally::Tally;
use super::rounds::Rounds;
use super::track::Tracker;
use crate::error::MigrateError;
use crate::monitor::Monitor;

/// A migration's report while it is written.
pub struct Account<'a> {
    /// The report so far.
    pub report: Report,
    monitor: &'a Monitor,
    /// The processor time of this thread when the migration began.
    cpu_before: Duration,
    /// When the guest started at the destination, milliseconds since the request was accepted.
    started_ms: f64,
}

impl<'a> Account<'a> {
    /// Begins the account of a migration that starts now, on this thread.
    #[must_use]
    pub fn new(report: Report, monitor: &'a Monitor) -> Self {
        Self { report, monitor, cpu_before: sterna_sys::process::thread_cpu_time(), started_ms: 0.0 }
    }

    fn elapsed_ms(&self) -> f64 {
        ms(self.monitor.elapsed())
    }

    /// Notes that the migration's turn has come.
    pub fn begun(&mut self) {
        self.report.queued_ms = self.elapsed_ms();
    }

    /// Notes what the destination said of itself.
    pub fn destination(&mut self, peer: &Peer) {
        let destination = &mut self.report.destination;
        destination.host.clone_from(&peer.host);
        destination.qemu.clone_from(&peer.qemu);
        destination.sterna.clone_from(&peer.sterna);
    }

    /// Notes why the destination refuses post-copy.
    pub fn no_postcopy(&mut self, problem: &Problem) {
        self.report.postcopy.reason = Some(format!("not after the switchover: {}", problem.message));
    }

    /// Notes that the first round can begin, the number of the RAM's pages, and how many of them are allocated.
    pub fn prepared(&mut self, total_pages: u64, allocated_pages: u64) {
        self.report.ram = RamPages { total_pages, allocated_pages };
        self.report.pages.unallocated = total_pages - allocated_pages;
        self.report.setup_ms = self.elapsed_ms();
    }

    /// Notes what the rounds did.
    pub fn rounds(&mut self, rounds: &Rounds) {
        let (report, counts) = (&mut self.report, rounds.counts);
        report.pages.full = counts.full;
        report.pages.delta = counts.delta;
        report.pages.sent = counts.bodies();
        report.pages.zero = counts.zero;
        report.pages.shared_reference = counts.reference;
        report.pages.unallocated += counts.unallocated;
        report.pages.free = counts.free;
        report.introspection = rounds.free_pages().account().clone();
        report.pages.fake_dirty_content = counts.unchanged;
        report.pages.fake_dirty_tracked = counts.again;
        report.bytes_on_wire = rounds.bytes();
        report.bytes_raw = counts.bodies() * PAGE_BYTES as u64;
        report.encoding = rounds.encoding();
        report.rounds.clone_from(&rounds.done);
        report.tracking.untracked_writes = rounds.untracked_writes;
        let (looks, look_time) = rounds.looks();
        (report.tracking.looks, report.tracking.look_ms) = (looks, ms(look_time));
        report.source.cpu_s = rounds.cpu().as_secs_f64();
    }

    /// Notes what tracking cost.
    pub fn tracked(&mut self, tracker: &dyn Tracker) {
        let cost = tracker.cost();
        let tracking = &mut self.report.tracking;
        tracking.scans = cost.scans;
        tracking.scan_ms = ms(cost.scan_time);
        tracking.write_faults = cost.write_faults;
        tracking.discarded_pages = cost.discarded_pages;
        (tracking.huge_bytes, tracking.map_small_ms) = (cost.huge_bytes, ms(cost.map_small_time));
    }

    /// Notes that pages follow after the switchover, and why, where the options did not ask for it.
    pub fn postcopy(&mut self, because: Because, options: &MigrateOptions) {
        self.report.mode = mode_after_switchover(options).into();
        let limit_ms = self.report.convergence.downtime_limit_ms;
        self.report.postcopy.reason = match because {
            Because::Asked => None,
            Because::Shorter => {
                let predicted_ms = self.report.convergence.predicted_downtime_ms.unwrap_or_default();
                Some(format!("rounds made the pause no shorter than {predicted_ms:.0} ms"))
            }
            Because::Foreseen => {
                Some(format!("the guest writes faster than rounds can follow, for a pause of {limit_ms:.0} ms"))
            }
            Because::Stalled => Some(format!("the rounds did not come down to a pause of {limit_ms:.0} ms")),
            Because::TimedOut => {
                let seconds = options.timeout_ms.unwrap_or_default() / 1e3;
                Some(format!("the rounds did not come down to a pause of {limit_ms:.0} ms within {seconds:.0} s"))
            }
        };
    }

    /// Notes that the devices are loaded at the destination.
    pub fn loaded(&mut self, loaded: &Loaded) {
        self.report.verify = loaded.verify.clone();
        if let Some(residue) = loaded.residue {
            self.report.postcopy.residue_pages = residue.pages;
            self.report.postcopy.residue_bytes = residue.bytes;
            self.report.postcopy.residue_ms = ms(residue.took);
        }
    }

    /// Notes that the guest was given away, with or without an answer.
    pub fn answered(&mut self) {
        self.started_ms = self.elapsed_ms();
        self.report.total_ms = self.started_ms;
    }

    /// Notes that the guest has run at the destination since `started_us`, by this host's clock. A machine that was
    /// stopped before has no downtime.
    pub fn started(&mut self, loaded: &Loaded, started_us: u64, cpu_us: u64, running: bool) {
        let since = |us: u64| started_us.saturating_sub(us) as f64 / 1e3;
        self.report.downtime = report::Downtime { start_ms: since(loaded.loaded_us), ..loaded.downtime.clone() };
        self.report.downtime_ms = if running { since(loaded.stop.0) } else { 0.0 };
        self.report.destination.cpu_s = cpu_us as f64 / 1e6;
    }

    /// Notes that the migration succeeded.
    pub fn completed(&mut self) {
        self.report.status = Status::Completed;
    }

    /// Notes a failure.
    pub fn failed(&mut self, problem: Problem) {
        self.report.error = Some(problem);
    }

    /// Notes that the guest stays here.
    pub fn rolled_back(&mut self, error: &MigrateError) {
        // A time limit that cancels is a cancellation in advance.
        let cancelled = matches!(
            error,
            MigrateError::Cancelled | MigrateError::NotConverging { .. } | MigrateError::OutOfTime { .. }
        );
        self.report.status = if cancelled { Status::Cancelled } else { Status::Failed };
        if let MigrateError::Mismatch { mismatches, pages } = *error {
            self.report.verify = Verify { checked: true, pages, mismatches, ..Verify::default() };
        }
    }

    /// Notes how both sides compare while the guest runs at the destination.
    pub fn compared(&mut self, verify: Verify) {
        if verify.mismatches > 0 {
            let differ = MigrateError::Mismatch { mismatches: verify.mismatches, pages: verify.pages };
            let problem = differ.problem().guest(Whereabouts::Destination);
            (self.report.status, self.report.error) = (Status::Failed, Some(problem));
        }
        self.report.verify = verify;
    }

    /// Notes how often the link to the destination was lost, and for how long in all.
    pub fn interrupted(&mut self, times: u32, time: Duration) {
        self.report.postcopy.interruptions += times;
        self.report.postcopy.interrupted_ms += ms(time);
    }

    /// Notes how the migration ended after the switchover.
    pub fn followed(&mut self, ended: Ended) {
        let elapsed_ms = self.elapsed_ms();
        let report = &mut self.report;
        report.total_ms = elapsed_ms;
        match ended {
            Ended::Paged(completed) => {
                // An earlier error may say already that the guest does not run there.
                report.status = if report.error.is_none() { Status::Completed } else { Status::Failed };
                let Some(Completed { account, verify, at }) = completed else { return };
                report.total_ms = elapsed_ms - ms(at.elapsed());
                report.postcopy.ms = account.took_us as f64 / 1e3;
                report.faults = account.faults;
                report.pages.duplicate = account.duplicate;
                report.destination.cpu_s += account.cpu_us as f64 / 1e6;
                self.compared(verify);
            }
            Ended::Gone(problem) => {
                report.status = Status::Failed;
                let message =
                    format!("the guest ended at the destination before all its pages were there: {}", problem.message);
                report.error = Some(Problem { message, ..problem }.guest(Whereabouts::Gone));
            }
            Ended::Lost(pages) => {
                report.status = Status::Failed;
                let message = format!(
                    "QEMU has ended here, and with its private memory {pages} pages that the guest had not got yet"
                );
                report.error = Some(pages_stay_away(Code::PagingLost, Blame::Qemu, message));
            }
            Ended::GivenUp => {
                report.status = Status::Failed;
                let left = self.monitor.progress().pages_left;
                let message = format!("the migration was given up while {left} pages were still here");
                report.error = Some(pages_stay_away(Code::GivenUp, Blame::Request, message));
            }
        }
    }

    /// Notes what was sent after the switchover.
    pub fn pages_after_switchover(&mut self, tally: &Tally) {
        tally.write(&mut self.report);
    }

    /// Notes that the migration has ended, and that this thread does nothing more for it.
    pub fn finish(&mut self) {
        let elapsed_ms = self.elapsed_ms();
        let Report { options, verify, status, .. } = &mut self.report;
        if options.verify && !verify.checked && *status == Status::Completed {
            verify.reason.get_or_insert_with(|| "the link to the destination was lost before".into());
        }
        if self.report.status == Status::Completed {
            self.report.resume_ms = elapsed_ms - self.started_ms;
        } else {
            self.report.total_ms = elapsed_ms;
        }
        self.thread_ends();
    }

    /// Adds the processor time of this thread.
    pub fn thread_ends(&mut self) {
        let took = sterna_sys::process::thread_cpu_time() - self.cpu_before;
        self.report.source.cpu_s += took.as_secs_f64();
    }
}

/// The problem of a guest that was let run at the destination and will not get its last pages.
fn pages_stay_away(code: Code, blame: Blame, message: String) -> Problem {
    let problem = Problem::new(code, blame, message).guest(Whereabouts::Gone);
    problem.hint("the guest at the destination waits for them for ever: stop it there")
}

/// The name of the mode, where pages follow after the switchover.
pub fn mode_after_switchover(options: &MigrateOptions) -> &'static str {
    if options.mode == Mode::Postcopy { "postcopy" } else { "hybrid" }
}
