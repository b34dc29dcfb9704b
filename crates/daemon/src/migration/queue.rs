//! The migrations of this host that wait for their turn: first come, first served.
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

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_sys::host::random_u128;

/// How long a wait may go on unasked.
const LOOK: Duration = Duration::from_millis(200);
/// How soon a full destination is asked again, at the earliest.
const ASK_AGAIN: Duration = Duration::from_millis(750);
/// How much later it may be, at random: hosts that wait for the same one do not ask in step.
const JITTER_MS: u128 = 500;

/// The line, and those whose turn it is.
#[derive(Debug)]
pub struct Queue {
    places: usize,
    line: Mutex<Line>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Line {
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

impl Queue {
    /// With so many migrations under way at one time.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { places, line: Mutex::default(), changed: Condvar::new() }
    }

    /// Stands in line, behind all who are there.
    #[must_use]
    pub fn join(self: &Arc<Self>, to: &str) -> Ticket {
        let mut line = self.lock();
        let number = line.next;
        line.next += 1;
        line.waiting.insert(number, Waiting { to: to.into(), asking: false });
        Ticket { queue: Arc::clone(self), number, to: to.into() }
    }

    /// How many wait, and how many are under way.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let line = self.lock();
        let waiting = line.waiting.values().filter(|waiting| !waiting.asking).count();
        Counts { waiting, under_way: line.under_way }
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
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

    fn wait(&self, number: u64, to: &str) -> Wait {
        let what = match self.full.get(to) {
            Some(full) => format!("{to}: {}", full.why),
            None => "other migrations of this host to end".into(),
        };
        let place = self.waiting.range(..=number).count() as u32;
        Wait { place, length: self.waiting.len() as u32, what }
    }
}

/// A migration's number in the line; it leaves the line when dropped.
#[derive(Debug)]
pub struct Ticket {
    queue: Arc<Queue>,
    number: u64,
    to: String,
}

impl Ticket {
    /// Waits for the turn; `None` where `goes_on` said no before. `show` hears what is waited for, now and then.
    pub fn wait(&self, goes_on: impl Fn() -> bool, show: impl Fn(Wait)) -> Option<Turn<'_>> {
        loop {
            if !goes_on() {
                return None;
            }
            let mut line = self.queue.lock();
            let now = Instant::now();
            if line.under_way < self.queue.places && line.next(now) == Some(self.number) {
                line.under_way += 1;
                if let Some(waiting) = line.waiting.get_mut(&self.number) {
                    waiting.asking = true;
                }
                // There may be another free place, and the next in line has been waiting for this one to go.
                self.queue.changed.notify_all();
                return Some(Turn { ticket: self, full: None, left: AtomicBool::new(false) });
            }
            let wait = line.wait(self.number, &self.to);
            let left = line.full.get(&self.to).map(|full| full.until.saturating_duration_since(now));
            let left = left.filter(|left| !left.is_zero()).map_or(LOOK, |left| left.min(LOOK));
            let (guard, _) = self.queue.changed.wait_timeout(line, left).unwrap_or_else(PoisonError::into_inner);
            drop(guard);
            show(wait);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.queue.lock().waiting.remove(&self.number);
        self.queue.changed.notify_all();
    }
}

/// One of the host's places, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    ticket: &'a Ticket,
    /// Why the destination takes no more, where it said so.
    full: Option<String>,
    /// Whether the place is given back for the time being.
    left: AtomicBool,
}

