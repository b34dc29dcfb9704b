//! Another QEMU takes a guest over on the same host, which writes its memory, reads and writes its disks by direct I/O
//! and talks over its network all the time: to and fro between two versions, and with whatever ends in the middle of
//! it.

/// Who is killed while a QEMU is replaced.
mod faults;

/// The same where the guest's memory is private.
mod private;

use std::path::{Path, PathBuf};

use serde_json::Value;
use sterna_api::Replaced;
use sterna_bench::baseline::qmp::Qmp;
use sterna_bench::tools;
use sterna_system_tests::disk::Disk;
use sterna_system_tests::images::{Images, read_what_it_wrote};
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::plan::JOBS;
use sterna_system_tests::{Answer, Census, Plan, Site, cli, needs, skip_without, turn};

/// Both QEMUs that there are.
fn qemus() -> [PathBuf; 2] {
    [tools::qemu_7_2().expect("looked for before"), tools::qemu_10_0().expect("looked for before")]
}

/// A guest's disks: one that it reads all the time, and one that it writes and reads again, both by direct I/O.
struct Disks {
    read: Disk,
    written: Images,
}

impl Disks {
    fn make() -> Self {
        // Those that are read are its disks a and b.
        Self { read: Disk::make(), written: Images::on_a_disk('c', false) }
    }

    fn are_as_they_should_be(&self, site: &Site) {
        self.read.is_read_as_it_is(site);
        read_what_it_wrote(&site.guest);
    }
}

/// A guest with these disks, of a processor model that is the same in both QEMUs.
fn plan(disks: &Disks, mode: &str) -> Plan {
    Plan {
        cpu: Some("qemu64".into()),
        jobs: format!("{JOBS};{};{}", disks.read.job(), Images::job('c')),
        more: [disks.read.arguments(), disks.written.words()].concat(),
        run: ["--memory-mode", mode].map(String::from).into(),
        ..Plan::small()
    }
}

/// Whether its turn is not today, or something is missing here.
fn left_out() -> bool {
    left_to_another_day(18) || skip_without(&[&needs::GUEST[..], &[tools::qemu_10_0]].concat())
}

/// Runs a test with a guest that is up and its disks, where both QEMUs are here.
fn with_guest(test: impl FnOnce(Site, &Disks)) {
    with_guest_in("shared", test);
}

/// The same with its memory in this mode.
fn with_guest_in(mode: &str, test: impl FnOnce(Site, &Disks)) {
    let _turn = turn();
    if !left_out() {
        let disks = Disks::make();
        test(Site::start(&plan(&disks, mode)), &disks);
    }
}

fn replace(site: &Site, words: &[&str]) -> Answer {
    cli::ask(site.here(), &[&["replace", &site.guest.name, "--json", "-"], words].concat())
}

fn replaced(answer: &Answer) -> Replaced {
    answer.expect(0, &[]);
    serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("no report ({error}): {answer:#?}"))
}

/// The QEMUs of the host that the guest is on.
fn processes(site: &Site) -> Vec<u32> {
    let program = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let processes = site.here().group.processes();
    processes.into_iter().map(|process| process.pid).filter(|pid| program(*pid).starts_with("qemu")).collect()
}

/// The files in the machine's directory, but for their tags.
fn files(site: &Site) -> Vec<String> {
    let dir = site.here().directory.join("state/vms").join(&site.guest.name);
    let names = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut files: Vec<String> =
        names(dir.join("run")).chain(names(dir)).map(|name| name.to_string_lossy().into_owned()).collect();
    for name in &mut files {
        if let Some((before, _)) = name.split_once('-') {
            *name = format!("{before}.sock");
        }
    }
    files.sort();
    files
}

/// The machine's record.
fn record(site: &Site) -> Value {
    read_record(&site.here().directory.join("state/vms").join(&site.guest.name).join("vm.json"))
}

fn read_record(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap_or_default()).unwrap_or_default()
}

/// The guest is in exactly one QEMU, nothing is left of another, and it never came to harm.
fn is_well(site: &Site, disks: &Disks) {
    site.eventually("the guest is in one QEMU, and nothing of another is left", || {
        let known = record(site);
        site.state_at(site.names().0) == "running"
            && processes(site).iter().map(|pid| u64::from(*pid)).eq(known["process"]["pid"].as_u64())
            && known["succession"].is_null()
            && files(site) == ["agent.sock", "qemu.log", "qmp.sock", "run", "vm.json"]
    });
    site.checker_is_well();
    disks.are_as_they_should_be(site);
    site.ran_on_one_host_at_a_time();
}

#[test]
fn a_guest_goes_to_and_fro_between_two_qemus_of_one_host_and_nothing_is_left_over() {
    to_and_fro("shared");
}

