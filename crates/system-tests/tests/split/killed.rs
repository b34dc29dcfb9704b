//! Daemons are killed at each step of a move, and of a merge: each record that they write down, and each message by
//! which a guest that is split changes hands.

use sterna_system_tests::cli::Attempt;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::random::Random;
use sterna_system_tests::steps::Steps;
use sterna_system_tests::{Plan, Point, Proxy, Site, needs, skip_without, turn};

use super::{HERE, all_is_given_back, ask, away, given_back_at, lending_by, merge_words, site, split, words_over};

/// The messages from the guest's stop on, of a guest that is split.
const MESSAGES: [Point; 9] = [
    Point::Request("stopped"),
    Point::Request("away"),
    Point::Request("away-end"),
    Point::Request("final-round-end"),
    Point::Reply("final-round-end"),
    Point::Request("load"),
    Point::Reply("load"),
    Point::Request("commit"),
    Point::Reply("commit"),
];

/// Those of what goes past the guest's next host: nothing does where both sides are compared.
const STRAIGHT: [Point; 2] = [Point::Request("straight"), Point::Reply("straight")];

/// The same where the rest of its pages follows it.
const MESSAGES_OF_POSTCOPY: [Point; 16] = [
    Point::Request("stopped"),
    Point::Request("away"),
    Point::Request("away-end"),
    Point::Request("load-postcopy"),
    Point::Reply("load-postcopy"),
    Point::Request("commit"),
    Point::Reply("commit"),
    STRAIGHT[0],
    STRAIGHT[1],
    Point::Request("paging"),
    Point::Reply("paging"),
    Point::Request("complete"),
    Point::Reply("complete"),
    Point::Request("chunk-digests"),
    Point::Request("release"),
    Point::Reply("release"),
];

/// Whose daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    MemoryHost,
}

impl Victim {
    fn host(self, site: &Site) -> &'static str {
        match self {
            Self::Source => site.names().0,
            Self::Destination => site.names().1,
            Self::MemoryHost => "c",
        }
    }
}

/// Some of these every day; in the long proof each of them 20 times.
fn chosen<T: Copy>(all: &[T]) -> Vec<T> {
    let mut random = Random::seeded();
    let some = (0..3).map(|_| all[random.below(all.len() as u64) as usize]).collect();
    if times(0, 1) == 0 { some } else { (0..20).flat_map(|_| all).copied().collect() }
}

/// A split guest on `a`, whose memory hosts are `c` and `d`.
pub fn on_its_way() -> Site {
    let hosts = ["a", "b", "c", "d"].map(str::to_owned).into();
    let site = lending_by(Site::start(&Plan { hosts, ..Plan::small() }), &["c", "d"]);
    ask(&site, &words_over(&site, HERE, &[("c", 200), ("d", 200)])).completed_split();
    site
}

fn begin(site: &Site, detour: Option<&str>, mode: &str) -> Attempt {
    begin_with(site, detour, mode, &["--verify"])
}

fn begin_with(site: &Site, detour: Option<&str>, mode: &str, more: &[&str]) -> Attempt {
    // Slow enough for its pages to be on their way when it is killed.
    let slowly: &[&str] = if mode == "precopy" { &[] } else { &["--postcopy-bandwidth", "20MB"] };
    site.begin(detour, &[&["--mode", mode], more, slowly].concat())
}

/// Begins something, and kills the daemon of a host at the step of this number, of which the name is returned: none
/// where it had ended before. The next daemon is there then.
fn killed_at(
    site: &mut Site,
    steps: &Steps,
    (host, step): (&str, usize),
    begin: impl FnOnce(&Site) -> Attempt,
) -> (Attempt, Option<String>) {
    steps.begin(site.daemon_at(host), Some(step));
    let mut attempt = begin(site);
    let name = steps.wait(|| attempt.has_ended());
    if name.is_some() {
        steps.kill();
        site.kill_daemon(host);
        site.start_daemon(host);
    }
    (attempt, name)
}

/// Whatever became of it, one host has the guest, with every page that it wrote, and what is away is where it was.
fn is_whole(site: &mut Site, attempt: Attempt, what: &str) {
    let answer = attempt.end();
    let verify = answer.report().map(|report| report.verify).unwrap_or_default();
    assert!(answer.code != 2 && verify.mismatches == 0, "{what}: {answer:#?}");
    let (here, there) = site.names();
    let runs = |host: &&str| site.state_at(host) == "running";
    site.eventually("one host has it", || [here, there].iter().filter(|host| runs(host)).count() == 1);
    let moved = runs(&there);
    if moved {
        site.moved();
    }
    println!("{what}: exit status {}, it has moved: {moved}", answer.code);
    site.nothing_is_left_there();
    site.is_heard_of();
    is_ready(site);
    assert!(away(site).is_some_and(|pages| pages > 0), "{what}: nothing of it is away");
}