impl Turn<'_> {
    /// The destination has said yes: it may have room for more.
    pub fn accepted(&self) {
        let mut line = self.ticket.queue.lock();
        line.waiting.remove(&self.ticket.number);
        line.full.remove(&self.ticket.to);
        self.ticket.queue.changed.notify_all();
    }

    /// Gives the place back until [`goes_on`](Self::goes_on): it moves nothing, for nobody knows how long.
    pub fn pauses(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.ticket.queue.lock().under_way -= 1;
            self.ticket.queue.changed.notify_all();
        }
    }

    /// Takes a place again, and does not wait for one.
    pub fn goes_on(&self) {
        if self.left.swap(false, Ordering::AcqRel) {
            self.ticket.queue.lock().under_way += 1;
        }
    }

    /// The destination takes no more at present, for this reason: back into the line, to the old place.
    pub fn refused(mut self, why: String) {
        self.full = Some(why);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Ticket { queue, number, to } = self.ticket;
        let mut line = queue.lock();
        line.under_way -= usize::from(!*self.left.get_mut());
        match self.full.take() {
            Some(why) => {
                let pause = ASK_AGAIN + Duration::from_millis((random_u128() % JITTER_MS) as u64);
                line.full.insert(to.clone(), Full { until: Instant::now() + pause, why });
            }
            // One that has ended made room there.
            None => drop(line.full.remove(to)),
        }
        if let Some(waiting) = line.waiting.get_mut(number) {
            waiting.asking = false;
        }
        queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whose turn it is now, without waiting for it.
    fn now(ticket: &Ticket) -> Option<Turn<'_>> {
        let asked = AtomicBool::new(false);
        ticket.wait(|| !asked.swap(true, Ordering::Relaxed), |_| ())
    }

    fn what_for(ticket: &Ticket) -> Wait {
        ticket.queue.lock().wait(ticket.number, &ticket.to)
    }

    fn queue(places: usize) -> Arc<Queue> {
        Arc::new(Queue::new(places))
    }

    #[test]
    fn turns_come_in_the_order_of_coming() {
        let queue = queue(1);
        let [first, second, third] = ["x", "y", "x"].map(|to| queue.join(to));
        assert!(now(&third).is_none() && now(&second).is_none());
        let turn = now(&first).unwrap();
        turn.accepted();
        assert_eq!(queue.counts(), Counts { waiting: 2, under_way: 1 });
        let waits = what_for(&third);
        assert_eq!((waits.place, waits.length), (2, 2));
        drop(turn);
        assert!(now(&third).is_none(), "the second is before it");
        drop(second);
        assert_eq!(what_for(&third).place, 1);
        assert!(now(&third).is_some());
    }

    #[test]
    fn a_full_destination_holds_up_nobody_who_goes_elsewhere() {
        let queue = queue(1);
        let [first, second, third] = ["full", "full", "free"].map(|to| queue.join(to));
        now(&first).unwrap().refused("it takes 1 at a time".into());
        assert_eq!(what_for(&first), Wait { place: 1, length: 3, what: "full: it takes 1 at a time".into() });
        assert_eq!(what_for(&second).what, "full: it takes 1 at a time", "one asks for all");
        assert!(now(&first).is_none() && now(&second).is_none());
        let turn = now(&third).unwrap();
        turn.accepted();
        assert_eq!(queue.counts(), Counts { waiting: 2, under_way: 1 }, "who waits holds no place");
    }

    #[test]
    fn a_full_destination_is_asked_again_by_the_first_in_line_alone() {
        let queue = queue(4);
        let [first, second] = ["full"; 2].map(|to| queue.join(to));
        now(&first).unwrap().refused("no".into());
        let again = first.wait(|| true, |_| ()).unwrap();
        assert!(now(&second).is_none());
        again.accepted();
        assert!(now(&second).is_some(), "there may be room for more");
    }

    #[test]
    fn the_end_of_one_of_ours_makes_room_at_once() {
        let queue = queue(2);
        let [first, second] = ["full"; 2].map(|to| queue.join(to));
        let running = now(&first).unwrap();
        running.accepted();
        now(&second).unwrap().refused("no".into());
        assert!(now(&second).is_none());
        drop(running);
        assert!(now(&second).is_some());
    }

    #[test]
    fn who_waits_for_a_lost_destination_holds_no_place_and_goes_on_without_waiting_for_one() {
        let queue = queue(1);
        let [first, second, third] = ["lost", "x", "x"].map(|to| queue.join(to));
        let waits = now(&first).unwrap();
        waits.accepted();
        waits.pauses();
        waits.pauses();
        let running = now(&second).expect("there is a place");
        running.accepted();
        assert_eq!(queue.counts(), Counts { waiting: 1, under_way: 1 });
        waits.goes_on();
        waits.goes_on();
        assert_eq!(queue.counts().under_way, 2, "its guest stands still: it does not wait");
        drop(running);
        assert!(now(&third).is_none(), "its place is taken");
        waits.pauses();
        drop(waits);
        assert_eq!(queue.counts().under_way, 0, "what was given back is not given back again");
        assert!(now(&third).is_some());
    }

    #[test]
    fn who_is_told_to_stop_waiting_does_and_leaves_the_line() {
        let queue = queue(1);
        let [first, second] = ["x"; 2].map(|to| queue.join(to));
        let running = now(&first).unwrap();
        running.accepted();
        let cancelled = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| second.wait(|| !cancelled.load(Ordering::Relaxed), |_| ()).is_some());
            cancelled.store(true, Ordering::Relaxed);
            assert!(!waits.join().unwrap());
        });
        drop(second);
        assert_eq!(queue.counts(), Counts { waiting: 0, under_way: 1 });
    }
}
