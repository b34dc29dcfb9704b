//! The order of turns on a link that several migrations share, and their times: start-time fair queueing (Goyal, Vin,
//! Cheng: "Start-time Fair Queueing", SIGCOMM 1996), paced to the link's rate. No thread and no clock of its own.
//!
//! Each flow (a migration with all its connections) counts the bytes it was given. The next turn goes to the flow with
//! the lowest count among those that wait. The count of the flow served last is the common clock: a flow that begins to
//! wait starts there, so that a flow that was idle or late neither catches up on the past nor waits for it. The order
//! waits for no flow: what one does not take goes to the others.
//!
//! A hurried flow is one whose guest stands still, or is about to, and waits for its last pages. It goes before the
//! others. At first these get no turn at all (`quiet.rs`), whether the link has a rate or not; then one after every
//! 16 MiB, so that no number of pauses starves a flow.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::quiet::Quiet;

/// How far the sending may run ahead of the rate: that makes a late wake-up good.
pub(super) const BURST: Duration = Duration::from_millis(5);

/// How much hurried flows may send before a waiting flow that is not hurried gets a turn, bytes.
const PATIENCE: u64 = 16 << 20;

/// The number of a flow: one of the migrations that share the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Flow(u64);

/// The number of a ticket: one connection's wait for one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// The answer to a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The connection may send now: the ticket is used up.
    Now,
    /// The ticket is the next, and its turn comes at this moment.
    At(Instant),
    /// Other tickets come first.
    Later,
}

/// The order of turns.
#[derive(Debug, Default)]
pub(super) struct Turns {
    bytes_per_s: Option<u64>,
    /// The moment when all bytes that were given are sent, at the rate.
    due: Option<Instant>,
    /// The count of the flow served last, bytes.
    clock: u64,
    flows: BTreeMap<Flow, Waiting>,
    /// Bytes given to hurried flows since a waiting flow that is not hurried had a turn.
    passed_over: u64,
    /// While a flow is hurried.
    quiet: Quiet,
    numbers: u64,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Bytes given, on the common clock.
    count: u64,
    hurried: bool,
    tickets: VecDeque<(Ticket, u64)>,
    /// Turns that were given and have not ended.
    sending: usize,
}

