//! The meter: guests' heartbeats as they arrive outside.
//!
//! Guests send a numbered datagram every millisecond. The kernel stamps each on arrival, so that a meter that has to
//! wait for a processor still measures the guest and not itself.

use std::io::IoSliceMut;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt, sockopt};
use serde::Serialize;
use sterna_guest_programs::beat::{BEAT_BYTES, Beat};

use crate::error::{Context, Result};
use crate::lab::{Host, net};
use crate::load::now_us;

/// The port that guests send heartbeats to; their programs' lines go to the next port.
pub const PORT: u16 = 9099;

/// One heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Arrival {
    /// The guest.
    pub from: Ipv4Addr,
    /// When it arrived, microseconds since 1970.
    pub at_us: i64,
    /// Its number: one more than the last.
    pub number: u64,
    /// The guest's monotonic clock when it was sent, nanoseconds.
    pub guest_ns: u64,
}

/// A line that a program in a guest reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// The guest.
    pub from: Ipv4Addr,
    /// When it arrived, microseconds since 1970.
    pub at_us: i64,
    /// What it says: a program's name, then words and `key=value`s.
    pub text: String,
}

impl Line {
    /// What stands behind `key=`.
    #[must_use]
    pub fn word(&self, key: &str) -> Option<&str> {
        self.text.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }

    /// The number that stands behind `key=`.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<f64> {
        self.word(key)?.parse().ok()
    }
}

/// The longest silence of a guest within some time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gap {
    /// How long, milliseconds.
    pub ms: f64,
    /// The last heartbeat before it, microseconds since 1970.
    pub from_us: i64,
    /// The first heartbeat after it, microseconds since 1970.
    pub to_us: i64,
    /// How much of it the guest's own clock saw, milliseconds.
    pub guest_ms: f64,
    /// Heartbeats sent within it that never arrived.
    pub lost: u64,
}

/// The counts of one guest's heartbeats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Delivery {
    /// How many arrived.
    pub arrived: u64,
    /// How many never arrived.
    pub lost: u64,
    /// How many came after one with a higher number.
    pub reordered: u64,
    /// How many came twice.
    pub duplicate: u64,
}

#[derive(Default)]
struct Seen {
    arrivals: Vec<Arrival>,
    lines: Vec<Line>,
}

/// A meter at work; dropping it ends it.
pub struct Meter {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    threads: Vec<JoinHandle<()>>,
}

impl Meter {
    /// Listens on a host of the lab.
    ///
    /// # Errors
    /// Where a socket cannot be made.
    pub fn start(host: &Host) -> Result<Self> {
        let mut meter = Self { stop: Arc::default(), seen: Arc::default(), threads: Vec::new() };
        meter.listen(bind(host, PORT)?, |seen, from, at_us, body| {
            let beat = decode(body).map(|beat| Arrival { from, at_us, number: beat.sequence, guest_ns: beat.guest_ns });
            seen.arrivals.extend(beat);
        });
        meter.listen(bind(host, PORT + 1)?, |seen, from, at_us, body| {
            let text = std::str::from_utf8(body).ok();
            seen.lines.extend(text.map(|text| Line { from, at_us, text: text.to_owned() }));
        });
        Ok(meter)
    }

    fn listen(&mut self, socket: UdpSocket, keep: impl Fn(&mut Seen, Ipv4Addr, i64, &[u8]) + Send + 'static) {
        let (stop, seen) = (self.stop.clone(), self.seen.clone());
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if let Some((from, at_us, body)) = receive(&socket) {
                    keep(&mut seen.lock().unwrap_or_else(PoisonError::into_inner), from, at_us, &body);
                }
            }
        }));
    }

    /// The heartbeats of a guest so far, in order of arrival.
    #[must_use]
    pub fn arrivals(&self, guest: Ipv4Addr) -> Vec<Arrival> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.arrivals.iter().filter(|arrival| arrival.from == guest).copied().collect()
    }

    /// What all programs in a guest have reported so far.
    #[must_use]
    pub fn all_lines(&self, guest: Ipv4Addr) -> Vec<Line> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.lines.iter().filter(|line| line.from == guest).cloned().collect()
    }

    /// What a program in a guest has reported so far.
    #[must_use]
    pub fn lines(&self, guest: Ipv4Addr, program: &str) -> Vec<Line> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let from_it = |line: &&Line| line.from == guest && line.text.split(' ').next() == Some(program);
        seen.lines.iter().filter(from_it).cloned().collect()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The error of a thread that panicked is of no interest here.
            let _ = thread.join();
        }
    }
}

/// A socket of the meter that tells when datagrams arrived.
fn bind(host: &Host, port: u16) -> Result<UdpSocket> {
    let address = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port);
    let socket =
        net::inside(&host.namespace, || UdpSocket::bind(address).context(|| format!("binding the meter to {port}")))?;
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true).context(|| "asking for arrival times".into())?;
    // Several seconds of many guests fit while the meter waits for a processor.
    setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).context(|| "enlarging the meter's buffer".into())?;
    socket.set_read_timeout(Some(Duration::from_millis(100))).context(|| "setting a timeout".into())?;
    Ok(socket)
}

