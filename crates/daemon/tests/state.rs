//! The state directory against those who may not write there: a QEMU that its guest has taken over, a disk that is
//! full, records that are damaged. "Failed before" says what the daemon did while a machine's directory was its
//! QEMU's user's.

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use support::{BARE, Host, Stranger, cannot_run, eventually, fill, run_request, runs, signal, small_host};

const NOBODY: u32 = 65534;

/// Runs a shell command as `nobody`; whether it succeeded.
fn as_nobody(command: &str) -> bool {
    let status = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", command])
        .stderr(std::process::Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// Why tests with another user for QEMU cannot run here, said once per test.
fn cannot_run_as_nobody() -> bool {
    let agent = support::agent().display();
    let cannot = !as_nobody(&format!("test -r {agent}"));
    if cannot {
        eprintln!("skipped: 'nobody' cannot read the agent where it was built, or there is no setpriv");
    }
    cannot
}

/// A host whose QEMUs are `nobody`'s, with a machine `m` that has a balloon.
fn host_of_nobody() -> Host {
    let host = Host::configured("qemu_user = \"nobody\"");
    fs::set_permissions(host.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    run_with_balloon(&host);
    host
}

fn run_with_balloon(host: &Host) {
    let mut request = run_request("m", &BARE);
    request["balloon"] = true.into();
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{vm}\n{}", host.log());
}

/// Has the daemon write the record of `m`.
fn store(host: &Host) -> u16 {
    let bytes = (32 << 20) + (rand() % 1024) * 4096;
    host.ask("PUT", "/v1/vms/m/balloon", Some(&json!({ "mode": "target", "memory_bytes": bytes }))).0
}

fn rand() -> u64 {
    sterna_sys::host::random_u128() as u64
}

fn dir_of(host: &Host, name: &str) -> PathBuf {
    host.state().join("vms").join(name)
}

/// The record of a machine as text: a JSON value cannot hold a number as wide as the boot's.
fn change_record(host: &Host, name: &str, change: impl FnOnce(String) -> String) {
    let path = dir_of(host, name).join("vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let changed = change(text.clone());
    assert_ne!(changed, text, "nothing was changed");
    fs::write(&path, changed).unwrap();
}

/// The RAM file of a machine.
fn ram_of(host: &Host, name: &str) -> PathBuf {
    let files = fs::read_dir(host.state().join("ram")).unwrap();
    let mut files = files.map(|entry| entry.unwrap().path());
    files.find(|path| path.file_name().unwrap().to_string_lossy().starts_with(&format!("{name}-"))).unwrap()
}

/// A record without a field that is an array of objects.
fn without_field(text: String, field: &str) -> String {
    let start = text.find(&format!("\"{field}\": [")).expect("the field is there");
    let end = start + text[start..].find("\n        }\n      ]").unwrap() + "\n        }\n      ]".len();
    let before = text[..start].trim_end().strip_suffix(',').unwrap();
    format!("{before}{}", &text[end..])
}

/// Makes of a machine that runs what an earlier daemon left: sockets beside the record, all of it QEMU's user's, no
/// word on its RAM files.
fn make_old(host: &Host, name: &str) {
    let dir = dir_of(host, name);
    for socket in ["qmp.sock", "agent.sock"] {
        fs::rename(dir.join("run").join(socket), dir.join(socket)).unwrap();
    }
    fs::remove_dir(dir.join("run")).unwrap();
    chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o750)).unwrap();
    change_record(host, name, |text| without_field(text.replace("/run/", "/"), "backings"));
}

/// Failed before: the symbolic link was followed, and what it led to held the record.
#[test]
fn what_qemus_user_puts_in_its_directory_is_not_written_to() {
    if cannot_run() || cannot_run_as_nobody() {
        return;
    }
    let host = host_of_nobody();
    let (dir, target) = (dir_of(&host, "m"), host.path("target"));
    fs::write(&target, "root's").unwrap();
    for place in [dir.clone(), dir.join("run")] {
        as_nobody(&format!("ln -s {} {}/vm.json.new", target.display(), place.display()));
    }
    assert_eq!(store(&host), 200);
    assert_eq!(fs::read_to_string(&target).unwrap(), "root's");
    assert!(!as_nobody(&format!("rm -f {0}/vm.json && echo {{}} > {0}/vm.json", dir.display())));
    assert!(!as_nobody(&format!("mv {0} {0}-away", dir.display())));
    assert!(as_nobody(&format!("touch {}/run/mine", dir.display())), "it has a directory of its own");
    assert_eq!(host.ask("DELETE", "/v1/vms/m?force=true", None).0, 204);
    assert!(!dir.exists());
}

/// Failed before: the forged record was believed.
#[test]
fn a_record_that_qemus_user_wrote_is_refused_and_the_machine_loses_nothing() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("m");
    host.run("other");
    let (pid, ram, path) = (host.pid_of("m"), ram_of(&host, "m"), dir_of(&host, "m").join("vm.json"));
    host.kill_daemon();
    chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    host.start_daemon();
    assert_eq!(host.names(), ["other"]);
    assert!(host.log().contains("it is not believed: it belongs to user 65534"), "{}", host.log());
    assert!(runs(pid) && ram.exists());
    assert_eq!(host.refused("POST", "/v1/vms", &run_request("m", &BARE)), "name-taken");
    assert!(ram.exists() && path.exists(), "nor is it removed by who wants the name");
    host.kill_daemon();
    chown(&path, Some(0), Some(0)).unwrap();
    host.start_daemon();
    assert_eq!((host.names(), host.pid_of("m")), (vec!["m".into(), "other".into()], pid));
}

/// Failed before: "removing a RAM file of no machine", while its guest ran.
#[test]
fn an_unreadable_record_costs_no_ram() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    for name in ["a", "a-b", "c"] {
        host.run(name);
    }
    let (pid, ram) = (host.pid_of("a"), ram_of(&host, "a"));
    let record = dir_of(&host, "a").join("vm.json");
    let whole = fs::read(&record).unwrap();
    host.kill_daemon();
    let map = host.state().join("ram/a-0123abcd");
    let stray = host.state().join("ram/gone-0123abcd");
    for path in [&map, &stray] {
        fs::write(path, "x").unwrap();
    }
    for damage in [&whole[..whole.len() / 2], b"", b"{\"name\":\"a\"}"] {
        fs::write(&record, damage).unwrap();
        host.start_daemon();
        assert_eq!(host.names(), ["a-b", "c"]);
        assert!(runs(pid) && ram.exists() && map.exists(), "{}", host.log());
        assert!(!stray.exists(), "what is nobody's goes all the same");
        host.kill_daemon();
    }
    fs::write(&record, &whole).unwrap();
    host.start_daemon();
    assert_eq!((host.names().len(), host.pid_of("a"), map.exists()), (3, pid, false));
    assert_eq!(host.state_of("a"), "running");
}

