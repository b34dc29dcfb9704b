use super::simulated::{Link, noise};
use super::*;

/// Goes on for `seconds`. Returns the used share of the link, and the share of the time with a queue of more than a
/// millisecond.
fn run(pace: &mut Pace, link: &mut Link, seconds: f64, quiet: bool) -> (f64, f64) {
    let (mut time, mut delivered, mut queued) = (0.0, 0.0, 0.0);
    while time < seconds {
        let paced = pace.rate(quiet);
        let (window, queue) = link.run(pace, u64::MAX, quiet);
        pace.seen(&window, paced);
        let length = window.length.as_secs_f64();
        time += length;
        delivered += window.delivered as f64;
        queued += if queue > Duration::from_millis(1) { length } else { 0.0 };
    }
    (delivered / time / link.bytes_per_s, queued / time)
}

const LINKS: [f64; 5] = [12.5e6, 31e6, 125e6, 312e6, 1.25e9];

#[test]
fn any_link_is_known_within_a_second_and_then_used_to_nine_tenths() {
    for bytes_per_s in LINKS {
        for trip_us in [50, 1000, 5000] {
            let (mut pace, mut link) = (Pace::new(None), Link::new(bytes_per_s, Duration::from_micros(trip_us)));
            run(&mut pace, &mut link, 1.0, false);
            let (used, queued) = run(&mut pace, &mut link, 4.0, false);
            assert!((0.84..0.95).contains(&used), "{bytes_per_s} B/s, {trip_us} us: {used:.3} used");
            assert!(queued < 0.12, "{bytes_per_s} B/s, {trip_us} us: a queue {queued:.3} of the time");
        }
    }
}

#[test]
fn where_no_fault_comes_nearly_all_of_the_link_is_used() {
    for bytes_per_s in LINKS {
        let (mut pace, mut link) = (Pace::new(None), Link::new(bytes_per_s, Duration::from_micros(100)));
        run(&mut pace, &mut link, 1.0, true);
        let (used, _) = run(&mut pace, &mut link, 4.0, true);
        assert!(used > 0.94, "{bytes_per_s} B/s: {used:.3}");
    }
}

#[test]
fn a_link_that_becomes_slower_or_faster_is_followed() {
    let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
    run(&mut pace, &mut link, 1.0, false);
    for bytes_per_s in [12.5e6, 125e6, 60e6, 1.25e9, 100e6] {
        link.bytes_per_s = bytes_per_s;
        run(&mut pace, &mut link, 3.0, false);
        let (used, queued) = run(&mut pace, &mut link, 3.0, false);
        assert!((0.84..0.96).contains(&used) && queued < 0.15, "{bytes_per_s} B/s: {used:.3}, {queued:.3}");
    }
}

#[test]
fn a_wrong_guess_is_corrected() {
    for guess in [1_000, 10_000_000, 10_000_000_000] {
        let (mut pace, mut link) = (Pace::new(Some(guess)), Link::new(125e6, Duration::from_micros(100)));
        run(&mut pace, &mut link, 8.0, false);
        let (used, _) = run(&mut pace, &mut link, 3.0, false);
        assert!((0.84..0.95).contains(&used), "guess {guess}: {used:.3}");
    }
}

#[test]
fn a_push_that_had_nothing_to_send_says_nothing_of_the_link() {
    let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
    run(&mut pace, &mut link, 1.0, false);
    let before = pace.link();
    for _ in 0..1000 {
        let idle = Window { delivered: 1000, busy: false, ..link.run(&pace, u64::MAX, false).0 };
        let paced = pace.rate(false);
        pace.seen(&idle, paced);
    }
    assert_eq!(pace.link(), before);
}

#[test]
fn a_link_that_carries_nothing_for_a_while_does_not_starve_the_push_for_ever() {
    let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
    run(&mut pace, &mut link, 1.0, false);
    let trip = Duration::from_micros(100);
    let dead = Window {
        length: SHORTEST_WINDOW,
        delivered: 0,
        busy: true,
        round_trip: trip,
        deviation: Duration::ZERO,
        least_trip: trip,
        lost: true,
        grain: 0,
    };
    for _ in 0..500 {
        let paced = pace.rate(false);
        pace.seen(&dead, paced);
    }
    assert!(pace.rate(false) >= LEAST as u64);
    run(&mut pace, &mut link, 10.0, false);
    let (used, _) = run(&mut pace, &mut link, 3.0, false);
    assert!(used > 0.84, "{used:.3}");
}

