use proptest::prelude::*;

use super::*;
use crate::throughput::{Sample, Throughput};

pub(crate) const LINK: f64 = 30_000.0;
pub(crate) const RAM: f64 = 262_144.0;
pub(crate) const DEVICES: Duration = Duration::from_millis(5);
pub(crate) const GOAL: Goal = Goal {
    downtime_limit: Duration::from_millis(300),
    downtime_ramp: None,
    throttle_percent: None,
    timeout: None,
    on_timeout: OnTimeout::Cancel,
    postcopy: false,
    rounds: None,
};

fn measured(rounds: u32, elapsed_ms: u64, pages_left: u64) -> Measured {
    Measured {
        rounds,
        elapsed: Duration::from_millis(elapsed_ms),
        pages_left,
        speed: Speed { bodies_per_s: LINK, light_per_s: 1e6, body_share: 1.0 },
        speed_is_known: true,
        device_time: DEVICES,
        too_fast: false,
    }
}

/// Pages that a guest writes at random, and its writes per second.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    pub(crate) pages: f64,
    pub(crate) writes_per_s: f64,
}

pub(crate) fn uniform(pages: f64, writes_per_s: f64) -> Vec<Region> {
    vec![Region { pages, writes_per_s }]
}

/// Nine of ten writes go to a tenth of the pages.
pub(crate) fn hot_spot(pages: f64, writes_per_s: f64) -> Vec<Region> {
    vec![
        Region { pages: pages * 0.1, writes_per_s: writes_per_s * 0.9 },
        Region { pages: pages * 0.9, writes_per_s: writes_per_s * 0.1 },
    ]
}

/// What came of a simulated migration.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) decision: Decision,
    pub(crate) pause: Duration,
    elapsed: Duration,
    rounds: u32,
    policy: Convergence,
}

/// A guest on a simulated link and clock. Pages written again before their turn are skipped (`skips`) or not.
pub(crate) struct Simulation {
    guest: Vec<Region>,
    skips: bool,
    link: f64,
}

impl Simulation {
    pub(crate) fn of(guest: Vec<Region>) -> Self {
        Self { guest, skips: true, link: LINK }
    }

    /// Sends `dirty` pages of each region, which were collected just now; bodies sent, seconds, and what is dirty
    /// afterwards.
    fn round(&self, dirty: &[f64], awake: f64, at_least: f64) -> (f64, f64, Vec<f64>) {
        const STEPS: f64 = 64.0;
        let (mut bodies, mut time, mut sent) = (0.0, 0.0, Vec::new());
        for (region, dirty) in self.guest.iter().zip(dirty) {
            let rate = region.writes_per_s * awake / region.pages;
            for _ in 0..STEPS as u32 {
                let pages = dirty / STEPS;
                let fresh = if self.skips { pages * (-rate * time).exp() } else { pages };
                bodies += fresh;
                time += fresh / self.link;
            }
            sent.push((rate, region.pages - dirty, *dirty));
        }
        let time = time.max(at_least).max(1e-4);
        // A page of the round is dirty afterwards if it was written at any time since: as a write before its turn or
        // behind it.
        let after = sent.iter().map(|(rate, clean, dirty)| (clean + dirty) * (1.0 - (-rate * time).exp())).collect();
        (bodies, time, after)
    }

