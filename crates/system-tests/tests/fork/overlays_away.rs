use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use sterna_api::{Vm, VmState};
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::site::files;
use sterna_system_tests::{Attempt, Site, cli};

use super::away::{LATEST_US, are_well, at, fork_to, have_all, stop_at};
use super::overlays::{Images, moved, read_what_they_wrote, used, with_disks};
use super::{daemon_dies_in, forked};

/// The overlay of a machine that is on another host by now, as its former host's directory has it.
fn overlays_of(images: &Images, name: &str) -> Vec<PathBuf> {
    let is_its =
        |path: &PathBuf| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}-")));
    images.overlays().into_iter().filter(is_its).collect()
}

fn remove_overlays_of(images: &Images, name: &str) {
    overlays_of(images, name).iter().for_each(|path| std::fs::remove_file(path).expect("its overlay"));
}

/// What is on record of the images under the disks of `origin`, and who else may want them.
fn on_record(site: &Site) -> String {
    let path = site.host("a").directory.join("state/vms/origin/vm.json");
    let record: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("its record")).expect("a record");
    record["bases"].to_string()
}

/// The disks are a raw one and one in qcow2.
#[test]
fn clones_on_another_host_write_disks_of_their_own_and_nobody_writes_what_is_under_them() {
    with_disks(true, &[], |site, images| {
        let b = site.host("b").listen();
        let before = used(site, "a", "origin");
        fork_to(site, "origin", &["x"], &[&b]).expect(1, &["would write the same disk", "--overlay-disks"]);
        forked(&fork_to(site, "origin", &["one", "two", "--overlay-disks"], &[&b]));
        let image = std::fs::read(images.disk()).expect("the image");
        are_well(site, &["origin", "one", "two"]);
        read_what_they_wrote(site, &["origin", "one", "two"]);
        have_all(site, &["one", "two"]);
        for name in ["one", "two"] {
            let (own, its) = (overlays_of(images, name), used(site, "b", name));
            assert_eq!(own.len(), 2, "one of each disk");
            assert!(own.iter().all(|path| its.contains(path)) && its.contains(&images.disk()), "{its:?}");
            // While they are there, nobody here writes what is under them.
            assert!(own.iter().all(|path| on_record(site).contains(&*path.to_string_lossy())), "{}", on_record(site));
        }
        // Who comes back has its disks, and what is forked there has them under its own.
        moved(site, "one", "b", "a");
        cli::ask(site.host("b"), &["fork", "two", "three", "--overlay-disks"]).expect(0, &[]);
        read_what_they_wrote(site, &["origin", "one", "two", "three"]);
        assert!(std::fs::read(images.disk()).expect("the image") == image, "somebody wrote the image");
        // A machine's end takes no disk along; without them nobody wants the images any more.
        for (host, name) in [("a", "one"), ("b", "two"), ("b", "three")] {
            stop_at(site, host, name);
            assert!(!overlays_of(images, name).is_empty());
            remove_overlays_of(images, name);
        }
        site.eventually("its disks are its own images again", || used(site, "a", "origin") == before);
        read_what_they_wrote(site, &["origin"]);
        assert!(images.overlays().is_empty(), "{:?}", images.overlays());
    });
}

/// What is never flushed is in the memory of this host alone.
#[test]
fn a_disk_that_is_never_flushed_has_no_overlay_on_another_host() {
    with_disks(false, &[], |site, images| {
        let b = site.host("b").listen();
        let plugged = images.0.join("other.img");
        std::fs::write(&plugged, vec![0; 1 << 20]).expect("a disk");
        let disk = format!("file={},format=raw,if=virtio,cache=unsafe", plugged.display());
        let bare = ["-nodefaults", "-display", "none", "-accel", "tcg", "-drive", &disk];
        let run = ["run", "bare", "--memory", "32M", "--detach", "--"];
        cli::ask(site.host("a"), &[&run[..], &bare].concat()).expect(0, &[]);
        fork_to(site, "bare", &["x", "--overlay-disks"], &[&b]).expect(1, &["never flushes", "cache=unsafe"]);
        fork_to(site, "origin", &["x", "--overlay-disks"], &["127.0.0.1:1"]).expect(1, &[]);
        assert!(images.overlays().is_empty(), "{:?}", images.overlays());
        // Here it may.
        cli::ask(site.host("a"), &["fork", "bare", "x", "--overlay-disks"]).expect(0, &[]);
        assert_eq!(overlays_of(images, "x").len(), 1);
    });
}

/// The daemon of the source, or that of the clones' host, dies at a moment of chance.
#[test]
fn whichever_daemon_is_killed_no_clone_elsewhere_loses_its_overlay_and_none_is_left_of_those_that_never_ran() {
    with_disks(false, &[], |site, images| {
        let mut random = Random(12);
        let b = site.host("b").listen();
        for number in 0..times(4, 60) {
            let names = [format!("x{number}"), format!("y{number}")];
            let words = ["fork", "origin", &names[0], &names[1], "--overlay-disks", "--to", &b, "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            let delay = Duration::from_micros(random.below(2 * LATEST_US));
            std::thread::sleep(delay);
            if number % 2 == 0 {
                daemon_dies_in(site, attempt);
            } else {
                site.kill_daemon("b");
                site.start_daemon("b");
                drop(attempt.end());
            }
            have_all(site, &[&names[0], &names[1]]);
            let mut came = HashSet::new();
            site.eventually("each has come, and is whole, or is gone", || {
                let settled = |vm: &Vm| vm.state != VmState::MigratingIn && vm.arriving.is_none();
                for vm in at(site, "b").into_iter().filter(settled) {
                    assert_eq!(vm.state, VmState::Running, "{vm:#?}");
                    assert_eq!(overlays_of(images, &vm.name).len(), 1, "{vm:#?}");
                    read_what_they_wrote(site, &[&vm.name]);
                    stop_at(site, "b", &vm.name);
                    came.insert(vm.name);
                }
                at(site, "b").is_empty() && files(site.host("b")).is_empty()
            });
            println!("{number}: a daemon killed after {delay:?}, {} clones", came.len());
            came.iter().for_each(|name| remove_overlays_of(images, name));
            site.eventually("every overlay has its user", || images.overlays().is_subset(&used(site, "a", "origin")));
            read_what_they_wrote(site, &["origin"]);
        }
        forked(&fork_to(site, "origin", &["after", "--overlay-disks"], &[&b]));
        read_what_they_wrote(site, &["origin", "after"]);
    });
}
