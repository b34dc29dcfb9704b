//! A split guest moves, and what is at its memory hosts stays there.

use std::time::Duration;

use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::random::Random;
use sterna_system_tests::{needs, skip_without, turn};

use super::{ask, away, given_back_at, killed, merge_words};

/// It moves to and fro between two hosts, and what is at the other two stays there; each daemon dies at any moment.
#[test]
fn a_split_guest_that_writes_moves_on_whoever_dies_and_what_is_away_stays_there() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = killed::on_its_way();
    let mut random = Random::seeded();
    let (mut dies, mut went, mut round) = (false, 0, 0);
    while round < times(6, 60) || went < 3 {
        round += 1;
        assert!(round < 100, "it never moves");
        let (here, there) = site.names();
        // Where somebody is to die on the way, that takes a while.
        let slowly: &[&str] = if dies { &["--bandwidth", "40MB"] } else { &[] };
        let mode = ["precopy", "hybrid", "postcopy"][random.below(3) as usize];
        let running = site.begin(None, &[&["--mode", mode, "--verify"], slowly].concat());
        let died = ["c", "d", here, there, here, there][random.below(6) as usize];
        if dies {
            std::thread::sleep(Duration::from_millis(random.below(2500)));
            site.kill_daemon(died);
            std::thread::sleep(Duration::from_millis(random.below(300)));
            site.start_daemon(died);
        }
        let answer = running.end();
        let report = answer.report();
        let (ms, pause) = report.as_ref().map_or((0.0, 0.0), |report| (report.total_ms, report.downtime_ms));
        let died = if dies { died } else { "nobody" };
        println!(
            "round {round}, {mode}: {here} to {there}, {died}'s daemon killed: exit status {}, {ms:.0} ms, paused {pause:.1} ms",
            answer.code
        );
        let verify = report.map(|report| report.verify).unwrap_or_default();
        if !dies {
            answer.expect(0, &[]);
            assert!(verify.checked && verify.pages > 0 && verify.away_pages > 0, "{verify:?}");
        }
        assert!(answer.code != 2 && verify.mismatches == 0, "{answer:#?}");
        let at = |host: &str| site.state_at(host) == "running";
        site.eventually("one host has it", || [here, there].iter().filter(|host| at(host)).count() == 1);
        if site.state_at(there) == "running" {
            went += 1;
            site.moved();
        }
        site.nothing_is_left_there();
        site.checker_is_well();
        assert!(away(&site).is_some_and(|pages| pages > 0), "nothing of it is away");
        dies = random.below(3) > 0;
    }
    println!("it moved {went} times");
    site.eventually("it is merged", || ask(&site, &merge_words(&site)).code == 0);
    given_back_at(&site, &["c", "d"]);
    site.checker_is_well();
    site.migrate(&[]);
    site.ran_on_one_host_at_a_time();
}
