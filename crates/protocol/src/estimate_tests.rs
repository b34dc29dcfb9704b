use proptest::prelude::*;

use super::*;

const PAGES: u64 = 100_000;
const BODY: f64 = 4_000.0;

const TERMS: Terms = Terms {
    bytes_per_s: 100e6,
    downtime_limit: Duration::from_millis(300),
    device_time: Duration::from_millis(5),
    setup_time: Duration::ZERO,
};
const LIVE: Way = Way { order: Order::Before, bytes_per_body: BODY, seconds_per_page: 0.0, skips_rewritten: false };

/// Looks as an observation of three seconds has them.
fn seen(curve: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
    [0.01, 0.03, 0.08, 0.18, 0.38, 0.75, 1.5, 1.7, 1.9, 2.25, 2.6, 3.0].map(|t| (t, curve(t))).to_vec()
}

/// Writes at random over a working set.
fn at_random(pages_per_s: f64, working_set: f64) -> Guest {
    let curve = |t: f64| 1.0 - (-pages_per_s * t / working_set).exp();
    Guest {
        used_pages: PAGES,
        zero_share: 0.0,
        written: Curve::new(seen(|t| working_set * curve(t)), PAGES as f64),
        again: Curve::new(seen(curve), 1.0),
        silent_share: 0.0,
    }
}

/// Writes one page after another, none twice within what matters.
fn in_line(pages_per_s: f64) -> Guest {
    Guest {
        written: Curve::new(seen(|t| pages_per_s * t), PAGES as f64),
        again: Curve::new([], 1.0),
        ..at_random(0.0, 1.0)
    }
}

fn close(one: f64, other: f64, share: f64) -> bool {
    (one - other).abs() <= share * other.abs()
}

#[test]
fn a_curve_goes_through_what_was_seen_and_on_as_it_grew() {
    let line = Curve::new(seen(|t| 100.0 * t), 1e6);
    assert!(close(line.at(0.5), 50.0, 1e-9) && close(line.at(30.0), 3_000.0, 1e-6));
    assert_eq!(Curve::new(seen(|t| 100.0 * t), 500.0).at(30.0), 500.0, "no more than there is");
    let saturating = |t: f64| 1_000.0 * (1.0 - (-t).exp());
    let curve = Curve::new(seen(saturating), 1e6);
    for t in [4.0, 6.0, 20.0] {
        assert!(close(curve.at(t), saturating(t), 0.01), "{} and {} after {t} s", curve.at(t), saturating(t));
    }
    assert_eq!(Curve::new([], 10.0).at(5.0), 0.0);
    // One spot that is full at once, and a slow stream beside it: the stream goes on.
    let both = Curve::new(seen(|t| 500.0 * (1.0 - (-20.0 * t).exp()) + 10.0 * t), 1e6);
    assert!(close(both.at(13.0), 630.0, 0.01), "{}", both.at(13.0));
}

#[test]
fn an_idle_guest_takes_its_pages_over_the_links_rate_and_stops_for_its_devices() {
    let guest = Guest { zero_share: 0.25, ..in_line(0.0) };
    let terms = Terms { setup_time: Duration::from_millis(100), ..TERMS };
    let found = predict(&guest, &LIVE, &terms);
    // 75,000 bodies of 4,000 bytes at 100 MB/s.
    assert!(close(found.total.as_secs_f64(), 0.1 + 3.0 + ROUND_TRIP + 0.005, 1e-6), "{found:?}");
    assert_eq!((found.downtime, found.bytes_on_wire, found.rounds), (TERMS.device_time, 300_000_000, 2));
    assert!(found.reaches_limit);
}

#[test]
fn stop_and_copy_is_one_pause() {
    let found = predict(&at_random(1e6, 5e4), &Way { order: Order::Paused, ..LIVE }, &TERMS);
    assert!(close(found.downtime.as_secs_f64(), 4.005, 1e-6) && found.total == found.downtime, "{found:?}");
    assert_eq!((found.rounds, found.bytes_on_wire, found.reaches_limit), (1, 400_000_000, false));
}

