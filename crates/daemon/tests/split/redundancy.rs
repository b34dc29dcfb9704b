//! The redundancy of a machine that is split is changed while its guest runs, and so is over how many memory hosts its
//! parity lies.

use super::onward::merged;
use super::parity::is_whole;
use super::*;

fn lenders<const COUNT: usize>() -> [Host; COUNT] {
    [(); COUNT].map(|()| lender(128))
}

/// What each of them lends.
const EACH: u64 = 50 * (MIB + 4096);

/// The request to have 16 MiB here, and the rest over these hosts.
fn over(lenders: &[&Host], redundancy: &str) -> Value {
    let mut request = request(16, lenders);
    request["redundancy"] = redundancy.into();
    request
}

/// A machine with more content than may be here: some of it is away, however often all of it comes and leaves.
pub fn run_fuller(host: &Host) {
    host.run_full("m");
    let ram = File::options().write(true).open(host.ram_of("m")).expect("its RAM");
    ram.write_all_at(&content(host), FULL.end).expect("room");
}

fn addresses(lenders: &[&Host]) -> Vec<String> {
    lenders.iter().map(|lender| lender.address()).collect()
}

#[test]
fn the_redundancy_of_a_machine_is_changed_and_so_is_over_how_many_hosts_its_parity_lies() {
    if cannot_run() {
        return;
    }
    let (mut host, four) = (Host::start(), lenders::<4>());
    let [a, b, c, d] = four.each_ref();
    run_fuller(&host);
    let before = content(&host);
    done(&host, SPLIT, &over(&[a, b], "none"));
    let steps = [
        (over(&[a, b, c], "parity"), vec![a, b, c], "parity"),
        (over(&[a, c], "copies=2"), vec![a, c], "copies=2"),
        (over(&four.each_ref(), "parity"), vec![a, b, c, d], "parity"),
        (over(&[d, b, a], "parity"), vec![d, b, a], "parity"),
        (over(&[b, c], "none"), vec![b, c], "none"),
    ];
    for (turn, (wanted, has, redundancy)) in steps.into_iter().enumerate() {
        done(&host, SPLIT, &wanted);
        let (mut lend, mut named) = (memory_of(&host), addresses(&has));
        lend.0.sort();
        named.sort();
        assert_eq!(lend, (named, vec![]));
        let shown = host.get("/v1/vms/m")["split"].clone();
        assert!(shown["redundancy"] == redundancy && number(&shown, "away_pages") > 0, "{shown}");
        if redundancy != "none" {
            is_whole(&host);
        }
        let others: Vec<_> = four.iter().filter(|one| !has.iter().any(|other| std::ptr::eq(*one, *other))).collect();
        is_paid(&host, &others);
        if turn == 2 {
            host.kill_daemon();
            host.start_daemon();
            eventually("all have answered", || {
                host.ask("POST", SPLIT, Some(&json!({ "here_bytes": 20 * MIB }))).1["status"] == "completed"
            });
        }
    }
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    is_paid(&host, &four.each_ref());
}

/// Nobody is there to take its place: the others have parity of fewer, and whoever is gone is owed what it lent.
#[test]
fn parity_lies_over_fewer_hosts_where_one_is_gone_for_good() {
    if cannot_run() {
        return;
    }
    let (host, mut four) = (Host::start(), lenders::<4>());
    run_fuller(&host);
    let before = content(&host);
    done(&host, SPLIT, &over(&four.each_ref(), "parity"));
    is_whole(&host);
    four[2].kill_daemon();
    done(&host, SPLIT, &over(&[&four[0], &four[1], &four[3]], "parity"));
    is_whole(&host);
    eventually("what was lent before is back", || [1, 3].iter().all(|which| lent(&four[*which]).0 == EACH));
    four[0].kill_daemon();
    done(&host, SPLIT, &mirrored(16, &[&four[1], &four[3]]));
    four[1].kill_daemon();
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    [0, 1, 2].iter().for_each(|which| four[*which].start_daemon());
    is_paid(&host, &four.each_ref());
}

