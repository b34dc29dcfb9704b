//! Whether one of two memory hosts that did not answer is there again.
//!
//! While one of two does not answer, nobody who sends or brings pages asks it: the other one has what is needed, and an
//! attempt to reach a host that has lost its power takes seconds. A thread that nothing else waits for asks it.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::lines::{Lines, Member};
use super::outage::Outage;
use super::{Split, SplitError};
use crate::error::MigrateError;

/// How often it is looked whether somebody is to be asked.
const LOOK: Duration = Duration::from_millis(100);

impl Split {
    /// Starts the thread. Nobody waits for its end: that comes soon after the split's, or once the host that is being
    /// asked then has answered, or has not.
    pub(super) fn look_for_silent_ones(self: &Arc<Self>) -> Result<(), SplitError> {
        let this = Arc::downgrade(self);
        let spawned = std::thread::Builder::new().name("probe".into()).spawn(move || look(&this));
        spawned.map_err(MigrateError::host("starting a thread for the guest's pages"))?;
        Ok(())
    }

    /// Whether a memory host does not answer that has a mirror, which may.
    pub(super) fn is_silent_of_two(&self, member: Member) -> bool {
        self.lenders.is_silent(member) && self.lenders.has_mirror(member)
    }
}

fn look(split: &Weak<Split>) {
    let mut outages: [Outage; Member::MOST] = Default::default();
    while let Some(split) = split.upgrade().filter(|split| !split.has_ended()) {
        let all = (0..split.lenders.count()).flat_map(|number| split.lenders.members(number));
        for member in all.filter(|member| split.is_silent_of_two(*member)) {
            let (began, outage) = (Instant::now(), &mut outages[member.index()]);
            if outage.rests(began) {
                continue;
            }
            match Lines::new(&split.lenders).ask(member, |_| Ok(())) {
                Ok(()) => drop(outage.over()),
                Err(_) => drop(outage.failed(began, Instant::now(), false)),
            }
        }
        drop(split);
        std::thread::sleep(LOOK);
    }
}
