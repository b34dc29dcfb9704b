//! Whether one of two memory hosts that did not answer is there again, and what follows.
//!
//! While one of two does not answer, nobody who sends or brings pages asks it: the other one has what is needed, and an
//! attempt to reach a host that has lost its power takes seconds. A thread that nothing else waits for asks it. Once it
//! answers, the same thread has it given the pages that left without it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::lender::Member;
use super::lines::Lines;
use super::outage::Outage;
use super::{Split, SplitError};
use crate::error::MigrateError;

/// How often it is looked whether somebody is to be asked.
const LOOK: Duration = Duration::from_millis(100);
/// How often each of two is asked that is not known to be silent: a guest that needs nothing of it would not find out.
const ROUND: Duration = Duration::from_secs(10);

impl Split {
    /// Starts the thread. Nobody waits for its end: that comes soon after the split's, or once the host that is being
    /// asked then has answered, or has not.
    pub(super) fn look_for_silent_ones(self: &Arc<Self>) -> Result<(), SplitError> {
        let this = Arc::downgrade(self);
        let spawned = std::thread::Builder::new().name("probe".into()).spawn(move || look(&this));
        spawned.map_err(MigrateError::host("starting a thread for the guest's pages"))?;
        Ok(())
    }

    /// The memory hosts that can be done without, and lend.
    fn pairs(&self) -> Vec<Member> {
        let lend = (0..self.lenders.count()).filter(|number| self.lenders.lends(*number));
        let all = lend.flat_map(|number| self.lenders.members(number));
        all.filter(|member| self.lenders.has_other(*member)).collect()
    }

    /// Finds out what those have lost that answer again, and copies to each what its mirror alone has, until the end.
    fn look_through_and_mend(&self) -> Result<(), SplitError> {
        // Before it is forgotten who is to be looked through.
        self.looking.store(true, Ordering::Release);
        let looked = self.look_through_each();
        self.looking.store(false, Ordering::Release);
        looked.and_then(|()| self.mend_each())
    }

    fn look_through_each(&self) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        for member in self.pairs().into_iter().filter(|member| self.lenders.has_returned(*member)) {
            self.look_through(&mut lines, member).inspect_err(|_| self.lenders.note_return(member))?;
        }
        Ok(())
    }

    fn mend_each(&self) -> Result<(), SplitError> {
        let mut lines = Lines::new(&self.lenders);
        let mut next = (self.pager.alone_chunks() > 0).then_some(0);
        while let Some(from) = next.filter(|_| !self.has_ended()) {
            next = self.mend_next(&mut lines, from)?;
        }
        self.retire_orphans(&mut lines)
    }

    /// Asks the memory hosts of a number whether they are there; [`silent`](Self::silent) says then who is not. One
    /// that has lost its power is waited for.
    pub fn ask_whether_there(&self, number: usize) {
        for member in self.lenders.members(number) {
            // What it answers is noted.
            let _ = Lines::new(&self.lenders).ask(member, |_| Ok(()));
        }
    }

    /// Whether each page that is at two memory hosts that have the same pages is at both, as far as can be known: both
    /// answer, and whoever has answered again was asked what it has still.
    #[must_use]
    pub fn is_at_both(&self) -> bool {
        let silent = self.pairs().into_iter().any(|member| self.lenders.is_silent(member));
        !silent && self.unknown().is_empty() && self.pager.alone_chunks() == 0 && self.orphans(1) == 0
    }

    /// Those that have answered again, or are new, and were not asked yet what they have.
    pub(super) fn unknown(&self) -> Vec<Member> {
        let pairs = self.pairs();
        // In this order: whoever is no longer to be asked is being looked through.
        let to_be_asked = pairs.iter().copied().filter(|member| self.lenders.is_to_be_asked(*member)).collect();
        if self.looking.load(Ordering::Acquire) { pairs } else { to_be_asked }
    }

    /// Whether a memory host does not answer that has a mirror, which may.
    pub(super) fn is_silent_of_two(&self, member: Member) -> bool {
        self.lenders.is_silent(member) && self.lenders.has_other(member)
    }
}

fn look(split: &Weak<Split>) {
    let mut outages: [Outage; Member::MOST] = Default::default();
    let (mut mending, mut round, mut was_still) = (Outage::default(), Instant::now(), false);
    while let Some(split) = split.upgrade().filter(|split| !split.has_ended()) {
        if split.still.is_on() {
            was_still = true;
            drop(split);
            std::thread::sleep(LOOK);
            continue;
        }
        if std::mem::take(&mut was_still) {
            // Whoever had the guest before, or was about to have it, is refused once they have heard of this owner.
            (0..split.lenders.count()).for_each(|number| split.ask_whether_there(number));
        }
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
        if round.elapsed() >= ROUND {
            let pairs = split.pairs().into_iter().filter(|member| member.which == 0);
            pairs.for_each(|member| split.ask_whether_there(member.number));
            round = Instant::now();
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
