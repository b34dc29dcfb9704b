//! Warm pools of machines with disks: each clone has an overlay of its own, of the disk as it was at the fork, whenever
//! it was made.

#[path = "support/disks.rs"]
mod disks;
mod support;

use std::collections::HashSet;
use std::path::PathBuf;

use disks::{A_WHILE, DISK, Disks};
use serde_json::json;
use support::pools::{fork, held, hold, ready, remove, take};
use support::{cannot_run, eventually};

/// A pool of two of the machine `a`, whose disk has 2 in its first MiB, as `a` writes another MiB; with what clones of
/// it have copies of.
fn with_pool() -> (Disks, PathBuf) {
    let disks = Disks::start();
    disks.io("a", "write -P 2 0 1M");
    let forked = fork(&disks.host, "a", &json!({ "hold": 2, "template": "t", "overlay_disks": true }));
    assert_eq!(forked["template"]["ready"], 2, "{forked}\n{}", disks.host.log());
    disks.io("a", "write -P 3 1M 1M");
    let number = |path: &PathBuf| path.file_stem().expect("a name").to_string_lossy().matches('-').count();
    let own = disks.overlays_of("t").into_iter().filter(|path| number(path) == 1).collect::<Vec<_>>();
    let [own] = own.as_slice() else { panic!("{own:?}") };
    (disks, own.clone())
}

/// The disk is what it was at the fork, and nobody has written it.
fn is_as_it_was(disks: &Disks) {
    disks.holds(&[(0, 1, 2), (1, DISK, 1)]);
}

/// The overlay of a machine whose disk is one over the image that all began as.
fn overlay_of(disks: &Disks, name: &str) -> PathBuf {
    let images = disks.images(name);
    assert_eq!(images[1..], [disks.image()], "{name}");
    images[0].clone()
}

#[test]
fn clones_of_a_pool_have_disks_of_their_own_whoever_has_ended_and_the_image_is_nobodys_while_one_is_there() {
    if cannot_run() {
        return;
    }
    let (mut disks, template) = with_pool();
    let mut overlays = vec![template.clone(), overlay_of(&disks, "a")];
    // The template's, the source's, and one of each that is held.
    assert_eq!(disks.overlays().len(), 4);
    for name in ["one", "two"] {
        assert_eq!(take(&disks.host, "t", name)["was_held"], true);
        overlays.push(overlay_of(&disks, name));
        disks.io(name, &format!("write -P {} 2M 1M", overlays.len()));
        eventually("another is ready", || ready(&disks.host, "t") == 2);
        disks.host.kill_daemon();
        disks.host.start_daemon();
    }
    // The source has gone, and one is made at once.
    disks.stop("a");
    hold(&disks.host, "t", 0);
    assert_eq!(disks.overlays(), overlays.iter().cloned().collect::<HashSet<_>>(), "they go with those that were held");
    assert_eq!(take(&disks.host, "t", "three")["was_held"], false);
    overlays.push(overlay_of(&disks, "three"));
    is_as_it_was(&disks);
    // It can be forked again, with another pool: its clones have its disk as it is then.
    disks.io("three", "write -P 9 0 1M");
    fork(&disks.host, "three", &json!({ "hold": 1, "overlay_disks": true }));
    take(&disks.host, "three", "four");
    assert_eq!(disks.images("four")[1..], [overlays[4].clone(), disks.image()]);
    is_as_it_was(&disks);
    ["three", "t"].iter().for_each(|name| remove(&disks.host, name));
    assert!(!template.exists() && held(&disks.host).is_empty());
    let used: HashSet<PathBuf> = ["one", "two", "three", "four"]
        .iter()
        .flat_map(|name| disks.images(name))
        .filter(|i| *i != disks.image())
        .collect();
    overlays.remove(0);
    assert_eq!(disks.overlays(), overlays.iter().cloned().chain(used).collect::<HashSet<_>>());
    assert_eq!(disks.overlays().len(), 6, "of the source, of four clones, and what two of these began as");
}

/// An overlay that was made after the fork is in nobody's list: its name says that somebody may want the image.
#[test]
fn the_image_under_a_pool_is_its_sources_again_once_no_template_and_no_clone_of_it_is_left() {
    if cannot_run() {
        return;
    }
    let (disks, template) = with_pool();
    take(&disks.host, "t", "one");
    eventually("another is ready", || ready(&disks.host, "t") == 2);
    // Made when the first two were ready already.
    hold(&disks.host, "t", 0);
    take(&disks.host, "t", "late");
    let lates = overlay_of(&disks, "late");
    disks.io("late", "write -P 4 0 1M");
    let ones = overlay_of(&disks, "one");
    ["one", "late"].iter().for_each(|name| disks.stop(name));
    std::fs::remove_file(&ones).expect("its overlay");
    std::thread::sleep(A_WHILE);
    assert_eq!(disks.images("a").len(), 2, "there is a template");
    remove(&disks.host, "t");
    assert!(!template.exists());
    std::thread::sleep(A_WHILE);
    assert_eq!(disks.images("a").len(), 2, "one that does not run may run again");
    is_as_it_was(&disks);
    std::fs::remove_file(&lates).expect("its overlay");
    eventually("the disk is one image again", || disks.images("a") == [disks.image()]);
    eventually("no overlay is left", || disks.overlays().is_empty());
    disks.holds(&[(0, 1, 2), (1, 2, 3), (2, DISK, 1)]);
}

/// What a daemon was making when it died is removed, unless somebody has it; so is what a template had whose removal
/// had begun. The records are put as a daemon leaves them that is killed there.
#[test]
fn overlays_that_a_daemon_was_making_or_removing_when_it_died_are_gone_once_the_next_one_is_there() {
    if cannot_run() {
        return;
    }
    let (mut disks, template) = with_pool();
    take(&disks.host, "t", "one");
    eventually("another is ready", || ready(&disks.host, "t") == 2);
    let before = disks.overlays();
    disks.host.kill_daemon();
    let record = disks.host.state().join("templates/t.json");
    let text = std::fs::read_to_string(&record).expect("its record");
    let left = template.with_file_name("t-00000000-1.qcow2");
    std::fs::copy(&template, &left).expect("a copy");
    let overlay = |path: &PathBuf| {
        json!({ "of": "x", "path": path, "base": disks.image(), "node": "n", "elsewhere": false }).to_string()
    };
    // One of them is a machine's.
    let making = [overlay(&left), overlay(&overlay_of(&disks, "one"))].join(",");
    let changed = text.replacen("\"making\": []", &format!("\"making\": [{making}]"), 1);
    assert_ne!(changed, text);
    std::fs::write(&record, &changed).expect("its record");
    disks.host.start_daemon();
    assert_eq!(disks.overlays(), before);
    assert!(std::fs::read_to_string(&record).expect("its record").contains("\"making\": []"), "they are settled");
    disks.host.kill_daemon();
    let changed = text.replacen("\"removed\": false", "\"removed\": true", 1);
    assert_ne!(changed, text);
    std::fs::write(&record, &changed).expect("its record");
    disks.host.start_daemon();
    assert!(!record.exists() && held(&disks.host).is_empty());
    assert_eq!(disks.overlays(), HashSet::from(["a", "one"].map(|name| overlay_of(&disks, name))));
    is_as_it_was(&disks);
}
