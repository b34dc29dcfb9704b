use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_bench::tools;
use sterna_system_tests::images::{Images, read_what_it_wrote};
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::random::Random;
use sterna_system_tests::{Attempt, PATIENCE, Plan, Site, cli, needs, skip_without, turn};

use super::{are_well, daemon_dies_in, fork, forked, machines, plan};

/// Where the guest's images are to lie.
pub fn images_of(site: &Site) -> PathBuf {
    site.guest.console.with_file_name("images")
}

/// The images that a machine's disks are made of, by its QEMU's word.
pub fn used(site: &Site, host: &str, name: &str) -> HashSet<PathBuf> {
    fn all(image: &Value, found: &mut HashSet<PathBuf>) {
        if let Some(path) = image["filename"].as_str() {
            found.insert(path.into());
            all(&image["backing-image"], found);
        }
    }
    let disks = Member::new(site, name).monitor(site.host(host)).execute("query-block", json!({})).expect("its disks");
    let mut found = HashSet::new();
    disks.as_array().into_iter().flatten().for_each(|disk| all(&disk["inserted"]["image"], &mut found));
    found
}

/// These guests, after this moment, have read what they wrote, and never anything else.
pub fn read_what_they_wrote(site: &Site, names: &[&str]) {
    names.iter().for_each(|name| read_what_it_wrote(&Member::new(site, name).guest));
}

/// Runs a test with a guest `origin` that writes a disk, raw, or two, one of them in qcow2; with `more` of QEMU's
/// words.
pub fn with_disks(both: bool, more: &[&str], test: impl FnOnce(&mut Site, &Images)) {
    with_disks_read(false, both, more, test);
}

/// The same with disks that are read by direct I/O, or not.
fn with_disks_read(direct: bool, both: bool, more: &[&str], test: impl FnOnce(&mut Site, &Images)) {
    let _turn = turn();
    if left_to_another_day(18) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan { jobs: format!("{};{}", plan().jobs, Images::job('a')), ..plan() };
    let mut site = Site::without_guest(&plan);
    let images = if direct { Images::on_a_disk('a', both) } else { Images::make(images_of(&site), 'a', both) };
    {
        let origin = Member::new(&site, "origin");
        let words = images.words();
        let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        origin.run(&plan, &["--memory-mode", "shared"], &words);
        origin.is_well();
    }
    test(&mut site, &images);
}

fn with_disk(test: impl FnOnce(&mut Site, &Images)) {
    with_disks(false, &[], test);
}

pub fn moved(site: &Site, name: &str, from: &str, to: &str) {
    let address = site.host(to).listen();
    cli::ask(site.host(from), &["migrate", name, "--to", &address, "--verify"]).expect(0, &[]);
}

#[test]
fn with_overlays_each_writes_a_disk_of_its_own_and_takes_it_along_and_nobody_writes_the_image() {
    with_disk(|site, images| {
        fork(site, "origin", &["x"]).expect(1, &["would write the same disk", "--overlay-disks"]);
        forked(&fork(site, "origin", &["one", "two", "--overlay-disks"]));
        let image = std::fs::read(images.disk()).expect("the image");
        let names = ["origin", "one", "two"];
        read_what_they_wrote(site, &names);
        assert_eq!(images.overlays().len(), 3);
        // Once more, over qcow2, and in another directory.
        let other = images.directory.join("other");
        std::fs::create_dir(&other).expect("a directory");
        let directory = format!("--overlay-disks={}", other.display());
        forked(&fork(site, "origin", &["three", &directory]));
        forked(&fork(site, "one", &["four", "--overlay-disks"]));
        let names = ["origin", "one", "two", "three", "four"];
        are_well(site, &names);
        read_what_they_wrote(site, &names);
        assert_eq!((images.overlays().len(), std::fs::read_dir(&other).expect("it").count()), (5, 2));
        // Who is moved has its own disk there, and back.
        for name in ["origin", "three"] {
            let before = used(site, "a", name);
            moved(site, name, "a", "b");
            read_what_they_wrote(site, &[name]);
            assert_eq!(used(site, "b", name), before, "{name}");
            moved(site, name, "b", "a");
        }
        are_well(site, &names);
        read_what_they_wrote(site, &names);
        assert!(std::fs::read(images.disk()).expect("the image") == image, "somebody wrote the image");
        // A machine's end takes no disk along.
        cli::ask(site.host("a"), &["stop", "four", "--force"]).expect(0, &[]);
        assert_eq!(images.overlays().len(), 5);
    });
}

