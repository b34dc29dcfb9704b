//! The migrations of this host that wait for their turn: threads that take the turns of a
//! [`Line`](crate::migration::line::Line).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sterna_sys::host::random_u128;

use super::line::{Answer, Counts, Line, Standing, Wait};

/// The line, and those whose turn it is.
#[derive(Debug)]
pub struct Queue {
    line: Mutex<Line>,
    changed: Condvar,
}

impl Queue {
    /// With so many migrations under way at one time.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { line: Mutex::new(Line::new(places)), changed: Condvar::new() }
    }

    /// Stands in line, behind all who are there.
    #[must_use]
    pub fn join(self: &Arc<Self>, to: &str) -> Ticket {
        Ticket { queue: Arc::clone(self), standing: self.lock().join(to) }
    }

    /// How many migrations may be under way at one time.
    #[must_use]
    pub fn places(&self) -> usize {
        self.lock().places()
    }

    /// How many wait, and how many are under way.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.lock().counts()
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A migration's number in the line; it leaves the line when dropped.
#[derive(Debug)]
pub struct Ticket {
    queue: Arc<Queue>,
    standing: Standing,
}

impl Ticket {
    /// Waits for the turn; `None` where `goes_on` said no before. `show` hears what is waited for, now and then.
    pub fn wait(&self, goes_on: impl Fn() -> bool, show: impl Fn(Wait)) -> Option<Turn<'_>> {
        loop {
            if !goes_on() {
                return None;
            }
            let mut line = self.queue.lock();
            match line.ask(&self.standing, Instant::now()) {
                Answer::Turn => {
                    // There may be another free place, and the next in line has been waiting for this one to go.
                    self.queue.changed.notify_all();
                    return Some(Turn { ticket: self, full: None, left: AtomicBool::new(false) });
                }
                Answer::Later(wait, look) => {
                    let waited = self.queue.changed.wait_timeout(line, look);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                    show(wait);
                }
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.queue.lock().leave(&self.standing);
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
        self.ticket.queue.lock().accepted(&self.ticket.standing);
        self.ticket.queue.changed.notify_all();
    }

    /// Gives the place back until [`goes_on`](Self::goes_on): it moves nothing, for nobody knows how long.
    pub fn pauses(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.ticket.queue.lock().give_back_place();
            self.ticket.queue.changed.notify_all();
        }
    }

    /// Takes a place again, and does not wait for one.
    pub fn goes_on(&self) {
        if self.left.swap(false, Ordering::AcqRel) {
            self.ticket.queue.lock().take_place();
        }
    }

    /// The destination takes no more at present, for this reason: back into the line, to the old place.
    pub fn refused(mut self, why: String) {
        self.full = Some(why);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Ticket { queue, standing } = self.ticket;
        let mut line = queue.lock();
        if !*self.left.get_mut() {
            line.give_back_place();
        }
        match self.full.take() {
            Some(why) => line.refused(standing, why, Instant::now(), random_u128()),
            None => line.ended(standing),
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
        ticket.queue.lock().wait(&ticket.standing)
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
    fn who_waits_gets_the_place_that_another_leaves() {
        let queue = queue(1);
        let [first, second] = ["x", "y"].map(|to| queue.join(to));
        let running = now(&first).unwrap();
        running.accepted();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| second.wait(|| true, |_| ()).is_some());
            drop(running);
            assert!(waits.join().unwrap());
        });
        assert_eq!(queue.counts(), Counts { waiting: 1, under_way: 0 });
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
