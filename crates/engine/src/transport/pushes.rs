//! Pushes from this host to another: those that go to the same host share one pace.
//!
//! Each by itself would take nine tenths of what it finds the link to carry, and several of them would fill it: then
//! every page that a guest waits for stands behind full queues, and a push that finds little of the link gets ever
//! less. So to the rule that measures the link ([`pace::push`](sterna_protocol::pace::push)) all of them are one. What
//! it allows is shared evenly by the connections that have something to send.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sterna_protocol::pace::push::{Counted, Ended, Push, Setting};
use sterna_sys::socket::{TcpInfo, set_notsent_lowat, set_pacing_rate};

/// The pushes away from a host, by where they go.
#[derive(Debug, Default)]
pub(super) struct Pushes(Mutex<HashMap<String, Weak<Mutex<Together>>>>);

/// The pushes to one host.
#[derive(Debug)]
struct Together {
    push: Push,
    /// From here its time is counted.
    began: Instant,
    /// What was counted of all, since each has come.
    counted: Counted,
    each: Vec<One>,
    numbers: u64,
}

/// One push.
#[derive(Debug)]
struct One {
    number: u64,
    connections: Vec<Connection>,
    /// What it may take at most, bytes per second.
    limit: Option<u64>,
    /// What its guest's faults have asked for, bytes, and whether hardly any come.
    asked: u64,
    quiet: bool,
}

#[derive(Debug)]
struct Connection {
    socket: TcpStream,
    /// What the kernel had counted when it was looked at last.
    last: TcpInfo,
}

/// A push's place among those that go where it goes. It ends when this is dropped.
#[derive(Debug)]
pub struct Place {
    together: Arc<Mutex<Together>>,
    number: u64,
}

impl Pushes {
    /// Adds a push over these connections, which takes at most `limit` bytes per second. The first one to a host begins
    /// at what the link is `known` to carry.
    ///
    /// # Errors
    /// The kernel gives no figures, or does not pace.
    pub fn join(
        &self,
        to: &str,
        sockets: Vec<TcpStream>,
        known: Option<u64>,
        limit: Option<u64>,
    ) -> sterna_sys::Result<Place> {
        let connection = |socket: TcpStream| Ok(Connection { last: TcpInfo::of(&socket)?, socket });
        let connections = sockets.into_iter().map(connection).collect::<sterna_sys::Result<Vec<_>>>()?;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, together| together.strong_count() > 0);
        let together = all.get(to).and_then(Weak::upgrade).unwrap_or_else(|| {
            let together = Arc::new(Mutex::new(Together::new(known)));
            all.insert(to.to_owned(), Arc::downgrade(&together));
            together
        });
        drop(all);
        let mut locked = lock(&together);
        let number = locked.join(connections, limit);
        let set = locked.set(Some(number));
        drop(locked);
        let place = Place { together, number };
        set.map(|()| place)
    }
}

impl Place {
    /// How long until the next [`step`](Self::step).
    #[must_use]
    pub fn window(&self) -> Duration {
        lock(&self.together).left()
    }

    /// Says how many bytes its guest's faults have asked for so far, and whether hardly any come. Where a window is
    /// over, counts what came through and sets the pace of the next. Returns what faults may take of the link before
    /// pushes give something up for them, bytes per second.
    ///
    /// # Errors
    /// The kernel gives no figures of this push, or does not pace it.
    pub fn step(&self, asked: u64, quiet: bool) -> sterna_sys::Result<u64> {
        let mut together = lock(&self.together);
        if let Some(one) = together.each.iter_mut().find(|one| one.number == self.number) {
            one.quiet = quiet;
            let more = asked.saturating_sub(std::mem::replace(&mut one.asked, asked));
            together.counted.asked += more;
        }
        if together.left().is_zero() {
            together.window_ends(self.number)?;
        }
        Ok(together.push.spare() / together.each.len().max(1) as u64)
    }
}

impl Drop for Place {
    /// What it took goes to the others at once.
    fn drop(&mut self) {
        let mut together = lock(&self.together);
        together.each.retain(|one| one.number != self.number);
        if !together.each.is_empty() {
            together.share_among_all();
            // Others' connections alone, and whoever has a broken one finds out by itself.
            let _ = together.set(None);
        }
    }
}

impl Together {
    fn new(known: Option<u64>) -> Self {
        let (began, counted) = (Instant::now(), Counted::default());
        let push = Push::new(known, None, 1, Duration::ZERO, &counted);
        Self { push, began, counted, each: Vec::new(), numbers: 0 }
    }

    fn join(&mut self, connections: Vec<Connection>, limit: Option<u64>) -> u64 {
        self.numbers += 1;
        // A guest that has just begun has hardly asked for anything: that says nothing yet.
        self.each.push(One { number: self.numbers, connections, limit, asked: 0, quiet: false });
        self.share_among_all();
        self.numbers
    }

    fn left(&self) -> Duration {
        self.push.left(self.began.elapsed())
    }

    fn window_ends(&mut self, number: u64) -> sterna_sys::Result<()> {
        let busy = self.count(number)?;
        let link = self.push.link();
        let Ended { window, paced, asked_rate } = self.push.ends(self.began.elapsed(), &self.counted);
        tracing::debug!(?window, paced, asked_rate, link, pushes = self.each.len(), busy, "a window of the push");
        self.push.share_among(busy, self.limit());
        self.set(Some(number))
    }

