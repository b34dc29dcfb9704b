use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sterna_api::{Forked, VmState};
use sterna_bench::baseline::qmp::Qmp;
use sterna_bench::command::wait_for;
use sterna_system_tests::cli::Answer;
use sterna_system_tests::images::Images;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Attempt, PATIENCE, Site, cli};

use super::faults::qemus;
use super::overlays::{moved, read_what_they_wrote, top, used, wait_until_forking, with_disks};
use super::{are_well, daemon_comes_back, fork, forked, machines};

/// The names of the machines that are there.
fn names(site: &Site) -> Vec<String> {
    machines(site).into_iter().map(|vm| vm.name).collect()
}

/// Every overlay has its user, and all who are there are well and read what they wrote.
fn all_is_well(site: &Site, images: &Images) {
    let there = names(site);
    let in_use = || there.iter().flat_map(|name| used(site, "a", name)).collect::<HashSet<_>>();
    site.eventually("every overlay has its user", || images.overlays().is_subset(&in_use()));
    let all: Vec<&str> = there.iter().map(String::as_str).collect();
    are_well(site, &all);
    read_what_they_wrote(site, &all);
}

/// Ends a clone, and removes its overlays.
fn end(site: &Site, name: &str) {
    let own = used(site, "a", name);
    let origin = used(site, "a", "origin");
    cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
    own.difference(&origin).for_each(|path| std::fs::remove_file(path).expect("its overlay"));
}

/// A clone's QEMU dies: as soon as it is there, when the source is about to pause, and a while later. The disks are a
/// raw one and one in qcow2.
#[test]
fn a_clone_s_qemu_that_dies_leaves_no_overlay_and_the_others_write_on() {
    with_disks(true, &[], |site, images| {
        let mut random = Random(7);
        for number in 0..times(3, 30) {
            let clones = [format!("x{number}"), format!("y{number}")];
            let before = qemus(site);
            let words = ["fork", "origin", &clones[0], &clones[1], "--overlay-disks", "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            let clone =
                wait_for("a clone's QEMU", PATIENCE, || Ok(qemus(site).into_iter().find(|pid| !before.contains(pid))));
            let clone = clone.expect("a clone's QEMU");
            if number % 3 > 0 {
                wait_until_forking(site);
            }
            let delay = Duration::from_micros(if number % 3 == 2 { random.below(150_000) } else { 0 });
            std::thread::sleep(delay);
            let _ = kill(Pid::from_raw(clone.cast_signed()), Signal::SIGKILL);
            let answer = attempt.end();
            println!("{number}, after {delay:?}: {}", answer.stderr.lines().next().unwrap_or_default());
            site.eventually("who was killed is gone", || !machines(site).iter().any(|vm| vm.pid == clone));
            assert!(names(site).contains(&"origin".to_owned()));
            // A clone that ran when it was killed keeps its overlays, as any machine does: those of one that was made,
            // and of another where it has written to them.
            let (there, made) = (names(site), clones_of(&answer));
            let in_use: HashSet<PathBuf> = there.iter().flat_map(|name| used(site, "a", name)).collect();
            let ran: Vec<PathBuf> = images.overlays().difference(&in_use).cloned().collect();
            for path in &ran {
                let was_made = made.iter().any(|name| is_of(path, name));
                assert!(was_made || has_data(path), "nobody uses {}, and it is empty", path.display());
                std::fs::remove_file(path).expect("its overlay");
            }
            all_is_well(site, images);
            there.iter().filter(|name| *name != "origin").for_each(|name| end(site, name));
        }
        forked(&fork(site, "origin", &["last", "--overlay-disks"]));
        all_is_well(site, images);
        // Both of its disks go along.
        let before = used(site, "a", "last");
        moved(site, "last", "a", "b");
        assert_eq!(used(site, "b", "last"), before);
        read_what_they_wrote(site, &["last"]);
    });
}

/// The source's QEMU answers nothing from its pause on, for longer than anybody waits: its guest runs on once it does.
#[test]
fn a_source_whose_qemu_hangs_in_its_pause_runs_on_once_it_answers() {
    with_disks(false, &[], |site, images| {
        for number in 0.. {
            assert!(number < 20, "it has never hung in the pause");
            let origin = machines(site).into_iter().find(|vm| vm.name == "origin").expect("the source").pid;
            let origin = Pid::from_raw(origin.cast_signed());
            let clone = format!("x{number}");
            let words = ["fork", "origin", &clone, "--overlay-disks", "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            wait_until_forking(site);
            kill(origin, Signal::SIGSTOP).expect("its QEMU");
            let answer = attempt.end();
            println!("{number}: {}, {}", answer.code, answer.stderr.lines().next().unwrap_or_default());
            let is_asked = answer.stderr.contains("is asked again until");
            kill(origin, Signal::SIGCONT).expect("its QEMU");
            site.eventually("the source is as any other machine", || {
                let shown = machines(site).into_iter().find(|vm| vm.name == "origin");
                shown.is_some_and(|vm| vm.state == VmState::Running)
                    && on_record(site, "origin").is_some_and(|record| record["forking"].is_null())
            });
            all_is_well(site, images);
            names(site).iter().filter(|name| *name != "origin").for_each(|name| end(site, name));
            if is_asked {
                break;
            }
        }
        forked(&fork(site, "origin", &["after", "--overlay-disks"]));
        all_is_well(site, images);
    });
}

/// The clones that a fork says it has made.
fn clones_of(answer: &Answer) -> Vec<String> {
    let report: Option<Forked> = serde_json::from_str(&answer.stdout).ok();
    report.into_iter().flat_map(|forked| forked.clones).map(|clone| clone.vm).collect()
}

/// Whether an overlay is this machine's.
fn is_of(overlay: &Path, name: &str) -> bool {
    overlay.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}-")))
}

/// Whether an image is larger than what QEMU formats.
fn has_data(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.len() > 200 << 10)
}

