//! A source that has lost its destination is told where it is now.

use sterna_api::{Blame, Phase, Problem, ResumeRequest};

use super::jobs::check_address;
use super::records::Stage;
use crate::problems::{host, unknown_vm};
use crate::vms::{Daemon, Hold, Lifecycle};

impl Daemon {
    /// Looks at once for the destination that a machine of here waits for, and elsewhere than before where `request` says so: that outlives
    /// this daemon. (One that serves pages looks every two seconds anyway, and at once when the address changes.)
    ///
    /// # Errors
    /// A [`Problem`]: unknown, not handed over, or it cannot be written down.
    pub fn resume(&self, name: &str, request: &ResumeRequest) -> Result<(), Problem> {
        if let Some(to) = &request.to {
            check_address(to)?;
        }
        let entry = self.table().get(name).cloned().ok_or_else(|| unknown_vm(name))?;
        let serves = match &entry.hold {
            Hold::WaitingForPeer { .. } => true,
            Hold::Leaving(monitor) => monitor.progress().phase == Phase::Postcopy,
            _ => false,
        };
        let lifecycle = entry.record.map(|record| record.lifecycle);
        let id = match lifecycle {
            Some(Lifecycle::Outgoing(id)) if serves => id,
            _ if entry.pager.is_some() => {
                return Err(nothing_to_resume(format!("'{name}' runs here, and its source looks for this host"))
                    .hint(format!("at its source: 'sterna resume {name} --to HOST:PORT'")));
            }
            _ => return Err(nothing_to_resume(format!("'{name}' has not been handed over to another host"))),
        };
        if let Some(to) = &request.to {
            let Some(Stage::HandingOver { postcopy, .. }) = self.records.stage(id) else {
                return Err(nothing_to_resume(format!("the migration of '{name}' has just ended")));
            };
            self.records
                .write(id, Some(name), Stage::HandingOver { peer: to.clone(), postcopy })
                .map_err(|error| host("cannot write down where the destination is", &error))?;
            tracing::info!(vm = name, %id, to, "its destination is said to be there now");
        }
        if let Hold::WaitingForPeer { verdict } = &entry.hold {
            verdict.hurry(request.to.as_deref());
        }
        Ok(())
    }
}

fn nothing_to_resume(why: String) -> Problem {
    Problem::new("not-migrating", Blame::Request, why)
}