/// Its pages have come, and its memory hosts have answered: before, it is not moved again.
fn is_ready(site: &Site) {
    site.eventually("its memory hosts have answered", || ask(site, &words_over(site, HERE, &[])).code == 0);
}

/// All of its guest's pages are as it wrote them, and it is a guest as any other.
fn comes_together(mut site: Site) {
    site.checker_is_well();
    site.eventually("it is merged", || ask(&site, &merge_words(&site)).code == 0);
    given_back_at(&site, &["c", "d"]);
    site.migrate(&[]);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
}

#[test]
fn a_split_guest_that_moves_is_whole_at_whichever_record_a_daemon_of_its_is_killed() {
    at_each_record("precopy");
}

#[test]
fn a_split_guest_whose_pages_follow_it_is_whole_at_whichever_record_a_daemon_of_its_is_killed() {
    at_each_record("postcopy");
}

fn at_each_record(mode: &str) {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = on_its_way();
    let steps = Steps::of(&mut site, &["a", "b"]);
    site.eventually("its memory hosts have answered", || begin(&site, None, mode).end().code == 0);
    site.moved();
    let mut all = Vec::new();
    for victim in [Victim::Source, Victim::Destination] {
        is_ready(&site);
        steps.begin(site.daemon_at(victim.host(&site)), None);
        begin(&site, None, mode).end().expect(0, &[]);
        site.moved();
        site.nothing_is_left_there();
        let taken = steps.end();
        println!("{victim:?}: {taken:?}");
        all.extend((0..taken.len()).map(|step| (victim, step)));
    }
    for (number, (victim, step)) in chosen(&all).into_iter().enumerate() {
        let host = victim.host(&site);
        let (attempt, name) = killed_at(&mut site, &steps, (host, step), |site| begin(site, None, mode));
        is_whole(&mut site, attempt, &format!("{number}: {victim:?} {step} {name:?}"));
        if number % all.len() == 0 {
            site.checker_is_well();
        }
    }
    drop(steps);
    comes_together(site);
}

#[test]
fn a_split_guest_that_moves_is_whole_at_whichever_message_a_daemon_of_its_is_killed() {
    at_each_message("precopy", &MESSAGES);
}

#[test]
fn a_split_guest_whose_pages_follow_it_is_whole_at_whichever_message_a_daemon_of_its_is_killed() {
    at_each_message("postcopy", &MESSAGES_OF_POSTCOPY);
}

fn at_each_message(mode: &str, messages: &[Point]) {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = on_its_way();
    let victims = [Victim::Source, Victim::Destination, Victim::MemoryHost];
    let all: Vec<_> = victims.iter().flat_map(|victim| messages.iter().map(|point| (*victim, *point))).collect();
    for (number, (victim, point)) in chosen(&all).into_iter().enumerate() {
        let (host, proxy) = (victim.host(&site), Proxy::start(site.here(), site.there()));
        proxy.hold(point);
        let verify: &[&str] = if STRAIGHT.contains(&point) { &[] } else { &["--verify"] };
        let attempt = begin_with(&site, Some(&proxy.address), mode, verify);
        proxy.wait_until_held();
        site.kill_daemon(host);
        match victim {
            // It is asked by both of the others, and is back a moment later.
            Victim::MemoryHost => proxy.release(),
            _ => proxy.cut(),
        }
        site.start_daemon(host);
        is_whole(&mut site, attempt, &format!("{number}: {victim:?} {point:?}"));
        if number % all.len() == 0 {
            site.checker_is_well();
        }
    }
    comes_together(site);
}

#[test]
fn a_guest_that_is_merged_is_whole_at_whichever_record_its_daemon_is_killed() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = site();
    let steps = Steps::of(&mut site, &["a"]);
    let merge = |site: &Site| {
        let words = merge_words(site);
        Attempt::run(site.here(), &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    site.eventually("it can be split", || ask(&site, &super::words(&site, HERE)).code == 0);
    steps.begin(site.daemon_at("a"), None);
    merge(&site).end().completed_split();
    all_is_given_back(&site);
    let taken = steps.end();
    println!("{taken:?}");
    let all: Vec<usize> = (0..taken.len()).collect();
    for (number, step) in chosen(&all).into_iter().enumerate() {
        if away(&site).is_none() {
            split(&site, HERE);
        }
        let (attempt, name) = killed_at(&mut site, &steps, ("a", step), merge);
        let code = attempt.end().code;
        site.eventually("it is merged", || away(&site).is_none() || ask(&site, &merge_words(&site)).code == 0);
        all_is_given_back(&site);
        println!("{number}: {step} {name:?}: exit status {code}");
        site.is_heard_of();
        if number % all.len() == 0 {
            site.checker_is_well();
        }
    }
    drop(steps);
    site.checker_is_well();
    site.migrate(&[]);
    site.checker_is_well();
    site.ran_on_one_host_at_a_time();
}