/// The daemon dies when the source's disk is on its overlay by now, and the record does not say so yet. A socket of the
/// guest's user tells when that is.
#[test]
fn a_daemon_that_dies_between_the_disks_and_the_record_finds_which_images_the_source_has() {
    let sockets = tempfile::tempdir().expect("a directory");
    let socket = format!("unix:{}/{{name}}.sock,server=on,wait=off", sockets.path().display());
    with_disks(false, &["-qmp", &socket], |site, images| {
        let mut monitor = Qmp::connect(&sockets.path().join("origin.sock")).expect("the user's own connection");
        let mut hits = 0;
        for number in 0.. {
            assert!(number < 40, "the daemon has never died in between");
            let before = top(site, "origin");
            let clone = format!("x{number}");
            let words = ["fork", "origin", &clone, "--overlay-disks", "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            wait_until_forking(site);
            let limit = Instant::now() + PATIENCE;
            while image(&mut monitor) == before {
                assert!(Instant::now() < limit, "its disk is never on an overlay");
            }
            // What is on record from now on is what was on record when it died.
            site.kill_daemon("a");
            let between = on_record(site, "origin").is_some_and(|record| {
                !record["forking"].is_null()
                    && !record["arguments"].to_string().contains(&image(&mut monitor).display().to_string())
            });
            daemon_comes_back(site, attempt);
            println!("{number}: the record {} changed yet", if between { "was not" } else { "had" });
            assert_eq!(top(site, "origin"), image(&mut monitor));
            let arguments = on_record(site, "origin").expect("its record")["arguments"].to_string();
            assert!(arguments.contains(&image(&mut monitor).display().to_string()), "{arguments}");
            all_is_well(site, images);
            names(site).iter().filter(|name| *name != "origin").for_each(|name| end(site, name));
            hits += usize::from(between);
            if hits == times(1, 5) {
                break;
            }
        }
        // Nobody else wants its images any more, so it is on its own disk again, soon; and beside it has the script.
        site.eventually("its disk is one image", || used(site, "a", "origin").len() == 2);
        let before = used(site, "a", "origin");
        moved(site, "origin", "a", "b");
        assert_eq!(used(site, "b", "origin"), before);
        read_what_they_wrote(site, &["origin"]);
    });
}

/// The daemon dies as soon as a clone is seen to run, which is before its record says that it does. The clone stays: it
/// may have written its disk.
#[test]
fn a_clone_that_runs_when_the_daemon_dies_runs_on() {
    let sockets = tempfile::tempdir().expect("a directory");
    let socket = format!("unix:{}/{{name}}.sock,server=on,wait=off", sockets.path().display());
    with_disks(false, &["-qmp", &socket], |site, images| {
        let mut hits = 0;
        for number in 0.. {
            assert!(number < 40, "the daemon has never died in between");
            let clone = format!("x{number}");
            let words = ["fork", "origin", &clone, "--overlay-disks", "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            wait_until_forking(site);
            let mut monitor = Qmp::connect(&sockets.path().join(format!("{clone}.sock"))).expect("its user's own");
            let limit = Instant::now() + PATIENCE;
            while monitor.execute("query-status", json!({})).expect("its state")["status"] != "running" {
                assert!(Instant::now() < limit, "the clone never runs");
            }
            site.kill_daemon("a");
            let begins = on_record(site, &clone).expect("the clone's record")["begins"] == true;
            daemon_comes_back(site, attempt);
            println!("{number}: the record {}", if begins { "said that it begins" } else { "was that of any machine" });
            site.eventually("the clone is as any other machine", || {
                on_record(site, &clone).is_some_and(|record| record["begins"] == false)
            });
            assert!(names(site).contains(&clone));
            all_is_well(site, images);
            end(site, &clone);
            hits += usize::from(begins);
            if hits == times(1, 5) {
                break;
            }
        }
    });
}

fn on_record(site: &Site, name: &str) -> Option<Value> {
    let path = site.host("a").directory.join(format!("state/vms/{name}/vm.json"));
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

/// The image that the guest's disk is written to, by QEMU's word.
fn image(monitor: &mut Qmp) -> PathBuf {
    let disks = monitor.execute("query-block", json!({})).expect("its disks");
    let disks = disks.as_array().into_iter().flatten();
    let file = disks.filter(|disk| disk["inserted"]["ro"] == false).find_map(|disk| disk["inserted"]["file"].as_str());
    PathBuf::from(file.expect("its disk"))
}