    pub(crate) fn run(&self, goal: Goal) -> Ended {
        let mut policy = Convergence::new(goal);
        let mut throughput = Throughput::default();
        let mut elapsed = RAM / self.link;
        throughput.add(Sample {
            bodies: RAM as u64,
            light: 0,
            rewritten: false,
            took: Duration::from_secs_f64(elapsed),
        });
        let mut dirty: Vec<f64> = self.round(&vec![0.0; self.guest.len()], 1.0, elapsed).2;
        for rounds in 1..100_000 {
            let measured = Measured {
                rounds,
                elapsed: Duration::from_secs_f64(elapsed),
                pages_left: dirty.iter().sum::<f64>() as u64,
                speed: throughput.speed(),
                device_time: DEVICES,
                speed_is_known: true,
                too_fast: false,
            };
            let decision = policy.step(&measured);
            let at_least = match decision {
                Decision::Round { at_least } => at_least.as_secs_f64(),
                Decision::Throttle { .. } => 0.0,
                Decision::Switchover | Decision::Postcopy(_) | Decision::GiveUp => {
                    let pause = DEVICES + Duration::from_secs_f64(dirty.iter().sum::<f64>() / self.link);
                    return Ended { decision, pause, elapsed: measured.elapsed, rounds, policy };
                }
            };
            let awake = 1.0 - f64::from(policy.throttle_percent()) / 100.0;
            let (bodies, time, after) = self.round(&dirty, awake, at_least);
            let took = Duration::from_secs_f64(time);
            throughput.add(Sample { bodies: bodies as u64, light: 0, rewritten: true, took });
            dirty = after;
            elapsed += time;
        }
        panic!("it never decides");
    }
}

#[test]
fn an_idle_guest_is_stopped_at_once() {
    assert_eq!(Convergence::new(GOAL).step(&measured(1, 100, 10)), Decision::Switchover);
}

#[test]
fn a_pause_within_the_limit_is_made_shorter_while_rounds_pay() {
    let mut policy = Convergence::new(GOAL);
    assert_eq!(policy.step(&measured(1, 100, 6_000)), Decision::Round { at_least: Duration::ZERO });
    assert_eq!(policy.step(&measured(2, 200, 3_000)), Decision::Round { at_least: Duration::ZERO });
    assert_eq!(policy.step(&measured(3, 300, 2_900)), Decision::Switchover);
}

#[test]
fn what_rounds_make_no_fewer_follows_where_the_guest_would_stand_still_for_it() {
    let goal = Goal { postcopy: true, ..GOAL };
    let end = |goal, left| {
        let mut policy = Convergence::new(goal);
        assert_eq!(policy.step(&measured(1, 100, left)), Decision::Round { at_least: Duration::ZERO });
        policy.step(&measured(2, 200, left))
    };
    // A tenth of a second, and a hundredth.
    assert_eq!(end(goal, 3_000), Decision::Postcopy(Because::Shorter));
    assert_eq!(end(goal, 300), Decision::Switchover);
    for other in
        [GOAL, Goal { throttle_percent: Some(50), ..goal }, Goal { downtime_ramp: Some(Duration::MAX), ..goal }]
    {
        assert_eq!(end(other, 3_000), Decision::Switchover);
    }
    // Without the link's speed nobody knows how long they take.
    let mut policy = Convergence::new(goal);
    policy.step(&measured(1, 100, 3_000));
    let unknown = Measured { speed_is_known: false, ..measured(2, 200, 3_000) };
    assert_eq!(policy.step(&unknown), Decision::Switchover);
    // While rounds pay, they go on.
    let mut policy = Convergence::new(goal);
    policy.step(&measured(1, 100, 6_000));
    assert_eq!(policy.step(&measured(2, 200, 3_000)), Decision::Round { at_least: Duration::ZERO });
}

#[test]
fn polishing_ends() {
    let mut policy = Convergence::new(Goal { downtime_limit: Duration::from_secs(3600), ..GOAL });
    let mut pages = 1e8;
    for round in 1..=MAX_POLISHING_ROUNDS {
        if policy.step(&measured(round, 100 * u64::from(round), pages as u64)) == Decision::Switchover {
            assert_eq!(round, MAX_POLISHING_ROUNDS);
            return;
        }
        pages *= 0.8;
    }
    panic!("it polishes for ever");
}

#[test]
fn writers_below_the_link_rate_end_below_the_limit_by_themselves() {
    for rate in [0.1, 0.25, 0.5] {
        for guest in [uniform(RAM * 0.75, rate * LINK), hot_spot(RAM * 0.75, rate * LINK)] {
            for skips in [false, true] {
                let ended = Simulation { skips, ..Simulation::of(guest.clone()) }.run(GOAL);
                assert_eq!(ended.decision, Decision::Switchover, "{rate}");
                assert!(ended.pause < Duration::from_millis(30), "{rate} × the link: {ended:?}");
                assert_eq!((ended.policy.stalls(), ended.policy.throttle_percent()), (0, 0));
            }
        }
    }
}