/// From shared memory, whose pages nothing may be read into when they become common; and then from private memory, of
/// which pages are copied that a read may land in later.
#[test]
fn a_guest_whose_disks_do_direct_io_is_forked_and_each_goes_on_by_direct_io() {
    with_disks_read(true, true, &[], |site, images| {
        forked(&fork(site, "origin", &["one", "--overlay-disks"]));
        forked(&fork(site, "origin", &["two", "--overlay-disks"]));
        forked(&fork(site, "one", &["three", "--overlay-disks"]));
        let names = ["origin", "one", "two", "three"];
        are_well(site, &names);
        read_what_they_wrote(site, &names);
        for name in names {
            let disks = Member::new(site, name).monitor(site.host("a")).execute("query-block", json!({}));
            let disks = disks.expect("its disks");
            let written: Vec<&Value> = disks.as_array().into_iter().flatten().map(|disk| &disk["inserted"]).collect();
            let written: Vec<&&Value> = written.iter().filter(|disk| disk["ro"] == false).collect();
            assert!(
                written.len() == 2 && written.iter().all(|disk| disk["cache"]["direct"] == true),
                "{name}: {disks:#}"
            );
        }
        // Another QEMU takes over what is private by now, and it is moved.
        cli::ask(site.host("a"), &["replace", "two", "--verify"]).expect(0, &[]);
        moved(site, "one", "a", "b");
        read_what_they_wrote(site, &names);
        assert_eq!(images.overlays().len(), 12, "an overlay of each disk for each, and of their sources");
    });
}

#[test]
fn where_no_overlay_can_be_made_none_is_left_and_the_guest_writes_on_where_it_did() {
    with_disk(|site, images| {
        let disks = used(site, "a", "origin");
        refusals(site, images);
        assert!(images.overlays().is_empty());
        chains(site, images);
        assert_eq!(used(site, "a", "origin"), disks);
        read_what_they_wrote(site, &["origin"]);
    });
}

/// A file system that is too small for an overlay.
struct Small(PathBuf);

