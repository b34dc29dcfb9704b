use std::path::PathBuf;

use serde_json::Value;
use sterna_system_tests::images::Images;
use sterna_system_tests::needs::times;
use sterna_system_tests::random::Random;
use sterna_system_tests::{Site, cli};

use super::away::{LATEST_US, a_daemon_dies, are_well, fork_to, have_all, stop_at};
use super::forked;
use super::overlays::{moved, read_what_they_wrote, used, with_disks};

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
        let plugged = images.directory.join("other.img");
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

#[test]
fn whichever_daemon_is_killed_no_clone_elsewhere_loses_its_overlay_and_none_is_left_of_those_that_never_ran() {
    with_disks(false, &[], |site, images| {
        let mut random = Random(12);
        for number in 0..times(4, 60) {
            let chance = (number, &mut random, 2 * LATEST_US);
            let came = a_daemon_dies(site, chance, &["--overlay-disks"], |site, name| {
                assert_eq!(overlays_of(images, name).len(), 1, "{name}");
                read_what_they_wrote(site, &[name]);
            });
            came.iter().for_each(|name| remove_overlays_of(images, name));
            site.eventually("every overlay has its user", || images.overlays().is_subset(&used(site, "a", "origin")));
            read_what_they_wrote(site, &["origin"]);
        }
        let b = site.host("b").listen();
        forked(&fork_to(site, "origin", &["after", "--overlay-disks"], &[&b]));
        read_what_they_wrote(site, &["origin", "after"]);
    });
}
