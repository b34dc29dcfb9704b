//! A running guest goes on as several: each keeps what it had, none sees what another writes, whatever ends in the
//! middle of it.

/// Clones on other hosts.
mod away;

/// One whose balloon is moving.
mod balloon;

/// Who is killed while a guest is forked.
mod faults;

/// Each has an overlay of the disk that it writes.
mod overlays;

/// Overlays of clones on other hosts.
mod overlays_away;

/// What ends while overlays are made and taken into use.
mod overlay_faults;

/// What becomes of network cards, and of trust groups.
mod network;

/// A guest that was cloned knows it, and one that was moved does not take itself for a clone.
mod generation;

/// Clones that are held ready, and families.
mod warm;

use std::collections::HashSet;

use sterna_api::{Forked, MemoryMode, Vm, VmState};
use sterna_bench::footprint;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::site::files;
use sterna_system_tests::{Answer, Attempt, Plan, Site, cli, needs, skip_without, turn};

const MIB: u64 = 1 << 20;

/// A guest that writes a part of its memory all the time, and the rest seldom.
fn plan() -> Plan {
    Plan { jobs: "checker:--mib,24,--rate,8".into(), run: Vec::new(), ..Plan::small() }
}

/// Runs a test with a guest `origin` on host `a` that is up, in this memory mode.
fn with_origin(mode: &str, test: impl FnOnce(&mut Site)) {
    with_origin_of(&["--memory-mode", mode], plan, test);
}

/// The same with these words of `run` and on hosts of this plan.
fn with_origin_of(run: &[&str], plan: fn() -> Plan, test: impl FnOnce(&mut Site)) {
    let _turn = turn();
    if left_to_another_day(18) || skip_without(&needs::GUEST) {
        return;
    }
    let mut site = Site::without_guest(&plan());
    {
        let origin = Member::new(&site, "origin");
        origin.run(&plan(), run, &[]);
        origin.is_well();
    }
    test(&mut site);
}

fn fork(site: &Site, name: &str, clones: &[&str]) -> Answer {
    cli::ask(site.host("a"), &[&["fork", name, "--json", "-"], clones].concat())
}

fn forked(answer: &Answer) -> Forked {
    answer.expect(0, &[]);
    let forked: Forked = serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"));
    println!(
        "{}: paused {:.1} ms, {:.0} ms in all, {} MiB copied, {} KiB of them in the pause, {} pieces",
        forked.vm,
        forked.pause_ms,
        forked.ms,
        forked.copied_bytes / MIB,
        forked.copied_in_pause_bytes / 1024,
        forked.pieces
    );
    forked
}

fn machines(site: &Site) -> Vec<Vm> {
    let answer = cli::ask(site.host("a"), &["ps", "--json"]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
}

/// The daemon dies while it does what was asked for; a new one lets the source run.
fn daemon_dies_in(site: &mut Site, attempt: Attempt) {
    site.kill_daemon("a");
    daemon_comes_back(site, attempt);
}

/// A new daemon lets the source run, after one that died while it did what was asked for.
fn daemon_comes_back(site: &mut Site, attempt: Attempt) {
    drop(attempt.end());
    site.start_daemon("a");
    site.eventually("the source runs", || {
        machines(site).iter().any(|vm| vm.name == "origin" && vm.state == VmState::Running)
    });
}

/// These guests are well, and each is in a process of its own.
fn are_well(site: &Site, names: &[&str]) {
    let members: Vec<Member<'_>> = names.iter().map(|name| Member::new(site, name)).collect();
    members.iter().for_each(Member::is_well);
    let processes: HashSet<u32> = members.iter().map(|member| member.shown("a").pid).collect();
    assert_eq!(processes.len(), names.len());
}

#[test]
fn a_guest_in_shared_memory_its_clones_and_theirs_each_go_on_and_share_what_nobody_has_written() {
    with_origin("shared", |site| {
        let report = forked(&fork(site, "origin", &["one", "two"]));
        assert_eq!((report.clones.len(), report.failed.len(), report.copied_bytes), (2, 0, 0), "{report:#?}");
        are_well(site, &["origin", "one", "two"]);
        let origin = Member::new(site, "origin");
        assert_eq!(origin.shown("a").memory_mode, MemoryMode::Private);
        // What they have written since is each one's own, and becomes common to its clones.
        let report = forked(&fork(site, "origin", &["three"]));
        assert!(report.copied_bytes >= MIB, "{report:#?}");
        forked(&fork(site, "one", &["four", "five"]));
        let names = ["origin", "one", "two", "three", "four", "five"];
        are_well(site, &names);
        let ram = |name: &&str| {
            footprint::Ram::of(Member::new(site, name).shown("a").pid, plan().memory_bytes).expect("its RAM")
        };
        let together = footprint::of(&names.iter().map(ram).collect::<Vec<_>>()).expect("their frames");
        let alone = footprint::of(&[ram(&"two")]).expect("its frames");
        println!("six: {} frames, one alone: {}", together.frames, alone.frames);
        assert!(together.frames < 3 * alone.frames, "six of them take as much as three would");
        // Each can be moved, and arrives as it was.
        let two = Member::new(site, "two");
        two.migrate(&["--verify"]).expect(0, &[]);
        two.is_well();
        // And ends, whatever the others have of it.
        for name in ["origin", "four"] {
            cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
        }
        are_well(site, &["one", "three", "five"]);
        for name in ["one", "three", "five"] {
            cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
        }
        site.eventually("nothing is left of any", || files(site.host("a")).is_empty());
    });
}

#[test]
fn forks_in_a_row_leave_each_guest_whole_and_grow_nothing() {
    with_origin("private", |site| {
        let mut pieces = Vec::new();
        for number in 0..times(3, 100) {
            let name = format!("n{number}");
            pieces.push(forked(&fork(site, "origin", &[&name])).pieces);
            are_well(site, &["origin", &name]);
            cli::ask(site.host("a"), &["stop", &name, "--force"]).expect(0, &[]);
        }
        println!("pieces: {pieces:?}");
        let watching = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", site.daemon_at("a"))).expect("the daemon runs");
            let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            tasks.flatten().map(name).filter(|name| name.trim() == "watch-origin").count()
        };
        assert_eq!(watching(), 1, "each fork leaves a thread");
        let origin = Member::new(site, "origin");
        // The last one's pages go within seconds: nobody but the source has them any more.
        let ram = || footprint::Ram::of(origin.shown("a").pid, plan().memory_bytes).expect("its RAM");
        let own = footprint::of(&[ram()]).expect("its frames").frames * 4096;
        site.eventually("the host holds no more than the guest has", || {
            let held = sterna_system_tests::census::ram_bytes(site.host("a")) + origin.shown("a").allocated_bytes;
            held < own + own / 4
        });
        origin.is_well();
    });
}

