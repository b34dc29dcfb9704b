//! What a machine's guest holds free, given back to this host. The machine runs on, and nothing else is done with it meanwhile.

use std::sync::Arc;

use sterna_api::units::milliseconds;
use sterna_api::{Code, Problem, ReclaimMethod, Reclaimed, Status};
use sterna_engine::inside::InsideQemu;
use sterna_engine::monitor::Monitor;
use sterna_engine::reclaim::Machine;

use super::control::{self, Control};
use super::{Daemon, Hold, VmRecord};
use crate::migration::outgoing;
use crate::problems::host;

/// By the guest's balloon.
pub mod balloon;

impl Daemon {
    /// Takes what a machine's guest holds free. Blocks until all is taken; `monitor` can end it before. A run that had begun is always reported on: how
    /// it ended is in its status.
    ///
    /// # Errors
    /// A [`Problem`]: an unknown or busy machine, or one of which nothing can be taken in this way, and why.
    pub fn reclaim(&self, name: &str, method: ReclaimMethod, monitor: &Arc<Monitor>) -> Result<Reclaimed, Problem> {
        let claimed = self.claim_for_now(name, Hold::Reclaiming(Arc::clone(monitor)))?;
        let mut account = Reclaimed { vm: name.into(), method, ..Reclaimed::default() };
        let done = match method {
            ReclaimMethod::Vmi => self.reclaim_by_vmi(&claimed.record, monitor, &mut account),
            ReclaimMethod::Balloon => balloon::reclaim(self, &claimed.record, monitor, &mut account),
        };
        account.ms = milliseconds(monitor.elapsed());
        match done {
            Ok(()) => account.status = Status::Completed,
            Err(problem) if problem.code == Code::Cancelled => {
                (account.status, account.error) = (Status::Cancelled, Some(problem));
            }
            // It never began.
            Err(problem) if account.candidate_pages == 0 => return Err(problem),
            Err(problem) => (account.status, account.error) = (Status::Failed, Some(problem)),
        }
        self.metrics.reclaimed(account.reclaimed_bytes);
        tracing::info!(vm = name, ?method, status = ?account.status, pages = account.reclaimed_pages, "free memory taken");
        Ok(account)
    }

    fn reclaim_by_vmi(&self, record: &VmRecord, monitor: &Monitor, account: &mut Reclaimed) -> Result<(), Problem> {
        let mut control = Control::connect(&record.qmp)?;
        // What others write past QEMU's mapping is not held up while a page is taken.
        outgoing::check_writers(&record.name, &control.inspect()?)?;
        let (agent, addresses) = control::agent_and_addresses(&record.agent, record.process.pid, &record.blocks)?;
        let blocks = record.block_files(&addresses).map_err(|error| host("cannot open the machine's RAM", &error))?;
        let qmp = control.share();
        let mut vmm = control::source(record, Arc::clone(&qmp))?;
        let _lent = self.balloons.lend(&record.name, qmp);
        let machine = Machine {
            vmm: &mut vmm,
            inside: &mut InsideQemu::new(agent),
            blocks: &blocks,
            trust_first_look: self.config.test_trust_first_look,
        };
        sterna_engine::reclaim::reclaim(machine, monitor, account).map_err(|error| error.problem())
    }
}
