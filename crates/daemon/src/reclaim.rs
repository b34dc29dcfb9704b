//! What a machine's guest holds free, given back to this host. The machine runs on, and nothing else is done with it
//! meanwhile.

use std::sync::Arc;

use sterna_api::units::milliseconds;
use sterna_api::{Code, Problem, ReclaimMethod, Reclaimed, Status, VmState};
use sterna_engine::memory::elsewhere::PagesElsewhere;
use sterna_engine::monitor::Monitor;
use sterna_engine::reclaim::Machine;

use crate::balloon::lending::Lending;
use crate::machines::claim::Claimed;
use crate::machines::control::{self, Control};
use crate::machines::hold::{Activity, Connection, Hold, Shown, cancel};
use crate::machines::reach::{accesses, check_writers};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::metrics::Metrics;

/// By the guest's balloon.
pub mod by_balloon;

/// What its guest holds free is being taken.
#[derive(Debug)]
struct Reclaiming(Arc<Monitor>);

impl Activity for Reclaiming {
    fn describe(&self) -> &'static str {
        "the memory that its guest holds free is being taken"
    }

    fn cancel(&self, name: &str) -> Result<(), Problem> {
        cancel(&self.0, name)
    }

    // QEMU serves one client at a time, and who takes its guest's free memory is one.
    fn show(&self) -> Shown {
        Shown::As { state: VmState::Running, note: Some(self.describe().into()), progress: None }
    }

    fn may_be_split(&self) -> bool {
        true
    }

    fn connection(&self) -> Connection {
        Connection::Lent { by: Arc::clone(&self.0), free_unless_lent: false }
    }
}

/// What it takes to take free memory.
#[derive(Debug)]
pub struct Reclaim<'a> {
    /// The machines.
    pub machines: &'a Machines,
    /// Connections to QEMU that those who look after balloons may use meanwhile.
    pub lending: &'a Lending,
    /// What is counted.
    pub metrics: &'a Metrics,
    /// For tests alone: a page is free that was so at the first look.
    pub trust_first_look: bool,
}

impl Reclaim<'_> {
    /// Takes what a machine's guest holds free. Blocks until all is taken; `monitor` can end it before. A run that had
    /// begun is always reported on: how it ended is in its status.
    ///
    /// # Errors
    /// A [`Problem`]: an unknown or busy machine, or one of which nothing can be taken in this way, and why.
    pub fn reclaim(&self, name: &str, method: ReclaimMethod, monitor: &Arc<Monitor>) -> Result<Reclaimed, Problem> {
        let claimed = Claimed::new(self.machines, name, Hold::busy(Reclaiming(Arc::clone(monitor))))?;
        let mut account = Reclaimed { vm: name.into(), method, ..Reclaimed::default() };
        let done = match method {
            ReclaimMethod::Vmi => self.by_vmi(&claimed.record, monitor, &mut account),
            ReclaimMethod::Balloon => by_balloon::reclaim(self.machines, &claimed.record, monitor, &mut account),
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
        tracing::info!(
            vm = name, ?method, status = ?account.status, pages = account.reclaimed_pages,
            "free memory taken"
        );
        Ok(account)
    }

    fn by_vmi(&self, record: &VmRecord, monitor: &Monitor, account: &mut Reclaimed) -> Result<(), Problem> {
        let mut control = Control::connect(&record.qmp)?;
        // What others write past QEMU's mapping is not held up while a page is taken.
        check_writers(&record.name, "have memory taken from it", &control.inspect()?)?;
        let split = self.machines.split_of(record)?;
        let (faults, blocks) = accesses(record, split.as_ref().map(|split| split.pager()))?;
        let qmp = control.share();
        let mut vmm = control::source(record, Arc::clone(&qmp))?;
        let _lent = self.lending.lend(&record.name, qmp);
        let machine = Machine {
            vmm: &mut vmm,
            faults,
            blocks: &blocks,
            away: None,
            elsewhere: split.map(|split| -> Arc<dyn PagesElsewhere> { split }),
            trust_first_look: self.trust_first_look,
        };
        sterna_engine::reclaim::reclaim(machine, monitor, account).map_err(|error| error.problem())
    }
}
