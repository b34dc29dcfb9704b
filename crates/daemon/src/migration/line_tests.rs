use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
/// The longest pause before a full destination is asked again.
const LONGEST_PAUSE: Duration = ASK_AGAIN.saturating_add(Duration::from_millis(JITTER_MS as u64));

fn is_turn(line: &mut Line, standing: &Standing, now: Instant) -> bool {
    line.ask(standing, now) == Answer::Turn
}

/// What who must wait is told.
#[track_caller]
fn waits(line: &mut Line, standing: &Standing, now: Instant) -> (Wait, Duration) {
    match line.ask(standing, now) {
        Answer::Later(wait, look) => (wait, look),
        Answer::Turn => panic!("it is its turn"),
    }
}

/// A line of so many places in which one was refused, and when that was.
fn refused(places: usize, random: u128) -> (Line, Standing, Instant) {
    let (mut line, now) = (Line::new(places), Instant::now());
    let first = line.join("full");
    assert!(is_turn(&mut line, &first, now));
    line.give_back_place();
    line.refused(&first, "it takes 1 at a time".into(), now, random);
    (line, first, now)
}

#[test]
fn a_full_destination_is_asked_again_after_its_pause_and_not_a_moment_earlier() {
    for random in [0, 1, JITTER_MS - 1, JITTER_MS, u128::MAX] {
        let (mut line, first, start) = refused(1, random);
        let again = start + ASK_AGAIN + MS * (random % JITTER_MS) as u32;
        let almost = again - Duration::from_nanos(1);
        assert_eq!(waits(&mut line, &first, almost).1, Duration::from_nanos(1), "it is awake at that moment");
        assert!(is_turn(&mut line, &first, again), "the end in the same instant");
        assert!(again <= start + LONGEST_PAUSE);
    }
}

#[test]
fn a_full_destination_is_asked_again_by_the_first_in_line_alone() {
    let (mut line, first, start) = refused(4, 0);
    let second = line.join("full");
    let (wait, _) = waits(&mut line, &second, start);
    assert_eq!(wait, Wait { place: 2, length: 2, what: "full: it takes 1 at a time".into() }, "one asks for all");
    let later = start + LONGEST_PAUSE;
    waits(&mut line, &second, later);
    assert!(is_turn(&mut line, &first, later));
    let (_, look) = waits(&mut line, &second, later);
    assert_eq!(look, LOOK, "nobody knows when the first will have its answer: it does not turn in circles");
    line.accepted(&first);
    assert!(is_turn(&mut line, &second, later), "there may be room for more");
}

#[test]
fn a_refusal_that_is_repeated_begins_a_new_pause_in_the_same_place() {
    let (mut line, first, mut now) = refused(1, 0);
    let second = line.join("full");
    for _ in 0..5 {
        now += ASK_AGAIN;
        waits(&mut line, &second, now);
        assert!(is_turn(&mut line, &first, now));
        line.give_back_place();
        line.refused(&first, "still".into(), now, 0);
        assert_eq!(waits(&mut line, &first, now).0, Wait { place: 1, length: 2, what: "full: still".into() });
    }
}

#[test]
fn while_the_clock_stands_still_nobody_asks_twice() {
    let (mut line, first, start) = refused(2, 0);
    for _ in 0..1000 {
        assert_eq!(waits(&mut line, &first, start).1, LOOK);
    }
}

#[test]
fn after_a_clock_that_has_jumped_a_destination_is_asked_once() {
    let (mut line, first, start) = refused(8, 0);
    let others = [(); 5].map(|()| line.join("full"));
    let tomorrow = start + Duration::from_secs(86_400);
    assert!(is_turn(&mut line, &first, tomorrow));
    assert!(others.iter().all(|other| !is_turn(&mut line, other, tomorrow)));
}

#[test]
fn a_look_at_a_moment_before_the_refusal_waits_no_longer_than_others() {
    let (mut line, first, start) = refused(1, 0);
    assert_eq!(waits(&mut line, &first, start - MS).1, LOOK);
}

#[test]
fn who_steps_back_leaves_its_place_to_one_that_goes_elsewhere() {
    let (mut line, first, start) = refused(1, 0);
    let elsewhere = line.join("free");
    assert!(is_turn(&mut line, &elsewhere, start));
    line.accepted(&elsewhere);
    let later = start + LONGEST_PAUSE;
    let (wait, look) = waits(&mut line, &first, later);
    assert_eq!((wait.place, look), (1, LOOK), "its destination may be asked, and there is no place");
    line.give_back_place();
    line.ended(&elsewhere);
    assert!(is_turn(&mut line, &first, later));
}

/// Two of the same destination end in the same instant, one of them because it is refused.
#[test]
fn an_end_and_a_refusal_in_one_instant_count_in_the_order_in_which_they_come() {
    for refused_last in [false, true] {
        let (mut line, now) = (Line::new(2), Instant::now());
        let [running, asks] = ["full"; 2].map(|to| line.join(to));
        assert!(is_turn(&mut line, &running, now));
        line.accepted(&running);
        assert!(is_turn(&mut line, &asks, now));
        let refuse = |line: &mut Line| {
            line.give_back_place();
            line.refused(&asks, "no".into(), now, 0);
        };
        let end = |line: &mut Line| {
            line.give_back_place();
            line.ended(&running);
        };
        let ends: [&dyn Fn(&mut Line); 2] = if refused_last { [&end, &refuse] } else { [&refuse, &end] };
        ends.iter().for_each(|end| end(&mut line));
        // Where the refusal came last, it may be of a time after the end.
        assert_eq!(is_turn(&mut line, &asks, now), !refused_last);
        assert!(!refused_last || is_turn(&mut line, &asks, now + ASK_AGAIN));
    }
}