/// Takes one datagram with its sender and time of arrival; `None` where none came in time.
fn receive(socket: &UdpSocket) -> Option<(Ipv4Addr, i64, Vec<u8>)> {
    // A line with a histogram may take more than one packet.
    let mut body = [0u8; 8192];
    let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
    let mut parts = [IoSliceMut::new(&mut body)];
    let message = recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty()).ok()?;
    let stamp = message.cmsgs().ok()?.find_map(|message| match message {
        ControlMessageOwned::ScmTimestampns(time) => Some(time.tv_sec() * 1_000_000 + time.tv_nsec() / 1_000),
        _ => None,
    });
    let (bytes, from) = (message.bytes, message.address?.ip());
    Some((from, stamp.unwrap_or_else(now_us), body.get(..bytes)?.to_vec()))
}

/// A heartbeat, as [`Beat::to_bytes`] writes it; `None` for anything else.
fn decode(body: &[u8]) -> Option<Beat> {
    let body: &[u8; BEAT_BYTES] = body.try_into().ok()?;
    let word = |half: &[u8]| half.try_into().map(u64::from_le_bytes).ok();
    let (sequence, guest_ns) = body.split_at(BEAT_BYTES / 2);
    Some(Beat { sequence: word(sequence)?, guest_ns: word(guest_ns)? })
}

/// The longest silence between two heartbeats that touches the time between two moments.
#[must_use]
pub fn longest_gap(arrivals: &[Arrival], from_us: i64, to_us: i64) -> Option<Gap> {
    let touching = arrivals.windows(2).filter(|pair| pair[1].at_us >= from_us && pair[0].at_us <= to_us);
    let longest = touching.max_by_key(|pair| pair[1].at_us - pair[0].at_us)?;
    let [last, first] = longest else { return None };
    Some(Gap {
        ms: (first.at_us - last.at_us) as f64 / 1e3,
        from_us: last.at_us,
        to_us: first.at_us,
        guest_ms: first.guest_ns.saturating_sub(last.guest_ns) as f64 / 1e6,
        lost: first.number.saturating_sub(last.number).saturating_sub(1),
    })
}

/// The counts of the heartbeats between two moments.
#[must_use]
pub fn delivery(arrivals: &[Arrival], from_us: i64, to_us: i64) -> Delivery {
    let numbers: Vec<u64> = arrivals
        .iter()
        .filter(|arrival| (from_us..=to_us).contains(&arrival.at_us))
        .map(|arrival| arrival.number)
        .collect();
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    sorted.dedup();
    let span = sorted.first().zip(sorted.last()).map_or(0, |(first, last)| last - first + 1);
    let mut highest = None;
    let reordered = numbers.iter().filter(|number| {
        let late = highest.is_some_and(|highest| **number < highest);
        highest = highest.max(Some(**number));
        late
    });
    Delivery {
        reordered: reordered.count() as u64,
        arrived: numbers.len() as u64,
        lost: span - sorted.len() as u64,
        duplicate: (numbers.len() - sorted.len()) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(times_and_numbers: &[(i64, u64)]) -> Vec<Arrival> {
        let make = |(at_ms, number): &(i64, u64)| Arrival {
            from: Ipv4Addr::LOCALHOST,
            at_us: at_ms * 1000,
            number: *number,
            guest_ns: number * 1_000_000,
        };
        times_and_numbers.iter().map(make).collect()
    }

    #[test]
    fn the_longest_gap_is_that_of_the_time_asked_about() {
        let arrivals = arrivals(&[(0, 0), (50, 1), (51, 2), (60, 3), (61, 4), (200, 5)]);
        let gap = longest_gap(&arrivals, 51_500, 100_000).unwrap();
        assert_eq!((gap.ms, gap.lost), (139.0, 0), "a gap that began within the time counts whole");
        let gap = longest_gap(&arrivals, 40_000, 60_500).unwrap();
        assert_eq!((gap.ms, gap.from_us, gap.guest_ms), (50.0, 0, 1.0));
        assert_eq!(longest_gap(&arrivals[..1], 0, 100), None);
    }

    #[test]
    fn a_heartbeat_is_read_as_the_guest_writes_it_and_nothing_else_is_one() {
        let beat = Beat { sequence: 7, guest_ns: u64::MAX - 1 };
        assert_eq!(decode(&beat.to_bytes()), Some(beat));
        assert_eq!(decode(&beat.to_bytes()[1..]), None);
        assert_eq!(decode(&[0; BEAT_BYTES + 1]), None);
    }

    #[test]
    fn numbers_are_found_in_a_reported_line() {
        let text = "CHECKER ok writes_per_s=120 bad=3".to_owned();
        let line = Line { from: Ipv4Addr::LOCALHOST, at_us: 0, text };
        assert_eq!(line.number("bad"), Some(3.0));
        assert_eq!(line.number("writes"), None);
    }

    #[test]
    fn losses_reordering_and_duplicates_are_told_apart() {
        let arrivals = arrivals(&[(0, 10), (1, 12), (2, 11), (3, 12), (4, 15)]);
        assert_eq!(delivery(&arrivals, 0, 10_000), Delivery { arrived: 5, lost: 2, reordered: 1, duplicate: 1 });
        assert_eq!(delivery(&arrivals, 8_000, 10_000), Delivery::default());
    }
}
