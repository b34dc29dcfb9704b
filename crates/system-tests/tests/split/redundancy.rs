//! The redundancy of a split guest is changed while it writes.

use super::*;

const LENDERS: [&str; 4] = ["b", "c", "d", "e"];

/// At which hosts it is, with so many MiB each, and how.
type Way = (&'static [(&'static str, u64)], &'static str);

/// Parity over three and over four, copies at two, and none follow each other; each of the daemons dies at any moment,
/// of which one at most is away at a time.
#[test]
fn redundancy_is_changed_under_a_guest_that_writes_whoever_dies() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let hosts = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
    let mut site = Site::start(&Plan { hosts, ..Plan::small() });
    // What was lent before may be owed still, and is lent beside.
    LENDERS.iter().for_each(|host| site.configure(host, "lend_memory = \"1G\""));
    let ways: [Way; 5] = [
        (&[("b", 150), ("c", 150), ("d", 150)], "parity"),
        (&[("c", 200), ("d", 200)], "copies=2"),
        (&[("b", 110), ("c", 110), ("d", 110), ("e", 110)], "parity"),
        (&[("e", 150), ("c", 150), ("b", 150)], "parity"),
        (&[("b", 120), ("d", 120)], "none"),
    ];
    let words = |site: &Site, (over, redundancy): Way| {
        [words_over(site, HERE, over), vec!["--redundancy".into(), redundancy.into()]].concat()
    };
    ask(&site, &words(&site, ways[0])).completed_split();
    let mut random = Random::seeded();
    let mut turn = 0;
    for round in 0..times(5, 60) {
        turn = (turn + 1 + random.below(4) as usize) % ways.len();
        let words = words(&site, ways[turn]);
        let died = a_daemon_dies_meanwhile(&mut site, &mut random, &words, &["a", "a", "b", "c", "d", "e"], 900);
        println!("round {round}: {:?}, daemon of {died}", ways[turn]);
    }
    for way in ways {
        site.eventually("it has what it is told to", || ask(&site, &words(&site, way)).code == 0);
        site.checker_is_well();
    }
    site.eventually("it is merged", || ask(&site, &merge_words(&site)).code == 0);
    given_back_at(&site, &LENDERS);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
}
