//! What of machines that leave is kept here, and what they can show where they go.

use std::collections::HashMap;
use std::sync::Arc;

use sterna_api::options::PreserveSharing;
use sterna_engine::source::Gang;
use sterna_engine::source::tickets::Tickets;
use sterna_protocol::spec::Ticket;

use super::sharing::Membership;
use crate::kept::{Keeper, Keeping};
use crate::machines::record::VmRecord;

/// What becomes of one machine's memory here when it has left, and the tickets that it can show.
#[derive(Debug, Clone, Default)]
pub struct Returns {
    /// What is kept of it, together with what is kept of its gang; `None` where nothing is.
    pub keeping: Option<Keeping>,
    shown: Vec<Ticket>,
    alone: Option<Arc<Gang>>,
}

impl Returns {
    /// The tickets of this machine, to which this host adds its `own`.
    #[must_use]
    pub fn tickets(&self, record: &VmRecord, own: Option<Ticket>) -> Tickets {
        Tickets { had: record.tickets.clone(), own, shown: self.shown.clone(), alone: self.alone.clone() }
    }
}

/// What is kept of each of these machines, and what it can show. Those that share pages on their way show each other's
/// tickets, and are kept together.
#[must_use]
pub fn returns(
    keeper: &Arc<Keeper>,
    members: &[VmRecord],
    sharing: &[Membership],
    asked: Option<PreserveSharing>,
) -> Vec<Returns> {
    let mut gangs: HashMap<u128, Returns> = HashMap::new();
    for (record, membership) in members.iter().zip(sharing) {
        let Some((gang, _)) = membership else { continue };
        let new = || Returns { keeping: keeper.keeping(&gang.spec.group), ..Returns::default() };
        gangs.entry(gang.spec.id).or_insert_with(new).shown.extend(&record.tickets);
    }
    let each = members.iter().zip(sharing).map(|(record, membership)| {
        let mut returns = match membership {
            Some((gang, _)) => gangs.get(&gang.spec.id).cloned().unwrap_or_default(),
            None => Returns {
                keeping: keeper.keeping(""),
                shown: record.tickets.clone(),
                alone: (!record.tickets.is_empty()).then(|| Gang::alone(record.content_bytes())),
            },
        };
        // What others made may be used again by them.
        returns.keeping = returns.keeping.filter(|_| record.owns_ram_files);
        if asked == Some(PreserveSharing::Off) {
            returns.shown.clear();
        }
        returns
    });
    each.collect()
}