#[test]
fn a_writer_above_the_link_rate_ends_by_timeout_as_asked() {
    let timeout = Duration::from_secs(60);
    for rate in [2.0, 4.0, 8.0] {
        for guest in [uniform(RAM * 0.75, rate * LINK), hot_spot(RAM * 0.75, rate * LINK)] {
            let cancel = Simulation::of(guest.clone()).run(Goal { timeout: Some(timeout), ..GOAL });
            assert_eq!(cancel.decision, Decision::GiveUp, "{rate}");
            assert!(cancel.elapsed >= timeout && cancel.policy.stalls() > 0, "{cancel:?}");
            let force = Goal { timeout: Some(timeout), on_timeout: OnTimeout::Force, ..GOAL };
            let forced = Simulation::of(guest).run(force);
            assert_eq!(forced.decision, Decision::Switchover, "{rate}");
            let predicted = forced.policy.predicted().unwrap().as_secs_f64();
            assert!((forced.pause.as_secs_f64() / predicted - 1.0).abs() < 0.2, "{predicted} s: {forced:?}");
        }
    }
}

#[test]
fn the_ramp_ends_what_stalls_a_little_above_the_limit() {
    // 20,000 pages, ever dirty: two thirds of a second.
    let stubborn = || Simulation { skips: false, ..Simulation::of(uniform(20_000.0, 8.0 * LINK)) };
    let without = stubborn().run(Goal { timeout: Some(Duration::from_secs(60)), ..GOAL });
    assert_eq!(without.decision, Decision::GiveUp);
    let ramp = Some(Duration::from_secs(2));
    let ended = stubborn().run(Goal { downtime_ramp: ramp, throttle_percent: Some(80), ..GOAL });
    assert_eq!(ended.decision, Decision::Switchover);
    assert_eq!((ended.policy.limit(), ended.policy.throttle_percent()), (Duration::from_millis(1200), 0));
    assert!(ended.pause < Duration::from_millis(1200), "{ended:?}");
    assert!(ended.elapsed < Duration::from_secs(20), "{ended:?}");
}

#[test]
fn throttling_ends_what_nothing_else_does_and_stays_below_its_ceiling() {
    for rate in [1.5, 2.0, 4.0, 8.0] {
        for guest in [uniform(RAM * 0.75, rate * LINK), hot_spot(RAM * 0.75, rate * LINK)] {
            let goal = Goal { throttle_percent: Some(95), downtime_ramp: Some(Duration::from_secs(1)), ..GOAL };
            let ended = Simulation::of(guest).run(goal);
            assert_eq!(ended.decision, Decision::Switchover, "{rate}");
            assert!(ended.pause <= Duration::from_secs(1), "{rate} × the link: {ended:?}");
            assert!(ended.policy.throttle_percent() <= 95);
        }
    }
    let timeout = Some(Duration::from_secs(120));
    let ceiling = Simulation::of(uniform(RAM, 8.0 * LINK)).run(Goal { timeout, throttle_percent: Some(35), ..GOAL });
    assert_eq!((ceiling.decision, ceiling.policy.throttle_percent()), (Decision::GiveUp, 35));
}

#[test]
fn a_ceiling_below_the_first_step_is_kept() {
    let goal = Goal { throttle_percent: Some(5), timeout: Some(Duration::from_secs(200)), ..GOAL };
    assert_eq!(Simulation::of(uniform(RAM, 8.0 * LINK)).run(goal).policy.throttle_percent(), 5);
}

#[test]
fn a_large_guest_that_converges_slowly_is_no_stall() {
    let ended = Simulation { link: 2_000.0, ..Simulation::of(uniform(RAM, 1_500.0)) }.run(GOAL);
    assert_eq!(ended.decision, Decision::Switchover);
    assert!(ended.elapsed > Duration::from_secs(200), "{ended:?}");
    assert_eq!(ended.policy.stalls(), 0);
}

