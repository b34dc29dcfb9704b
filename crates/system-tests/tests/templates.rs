//! Guests that begin as one memory template: they share what none of them has written, each is its own, and each moves
//! as any guest in private memory does.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sterna_api::{Report, Status, VmState};
use sterna_bench::command::wait_for;
use sterna_bench::footprint::{self, Footprint};
use sterna_bench::lab::Host;
use sterna_system_tests::member::Member;
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::site::files;
use sterna_system_tests::{PATIENCE, Plan, Site, cli, needs, skip_without, turn};

const MIB: u64 = 1 << 20;

/// The clones, and the mode in which each of them moves.
const CLONES: [(&str, &str); 3] = [("one", "precopy"), ("two", "postcopy"), ("three", "hybrid")];

/// Starts a guest on host `a` as a clone: from a template, with its devices in the state that belongs to that.
fn begin(clone: &Member<'_>, plan: &Plan, template: &[&str], state: &Path) {
    clone.run(plan, template, &["-incoming", "defer"]);
    load(clone, clone.site.host("a"), state);
}

/// Bytes of its QEMU's memory behind which the template stands.
fn shared_bytes(clone: &Member<'_>, template: &Path) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{}/maps", clone.shown("a").pid)).expect("its QEMU runs");
    let mapped = maps.lines().filter(|line| line.ends_with(template.to_str().expect("a name")));
    let bytes = mapped.map(|line| {
        assert!(line.contains(" rw-p "), "{line}");
        let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let address = |digits| u64::from_str_radix(digits, 16).expect("an address");
        address(to) - address(from)
    });
    bytes.sum()
}

/// Lets QEMU load the devices' state, after which the guest goes on as the template's did.
fn load(member: &Member<'_>, host: &Host, state: &Path) {
    let mut qmp = member.monitor(host);
    let mut tell = |command: &str, arguments| qmp.execute(command, arguments).expect("QEMU does it");
    tell("migrate-set-capabilities", json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}]}));
    tell("migrate-incoming", json!({"uri": format!("exec:cat {}", state.display())}));
    let loaded = || Ok((tell("query-migrate", json!({}))["status"] == "completed").then_some(()));
    wait_for("the devices", PATIENCE, loaded).expect("QEMU loads them");
    // The template's guest stood still when its devices were saved.
    tell("cont", json!({}));
}

/// Stops a machine that runs, and makes a template of its RAM: the template, and the state of its devices.
fn template_of(member: &Member<'_>, host: &Host, directory: &Path) -> (PathBuf, PathBuf) {
    let (template, state) = (directory.join("template"), directory.join("devices"));
    let mut qmp = member.monitor(host);
    let mut tell = |command: &str, arguments| qmp.execute(command, arguments).expect("QEMU does it");
    tell("stop", json!({}));
    tell("migrate-set-capabilities", json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}]}));
    tell("migrate", json!({"uri": format!("exec:cat > {}", state.display())}));
    let saved = || match tell("query-migrate", json!({}))["status"].as_str() {
        Some("completed") => Ok(Some(())),
        Some("failed") => panic!("QEMU does not save its devices"),
        _ => Ok(None),
    };
    wait_for("the devices' state", PATIENCE, saved).expect("QEMU saves its devices");
    let is_its = |path: &PathBuf| path.parent().is_some_and(|parent| parent.ends_with("ram"));
    let ram = files(host).into_iter().find(is_its).expect("its RAM file");
    let copy = ["--sparse=always", ram.to_str().expect("a name"), template.to_str().expect("a name")];
    host.output("cp", &copy).expect("a copy");
    fs::set_permissions(&template, Permissions::from_mode(0o444)).expect("root may");
    (template, state)
}

/// Runs a guest on host `a` until it is well, and makes a template of it: the template, and the state of its devices.
fn origin(site: &Site, plan: &Plan, directory: &Path) -> (PathBuf, PathBuf) {
    let origin = Member::new(site, "origin");
    origin.run(plan, &[], &[]);
    origin.is_well();
    let made = template_of(&origin, site.host("a"), directory);
    cli::ask(site.host("a"), &["stop", "origin", "--force"]).expect(0, &[]);
    made
}

fn modified(template: &Path, at: SystemTime) {
    File::open(template).and_then(|file| file.set_modified(at)).expect("root may");
}