/// Made by hand: what an earlier daemon left while its guests ran.
#[test]
fn a_machine_of_an_older_daemon_is_taken_over_and_can_be_moved() {
    if cannot_run() || cannot_run_as_nobody() {
        return;
    }
    let (mut host, peer) = (host_of_nobody(), Host::start());
    let (pid, dir) = (host.pid_of("m"), dir_of(&host, "m"));
    host.kill_daemon();
    make_old(&host, "m");
    assert!(as_nobody(&format!("touch {}/vm.json.new", dir.display())), "it is as it was then");
    host.start_daemon();
    assert_eq!((host.state_of("m"), host.pid_of("m")), ("running".into(), pid), "{}", host.log());
    let about = fs::metadata(&dir).unwrap();
    assert_eq!((about.uid(), about.gid(), about.mode() & 0o7777), (0, 0, 0o750));
    let record = fs::read_to_string(dir.join("vm.json")).unwrap();
    let inode = fs::metadata(ram_of(&host, "m")).unwrap().ino();
    assert!(record.contains(&format!("\"inode\": {inode}")), "{record}");
    assert!(!as_nobody(&format!("touch {}/x", dir.display())));
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    assert_eq!((host.ram_files(), dir.exists()), (0, false));
}

/// Failed before: the pipe was waited for with the machine's name taken for ever; the link's target was in the
/// daemon's log.
#[test]
fn a_pipe_or_a_link_in_the_place_of_qemus_log_is_not_read() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let secret = host.path("secret");
    fs::write(&secret, "root:secret\n").unwrap();
    let link = |path: &Path| symlink(&secret, path).unwrap();
    let pipe = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    for put in [&link as &dyn Fn(&Path), &pipe] {
        host.run("m");
        let log = dir_of(&host, "m").join("qemu.log");
        fs::remove_file(&log).unwrap();
        put(&log);
        let status = host.ask("DELETE", "/v1/vms/m?force=true", None).0;
        assert_eq!(status, 204);
        assert!(host.names().is_empty() && !dir_of(&host, "m").exists());
        assert!(fs::symlink_metadata(host.state().join("logs/m.log")).is_err(), "it is not kept for a log");
        assert!(!host.log().contains("root:secret"));
    }
    assert!(secret.exists());
}

