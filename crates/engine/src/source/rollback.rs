//! The guest stays, or nobody knows yet where it is.

use std::time::{Duration, Instant};

use sterna_api::problem::Whereabouts;
use sterna_api::{Phase, Status};

use super::{Fate, Migration, ask_verdict};
use crate::error::MigrateError;
use crate::host::Verdict;
use crate::vmm::{self, VmmError};

impl Migration<'_> {
    /// The guest was given away and the answer did not come: asks until it is known, for a while.
    pub(super) fn find_out(&mut self, lost: MigrateError) -> Result<Fate, MigrateError> {
        let deadline = Instant::now() + Duration::from_secs(3);
        self.monitor
            .update(|progress| progress.waiting_for = Some("the destination's word on who has the guest".into()));
        loop {
            match ask_verdict(self.id, self.peer, self.daemon, self.host.credentials().as_deref()) {
                Ok(Verdict::Aborted) => return Err(lost),
                Ok(Verdict::Committed) => {
                    // Where the destination itself said what is wrong, the guest is its own and does not run there.
                    match lost {
                        MigrateError::Peer(problem) => self.report.error = Some(problem),
                        _ => self.report.status = Status::Completed,
                    }
                    return Ok(Fate::There);
                }
                Err(error) if Instant::now() > deadline => {
                    let mut problem = lost.problem_at_source().guest(Whereabouts::Paused);
                    problem.cause.push(error.to_string());
                    problem.hint = Some(format!(
                        "the guest is stopped here until {} answers; bring its daemon back, and it goes on by itself",
                        self.peer
                    ));
                    self.report.error = Some(problem);
                    return Ok(Fate::Unknown);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Lets the guest run on here, and writes down why.
    pub(super) fn give_back(&mut self, vmm: &mut dyn vmm::Source, error: &MigrateError) -> Fate {
        tracing::warn!(vm = self.spec.name, %error, "migration failed, the guest stays");
        self.monitor.enter(Phase::Rollback);
        // A time limit that says to cancel is a cancellation asked for in advance.
        let cancelled = matches!(error, MigrateError::Cancelled | MigrateError::NotConverging { .. });
        self.report.status = if cancelled { Status::Cancelled } else { Status::Failed };
        if let MigrateError::Mismatch { mismatches, pages } = *error {
            self.report.verify =
                sterna_api::report::Verify { checked: true, pages, mismatches, excluded_free_pages: 0 };
        }
        let mut problem = error.problem_at_source();
        let fate = match vmm.rollback() {
            Ok(()) => Fate::Here,
            Err(rollback) => {
                problem.cause.push(format!("and the guest could not be given back: {rollback}"));
                problem = problem.guest(match rollback {
                    VmmError::Gone { .. } => Whereabouts::Gone,
                    _ => Whereabouts::Paused,
                });
                // Also where its connection ended: whether the VMM has, its process says.
                Fate::NotGivenBack
            }
        };
        self.report.error = Some(problem);
        fate
    }
}
