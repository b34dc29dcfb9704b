use super::*;
use crate::convergence::tests::{DEVICES, GOAL, LINK, RAM, Region, Simulation, hot_spot, uniform};
use crate::convergence::{Decision, Goal};

const SPEED: Speed = Speed { bodies_per_s: LINK, light_per_s: 1e6, body_share: 1.0 };

fn foresight() -> Foresight {
    Foresight::new(GOAL.downtime_limit, DEVICES)
}

/// Different pages that a guest writes within a time.
fn written(guest: &[Region], seconds: f64) -> u64 {
    let of = |region: &Region| region.pages * (1.0 - (-region.writes_per_s / region.pages * seconds).exp());
    guest.iter().map(of).sum::<f64>() as u64
}

fn window(seconds: f64, written: u64) -> Window {
    Window { took: Duration::from_secs_f64(seconds), written, speed: Some(SPEED), left: RAM as u64 }
}

/// The seconds after which a guest that goes on as it does is found too fast, in a migration whose windows end when
/// they should; `None` where it is not.
fn found_after(guest: &[Region], ram: f64) -> Option<f64> {
    let (mut foresight, mut now) = (foresight(), 0.0);
    while let Some(longest) = foresight.window() {
        let took = longest.as_secs_f64();
        now += took;
        if foresight.step(&Window { left: ram as u64, ..window(took, written(guest, took)) }) {
            return Some(now);
        }
        assert!(now < 60.0, "it never decides");
    }
    None
}

#[test]
fn who_is_found_too_fast_never_ends_by_rounds_and_who_is_not_ends_or_is_near_the_limit() {
    let mut found = 0;
    for pages in [4_000.0, 8_000.0, 16_000.0, 64_000.0, RAM] {
        for rate in [0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 1.6, 2.0, 4.0, 8.0, 32.0] {
            for guest in [uniform(pages, rate * LINK), hot_spot(pages, rate * LINK)] {
                let timeout = Some(Duration::from_secs(300));
                let rounds = Simulation::of(guest.clone()).run(Goal { timeout, ..GOAL });
                let ends = rounds.decision == Decision::Switchover;
                let too_fast = found_after(&guest, RAM);
                found += u32::from(too_fast.is_some());
                if too_fast.is_some() {
                    assert!(!ends, "{pages} pages, {rate} × the link: {rounds:?}");
                } else if !ends {
                    let within = written(&guest, foresight().limit.as_secs_f64());
                    let times = SPEED.time_for(within).as_secs_f64() / foresight().limit.as_secs_f64();
                    assert!(times <= MARGIN, "{pages} pages, {rate} × the link: {times} × the limit, {rounds:?}");
                }
            }
        }
    }
    assert!(found >= 15, "{found}");
}

#[test]
fn a_guest_that_is_too_fast_is_found_while_a_few_percent_of_its_pages_have_gone() {
    for ram in [RAM / 2.0, RAM, RAM * 8.0, RAM * 64.0] {
        let seconds = found_after(&uniform(ram, 4.0 * LINK), ram).expect("it is too fast");
        let all = ram / LINK;
        assert!(seconds < 0.45 || seconds < all * PATIENCE + 0.6, "{seconds} s of {all} s");
    }
}

#[test]
fn a_burst_is_not_taken_for_more() {
    let mut foresight = foresight();
    assert!(!foresight.step(&window(0.295, 30_000)));
    assert!(foresight.doubts());
    assert!(!foresight.step(&window(0.1, 100)), "it is over");
    assert_eq!(foresight.window(), None);
    // A long round, and a burst at its end.
    assert!(!foresight.step(&window(8.0, 30_000)));
    assert_eq!(foresight.window(), None);
}

#[test]
fn a_large_guest_is_watched_for_longer_than_a_small_one() {
    let guest = uniform(RAM, 4.0 * LINK);
    let (small, large) = (found_after(&guest, RAM).unwrap(), found_after(&guest, RAM * 10.0).unwrap());
    assert!(large > 2.0 * small, "{small} s, {large} s");
    let huge = found_after(&guest, RAM * 1e6).unwrap();
    assert!(huge < LONGEST_BURST.as_secs_f64() * 2.0, "{huge} s");
}

#[test]
fn nothing_is_said_before_the_links_speed_is_known() {
    let mut foresight = foresight();
    let first = foresight.window().unwrap();
    let unknown = |seconds: f64| Window { speed: None, ..window(seconds, 200_000) };
    assert!(!foresight.step(&unknown(0.001)));
    assert_eq!(foresight.window(), Some(first));
    for _ in 0..4 {
        let seconds = foresight.window().unwrap().as_secs_f64();
        assert!(!foresight.step(&unknown(seconds)));
    }
    assert_eq!(foresight.window(), Some(first * 16));
    assert!(!foresight.step(&window(4.8, 200_000)));
    assert!(foresight.doubts());
    assert!(foresight.step(&window(0.31, 80_000)));
}

#[test]
fn pages_that_hold_what_they_held_are_light() {
    let silent = Speed { body_share: 0.02, ..SPEED };
    let mut foresight = foresight();
    assert!(!foresight.step(&Window { speed: Some(silent), ..window(0.295, 30_000) }));
    assert_eq!(foresight.window(), None);
}

#[test]
fn a_guest_that_becomes_too_fast_later_is_found_then() {
    let mut foresight = foresight();
    assert!(!foresight.step(&window(0.295, 3_000)));
    assert!(!foresight.step(&window(8.0, 20_000)));
    assert!(!foresight.step(&window(0.7, 60_000)), "it may be a burst");
    assert!(foresight.step(&Window { left: 100_000, ..window(0.12, 15_000) }));
}

#[test]
fn a_limit_that_the_devices_use_up_is_judged_by_what_the_guest_writes_all_the_time() {
    let mut idle = Foresight::new(Duration::from_millis(1), DEVICES);
    assert!(!idle.step(&window(0.1, 500)));
    assert_eq!(idle.window(), None);
    let mut busy = Foresight::new(Duration::from_millis(1), DEVICES);
    assert!(!busy.step(&window(0.1, 9_000)));
    assert!(busy.step(&Window { left: 1_000, ..window(0.1, 9_000) }));
}