/// The same by itself, and again: with parity of three, then with copies at two.
#[test]
fn a_machine_goes_on_without_memory_hosts_by_itself_one_after_the_other() {
    if cannot_run() {
        return;
    }
    let (host, mut four) = (Host::configured("spare_after = '0s'"), [(); 4].map(|()| lender(256)));
    run_fuller(&host);
    let before = content(&host);
    done(&host, SPLIT, &over(&four.each_ref(), "parity"));
    is_whole(&host);
    let has = |four: &[Host; 4], which: &[usize], redundancy: &str| {
        let split = host.get("/v1/vms/m")["split"].clone();
        let left: Vec<_> = which.iter().map(|one| four[*one].address()).collect();
        memory_of(&host) == (left, vec![]) && split["redundancy"] == redundancy
    };
    let goes = |four: &mut [Host; 4], which: usize| four[which].kill_daemon();
    for (gone, left, redundancy) in [(1, &[0, 2, 3][..], "parity"), (3, &[0, 2][..], "copies=2")] {
        goes(&mut four, gone);
        eventually("the others go on without it", || has(&four, left, redundancy));
        is_whole(&host);
    }
    goes(&mut four, 0);
    done(&host, MERGE, &Value::Null);
    is_as_before(&host, &before);
    [0, 1, 3].iter().for_each(|which| four[*which].start_daemon());
    is_paid(&host, &four.each_ref());
}

/// It waits for two of three. Who calls it off has both, a daemon that comes back goes on, and a person may go back.
#[test]
fn a_change_of_redundancy_that_was_called_off_is_gone_on_with_or_taken_back() {
    if cannot_run() {
        return;
    }
    let (mut host, mut all) = (Host::start(), lenders::<5>());
    run_fuller(&host);
    let before = content(&host);
    let first = |all: &[Host; 5]| over(&[&all[0], &all[1], &all[2]], "parity");
    let peers = |all: &[Host; 5], which: &[usize]| which.iter().map(|one| all[*one].address()).collect::<Vec<_>>();
    done(&host, SPLIT, &first(&all));
    is_whole(&host);
    for goes_back in [true, false] {
        [0, 1].iter().for_each(|which| all[*which].kill_daemon());
        let asked = over(&[&all[3], &all[4]], "none");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| host.ask("POST", SPLIT, Some(&asked)));
            eventually("the former ones are leaving", || memory_of(&host).1 == peers(&all, &[0, 1, 2]));
            assert_eq!(host.ask("POST", "/v1/vms/m/cancel", None).0, 202);
            let report = asking.join().expect("an answer").1;
            assert!(report["status"] == "cancelled" && report.to_string().contains("stays with them"), "{report}");
            let hint = report["error"]["hint"].as_str().unwrap_or_default();
            assert!(hint.contains("goes on with it") && hint.contains("goes back"), "{report}");
        });
        assert_eq!(memory_of(&host), (peers(&all, &[3, 4]), peers(&all, &[0, 1, 2])));
        let (status, problem) = host.ask("POST", "/v1/migrations", Some(&json!({ "vms": ["m"], "to": "127.0.0.1:1" })));
        assert!(status >= 400 && problem.to_string().contains("coming back"), "{status} {problem}");
        [0, 1].iter().for_each(|which| all[*which].start_daemon());
        if goes_back {
            done(&host, SPLIT, &first(&all));
            assert_eq!(memory_of(&host), (peers(&all, &[0, 1, 2]), vec![]));
            is_whole(&host);
            is_paid(&host, &[&all[3], &all[4]]);
        } else {
            host.kill_daemon();
            host.start_daemon();
            eventually("they have left", || memory_of(&host) == (peers(&all, &[3, 4]), vec![]));
            is_paid(&host, &[&all[0], &all[1], &all[2]]);
        }
    }
    merged(&host);
    is_as_before(&host, &before);
    is_paid(&host, &all.each_ref());
}