#[test]
fn a_stream_of_writes_leaves_a_geometric_series() {
    // A fifth of the link's 25,000 pages/s: each round is a fifth of the one before.
    let found = predict(&in_line(5_000.0), &LIVE, &TERMS);
    assert!(close(found.total.as_secs_f64(), 4.0 / (1.0 - 0.2), 0.02), "{found:?}");
    assert!(close(found.bytes_on_wire as f64, 4e8 / (1.0 - 0.2), 0.02), "{found:?}");
    assert!(found.reaches_limit && found.downtime < Duration::from_millis(10), "{found:?}");
}

#[test]
fn writes_faster_than_the_link_over_more_than_the_limit_carries_do_not_converge() {
    let found = predict(&at_random(1e6, 50_000.0), &LIVE, &TERMS);
    assert!(!found.reaches_limit, "{found:?}");
    assert!(close(found.downtime.as_secs_f64(), 2.005, 0.01), "the working set goes in the pause: {found:?}");
    let small = predict(&at_random(1e6, 5_000.0), &LIVE, &TERMS);
    assert!(small.reaches_limit && close(small.downtime.as_secs_f64(), 0.205, 0.01), "{small:?}");
}

#[test]
fn what_would_be_sent_in_vain_is_left_out() {
    let guest = at_random(50_000.0, 20_000.0);
    let (all, some) = (predict(&guest, &LIVE, &TERMS), predict(&guest, &Way { skips_rewritten: true, ..LIVE }, &TERMS));
    assert!(some.bytes_on_wire < all.bytes_on_wire / 10 * 9, "{some:?} {all:?}");
    // A guest that writes everything all the time: nothing of the first round is worth sending.
    let whole = at_random(1e9, PAGES as f64);
    let found = predict(&whole, &Way { skips_rewritten: true, ..LIVE }, &TERMS);
    assert!(found.bytes_on_wire < 480_000_000 && close(found.downtime.as_secs_f64(), 4.005, 0.02), "{found:?}");
}

#[test]
fn auto_is_pre_copy_as_far_as_rounds_help_and_has_what_is_left_follow() {
    let auto = Way { order: Order::Auto, ..LIVE };
    // Rounds leave next to nothing: it is pre-copy.
    for guest in [in_line(0.0), in_line(5_000.0)] {
        assert_eq!(predict(&guest, &auto, &TERMS), predict(&guest, &LIVE, &TERMS));
    }
    // 5,000 pages that are written all the time: 0.2 s in the pause, which is within the limit; or they follow.
    let hot = at_random(1e6, 5_000.0);
    let (paused, follows) = (predict(&hot, &LIVE, &TERMS), predict(&hot, &auto, &TERMS));
    assert!(paused.reaches_limit && paused.downtime > Duration::from_millis(200), "{paused:?}");
    assert!(follows.reaches_limit && follows.downtime < Duration::from_millis(10), "{follows:?}");
    assert!(close(follows.total.as_secs_f64(), paused.total.as_secs_f64(), 0.01), "{follows:?} {paused:?}");
    // Half of its memory: rounds would be in vain, and that is seen early in the first one.
    let fast = at_random(1e6, 50_000.0);
    let (turns, at_once) =
        (predict(&fast, &auto, &TERMS), predict(&fast, &Way { order: Order::After { rounds: 0 }, ..LIVE }, &TERMS));
    assert!(turns.reaches_limit && turns.downtime == at_once.downtime && turns.rounds == 1, "{turns:?}");
    let more = (turns.total - at_once.total).as_secs_f64();
    assert!(more > 0.0 && more < 0.3, "what it wrote again of what had gone in 0.4 s: {more} s");
    assert!(predict(&fast, &LIVE, &TERMS).total > turns.total + Duration::from_secs(1));
}

#[test]
fn a_host_slower_than_the_link_sets_the_pace() {
    let found = predict(&in_line(0.0), &Way { seconds_per_page: 1e-3, ..LIVE }, &TERMS);
    assert!(close(found.total.as_secs_f64(), 100.0, 0.01), "{found:?}");
}

#[test]
fn pages_that_follow_the_guest_leave_a_pause_of_devices_and_a_map_whatever_it_writes() {
    let at = |rounds| predict(&at_random(1e6, 50_000.0), &Way { order: Order::After { rounds }, ..LIVE }, &TERMS);
    let (none, one) = (at(0), at(1));
    let map = PAGES as f64 / 8.0 / 100e6 + ROUND_TRIP;
    for found in [none, one] {
        assert!(close(found.downtime.as_secs_f64(), 0.005 + map, 1e-6) && found.reaches_limit, "{found:?}");
    }
    assert!(close(none.total.as_secs_f64(), 4.0 + 0.005 + map, 1e-6), "every page once: {none:?}");
    assert_eq!((none.rounds, none.bytes_on_wire), (0, 400_000_000 + PAGES / 8));
    // The round sends everything, and the guest writes half of it meanwhile.
    assert!(close(one.total.as_secs_f64(), 6.0, 0.01) && one.rounds == 1, "{one:?}");
    assert!(close(one.bytes_on_wire as f64, 6e8, 0.01), "{one:?}");
}