impl Small {
    fn make(path: PathBuf, kib: u32) -> Self {
        std::fs::create_dir(&path).expect("a directory");
        let small = Self(path);
        let size = format!("size={kib}k");
        let words = ["-t", "tmpfs", "-o", &size, "none"];
        let mounted = Command::new("mount").args(words).arg(&small.0).status().expect("mount");
        assert!(mounted.success());
        small
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn refusals(site: &Site, images: &Images) {
    // Too small for the first overlay, and for the second: of neither is anything left.
    for kib in [64, 256] {
        let small = Small::make(images.directory.join("small"), kib);
        let directory = format!("--overlay-disks={}", small.0.display());
        fork(site, "origin", &["x", &directory]).expect(1, &["make the overlay", "no space"]);
        assert_eq!(std::fs::read_dir(&small.0).expect("it").count(), 0, "{kib} KiB");
    }
    fork(site, "origin", &["x", "--overlay-disks=/nowhere"]).expect(2, &["no directory"]);
    fork(site, "origin", &["x", "--overlay-disks", "--", "-smp", "1"]).expect(2, &["disk.img is not in the arguments"]);
    // Their files are there by the time that a clone's QEMU does not start.
    let words = Member::new(site, "origin").shown("a").arguments;
    let words = words.iter().map(String::as_str).chain(["-nonsense"]);
    let words: Vec<&str> = ["x", "--overlay-disks", "--"].into_iter().chain(words).collect();
    fork(site, "origin", &words).expect(1, &["nonsense"]);
}

/// A machine whose disk is named in other words, in the newest QEMU that there is, is forked again and again.
fn chains(site: &Site, images: &Images) {
    let plugged = images.directory.join("other.img");
    std::fs::write(&plugged, vec![0; 1 << 20]).expect("a disk");
    let file = format!("driver=raw,node-name=p,file.driver=file,file.filename={}", plugged.display());
    let qemu = tools::qemu_10_0().or_else(|_| tools::qemu_7_2()).expect("looked for before").display().to_string();
    let run = ["run", "bare", "--memory", "32M", "--qemu", &qemu, "--detach", "--"];
    let bare = ["-nodefaults", "-display", "none", "-accel", "tcg"];
    let disk = ["-blockdev", &file, "-device", "virtio-blk-pci,drive=p"];
    cli::ask(site.host("a"), &[&run[..], &bare, &disk].concat()).expect(0, &[]);
    // Fewer than the daemon makes fewer of.
    let most = times(3, 7);
    for number in 2..=most {
        forked(&fork(site, "bare", &["other", "--overlay-disks", "--paused"]));
        let (own, its) = (used(site, "a", "bare"), used(site, "a", "other"));
        assert_eq!((own.len(), its.len(), own.intersection(&its).count()), (number, number, number - 1));
        cli::ask(site.host("a"), &["stop", "other", "--force"]).expect(0, &[]);
    }
    assert_eq!(images.overlays().len(), 2 * (most - 1));
    cli::ask(site.host("a"), &["stop", "bare", "--force"]).expect(0, &[]);
}

/// Waits until the record says that the guest is being forked, which is just before its pause.
pub fn wait_until_forking(site: &Site) {
    let record = site.host("a").directory.join("state/vms/origin/vm.json");
    let limit = Instant::now() + PATIENCE;
    // Closer than what waits for something else looks.
    while !std::fs::read_to_string(&record)
        .is_ok_and(|text| serde_json::from_str::<Value>(&text).is_ok_and(|record| !record["forking"].is_null()))
    {
        assert!(Instant::now() < limit, "it is never forked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The daemon dies at a moment of chance: before the guest's pause, or in it and soon after.
#[test]
fn whenever_the_daemon_is_killed_the_source_writes_on_and_no_overlay_is_left_that_nobody_uses() {
    with_disk(|site, images| {
        let mut random = Random(6);
        for number in 0..times(2, 14) {
            let names = [format!("x{number}"), format!("y{number}")];
            let words = ["fork", "origin", &names[0], &names[1], "--overlay-disks", "--json", "-"];
            let attempt = Attempt::run(site.host("a"), &words);
            let in_pause = number % 2 == 0;
            if in_pause {
                wait_until_forking(site);
            }
            let delay = Duration::from_micros(random.below(if in_pause { 120_000 } else { 900_000 }));
            std::thread::sleep(delay);
            daemon_dies_in(site, attempt);
            let there: Vec<String> = machines(site).into_iter().map(|vm| vm.name).collect();
            println!(
                "{number}: the daemon killed after {delay:?}, {} clones, the source on {} images",
                there.len() - 1,
                used(site, "a", "origin").len()
            );
            let in_use = || there.iter().flat_map(|name| used(site, "a", name)).collect::<HashSet<_>>();
            site.eventually("every overlay has its user", || images.overlays().is_subset(&in_use()));
            let all: Vec<&str> = there.iter().map(String::as_str).collect();
            are_well(site, &all);
            read_what_they_wrote(site, &all);
            for name in there.iter().filter(|name| *name != "origin") {
                let own = top(site, name);
                cli::ask(site.host("a"), &["stop", name, "--force"]).expect(0, &[]);
                std::fs::remove_file(own).expect("its overlay");
            }
        }
        // Nobody else wants its images any more, so it is on its own disk again, soon; and beside it has the script.
        site.eventually("its disk is one image", || used(site, "a", "origin").len() == 2);
        // What is on record is what QEMU has: it opens the same elsewhere.
        let before = used(site, "a", "origin");
        moved(site, "origin", "a", "b");
        assert_eq!(used(site, "b", "origin"), before);
        read_what_they_wrote(site, &["origin"]);
    });
}

/// The image that a machine writes.
pub fn top(site: &Site, name: &str) -> PathBuf {
    let disks = Member::new(site, name).monitor(site.host("a")).execute("query-block", json!({})).expect("its disks");
    let disks = disks.as_array().into_iter().flatten();
    let own = disks.filter(|disk| disk["inserted"]["ro"] == false).find_map(|disk| disk["inserted"]["file"].as_str());
    Path::new(own.expect("its disk")).to_path_buf()
}
