use sterna_bench::tools;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Plan, Site, cli, turn};

use super::{Disks, faults, is_well, left_out, plan, processes, qemus, replaced, to_and_fro};

#[test]
fn a_guest_in_private_memory_goes_to_and_fro_and_only_what_it_has_written_is_copied() {
    to_and_fro("private");
}

#[test]
fn a_new_qemu_that_is_killed_before_it_has_a_guest_in_private_memory_leaves_it() {
    faults::new_qemu_dies("private");
}

#[test]
fn whenever_the_daemon_is_killed_a_guest_in_private_memory_is_whole_and_in_one_qemu() {
    faults::daemons_die("private", 11);
}

#[test]
fn whichever_qemu_of_a_guest_in_private_memory_is_killed_and_whenever_the_guest_is_in_the_other_or_ended() {
    faults::qemus_die("private", 17);
}

/// What guests have in common stays so: a guest that was forked gets another QEMU, and so does its clone.
#[test]
fn a_guest_that_was_forked_and_its_clone_each_get_another_qemu_and_stay_apart() {
    let _turn = turn();
    if left_out() {
        return;
    }
    let plan = Plan { run: Vec::new(), cpu: Some("qemu64".into()), ..Plan::small() };
    let site = Site::without_guest(&plan);
    let origin = Member::new(&site, "origin");
    origin.run(&plan, &["--memory-mode", "shared"], &[]);
    origin.is_well();
    let mut random = Random(3);
    for number in 0..times(2, 20) {
        let clone = format!("n{number}");
        cli::ask(site.host("a"), &["fork", "origin", &clone]).expect(0, &[]);
        let copy = Member::new(&site, &clone);
        for _ in 0..2 {
            let one = [&origin, &copy][random.below(2) as usize];
            let qemu = qemus()[random.below(2) as usize].display().to_string();
            let words = ["replace", &one.guest.name, "--verify", "--json", "-", "--qemu", &qemu];
            let report = replaced(&cli::ask(site.host("a"), &words));
            assert!(report.verify.checked && report.verify.mismatches == 0, "{report:#?}");
            println!(
                "{}: paused {:.1} ms, {:.0} ms in all, {} KiB copied",
                report.vm,
                report.pause_ms,
                report.ms,
                report.copied_bytes >> 10
            );
            origin.is_well();
            copy.is_well();
        }
        cli::ask(site.host("a"), &["stop", &clone, "--force"]).expect(0, &[]);
    }
    origin.migrate(&["--verify"]).expect(0, &[]);
    origin.is_well();
}

#[test]
fn a_guest_in_private_memory_whose_disk_is_read_past_qemu_untold_stays_where_it_is() {
    let _turn = turn();
    if left_out() {
        return;
    }
    let disks = Disks::make();
    let untold = disks.read.arguments_with("cache=none,aio=io_uring");
    let plan = Plan { more: [untold, disks.written.words()].concat(), ..plan(&disks, "private") };
    let site = Site::start(&plan);
    let before = processes(&site);
    let qemu = tools::qemu_10_0().expect("looked for before").display().to_string();
    super::replace(&site, &["--qemu", &qemu]).expect(1, &["direct I/O", "aio=threads"]);
    assert_eq!(processes(&site), before);
    is_well(&site, &disks);
}