#[test]
fn nonsense_is_no_panic() {
    let nan = Guest {
        zero_share: f64::NAN,
        silent_share: 7.0,
        written: Curve::new([(f64::NAN, 1.0), (-1.0, 5.0), (1.0, f64::INFINITY), (2.0, 9.0), (2.0, 3.0)], f64::NAN),
        ..in_line(0.0)
    };
    for bytes_per_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        for order in [Order::Paused, Order::Before, Order::After { rounds: 0 }, Order::After { rounds: u32::MAX }] {
            let way = Way { order, skips_rewritten: true, ..LIVE };
            let found = predict(&nan, &way, &Terms { bytes_per_s, ..TERMS });
            assert!(found.total <= Duration::from_secs(1_000_000_001));
        }
    }
}

proptest! {
    #[test]
    fn curves_never_fall(
        points in prop::collection::vec((0.0..5.0f64, 0.0..1e5f64), 0..20),
        a in 0.0..100.0f64,
        b in 0.0..100.0f64,
    ) {
        let curve = Curve::new(points, 5e4);
        prop_assert!(curve.at(a.min(b)) <= curve.at(a.max(b)) + 1e-6);
        prop_assert!(curve.at(b) <= 5e4);
    }

    #[test]
    fn more_bandwidth_is_never_slower_in_stop_and_copy(
        rate in 1e6..1e9f64,
        more in 1.0..10.0f64,
        zero in 0.0..1.0f64,
        cost in 0.0..1e-4f64,
    ) {
        let guest = Guest { zero_share: zero, ..in_line(100.0) };
        let way = Way { order: Order::Paused, seconds_per_page: cost, ..LIVE };
        let at = |bytes_per_s| predict(&guest, &way, &Terms { bytes_per_s, ..TERMS });
        prop_assert!(at(rate * more).total <= at(rate).total);
    }

    #[test]
    fn more_bandwidth_never_loses_the_limit(
        rate in 1e6..1e9f64,
        more in 1.0..10.0f64,
        pages_per_s in 1.0..1e6f64,
        set in 100.0..1e5f64,
    ) {
        let guest = at_random(pages_per_s, set);
        let at = |bytes_per_s| predict(&guest, &LIVE, &Terms { bytes_per_s, ..TERMS }).reaches_limit;
        prop_assert!(!at(rate) || at(rate * more));
    }

    #[test]
    fn a_guest_that_writes_nothing_is_never_slower_over_a_faster_link(rate in 1e6..1e9f64, more in 1.0..10.0f64) {
        let at = |bytes_per_s| predict(&in_line(0.0), &LIVE, &Terms { bytes_per_s, ..TERMS });
        prop_assert!(at(rate * more).total <= at(rate).total);
        prop_assert_eq!(at(rate * more).bytes_on_wire, at(rate).bytes_on_wire);
    }

    #[test]
    fn a_quieter_guest_never_loses_the_limit(rate in 1e6..1e9f64, pages_per_s in 1.0..1e5f64, more in 1.0..10.0f64) {
        let terms = Terms { bytes_per_s: rate, ..TERMS };
        let at = |pages_per_s| predict(&in_line(pages_per_s), &LIVE, &terms).reaches_limit;
        prop_assert!(!at(pages_per_s * more) || at(pages_per_s));
    }

    #[test]
    fn smaller_bodies_never_make_the_pause_of_stop_and_copy_longer(rate in 1e6..1e9f64, ratio in 0.01..1.0f64) {
        let terms = Terms { bytes_per_s: rate, ..TERMS };
        let way = |ratio: f64| Way { order: Order::Paused, bytes_per_body: BODY * ratio, ..LIVE };
        let at = |ratio: f64| predict(&in_line(9.0), &way(ratio), &terms);
        prop_assert!(at(ratio).downtime <= at(1.0).downtime);
    }
}
