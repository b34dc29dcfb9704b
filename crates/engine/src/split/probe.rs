//! Whether one of two memory hosts that did not answer is there again, and what follows.
//!
//! While one of two does not answer, nobody who sends or brings pages asks it: the other one has what is needed, and an
//! attempt to reach a host that has lost its power takes seconds. A thread that nothing else waits for asks it. Once it
//! answers, the same thread has it given the pages that left without it.

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

    /// The memory hosts that have mirrors.
    fn pairs(&self) -> Vec<Member> {
        let all = (0..self.lenders.count()).flat_map(|number| self.lenders.members(number));
        all.filter(|member| self.lenders.has_mirror(*member)).collect()
    }

    /// Finds out what those have lost that answer again, and copies to each what its mirror alone has, until the end.
    fn look_through_and_mend(&self) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        for member in self.pairs().into_iter().filter(|member| self.lenders.has_returned(*member)) {
            self.look_through(&mut lines, member).inspect_err(|_| self.lenders.note_return(member))?;
        }
        let mut next = (self.pager.alone_chunks() > 0).then_some(0);
        while let Some(from) = next.filter(|_| !self.has_ended()) {
            next = self.mend_next(&mut lines, from)?;
        }
        Ok(())
    }

    /// Whether a memory host does not answer that has a mirror, which may.
    pub(super) fn is_silent_of_two(&self, member: Member) -> bool {
        self.lenders.is_silent(member) && self.lenders.has_mirror(member)
    }
}

fn look(split: &Weak<Split>) {
    let mut outages: [Outage; Member::MOST] = Default::default();
    let mut mending = Outage::default();
    while let Some(split) = split.upgrade().filter(|split| !split.has_ended()) {
        for member in split.pairs().into_iter().filter(|member| split.is_silent_of_two(*member)) {
            let (began, outage) = (Instant::now(), &mut outages[member.index()]);
            if outage.rests(began) {
                continue;
            }
            match Lines::new(&split.lenders).ask(member, |_| Ok(())) {
                Ok(()) => drop(outage.over()),
                Err(_) => drop(outage.failed(began, Instant::now(), false)),
            }
        }
        let began = Instant::now();
        if !mending.rests(began) {
            match split.look_through_and_mend() {
                Ok(()) => drop(mending.over()),
                Err(error) => {
                    if !mending.is_on() {
                        tracing::warn!(error = &error as &dyn std::error::Error, "pages stay at one memory host");
                    }
                    mending.failed(began, Instant::now(), false);
                }
            }
        }
        drop(split);
        std::thread::sleep(LOOK);
    }
}