#[test]
fn clones_of_one_template_share_its_memory_stay_apart_and_move_in_every_mode() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    // With memory that is given back before and after the template is made: the balloon takes some that is of it.
    let jobs = "checker:--mib,16,--rate,4;churn:--mib,16,--rate,4".into();
    let plan = Plan { jobs, run: Vec::new(), ..Plan::small() };
    let site = Site::without_guest(&plan);
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let (template, state) = origin(&site, &plan, directory.path());

    let path = template.to_str().expect("a name");
    let private = ["--memory-mode", "private", "--memory-template", path];
    let refused = ["run", "x", "--memory", "64M", "--memory-template", path, "--detach"];
    cli::ask(site.host("a"), &refused).expect(2, &["private"]);
    let clones = CLONES.map(|(name, _)| Member::new(&site, name));
    clones.iter().for_each(|clone| {
        begin(clone, &plan, &private, &state);
    });
    clones.iter().for_each(Member::is_well);

    let held = fs::metadata(&template).expect("it is there").blocks() * 512;
    let own: Vec<u64> = clones.iter().map(|clone| clone.shown("a").allocated_bytes).collect();
    println!(
        "the template {} MiB, the clones' own {:?}",
        held / MIB,
        own.iter().map(|own| own / MIB).collect::<Vec<_>>()
    );
    assert!(own.iter().all(|own| *own > 4 * MIB), "none of them writes");
    assert!(held + own.iter().sum::<u64>() < 2 * held, "three guests take as much as two would: {own:?}");
    assert_eq!(clones[0].shown("a").memory_template.as_deref(), Some(path));

    a_balloon_takes_what_is_shared(&clones[2], &template);
    a_changed_template_is_noticed(&clones[0], &template);
    for (clone, (_, mode)) in clones.iter().zip(CLONES) {
        let answer = clone.migrate(&["--verify", "--mode", mode, "--bandwidth", "60MB"]);
        answer.expect(0, &[]);
        let report: Report = answer.report().unwrap_or_else(|| panic!("no report: {answer:#?}"));
        println!("{mode}: {:?}", report.pages);
        assert_eq!(report.status, Status::Completed, "{report:#?}");
        assert!(report.verify.checked && report.verify.pages > 0 && report.verify.mismatches == 0, "{report:#?}");
        clone.is_well();
        assert_eq!(clone.shown("b").memory_template, None);
    }
    assert_eq!(fs::metadata(&template).expect("nobody removed it").blocks() * 512, held, "it has grown");
}

/// No scanner is at work: what clones share they share because they began as one file. They stand still, so that what
/// is sent is what they share and what each has of its own, and nothing is written meanwhile.
#[test]
fn clones_that_move_together_send_what_they_share_once_and_arrive_as_small_as_they_left() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan { jobs: "checker:--mib,16,--rate,4".into(), run: Vec::new(), ..Plan::small() };
    let site = Site::without_guest(&plan);
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let (template, state) = origin(&site, &plan, directory.path());

    let path = template.to_str().expect("a name");
    let private = ["--memory-mode", "private", "--trust-group", "family", "--memory-template", path];
    let names: Vec<String> = (0..needs::times(4, 8)).map(|number| format!("c{number}")).collect();
    let clones: Vec<Member<'_>> = names.iter().map(|name| Member::new(&site, name)).collect();
    clones.iter().for_each(|clone| {
        begin(clone, &plan, &private, &state);
    });
    clones.iter().for_each(Member::is_well);
    let stand_still = |mode| {
        let (here, there) = if mode == "precopy" { ("a", "b") } else { ("b", "a") };
        let (from, to) = (site.host(here), site.host(there));
        let tell = |host, what: &str| clones.iter().for_each(|clone| clone.tell(host, what));
        tell(from, "stop");
        let before = footprint_at(&clones, here, &plan);
        let listen = to.listen();
        let head: Vec<&str> = ["migrate"].into_iter().chain(names.iter().map(String::as_str)).collect();
        let options = ["--to", &listen, "--mode", mode, "--preserve-sharing", "on", "--verify", "--json", "-"];
        let answer = cli::ask(from, &[&head[..], &options].concat());
        answer.expect(0, &[]);
        let reports: Value = serde_json::from_str(&answer.stdout).expect("reports");
        let reports = reports["migrations"].as_array().expect("one each");
        let sum = |what: &str| reports.iter().filter_map(|report| report.pointer(what)?.as_u64()).sum::<u64>();
        assert_eq!((sum("/verify/mismatches"), reports.len()), (0, clones.len()));
        let (bytes, references) = (sum("/bytes_on_wire"), sum("/pages/shared_reference"));
        let after = footprint_at(&clones, there, &plan);
        println!("{mode}: {before:?} -> {after:?}, {bytes} bytes on the wire, {references} references");
        assert!(references > 0);
        assert!(bytes as f64 <= 1.02 * before.frames as f64 * 4096.0, "{mode}: what they share went more than once");
        assert!(after.frames as f64 <= 1.02 * before.frames as f64, "{mode}: they have grown");
        tell(to, "cont");
        clones.iter().for_each(Member::is_well);
    };
    ["precopy", "postcopy"].into_iter().for_each(stand_still);
}