impl Turns {
    /// The order on a link of this rate, bytes per second; without a rate nobody waits.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, ..Self::default() }
    }

    /// The link's rate.
    pub fn rate(&self) -> Option<u64> {
        self.bytes_per_s
    }

    /// Sets another rate from now on. Bytes given at the old rate are forgotten, so that a wait at a very low rate ends
    /// with that rate.
    pub fn set_rate(&mut self, bytes_per_s: Option<u64>) {
        self.bytes_per_s = bytes_per_s;
        self.due = None;
    }

    /// Adds a flow.
    pub fn join(&mut self) -> Flow {
        let flow = Flow(self.number());
        self.flows.insert(flow, Waiting::default());
        flow
    }

    /// Removes a flow that has ended.
    pub fn part(&mut self, flow: Flow, now: Instant) {
        self.flows.remove(&flow);
        self.quiet_ends(now);
    }

    /// Makes a flow hurried: a guest waits for it from now on.
    pub fn hurry(&mut self, flow: Flow, now: Instant) {
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.hurried = true;
            self.quiet.begin(now);
        }
    }

    /// Makes a flow one like the others: no guest waits for it any more.
    pub fn calm(&mut self, flow: Flow, now: Instant) {
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.hurried = false;
        }
        self.quiet_ends(now);
    }

    fn quiet_ends(&mut self, now: Instant) {
        if !self.flows.values().any(|waiting| waiting.hurried) {
            self.quiet.end(now);
        }
    }

    /// Until when a flow must not begin to send, whatever is its turn; `None` where it may.
    pub fn quiet_for(&self, flow: Flow, now: Instant) -> Option<Instant> {
        let hurried = self.flows.get(&flow).is_some_and(|waiting| waiting.hurried);
        if hurried { None } else { self.quiet.until(now) }
    }

    /// Whether a flow that is not hurried has turns that have not ended.
    pub fn others_send(&self) -> bool {
        self.flows.values().any(|waiting| !waiting.hurried && waiting.sending > 0)
    }

    /// What a flow was given a turn for has been sent.
    pub fn sent(&mut self, flow: Flow) {
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.sending = waiting.sending.saturating_sub(1);
        }
    }

    /// The others' bytes have arrived: from now on they lose something by the quiet.
    pub fn quiet_counts(&mut self, now: Instant) {
        self.quiet.counts(now);
    }

    /// The flows that are hurried.
    pub fn hurried(&self) -> Vec<Flow> {
        self.flows.iter().filter(|(_, waiting)| waiting.hurried).map(|(flow, _)| *flow).collect()
    }

    /// Asks for a turn in which a flow sends this many bytes. Within a flow the first request goes first.
    pub fn ask(&mut self, flow: Flow, bytes: u64) -> Ticket {
        let (ticket, clock) = (Ticket(self.number()), self.clock);
        let waiting = self.flows.entry(flow).or_default();
        if waiting.tickets.is_empty() {
            waiting.count = waiting.count.max(clock);
        }
        waiting.tickets.push_back((ticket, bytes));
        ticket
    }

    /// Withdraws a ticket: nothing is counted.
    pub fn withdraw(&mut self, flow: Flow, ticket: Ticket) {
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.tickets.retain(|(other, _)| *other != ticket);
        }
    }

    /// Whether it is this ticket's turn at `now`; where it is, the turn is taken until it is [`sent`](Self::sent).
    pub fn turn(&mut self, flow: Flow, ticket: Ticket, now: Instant) -> Turn {
        if let Some(until) = self.quiet_for(flow, now) {
            return Turn::At(until);
        }
        let turn = self.turn_at_rate(flow, ticket, now);
        if turn == Turn::Now
            && let Some(waiting) = self.flows.get_mut(&flow)
        {
            waiting.sending += 1;
        }
        turn
    }

    fn turn_at_rate(&mut self, flow: Flow, ticket: Ticket, now: Instant) -> Turn {
        let Some(rate) = self.bytes_per_s else {
            self.withdraw(flow, ticket);
            return Turn::Now;
        };
        if self.next(now) != Some((flow, ticket)) {
            return Turn::Later;
        }
        let at = self.due.map_or(now, |due| due.max(now.checked_sub(BURST).unwrap_or(now)));
        if at > now {
            return Turn::At(at);
        }
        let others_wait = self.flows.values().any(|waiting| !waiting.hurried && !waiting.tickets.is_empty());
        if let Some(waiting) = self.flows.get_mut(&flow)
            && let Some((_, bytes)) = waiting.tickets.pop_front()
        {
            if waiting.hurried {
                self.passed_over = if others_wait { self.passed_over.saturating_add(bytes) } else { 0 };
            } else {
                self.passed_over = 0;
                self.clock = self.clock.max(waiting.count);
            }
            waiting.count = waiting.count.saturating_add(bytes);
            self.due = at.checked_add(Duration::from_secs_f64(bytes as f64 / rate as f64));
        }
        Turn::Now
    }

    /// The next ticket.
    fn next(&self, now: Instant) -> Option<(Flow, Ticket)> {
        let first = |hurried: bool| {
            let flows = self.flows.iter().filter(move |(_, waiting)| waiting.hurried == hurried);
            let fronts = flows.filter_map(|(flow, waiting)| Some((waiting.count, *flow, waiting.tickets.front()?.0)));
            fronts.min_by_key(|(count, flow, _)| (*count, *flow)).map(|(_, flow, ticket)| (flow, ticket))
        };
        match (first(true), first(false)) {
            (Some(_), Some(other)) if self.passed_over >= PATIENCE && self.quiet.until(now).is_none() => Some(other),
            (Some(hurried), _) => Some(hurried),
            (None, other) => other,
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 100_000_000;
    const MIB: u64 = 1 << 20;

    /// Migrations on a simulated link and clock.
    struct Link {
        turns: Turns,
        now: Instant,
        flows: Vec<Sender>,
    }

    /// A migration with a number of connections. Each asks again as soon as it has sent, no faster than its own limit.
    struct Sender {
        flow: Flow,
        chunk: u64,
        own_rate: Option<u64>,
        /// For each connection its ticket, or the time when it asks next.
        connections: Vec<Result<Ticket, Instant>>,
        own_due: Instant,
        sent: u64,
    }

    impl Link {
        fn new() -> Self {
            Self { turns: Turns::new(Some(RATE)), now: Instant::now(), flows: Vec::new() }
        }

        fn add(&mut self, connections: usize, chunk: u64, own_rate: Option<u64>) -> usize {
            let flow = self.turns.join();
            let connections = vec![Err(self.now); connections];
            self.flows.push(Sender { flow, chunk, own_rate, connections, own_due: self.now, sent: 0 });
            self.flows.len() - 1
        }

        fn stop(&mut self, index: usize) {
            let flow = &mut self.flows[index];
            for ticket in flow.connections.drain(..).flatten() {
                self.turns.withdraw(flow.flow, ticket);
            }
        }

        /// Lets time pass. Returns what each flow sent meanwhile.
        fn run(&mut self, time: Duration) -> Vec<u64> {
            let (before, end) = (self.sent(), self.now + time);
            while self.now < end {
                let mut wake = end;
                let mut went = false;
                for sender in &mut self.flows {
                    for connection in &mut sender.connections {
                        if let Err(at) = *connection {
                            if at > self.now {
                                wake = wake.min(at);
                                continue;
                            }
                            *connection = Ok(self.turns.ask(sender.flow, sender.chunk));
                        }
                        let Ok(ticket) = *connection else { continue };
                        match self.turns.turn(sender.flow, ticket, self.now) {
                            Turn::Later => {}
                            Turn::At(at) => wake = wake.min(at),
                            Turn::Now => {
                                self.turns.sent(sender.flow);
                                sender.sent += sender.chunk;
                                sender.own_due = sender.own_due.max(self.now);
                                if let Some(rate) = sender.own_rate {
                                    sender.own_due += Duration::from_secs_f64(sender.chunk as f64 / rate as f64);
                                }
                                *connection = Err(sender.own_due);
                                went = true;
                            }
                        }
                    }
                }
                if !went {
                    self.now = wake;
                }
            }
            self.sent().iter().zip(before).map(|(after, before)| after - before).collect()
        }

        fn sent(&self) -> Vec<u64> {
            self.flows.iter().map(|sender| sender.sent).collect()
        }
    }

    /// Checks that a share is within five percent of what it should be.
    #[track_caller]
    fn about(bytes: u64, of_rate: f64, seconds: f64) {
        let share = bytes as f64 / (RATE as f64 * seconds);
        assert!((share / of_rate - 1.0).abs() < 0.05, "{share:.3} of the link instead of {of_rate:.3}");
    }

    #[test]
    fn migrations_get_equal_shares_however_many_there_are() {
        for count in [1, 2, 3, 8] {
            let mut link = Link::new();
            (0..count).for_each(|_| _ = link.add(1, MIB, None));
            for sent in link.run(Duration::from_secs(10)) {
                about(sent, 1.0 / count as f64, 10.0);
            }
        }
    }

    #[test]
    fn eight_connections_get_no_more_than_one() {
        let mut link = Link::new();
        link.add(1, MIB, None);
        link.add(8, MIB, None);
        for sent in link.run(Duration::from_secs(5)) {
            about(sent, 0.5, 5.0);
        }
    }

    #[test]
    fn small_frames_get_no_less_than_large_ones() {
        let mut link = Link::new();
        link.add(1, 40_000, None);
        link.add(1, MIB, None);
        for sent in link.run(Duration::from_secs(5)) {
            about(sent, 0.5, 5.0);
        }
    }

    #[test]
    fn a_late_one_gets_its_share_at_once_and_no_more() {
        let mut link = Link::new();
        link.add(2, MIB, None);
        about(link.run(Duration::from_secs(20))[0], 1.0, 20.0);
        link.add(1, MIB, None);
        for sent in link.run(Duration::from_secs(1)) {
            about(sent, 0.5, 1.0);
        }
    }

    #[test]
    fn an_idle_one_leaves_its_share_to_the_others_and_saves_nothing_up() {
        let mut link = Link::new();
        let idle = link.add(4, MIB, None);
        link.add(1, MIB, None);
        link.run(Duration::from_secs(2));
        link.stop(idle);
        let sent = link.run(Duration::from_secs(10));
        assert_eq!(sent[idle], 0);
        about(sent[1], 1.0, 10.0);
        link.flows[idle].connections = vec![Err(link.now); 4];
        for sent in link.run(Duration::from_secs(2)) {
            about(sent, 0.5, 2.0);
        }
    }

    #[test]
    fn a_limit_of_its_own_below_the_share_holds_and_the_rest_goes_to_the_others() {
        let mut link = Link::new();
        link.add(1, MIB, Some(RATE / 10));
        link.add(1, MIB, None);
        link.add(8, MIB, None);
        let sent = link.run(Duration::from_secs(10));
        about(sent[0], 0.1, 10.0);
        about(sent[1], 0.45, 10.0);
        about(sent[2], 0.45, 10.0);
    }

    #[test]
    fn a_guest_that_waits_goes_first_and_starves_nobody() {
        let mut link = Link::new();
        let others = 7;
        (0..others).for_each(|_| _ = link.add(1, MIB, None));
        let paused = link.add(1, MIB, None);
        link.run(Duration::from_secs(1));
        link.turns.hurry(link.flows[paused].flow, link.now);
        assert_eq!(link.run(Duration::from_millis(250))[..others], [0; 7], "at first the others wait");
        link.run(Duration::from_secs(1));
        let sent = link.run(Duration::from_secs(10));
        about(sent[paused], 16.0 / 17.0, 10.0);
        for sent in &sent[..others] {
            about(*sent, 1.0 / 17.0 / others as f64, 10.0);
        }
    }

    #[test]
    fn while_a_guest_stands_still_the_others_finish_what_they_send_and_begin_nothing() {
        let (mut turns, now) = (Turns::new(None), Instant::now());
        let (paused, other) = (turns.join(), turns.join());
        let under_way = turns.ask(other, MIB);
        assert_eq!(turns.turn(other, under_way, now), Turn::Now);
        turns.hurry(paused, now);
        assert!(turns.others_send());
        let last = turns.ask(paused, MIB);
        assert_eq!(turns.turn(paused, last, now), Turn::Now);
        let next = turns.ask(other, MIB);
        assert!(matches!(turns.turn(other, next, now), Turn::At(_)));
        turns.sent(other);
        assert!(!turns.others_send(), "its own turn is not another's");
        turns.calm(paused, now);
        assert_eq!(turns.turn(other, next, now), Turn::Now);
        turns.hurry(paused, now);
        turns.part(paused, now);
        assert_eq!(turns.quiet_for(other, now), None, "one that has ended needs no quiet");
    }

    #[test]
    fn who_does_not_wait_any_more_holds_nobody_up_and_is_not_charged() {
        let (mut turns, now) = (Turns::new(Some(RATE)), Instant::now());
        let (gone, stays) = (turns.join(), turns.join());
        let withdrawn = turns.ask(gone, MIB);
        let second = turns.ask(stays, MIB);
        assert_eq!(turns.turn(stays, second, now), Turn::Later);
        turns.withdraw(gone, withdrawn);
        assert_eq!(turns.turn(stays, second, now), Turn::Now);
        let again = turns.ask(gone, MIB);
        assert!(matches!(turns.turn(gone, again, now), Turn::At(_)));
        turns.part(gone, now);
        let third = turns.ask(stays, MIB);
        assert!(
            matches!(turns.turn(stays, third, now), Turn::At(_)),
            "a flow that ended with tickets left is forgotten"
        );
    }

    #[test]
    fn a_rate_taken_away_ends_every_wait() {
        let (mut turns, now) = (Turns::new(Some(1)), Instant::now());
        let flow = turns.join();
        let (first, second) = (turns.ask(flow, MIB), turns.ask(flow, MIB));
        assert_eq!(turns.turn(flow, first, now), Turn::Now);
        assert!(matches!(turns.turn(flow, second, now), Turn::At(_)));
        turns.set_rate(None);
        assert_eq!(turns.turn(flow, second, now), Turn::Now);
    }
}