#[test]
fn what_cannot_be_forked_is_refused_and_runs_on_and_one_that_is_paused_is_forked_as_it_stands() {
    with_origin("shared", |site| {
        refusals(site);
        let (origin, clone) = (Member::new(site, "origin"), Member::new(site, "held"));
        origin.tell(site.host("a"), "stop");
        let report = forked(&fork(site, "origin", &["held", "--paused"]));
        assert!(report.pause_ms == 0.0 && report.clones.len() == 1, "{report:#?}");
        assert_eq!((origin.shown("a").state, clone.shown("a").state), (VmState::Paused, VmState::Paused));
        clone.tell(site.host("a"), "cont");
        clone.is_well();
        origin.tell(site.host("a"), "cont");
        are_well(site, &["origin", "held"]);
    });
}

fn refusals(site: &Site) {
    let pid = Member::new(site, "origin").shown("a").pid;
    fork(site, "nobody", &["x"]).expect(1, &["no virtual machine 'nobody'"]);
    fork(site, "origin", &["origin"]).expect(1, &["there already is"]);
    fork(site, "origin", &["x", "x"]).expect(2, &["two clones"]);
    fork(site, "origin", &["../x"]).expect(2, &["cannot be a machine's name"]);
    // A clone whose QEMU does not start, beside one whose does: neither is there.
    fork(site, "origin", &["x", "y", "--", "-device", "nonsense"]).expect(1, &["nonsense"]);
    // One whose devices are others: QEMU refuses the state, and the source runs on.
    let bare = ["x", "--", "-nodefaults", "-display", "none", "-machine", "pc-q35-7.2", "-accel", "tcg"];
    fork(site, "origin", &bare).expect(1, &[]);
    let shown = Member::new(site, "origin").shown("a");
    assert_eq!((shown.pid, shown.state), (pid, VmState::Running));
    are_well(site, &["origin"]);

    let directory = tempfile::tempdir().expect("a directory");
    let disk = directory.path().join("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).expect("a disk");
    let run = |name: &str, words: &[&str]| {
        let head = ["run", name, "--memory", "32M", "--detach", "--", "-nodefaults", "-display", "none"];
        cli::ask(site.host("a"), &[&head[..], words].concat()).expect(0, &[]);
    };
    let drive = format!("if=virtio,format=raw,file={}", disk.display());
    run("disk", &["-accel", "tcg", "-drive", &drive]);
    fork(site, "disk", &["x"]).expect(1, &["would write the same disk"]);
    let socket = format!("unix:{},server=on,wait=off", directory.path().join("serial").display());
    run("socket", &["-accel", "tcg", "-serial", &socket]);
    fork(site, "socket", &["x"]).expect(1, &["take the source's socket", "{name}"]);
    assert!(directory.path().join("serial").exists());
    let locked = ["-accel", "tcg", "-overcommit", "mem-lock=on"];
    run("locked", &locked);
    fork(site, "locked", &["x"]).expect(1, &["locked memory"]);
    let names: Vec<String> = ["disk", "socket", "locked"].map(String::from).into();
    for name in &names {
        assert_eq!(Member::new(site, name).shown("a").state, VmState::Running);
        cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
    }
    are_well(site, &["origin"]);
}