/// A guest with its memory in this mode goes to and fro, and is moved in the end.
fn to_and_fro(mode: &str) {
    with_guest_in(mode, |site, disks| {
        let [seven, ten] = qemus();
        // The first trip brings what stays on purpose: caches, threads of the daemon's pool.
        for qemu in [&ten, &seven] {
            replaced(&replace(&site, &["--qemu", &qemu.display().to_string()]));
        }
        is_well(&site, disks);
        let before = Census::settled(&site, site.names().0);
        for number in 0..times(4, 200) {
            let (qemu, version) = if number % 2 == 0 { (&ten, "10.0") } else { (&seven, "7.2") };
            let report = replaced(&replace(&site, &["--verify", "--qemu", &qemu.display().to_string()]));
            assert!(report.to_qemu.starts_with(version), "{report:#?}");
            assert!(report.verify.checked && report.verify.mismatches == 0, "{report:#?}");
            assert_eq!(report.to_path, qemu.display().to_string());
            assert_eq!(report.copied_bytes > 0, mode == "private", "{report:#?}");
            assert!(report.copied_bytes < plan(disks, mode).memory_bytes / 2, "not all of it again: {report:#?}");
            assert_eq!(processes(&site), [report.pid]);
            is_well(&site, disks);
            println!(
                "{number}: {} to {}: paused {:.1} ms, {:.0} ms in all, {:.0} ms of them before, ended in {:.0} ms, \
                 {} KiB copied, {} of them in the pause",
                report.from_qemu,
                report.to_qemu,
                report.pause_ms,
                report.ms,
                report.prepare_ms,
                report.end_ms,
                report.copied_bytes >> 10,
                report.copied_in_pause_bytes >> 10
            );
        }
        before.is_all_of(&site, site.names().0);
        // And it can still be moved.
        let mut site = site;
        site.migrate(&[]);
        is_well(&site, disks);
    });
}

#[test]
fn a_qemu_that_cannot_take_the_guest_over_leaves_it_where_it_is() {
    with_guest(|site, disks| {
        let plan = plan(disks, "shared");
        let pid = processes(&site);
        replace(&site, &["--qemu", "/bin/true"]).expect(1, &["/bin/true"]);
        replace(&site, &["--qemu", "/nowhere/qemu"]).expect(1, &["no qemu"]);
        // A device that the guest does not have: its state does not come.
        let words = site.qemu_words(&plan);
        let more = |extra: &[&'static str]| -> Vec<String> {
            let words = words.iter().cloned().chain(extra.iter().map(|word| (*word).to_owned()));
            ["--".into()].into_iter().chain(words).collect()
        };
        let refused = [(["-device", "virtio-rng-pci"], 1, "qemu"), (["-device", "nonsense"], 1, "nonsense")];
        for (extra, code, said) in refused.into_iter().chain([(["-m", "1G"], 2, "--memory")]) {
            let words = more(&extra);
            replace(&site, &words.iter().map(String::as_str).collect::<Vec<_>>()).expect(code, &[said]);
            assert_eq!(processes(&site), pid, "the guest is where it was");
        }
        is_well(&site, disks);
        // What the guest does not see may change, and is named.
        let words = more(&["-msg", "timestamp=on"]);
        let report = replaced(&replace(&site, &words.iter().map(String::as_str).collect::<Vec<_>>()));
        assert_eq!(report.changed_arguments, ["+ -msg timestamp=on"]);
        is_well(&site, disks);
        let again = replaced(&replace(&site, &[]));
        assert!(again.changed_arguments.is_empty() && again.from_path == again.to_path, "{again:#?}");
        is_well(&site, disks);
    });
}

#[test]
fn all_machines_are_replaced_in_turn_until_one_fails() {
    let _turn = turn();
    if left_out() {
        return;
    }
    let site = Site::without_guest(&Plan::small());
    let host = site.here();
    let run = |name: &str, mode: &str, more: &[&str]| {
        // A machine of nothing but firmware.
        let words = ["run", name, "--memory", "32M", "--memory-mode", mode, "--detach", "--"];
        let machine = ["-nodefaults", "-display", "none", "-accel", "tcg"];
        cli::ask(host, &[&words[..], &machine, more].concat()).expect(0, &[]);
    };
    // A port that two QEMUs cannot have.
    let port = ["-vnc", "127.0.0.1:9"];
    let shown = |name: &str| -> Value {
        serde_json::from_str(&cli::ask(host, &["show", name, "--json"]).stdout).unwrap_or_default()
    };
    for (name, mode, more) in
        [("a", "private", &[][..]), ("b", "shared", &[]), ("c", "private", &port), ("d", "shared", &[])]
    {
        run(name, mode, more);
    }
    // One that its user paused stays paused.
    let of_b: Value = read_record(&host.directory.join("state/vms/b/vm.json"));
    let mut monitor = Qmp::connect(Path::new(of_b["qmp"].as_str().expect("its monitor"))).expect("its monitor");
    monitor.execute("stop", serde_json::json!({})).expect("it is paused");
    drop(monitor);
    let before: Vec<Value> = ["a", "b", "c", "d"].map(|name| shown(name)["pid"].clone()).into();
    let ten = tools::qemu_10_0().expect("looked for before").display().to_string();
    let answer = cli::ask(host, &["replace", "--all", "--qemu", &ten]);
    answer.expect(1, &["'c'", "not begun: d", "Address already in use"]);
    let after: Vec<Value> = ["a", "b", "c", "d"].map(|name| shown(name)["pid"].clone()).into();
    let changed: Vec<bool> = before.iter().zip(&after).map(|(before, after)| before != after).collect();
    assert_eq!(changed, [true, true, false, false], "{answer:#?}");
    for (name, version) in [("a", "10.0"), ("b", "10.0"), ("c", "7.2"), ("d", "7.2")] {
        let vm = shown(name);
        assert!(vm["qemu"].as_str().is_some_and(|known| known.starts_with(version)), "{vm:#}");
        assert_eq!(vm["state"], if name == "b" { "paused" } else { "running" }, "{vm:#}");
        cli::ask(host, &["stop", "--force", name]).expect(0, &[]);
    }
    cli::ask(host, &["replace", "a"]).expect(1, &["no virtual machine"]);
    cli::ask(host, &["replace", "--all"]).expect(0, &[]);
}
