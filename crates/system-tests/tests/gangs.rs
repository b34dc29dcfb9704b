//! Gangs: guests that share pages move together, each right, and as small as before.

use nix::sys::signal::Signal;
use sterna_bench::command::{PATIENCE, wait_for};
use sterna_bench::ksm::Ksm;
use sterna_system_tests::gang::GangSite;
use sterna_system_tests::needs::{left_to_another_day, left_to_the_proofs};
use sterna_system_tests::{cli, needs, skip_without, turn};

/// A checker in each guest, none of whose pages is ever equal to another guest's; kernel and image are equal in all.
const JOBS: &str = "checker:--mib,16,--rate,2,--seed,1{number}";
/// Beside it one whose pages are equal in all guests now and then: they are merged, and written again.
const MORE: &str = ";checker:--mib,2,--rate,1";

#[test]
fn a_gang_arrives_as_small_as_it_left_in_every_mode_and_every_guest_has_its_own_memory() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let Ok(ksm) = Ksm::take() else {
        return println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
    };
    let mut site = GangSite::start(3, JOBS);
    ksm.settle(std::time::Duration::from_secs(600), || Ok(site.footprint().frames)).expect("merged");
    for mode in ["--mode precopy", "--mode hybrid", "--mode postcopy", "--mode auto --compress lz4 --streams 2"] {
        let before = site.footprint();
        let moved = site.migrate(mode, true);
        let after = site.footprint();
        let references: u64 = moved.iter().map(|one| one.shared_references).sum();
        let sent: u64 = moved.iter().map(|one| one.pages_sent).sum();
        println!("{mode}: {before:?} -> {after:?}, {references} references, {sent} bodies");
        site.checkers_are_well();
        assert!(references > 0, "{mode}");
        // The guests run on, and write pages that they shared.
        assert!(after.frames as f64 <= before.frames as f64 * 1.05 + 2000.0, "{mode}: {before:?} -> {after:?}");
    }
}

#[test]
fn whoever_of_a_gang_does_not_arrive_costs_itself_alone() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let Ok(ksm) = Ksm::take() else {
        return println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
    };
    let site = GangSite::start(3, JOBS);
    ksm.settle(std::time::Duration::from_secs(600), || Ok(site.footprint().frames)).expect("merged");
    let all = ["g0", "g1", "g2"];
    let ended = site.disturbed(&all, ["a", "b"], |from| {
        cli::ask(from, &["cancel", "g0"]).expect(0, &[]);
    });
    assert_eq!(ended, ["cancelled", "completed", "completed"]);
    site.are_well(&all);
    // What was to come with it is not waited for: it comes alone.
    let hosts = ["a", "b"].map(|name| site.lab.host(name).expect("a host"));
    let answer = cli::ask(hosts[0], &["migrate", "g0", "--to", &hosts[1].listen(), "--verify", "--json", "-"]);
    let report: serde_json::Value = serde_json::from_str(&answer.stdout).expect("a report");
    assert_eq!(report["verify"]["mismatches"], 0, "{report:#}");
    // It shares with those that are there: of a guest of its own it has some 2,000 pages at most.
    let pages = |name: &str| report["pages"][name].as_u64().unwrap_or(0);
    println!("it refers to {} pages and sends {}", pages("shared_reference"), pages("sent"));
    assert!(pages("shared_reference") > 1000, "{report:#}");
    site.are_well(&all);
    let ended = site.disturbed(&all, ["b", "a"], |_| site.signal_qemu("g1", "b", Signal::SIGKILL));
    assert_eq!(ended, ["completed", "failed", "completed"]);
    site.are_well(&["g0", "g2"]);
}

/// KSM merges and un-merges frames at every moment of the moves, also those of the source with those of the
/// destination: both are one kernel here.
#[test]
fn eight_guests_go_to_and_fro_in_every_mode_while_their_frames_are_merged() {
    let _turn = turn();
    if left_to_the_proofs() || skip_without(&needs::GUEST) {
        return;
    }
    let Ok(ksm) = Ksm::take() else {
        return println!("skipped: this kernel does not merge equal pages, or does not let this user ask for it");
    };
    let mut site = GangSite::start(8, &format!("{JOBS}{MORE}"));
    ksm.settle(std::time::Duration::from_secs(600), || Ok(site.footprint().frames)).expect("merged");
    ksm.scan().expect("KSM scans");
    let most: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    // The guests write what was merged while they stood still: only then is it as it stays.
    let mut frames = site.footprint().frames;
    let stays = || {
        std::thread::sleep(std::time::Duration::from_secs(4));
        let before = std::mem::replace(&mut frames, site.footprint().frames);
        Ok((frames <= before + before / 1000).then_some(()))
    };
    wait_for("a footprint that stays", PATIENCE, stays).expect("it stays");
    for mode in ["precopy", "postcopy", "hybrid"] {
        for number in 0..20 {
            let (before, watch) = (site.footprint(), site.watch_there());
            let moved = site.migrate(&format!("--mode {mode}"), true);
            let (peak, after) = (watch.finish().frames, site.footprint());
            let references: u64 = moved.iter().map(|one| one.shared_references).sum();
            let mappings = site.most_mappings();
            let ratio = |frames| frames as f64 / before.frames as f64;
            println!(
                "{mode} {number}: {} frames, at most x {:.3}, after x {:.3}, {references} references, {mappings} mappings",
                before.frames,
                ratio(peak),
                ratio(after.frames)
            );
            site.checkers_are_well();
            assert!(references > 0 && mappings < most, "{mode} {number}");
            assert!(ratio(peak) <= 1.05, "{mode} {number}");
        }
    }
}