#[test]
fn a_stalled_migration_does_not_spin() {
    // All that is left is held back: rounds of no length.
    let mut policy = Convergence::new(GOAL);
    let stuck = |round| measured(round, 1_000, 100_000);
    policy.step(&stuck(1));
    assert_eq!(policy.step(&stuck(2)), Decision::Round { at_least: STALLED_ROUND });
    let ended = Simulation::of(uniform(20_000.0, 1e9)).run(Goal { timeout: Some(Duration::from_secs(20)), ..GOAL });
    assert!(ended.rounds < 300, "{ended:?}");
}

#[test]
fn a_guest_that_became_busier_is_compared_with_itself_as_it_is_now() {
    let mut policy = Convergence::new(GOAL);
    policy.step(&measured(1, 1_000, 12_000));
    for round in 2..10 {
        policy.step(&measured(round, u64::from(round) * 1_000, 100_000));
    }
    let before = policy.stalls();
    assert!(before >= 2);
    // It recovers: far above its best, and progress all the same.
    for round in 10..14 {
        policy.step(&measured(round, u64::from(round) * 1_000, 100_000 >> (round - 9)));
    }
    assert_eq!(policy.stalls(), before);
}

#[test]
fn where_post_copy_is_allowed_it_comes_after_everything_else_that_was_asked_for() {
    let goal = Goal { postcopy: true, ..GOAL };
    let bare = Simulation::of(uniform(RAM, 8.0 * LINK)).run(goal);
    assert_eq!(bare.decision, Decision::Postcopy(Because::Stalled));
    assert_eq!(bare.policy.stalls(), 1);
    let throttled = Simulation::of(uniform(RAM, 8.0 * LINK)).run(Goal { throttle_percent: Some(35), ..goal });
    assert_eq!((throttled.decision, throttled.policy.throttle_percent()), (bare.decision, 35));
    // Where rounds pay, they go on to the limit.
    let converging = Simulation::of(uniform(RAM, 0.5 * LINK)).run(goal);
    assert_eq!(converging.decision, Decision::Switchover);
}

#[test]
fn where_rounds_are_in_vain_post_copy_comes_at_once_unless_something_else_was_asked_for() {
    let too_fast = Measured { too_fast: true, ..measured(2, 400, 200_000) };
    let goal = Goal { postcopy: true, ..GOAL };
    assert_eq!(Convergence::new(goal).step(&too_fast), Decision::Postcopy(Because::Foreseen));
    let within = Measured { too_fast: true, ..measured(2, 400, 10) };
    assert_eq!(Convergence::new(goal).step(&within), Decision::Switchover);
    let others = [
        GOAL,
        Goal { throttle_percent: Some(50), ..goal },
        Goal { downtime_ramp: Some(Duration::from_secs(1)), ..goal },
        Goal { rounds: Some(9), ..goal },
    ];
    for goal in others {
        assert_eq!(Convergence::new(goal).step(&too_fast), Decision::Round { at_least: Duration::ZERO });
    }
}

#[test]
fn rounds_that_were_asked_for_are_done_and_no_more_whatever_they_reach() {
    let goal = Goal { postcopy: true, rounds: Some(3), ..GOAL };
    for rate in [0.0, 8.0] {
        let ended = Simulation::of(uniform(RAM, rate * LINK)).run(goal);
        assert_eq!((ended.decision, ended.rounds), (Decision::Postcopy(Because::Asked), 3));
    }
    let late =
        Goal { timeout: Some(Duration::from_millis(1)), rounds: Some(9), on_timeout: OnTimeout::Postcopy, ..GOAL };
    assert_eq!(Simulation::of(uniform(RAM, LINK)).run(late).decision, Decision::Postcopy(Because::TimedOut));
}

#[test]
fn a_limit_below_what_the_devices_take_still_ends_when_nothing_is_left() {
    let mut policy = Convergence::new(Goal { downtime_limit: Duration::from_millis(1), ..GOAL });
    assert_eq!(policy.step(&measured(1, 100, 100)), Decision::Round { at_least: Duration::ZERO });
    assert_eq!(policy.step(&measured(2, 200, 0)), Decision::Switchover);
}