/// A QEMU of somebody else's with its RAM in this file.
fn adopted(host: &Host, ram: &Path) -> Stranger {
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", ram.display());
    let arguments = ["-accel", "tcg", "-display", "none", "-vga", "none", "-m", "64M", "-object", &backend, "-machine"];
    Stranger::start(&host.path(""), &[&arguments[..], &["q35,memory-backend=ram"]].concat(), true)
}

/// Failed before: the migration read the other guest's RAM.
#[test]
fn another_guests_ram_in_the_place_of_ones_own_is_not_opened() {
    if cannot_run() {
        return;
    }
    let (mut host, peer) = (Host::start(), Host::start());
    host.run("victim");
    let victim = ram_of(&host, "victim");
    let dir = tempfile::Builder::new().prefix("sterna-adopt-").tempdir_in("/dev/shm").unwrap();
    let ram = dir.path().join("ram");
    let stranger = adopted(&host, &ram);
    let (status, vm) = host.ask("POST", "/v1/vms/adopt", Some(&stranger.request("m")));
    assert_eq!(status, 201, "{vm}");
    fs::rename(&ram, dir.path().join("kept")).unwrap();
    for put in [
        |from: &Path, to: &Path| symlink(from, to).unwrap(),
        |_: &Path, to: &Path| {
            fs::write(to, [0u8; 4096]).unwrap();
        },
    ] {
        put(&victim, &ram);
        for _ in 0..2 {
            let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({ "verify": true })));
            assert_eq!((&reports[0]["status"], host.state_of("m")), (&json!("failed"), "running".into()));
            assert!(reports[0]["error"].to_string().contains("it was replaced"), "{}", reports[0]);
            assert_eq!(host.get("/v1/vms/m")["allocated_bytes"], 0, "nor is it counted");
            host.kill_daemon();
            host.start_daemon();
        }
        fs::remove_file(&ram).unwrap();
    }
    fs::rename(dir.path().join("kept"), &ram).unwrap();
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    assert_eq!(host.state_of("victim"), "running");
}

/// Failed before: it was adopted, and whoever moved it moved the other guest's memory.
#[test]
fn a_machine_whose_ram_is_another_machines_is_refused() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("victim");
    let stranger = adopted(&host, &ram_of(&host, "victim"));
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &stranger.request("m")), "ram-of-another");
    assert!(!dir_of(&host, "m").exists());
    // A record that says so is not believed either; nothing of either machine goes.
    let dir = tempfile::Builder::new().prefix("sterna-adopt-").tempdir_in("/dev/shm").unwrap();
    drop(stranger);
    let stranger = adopted(&host, &dir.path().join("ram"));
    assert_eq!(host.ask("POST", "/v1/vms/adopt", Some(&stranger.request("m"))).0, 201);
    host.kill_daemon();
    let number = |path: &Path| format!("\"inode\": {}", fs::metadata(path).unwrap().ino());
    let (own, other) = (number(&dir.path().join("ram")), number(&ram_of(&host, "victim")));
    let device = |name: &str| {
        let text = fs::read_to_string(dir_of(&host, name).join("vm.json")).unwrap();
        let start = text.find("\"device\": [").unwrap();
        text[start..start + text[start..].find(']').unwrap()].to_string()
    };
    let devices = (device("m"), device("victim"));
    change_record(&host, "m", |text| text.replace(&own, &other).replace(&devices.0, &devices.1));
    host.start_daemon();
    assert_eq!(host.names().len(), 1, "whichever was read first: {}", host.log());
    assert!(host.log().contains("its RAM is the RAM of"));
    assert_eq!(host.ram_files(), 1);
}

fn record(host: &Host, name: &str) -> Option<String> {
    fs::read_to_string(dir_of(host, name).join("vm.json")).ok()
}

