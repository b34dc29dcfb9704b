//! Whose turn it is among the migrations of this host, and when the others look again: first come, first served.
//!
//! So many are under way at one time. One whose destination takes in as many machines as it may steps back and keeps
//! its place in the line: meanwhile it holds none of this host's places, and those that go elsewhere pass it. So a full
//! destination holds up nobody else, and two hosts that empty themselves into each other never wait in a circle:
//! whoever holds a place at either end is moving. The first in line for a full destination asks again after a second or
//! so, and at once when one of ours has ended there.
//!
//! One whose guest runs at a destination that is lost, and waits there for its pages, may have to wait for long:
//! meanwhile it holds no place either. When its pages go on, they go on at once, were all places taken by now: a guest
//! stands still for them.
//!
//! No clock, lock or thread of its own: `queue::Queue` has them.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// How long a wait may go on unasked.
const LOOK: Duration = Duration::from_millis(200);
/// How soon a full destination is asked again, at the earliest.
const ASK_AGAIN: Duration = Duration::from_millis(750);
/// How much later it may be, at random: hosts that wait for the same one do not ask in step.
const JITTER_MS: u128 = 500;

/// The line, and how many have their turn.
#[derive(Debug)]
pub struct Line {
    places: usize,
    under_way: usize,
    next: u64,
    /// By number, which is the order of coming.
    waiting: BTreeMap<u64, Waiting>,
    /// Destinations that take no more at present.
    full: HashMap<String, Full>,
}

#[derive(Debug)]
struct Waiting {
    to: String,
    /// Whether it holds a place and is asking its destination.
    asking: bool,
}

#[derive(Debug)]
struct Full {
    until: Instant,
    why: String,
}

/// A migration of the line, waiting or under way.
#[derive(Debug)]
pub struct Standing {
    number: u64,
    to: String,
}

/// What a migration that asks for its turn is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It is its turn: it holds a place from now on, and asks its destination.
    Turn,
    /// It waits for something, and asks again after this time at the latest, or when anything has changed.
    Later(Wait, Duration),
}

/// What a migration waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// Its place in the line, from 1.
    pub place: u32,
    /// How many are in the line.
    pub length: u32,
    /// What for, in words.
    pub what: String,
}

/// How many migrations there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// In the line.
    pub waiting: usize,
    /// Under way.
    pub under_way: usize,
}

impl Line {
    /// With so many migrations under way at one time.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { places, under_way: 0, next: 0, waiting: BTreeMap::new(), full: HashMap::new() }
    }

    /// How many may be under way at one time.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places
    }

    /// Stands in line, behind all who are there.
    #[must_use]
    pub fn join(&mut self, to: &str) -> Standing {
        let number = self.next;
        self.next += 1;
        self.waiting.insert(number, Waiting { to: to.into(), asking: false });
        Standing { number, to: to.into() }
    }

    /// It does not wait any more.
    pub fn leave(&mut self, standing: &Standing) {
        self.waiting.remove(&standing.number);
    }

    /// Whether it is its turn at `now`; where it is, the turn is taken.
    #[must_use]
    pub fn ask(&mut self, standing: &Standing, now: Instant) -> Answer {
        if self.under_way < self.places && self.next(now) == Some(standing.number) {
            self.under_way += 1;
            if let Some(waiting) = self.waiting.get_mut(&standing.number) {
                waiting.asking = true;
            }
            return Answer::Turn;
        }
        let left = self.full.get(&standing.to).map(|full| full.until.saturating_duration_since(now));
        let left = left.filter(|left| !left.is_zero()).map_or(LOOK, |left| left.min(LOOK));
        Answer::Later(self.wait(standing), left)
    }

    /// The destination has said yes: it may have room for more.
    pub fn accepted(&mut self, standing: &Standing) {
        self.waiting.remove(&standing.number);
        self.full.remove(&standing.to);
    }

    /// Its turn is over because the destination takes no more at present: it goes back to its old place in the line.
    /// `random` says how much later than at the earliest the destination is asked again.
    pub fn refused(&mut self, standing: &Standing, why: String, now: Instant, random: u128) {
        let until = now + ASK_AGAIN + Duration::from_millis((random % JITTER_MS) as u64);
        self.full.insert(standing.to.clone(), Full { until, why });
        self.asks_no_more(standing);
    }

    /// Its turn is over because it has ended: that made room at the destination.
    pub fn ended(&mut self, standing: &Standing) {
        self.full.remove(&standing.to);
        self.asks_no_more(standing);
    }

    /// One of the places is free again.
    pub fn give_back_place(&mut self) {
        self.under_way -= 1;
    }

    /// A place is taken, whether or not one is free.
    pub fn take_place(&mut self) {
        self.under_way += 1;
    }

    /// How many wait, and how many are under way.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let waiting = self.waiting.values().filter(|waiting| !waiting.asking).count();
        Counts { waiting, under_way: self.under_way }
    }

    /// What it waits for.
    #[must_use]
    pub fn wait(&self, standing: &Standing) -> Wait {
        let Standing { number, to } = standing;
        let what = match self.full.get(to) {
            Some(full) => format!("{to}: {}", full.why),
            None => "other migrations of this host to end".into(),
        };
        let place = self.waiting.range(..=number).count() as u32;
        Wait { place, length: self.waiting.len() as u32, what }
    }

    /// Whose turn it is, where there is a free place.
    fn next(&self, now: Instant) -> Option<u64> {
        let may_ask = |waiting: &Waiting| match self.full.get(&waiting.to) {
            None => true,
            // One at a time, until it has accepted one.
            Some(full) => {
                full.until <= now && !self.waiting.values().any(|other| other.asking && other.to == waiting.to)
            }
        };
        self.waiting.iter().find(|(_, waiting)| !waiting.asking && may_ask(waiting)).map(|(number, _)| *number)
    }

    fn asks_no_more(&mut self, standing: &Standing) {
        if let Some(waiting) = self.waiting.get_mut(&standing.number) {
            waiting.asking = false;
        }
    }
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