fn any_duration() -> impl Strategy<Value = Duration> {
    (0..200_000_u64).prop_map(Duration::from_millis)
}

fn any_goal() -> impl Strategy<Value = Goal> {
    let timeout = proptest::option::of(any_duration());
    let ramp = proptest::option::of(any_duration());
    let on_timeout = prop_oneof![Just(OnTimeout::Force), Just(OnTimeout::Cancel), Just(OnTimeout::Postcopy)];
    let postcopy = (any::<bool>(), proptest::option::of(0..100_u32));
    (any_duration(), ramp, proptest::option::of(any::<u8>()), timeout, on_timeout, postcopy).prop_map(
        |(downtime_limit, downtime_ramp, throttle_percent, timeout, on_timeout, (postcopy, rounds))| Goal {
            downtime_limit,
            downtime_ramp,
            throttle_percent,
            timeout,
            on_timeout,
            postcopy,
            rounds,
        },
    )
}

fn any_measured() -> impl Strategy<Value = Measured> {
    let speed = (0.0..1e7_f64, 0.0..1e7_f64, 0.0..1.0_f64).prop_map(|(bodies_per_s, light_per_s, body_share)| Speed {
        bodies_per_s,
        light_per_s,
        body_share,
    });
    let pages = prop_oneof![Just(0), 0..100_000_u64, any::<u64>()];
    (any::<u32>(), any_duration(), pages, speed, any_duration(), any::<bool>()).prop_map(
        |(rounds, elapsed, pages_left, speed, device_time, too_fast)| Measured {
            rounds,
            elapsed,
            pages_left,
            speed,
            speed_is_known: too_fast,
            device_time,
            too_fast,
        },
    )
}

proptest! {
    #[test]
    fn whatever_is_measured_the_rules_hold(
        goal in any_goal(),
        rounds in proptest::collection::vec(any_measured(), 1..60),
    ) {
        let mut policy = Convergence::new(goal);
        let ramp = goal.downtime_ramp.unwrap_or_default().max(goal.downtime_limit);
        for measured in rounds {
            let (throttle, limit) = (policy.throttle_percent(), policy.limit());
            let decision = policy.step(&measured);
            let late = goal.timeout.is_some_and(|timeout| measured.elapsed >= timeout);
            prop_assert!(measured.pages_left > 0 || decision == Decision::Switchover || goal.rounds.is_some());
            prop_assert!(policy.throttle_percent() >= throttle);
            prop_assert!(policy.throttle_percent() <= goal.throttle_percent.unwrap_or(0));
            prop_assert!(policy.limit() >= limit && policy.limit() <= ramp);
            match decision {
                Decision::Throttle { percent } => prop_assert!(percent > throttle && !late),
                Decision::Round { at_least } => prop_assert!(at_least <= STALLED_ROUND && !late),
                Decision::Postcopy(Because::Asked) => {
                    prop_assert!(goal.rounds.is_some_and(|rounds| measured.rounds >= rounds));
                }
                Decision::Postcopy(Because::Shorter) => prop_assert!(
                    goal.turns_at_once()
                        && measured.predicted_downtime() <= policy.limit()
                        && measured.predicted_downtime().saturating_sub(measured.device_time) > FOLLOWS
                ),
                Decision::Postcopy(Because::Foreseen) => {
                    prop_assert!(measured.too_fast && goal.turns_at_once() && !late);
                }
                Decision::Postcopy(Because::Stalled) => prop_assert!(goal.postcopy && !late),
                Decision::Postcopy(Because::TimedOut) => {
                    prop_assert!(late && goal.on_timeout == OnTimeout::Postcopy);
                }
                Decision::GiveUp => prop_assert!(late && goal.on_timeout == OnTimeout::Cancel),
                Decision::Switchover => prop_assert!(
                    measured.pages_left == 0
                        || measured.predicted_downtime() <= policy.limit()
                        || (late && goal.on_timeout == OnTimeout::Force)
                ),
            }
        }
    }
}