/// Failed before: what had been written of new records stayed. The rest held.
#[test]
fn a_full_disk_fails_what_is_asked_and_leaves_records_and_guests_as_they_were() {
    if cannot_run() {
        return;
    }
    let (mut host, peer) = (small_host(), Host::start());
    run_with_balloon(&host);
    let (pid, before) = (host.pid_of("m"), record(&host, "m"));
    let filling = host.path("state/filling");
    fill(&filling);
    // What would be written is refused, and nothing is left of it.
    assert_eq!(host.refused("POST", "/v1/vms", &run_request("n", &BARE)), "host-error");
    assert_eq!((host.names(), host.ram_files(), dir_of(&host, "n").exists()), (vec!["m".into()], 1, false));
    assert_eq!(store(&host), 500);
    assert_eq!(record(&host, "m"), before);
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({})));
    assert_eq!((&reports[0]["status"], host.state_of("m")), (&json!("failed"), "running".into()));
    assert!(reports[0]["error"].to_string().contains("No space left"), "{}", reports[0]);
    assert_eq!((record(&host, "m"), peer.names()), (before.clone(), vec![]));
    assert_eq!(fs::read_dir(dir_of(&host, "m")).unwrap().count(), 3, "no half of a record");
    // What comes here is refused at its source.
    peer.run("p");
    let reports = peer.ended(peer.migrate(&["p"], &host.address(), json!({})));
    assert_eq!((&reports[0]["status"], peer.state_of("p")), (&json!("failed"), "running".into()), "{}", reports[0]);
    assert_eq!(host.names(), ["m"]);
    // A daemon starts, and finds what there was.
    host.kill_daemon();
    host.start_daemon();
    assert_eq!((host.state_of("m"), host.pid_of("m")), ("running".into(), pid));
    fs::remove_file(filling).unwrap();
    assert_eq!(store(&host), 200);
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({ "verify": true })));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
}

#[test]
fn a_disk_that_fills_while_a_guest_leaves_or_comes_costs_the_migration_alone() {
    if cannot_run() {
        return;
    }
    let (host, peer) = (small_host(), Host::start());
    run_with_balloon(&host);
    // Slow enough to be met under way; each side in turn has the full disk.
    let slow = json!({ "bandwidth_bytes_per_s": 200_000, "skip_free": "off" });
    let meet = |from: &Host, to: &Host| {
        let id = from.migrate(&["m"], &to.address(), slow.clone());
        eventually("it is under way", || from.get("/v1/vms/m")["migration"]["phase"] == "precopy");
        let filling = host.path("state/filling");
        fill(&filling);
        let faster = json!({ "bandwidth_bytes_per_s": null });
        assert_eq!(from.ask("PUT", "/v1/host/bandwidth", Some(&faster)).0 / 100, 2);
        let reports = from.ended(id);
        let seen = (reports[0]["status"].clone(), from.state_of("m"), to.names());
        fs::remove_file(filling).unwrap();
        (seen, reports[0].to_string())
    };
    let (seen, report) = meet(&host, &peer);
    assert_eq!(seen, (json!("failed"), "running".into(), vec![]), "{report}");
    assert!(report.contains("No space left"), "{report}");
    let reports = host.ended(host.migrate(&["m"], &peer.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    let (seen, report) = meet(&peer, &host);
    assert_eq!(seen, (json!("failed"), "running".into(), vec![]), "{report}");
}

/// Failed before: without its lock file the directory was anybody's.
#[test]
fn a_second_daemon_on_the_same_directory_ends_and_says_why() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("m");
    let link = host.path("link");
    symlink(host.state(), &link).unwrap();
    fs::remove_file(host.state().join("lock")).unwrap();
    for state in [host.state(), link] {
        let output = host.second_daemon(&state);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("another daemon uses the state directory"), "{text}");
    }
    assert_eq!((host.state_of("m"), host.ram_files()), ("running".into(), 1));
}

/// Failed before: each held the daemon's start, and each list, up for five seconds.
#[test]
fn qemus_that_do_not_answer_hold_each_other_up_neither_at_a_start_nor_in_a_list() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let names = ["a", "b", "c", "d", "e", "f"];
    let pids = names.map(|name| {
        host.run(name);
        host.pid_of(name)
    });
    host.kill_daemon();
    pids.into_iter().for_each(|pid| signal(pid, Signal::STOP));
    // One after the other they would take 30 s each time, and neither call waits so long.
    let began = Instant::now();
    host.start_daemon();
    assert_eq!(host.names(), names);
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    pids.into_iter().for_each(|pid| signal(pid, Signal::CONT));
    for name in names {
        eventually("it answers again", || host.state_of(name) == "running");
    }
}

/// Failed before, with twelve files: each machine counted as one that had ended, and its RAM was removed while its
/// guest ran.
#[test]
fn a_daemon_that_may_open_few_files_takes_no_machine_for_one_that_ended() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let names = ["a", "b", "c", "d"];
    for name in names {
        host.run(name);
    }
    host.kill_daemon();
    // Too few to begin with, too few for the machines, enough. How far the daemon gets in that time does not matter:
    // it must not do harm.
    for files in [8, 10, 12, 14, 16, 20] {
        host.start_daemon_with_few_files(files);
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(host.ram_files(), names.len(), "with {files} files: {}", host.log());
        host.kill_daemon();
    }
    host.start_daemon();
    assert_eq!(host.names(), names);
    assert_eq!(host.state_of("d"), "running");
}