#[test]
fn acknowledgements_that_come_in_lumps_do_not_talk_the_link_down() {
    // Four connections over loopback: each segment has 64 KiB, as much as a quarter of a window.
    let lump = 256 << 10;
    let (mut pace, mut link) = (Pace::new(Some(24_000_000)), Link::new(24e6, Duration::from_micros(50)));
    let (mut seconds, mut acknowledged, mut least) = (0.0, 0, u64::MAX);
    while seconds < 10.0 {
        let paced = pace.rate(false);
        let (window, _) = link.run(&pace, u64::MAX, false);
        acknowledged += window.delivered;
        let delivered = acknowledged / lump * lump;
        acknowledged -= delivered;
        pace.seen(&Window { delivered, grain: lump, ..window }, paced);
        seconds += window.length.as_secs_f64();
        least = least.min(pace.link());
    }
    assert!(least > 20_000_000, "{least}");
}

#[test]
fn acknowledgements_held_up_by_a_busy_processor_do_not_make_the_link_look_faster() {
    let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
    let (mut seconds, mut held, mut random, mut queued) = (0.0, 0, 1u64, 0.0);
    while seconds < 20.0 {
        let paced = pace.rate(false);
        let (window, queue) = link.run(&pace, u64::MAX, false);
        // Up to two milliseconds' worth comes with the next window.
        let late = (noise(&mut random) * 238_000.0) as u64;
        let delivered = window.delivered + std::mem::replace(&mut held, late) - late;
        pace.seen(&Window { delivered, ..window }, paced);
        seconds += window.length.as_secs_f64();
        queued += if queue > Duration::from_millis(1) { window.length.as_secs_f64() } else { 0.0 };
    }
    assert!(queued < 3.0, "a queue for {queued:.1} s of {seconds:.1}");
    assert!((110_000_000..124_000_000).contains(&pace.link()), "{}", pace.link());
}

#[test]
fn acknowledgements_that_queue_behind_what_the_guest_sends_do_not_starve_the_push() {
    let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
    let (mut seconds, mut held, mut random, mut sum) = (0.0, 0, 1u64, 0);
    while seconds < 20.0 {
        let paced = pace.rate(false);
        let (window, _) = link.run(&pace, u64::MAX, false);
        sum += window.delivered;
        // Up to ten milliseconds' worth come with the next window.
        let late = (window.delivered as f64 / window.length.as_secs_f64() * 0.01 * noise(&mut random)) as u64;
        let delivered = window.delivered + std::mem::replace(&mut held, late) - late;
        let (round_trip, deviation) = (Duration::from_millis(5), Duration::from_micros(2500));
        pace.seen(&Window { delivered, round_trip, deviation, ..window }, paced);
        seconds += window.length.as_secs_f64();
    }
    let used = sum as f64 / seconds / 119e6;
    assert!(used > 0.8, "{used:.3}");
}

#[test]
fn a_window_that_others_queues_keep_small_is_left_to_tcp() {
    let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
    for _ in 0..200 {
        let paced = pace.rate(false);
        // 270 KB on their way at most, and nine milliseconds for each.
        let (window, _) = link.run(&pace, 30_000_000, false);
        let (round_trip, deviation) = (Duration::from_millis(9), Duration::from_millis(1));
        pace.seen(&Window { round_trip, deviation, ..window }, paced);
    }
    assert!(pace.link() > 60_000_000, "{}", pace.link());
}

#[test]
fn a_sender_that_is_slow_itself_does_not_make_the_link_look_slow() {
    let (mut pace, mut link) = (Pace::new(Some(119_000_000)), Link::new(119e6, Duration::from_micros(100)));
    for _ in 0..200 {
        let paced = pace.rate(false);
        let (window, _) = link.run(&pace, paced * 4 / 5, false);
        pace.seen(&window, paced);
    }
    assert!(pace.link() > 100_000_000, "{}", pace.link());
}

#[test]
fn a_limit_from_elsewhere_is_not_taken_for_the_link_being_slow() {
    let (mut pace, mut link) = (Pace::new(None), Link::new(125e6, Duration::from_micros(100)));
    run(&mut pace, &mut link, 1.0, false);
    for _ in 0..200 {
        let paced = pace.rate(false).min(20_000_000);
        let (window, _) = link.run(&pace, paced, false);
        pace.seen(&window, paced);
    }
    assert!(pace.link() > 15_000_000, "{}", pace.link());
}