#[test]
fn who_leaves_while_its_destination_is_full_leaves_it_to_the_next() {
    let (mut line, first, start) = refused(1, 0);
    let second = line.join("full");
    line.leave(&first);
    assert_eq!(waits(&mut line, &second, start).0.place, 1);
    assert!(is_turn(&mut line, &second, start + ASK_AGAIN));
}

/// Hosts that send machines to each other, on a simulated clock.
struct Hosts {
    lines: [Line; 3],
    /// How many machines each takes in at a time.
    incoming: usize,
    now: Instant,
    random: u128,
    migrations: Vec<Migration>,
    /// Migrations by number, in the order in which they began to move.
    starts: Vec<usize>,
}

#[derive(Debug)]
struct Migration {
    from: usize,
    to: usize,
    standing: Standing,
    takes: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Asks again then, or as soon as anything has changed at its host.
    Waits(Instant),
    Moves(Instant),
    Ended,
}

impl Hosts {
    /// Each migration goes `from` a host to one of the two others, and takes so long.
    fn new(moves: &[(usize, bool, Duration)], outgoing: usize, incoming: usize, random: u128) -> Self {
        let (mut lines, now) = ([(); 3].map(|()| Line::new(outgoing)), Instant::now());
        let migration = |(from, next, takes): &(usize, bool, Duration)| {
            let to = (from + if *next { 1 } else { 2 }) % 3;
            let standing = lines[*from].join(["a", "b", "c"][to]);
            Migration { from: *from, to, standing, takes: *takes, state: State::Waits(now) }
        };
        let migrations = moves.iter().map(migration).collect();
        Self { lines, incoming, now, random, migrations, starts: Vec::new() }
    }

    /// Until all have ended.
    fn run(&mut self) -> Duration {
        let (start, mut in_one_instant) = (self.now, 0);
        loop {
            let changed = self.step();
            let next = self.migrations.iter_mut().filter_map(|migration| match &mut migration.state {
                State::Waits(at) if changed[migration.from] => {
                    *at = self.now;
                    Some(*at)
                }
                State::Waits(at) | State::Moves(at) => Some(*at),
                State::Ended => None,
            });
            let Some(next) = next.min() else { return self.now - start };
            in_one_instant = if next > self.now { 0 } else { in_one_instant + 1 };
            assert!(in_one_instant < 100, "somebody turns in circles: {:?}", self.migrations);
            assert!(next < start + Duration::from_secs(86_400), "somebody waits for ever: {:?}", self.migrations);
            self.now = next;
        }
    }

    /// What is due now; at which hosts it wakes those who wait.
    fn step(&mut self) -> [bool; 3] {
        let mut changed = [false; 3];
        for Migration { from, standing, state, .. } in &mut self.migrations {
            if matches!(state, State::Moves(until) if *until <= self.now) {
                *state = State::Ended;
                self.lines[*from].give_back_place();
                self.lines[*from].ended(standing);
                changed[*from] = true;
            }
        }
        for index in 0..self.migrations.len() {
            let Migration { from, to, state, .. } = &self.migrations[index];
            let (from, to, state) = (*from, *to, *state);
            if !matches!(state, State::Waits(at) if at <= self.now || changed[from]) {
                continue;
            }
            let moving = |other: &&Migration| other.to == to && matches!(other.state, State::Moves(_));
            let has_room = self.migrations.iter().filter(moving).count() < self.incoming;
            let (line, migration) = (&mut self.lines[from], &mut self.migrations[index]);
            migration.state = match line.ask(&migration.standing, self.now) {
                Answer::Later(_, look) => State::Waits(self.now + look),
                Answer::Turn if has_room => {
                    line.accepted(&migration.standing);
                    self.starts.push(index);
                    changed[from] = true;
                    State::Moves(self.now + migration.takes)
                }
                Answer::Turn => {
                    self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    line.give_back_place();
                    line.refused(&migration.standing, "it is full".into(), self.now, self.random >> 64);
                    changed[from] = true;
                    State::Waits(self.now)
                }
            };
        }
        changed
    }
}

proptest! {
    #[test]
    fn hosts_that_empty_themselves_into_each_other_never_wait_in_a_circle(
        moves in prop::collection::vec((0usize..3, any::<bool>(), 1u64..20_000), 1..12),
        outgoing in 1usize..4, incoming in 1usize..4, random in any::<u128>(),
    ) {
        let moves: Vec<_> = moves.into_iter().map(|(from, next, ms)| (from, next, Duration::from_millis(ms))).collect();
        let mut hosts = Hosts::new(&moves, outgoing, incoming, random);
        let took = hosts.run();
        prop_assert_eq!(hosts.starts.len(), moves.len());
        // Where nothing moves no destination is full, and one is asked again as soon as its pause is over.
        let one_by_one: Duration = moves.iter().map(|(_, _, takes)| *takes + LONGEST_PAUSE + LOOK).sum();
        prop_assert!(took <= one_by_one, "{:?} of {:?}", took, one_by_one);
        for way in 0..6 {
            let way = (way / 2, way % 2 == 0);
            let starts = hosts.starts.iter().filter(|index| (moves[**index].0, moves[**index].1) == way);
            prop_assert!(starts.is_sorted(), "not first come, first served: {:?}", hosts.starts);
        }
        prop_assert!(hosts.lines.iter().all(|line| line.counts() == Counts::default()));
    }
}