/// Their host has memory for what they share, and not for what they write of it.
#[test]
fn guests_that_write_what_they_share_are_stopped_before_their_host_has_no_memory_and_go_on_when_it_has() {
    let _turn = turn();
    if left_to_another_day(5) || skip_without(&needs::GUEST) {
        return;
    }
    let plan = Plan { jobs: "checker:--mib,96,--rate,4".into(), run: Vec::new(), ..Plan::small() };
    let site = Site::without_guest(&plan);
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let (template, state) = origin(&site, &plan, directory.path());
    let path = template.to_str().expect("a name");
    let private = ["--memory-mode", "private", "--memory-template", path];
    let clones = CLONES.map(|(name, _)| Member::new(&site, name));
    clones.iter().for_each(|clone| {
        begin(clone, &plan, &private, &state);
        clone.tell(site.host("a"), "stop");
    });
    let group = &site.host("a").group;
    let limit = group.limit(group.memory_bytes().expect("what it takes") + (100 << 20)).expect("a limit");
    clones.iter().for_each(|clone| clone.tell(site.host("a"), "cont"));
    let stopped =
        || clones.iter().filter(|clone| clone.shown("a").note.is_some_and(|note| note.contains("no memory left")));
    site.eventually("a guest is stopped", || stopped().count() > 0);
    stopped().for_each(|clone| assert_eq!(clone.shown("a").state, VmState::Paused));
    println!("{} stopped, each shares {:?} MiB", stopped().count(), clones[0].shown("a").shared_bytes / MIB);
    // One that is moved away runs where there is memory.
    let moves = stopped().next().expect("one is stopped");
    moves.migrate(&["--verify"]).expect(0, &[]);
    assert_eq!(moves.shown("b").state, VmState::Running);
    moves.is_well();
    drop(limit);
    let stay = || clones.iter().filter(|clone| clone.guest.name != moves.guest.name);
    site.eventually("the others go on", || stay().all(|clone| clone.shown("a").state == VmState::Running));
    stay().for_each(Member::is_well);
    assert!(stay().all(|clone| clone.shown("a").note.is_none()));
}

/// The memory of all clones on this host, where a frame counts once.
fn footprint_at(clones: &[Member<'_>], host: &str, plan: &Plan) -> Footprint {
    let ram = |clone: &Member<'_>| footprint::Ram::of(clone.shown(host).pid, plan.memory_bytes).expect("its RAM");
    footprint::of(&clones.iter().map(ram).collect::<Vec<_>>()).expect("their frames")
}

fn a_balloon_takes_what_is_shared(clone: &Member<'_>, template: &Path) {
    let (shared, own) = (shared_bytes(clone, template), clone.shown("a").allocated_bytes);
    cli::ask(clone.site.host("a"), &["balloon", &clone.guest.name, "--target", "160M"]).expect(0, &[]);
    clone.site.eventually("the balloon is full", || {
        clone.shown("a").balloon.is_some_and(|balloon| balloon.size_bytes >= 90 * MIB)
    });
    let (shared_after, own_after) = (shared_bytes(clone, template), clone.shown("a").allocated_bytes);
    println!("shared {} MiB, then {}; own {}, then {}", shared / MIB, shared_after / MIB, own / MIB, own_after / MIB);
    assert!(shared_after < shared, "the balloon took nothing that was shared");
    clone.is_well();
}

fn a_changed_template_is_noticed(clone: &Member<'_>, template: &Path) {
    let before = fs::metadata(template).and_then(|meta| meta.modified()).expect("it is there");
    modified(template, before + Duration::from_nanos(1));
    clone.migrate(&[]).expect(1, &["may be damaged"]);
    modified(template, before);
    clone.is_well();
}