    /// Counts what came through since the last look. Returns how many connections had something to send for at least
    /// half of the time.
    fn count(&mut self, number: u64) -> sterna_sys::Result<u32> {
        let window = self.push.length(self.began.elapsed());
        let counted = &mut self.counted;
        (counted.round_trip, counted.deviation, counted.least_trip) = (Duration::ZERO, Duration::ZERO, Duration::MAX);
        counted.grain = 0;
        let mut with_more = 0;
        for one in &mut self.each {
            for Connection { socket, last } in &mut one.connections {
                let now = match TcpInfo::of(socket) {
                    Ok(now) => now,
                    Err(error) if one.number == number => return Err(error),
                    Err(_) => continue,
                };
                let before = std::mem::replace(last, now);
                let busy = now.busy.saturating_sub(before.busy);
                counted.acknowledged += now.acknowledged_bytes.saturating_sub(before.acknowledged_bytes);
                counted.busy += busy;
                counted.round_trip = counted.round_trip.max(now.round_trip);
                counted.deviation = counted.deviation.max(now.round_trip_deviation);
                counted.least_trip = counted.least_trip.min(now.least_round_trip);
                counted.retransmitted += u64::from(now.retransmitted.saturating_sub(before.retransmitted));
                counted.grain += u64::from(now.segment_bytes);
                with_more += u32::from(busy >= window / 2);
            }
        }
        Ok(with_more)
    }

    /// Begins anew with all connections: whoever has something to send shows in the next window.
    fn share_among_all(&mut self) {
        let connections: usize = self.each.iter().map(|one| one.connections.len()).sum();
        self.push.share_among(connections as u32, self.limit());
    }

    /// What all may take together, where none is without a limit.
    fn limit(&self) -> Option<u64> {
        self.each.iter().try_fold(0_u64, |all, one| Some(all.saturating_add(one.limit?)))
    }

    /// Sets the pace of each connection, where it changes. A failure counts where it is this push's own.
    fn set(&mut self, number: Option<u64>) -> sterna_sys::Result<()> {
        let quiet = self.each.iter().all(|one| one.quiet);
        let Some(Setting { bytes_per_s, unsent }) = self.push.set(quiet) else { return Ok(()) };
        for one in &self.each {
            let most = one.limit.map_or(u64::MAX, |limit| limit / one.connections.len().max(1) as u64);
            for Connection { socket, .. } in &one.connections {
                let paced = set_pacing_rate(socket, Some(bytes_per_s.min(most)));
                let set = paced.and_then(|()| set_notsent_lowat(socket, unsent));
                if number == Some(one.number) {
                    set?;
                }
            }
        }
        Ok(())
    }
}

fn lock(together: &Mutex<Together>) -> MutexGuard<'_, Together> {
    together.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn connected(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// What each connection is set to, and how many there are.
    fn paced(place: &Place) -> (u64, usize) {
        let together = lock(&place.together);
        (together.push.each(), together.each.iter().map(|one| one.connections.len()).sum())
    }

    #[test]
    fn pushes_to_one_host_share_what_one_would_have_and_others_do_not() {
        let (pushes, listener) = (Pushes::default(), TcpListener::bind("127.0.0.1:0").unwrap());
        let (sockets, _others): (Vec<_>, Vec<_>) = (0..4).map(|_| connected(&listener)).unzip();
        let [a, b, c, d] = sockets.try_into().unwrap();
        let first = pushes.join("there", vec![a], Some(100_000_000), None).unwrap();
        assert_eq!(paced(&first), (90_000_000, 1));
        let second = pushes.join("there", vec![b, c], Some(7), None).unwrap();
        assert_eq!(paced(&first), (30_000_000, 3), "as many bytes for each connection");
        let elsewhere = pushes.join("elsewhere", vec![d], Some(50_000_000), None).unwrap();
        assert_eq!(paced(&elsewhere), (45_000_000, 1));
        drop(first);
        assert_eq!(paced(&second), (45_000_000, 2), "who has gone leaves its part");
        drop(second);
        let (again, _other) = connected(&listener);
        let again = pushes.join("there", vec![again], Some(20_000_000), None).unwrap();
        assert_eq!(paced(&again), (18_000_000, 1), "nothing is known of a link that nobody used");
        assert_eq!(lock(&pushes.0.lock().unwrap()["there"].upgrade().unwrap()).each.len(), 1);
    }

    #[test]
    fn a_limit_is_its_own_migrations() {
        let (pushes, listener) = (Pushes::default(), TcpListener::bind("127.0.0.1:0").unwrap());
        let ((a, _a), (b, _b)) = (connected(&listener), connected(&listener));
        let limited = pushes.join("there", vec![a], Some(100_000_000), Some(1_000_000)).unwrap();
        assert_eq!(lock(&limited.together).limit(), Some(1_000_000));
        let free = pushes.join("there", vec![b], None, None).unwrap();
        assert_eq!(lock(&free.together).limit(), None);
        let spare = free.step(1000, true).unwrap();
        assert!(spare.abs_diff(5_000_000) <= 1, "{spare} is not half of what both leave to faults");
        assert_eq!(lock(&free.together).counted.asked, 1000);
        free.step(1500, true).unwrap();
        assert_eq!(lock(&free.together).counted.asked, 1500);
    }
}
