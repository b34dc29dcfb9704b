//! The command line against real daemons: what is printed, and every exit code.

#[path = "../../daemon/tests/support/mod.rs"]
mod support;

use std::process::{Command, Output};

use serde_json::{Value, json};
use support::{BARE, Host, cannot_run, eventually};

fn sterna(host: &Host, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--api", &host.api()])
        .args(arguments)
        .output()
        .expect("the command line starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must end with this code; its output.
fn expect(host: &Host, code: i32, arguments: &[&str]) -> (String, String) {
    let output = sterna(host, arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "sterna {arguments:?}\n{out}\n{err}");
    (out, err)
}

fn run(host: &Host, name: &str) {
    let qemu = support::qemu();
    let mut arguments = vec!["run", name, "--memory", "64M", "--qemu", &qemu, "--detach", "--"];
    arguments.extend(BARE);
    expect(host, 0, &arguments);
}

#[test]
fn machines_are_run_listed_shown_and_stopped() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    run(&host, "db1");
    let (out, _) = expect(&host, 0, &["ps"]);
    assert!(out.contains("NAME") && out.contains("db1") && out.contains("64.00 MiB"), "{out}");
    let (out, _) = expect(&host, 0, &["ps", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()[0]["name"], "db1");
    let (out, _) = expect(&host, 0, &["show", "db1"]);
    assert!(out.contains("running") && out.contains("-machine q35"), "{out}");
    let (out, _) = expect(&host, 0, &["show", "db1", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["memory_bytes"], 64 << 20);
    expect(&host, 0, &["stop", "db1", "--force"]);
    assert!(host.names().is_empty());
}

#[test]
fn a_command_whose_output_nobody_reads_any_more_ends_and_says_nothing() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let ended = command.args(["--api", &host.api(), "ps"]).stdout(writer).output().expect("the command line starts");
    assert_eq!((ended.status.code(), text(&ended.stderr)), (Some(141), String::new()));
}

#[test]
fn an_estimate_is_a_table_or_json_and_the_machine_runs_on() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    run(&host, "db1");
    let question = ["estimate", "db1", "--bandwidth", "1Gbit", "--duration", "300ms"];
    let (out, _) = expect(&host, 0, &question);
    assert!(out.contains("WITHIN LIMIT") && out.contains("stop-and-copy") && out.contains("write faults"), "{out}");
    let (out, _) = expect(&host, 0, &[&question[..], &["--json"]].concat());
    let estimate: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&estimate["vm"], &estimate["bandwidth_bytes_per_s"]), (&json!("db1"), &json!(125_000_000)));
    assert_eq!(host.state_of("db1"), "running");
    expect(&host, 1, &["estimate", "nobody", "--bandwidth", "1Gbit"]);
    expect(&host, 2, &["estimate", "db1", "--bandwidth", "1Gbit", "--duration", "1h"]);
}

#[test]
fn an_evacuation_that_ends_early_is_reported_and_its_machines_run_on() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    run(&host, "db1");
    run(&host, "db2");
    let nobody = ["--to", "127.0.0.1:1", "--memory", "127.0.0.1:2=1G", "--json", "-"];
    let (out, err) = expect(&host, 1, &[&["evacuate", "db1", "db2"][..], &nobody].concat());
    let reports: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(reports["split"][0]["vm"], "db1", "{reports}");
    assert_eq!(reports["split"][0]["status"], "failed", "{reports}");
    assert_eq!((reports["split"].as_array().map(Vec::len), &reports["migrations"]), (Some(1), &json!([])));
    assert!(err.contains("db1"), "{err}");
    for name in ["db1", "db2"] {
        assert_eq!(host.state_of(name), "running");
    }
}

#[test]
fn an_attached_run_ends_with_its_machine() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let mut arguments =
        vec!["--api".into(), host.api(), "run".into(), "m".into(), "--memory".into(), "64M".into(), "--".into()];
    arguments.extend(BARE.iter().map(|word| (*word).to_string()));
    let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(&arguments)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the command line starts");
    eventually("it runs", || host.state_of("m") == "running");
    expect(&host, 0, &["stop", "m", "--force"]);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("not on this host any more"), "{}", text(&output.stdout));
}

#[test]
fn ctrl_c_leaves_the_machine_of_an_attached_run_running() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--api", &host.api(), "run", "m", "--memory", "64M", "--"])
        .args(BARE)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the command line starts");
    eventually("it runs", || host.state_of("m") == "running");
    // It says so before it listens for the key.
    eventually("it listens for the key", || listens_for_the_key(&child));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && text(&output.stdout).contains("runs on"), "{}", text(&output.stdout));
    assert_eq!(host.state_of("m"), "running");
}

/// Whether SIGINT is caught (`SigCgt` in `proc_pid_status(5)`), and not the end of it.
fn listens_for_the_key(child: &std::process::Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|signals| signals & (1 << (rustix::process::Signal::INT.as_raw() - 1)) != 0)
}

fn interrupt(child: &std::process::Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a signal");
}

#[test]
fn a_migration_prints_its_report_and_writes_it_as_json() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    run(&a, "m1");
    run(&a, "m2");
    let (out, err) = expect(&a, 0, &["migrate", "m1", "--to", &b.address(), "--verify"]);
    assert!(out.contains("moved to") && out.contains("downtime") && out.contains("0 differ"), "{out}");
    assert!(err.contains("m1: "), "progress in plain lines: {err}");
    let (out, _) = expect(&b, 0, &["migrate", "m1", "--to", &a.address(), "--json", "-"]);
    let report: Value = serde_json::from_str(&out).expect("standard output is the report's alone");
    assert_eq!((&report["schema"], &report["status"], &report["vm"]), (&1.into(), &"completed".into(), &"m1".into()));
    let file = a.path("report.json");
    expect(&a, 0, &["migrate", "m1", "m2", "--to", &b.address(), "--json", file.to_str().unwrap()]);
    let gang: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(gang["migrations"].as_array().unwrap().len(), 2);
    assert_eq!(b.names(), ["m1", "m2"]);
}

#[test]
fn every_exit_code_means_what_it_says() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    run(&host, "m");
    let (_, err) = expect(&host, 1, &["migrate", "m", "--to", "127.0.0.1:1"]);
    for part in ["cannot reach", "fault:", "because:", "hint:", "stays at the source"] {
        assert!(err.contains(part), "'{part}' is missing: {err}");
    }
    expect(&host, 1, &["show", "nobody"]);
    expect(&host, 1, &["stop", "nobody"]);
    expect(&host, 1, &["cancel", "m"]);
    expect(&host, 1, &["adopt", "x", "--pid", "1", "--qmp", "/nowhere"]);
    for usage in [
        &["migrate", "m"] as &[&str],
        &["migrate", "m", "--to", "nowhere"],
        &["migrate", "m", "--to", "127.0.0.1:1", "--streams", "99"],
        &["migrate", "m", "--to", "127.0.0.1:1", "--compress", "brotli"],
        &["migrate", "m", "--to", "127.0.0.1:1", "--mode", "hybrid", "--no-postcopy"],
        &["run", "x", "--memory", "lots", "--"],
        &["run", "../x", "--memory", "64M", "--detach", "--"],
        &["run", "x", "--memory", "64M", "--detach", "--", "-m", "1G"],
        &["estimate", "m"],
        &["frobnicate"],
    ] {
        expect(&host, 2, usage);
    }
    assert_eq!(host.names(), ["m"]);
    host.stop_daemon();
    let (_, err) = expect(&host, 5, &["ps"]);
    assert!(err.contains("cannot reach the daemon"), "{err}");
}

#[test]
fn a_cancelled_migration_ends_with_3_by_command_and_by_ctrl_c() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run_full("m");
    for by_key in [false, true] {
        let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--api", &a.api(), "migrate", "m", "--to", &b.address(), "--bandwidth", "96KB"])
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("the command line starts");
        eventually("it is on its way", || a.get("/v1/vms/m")["migration"]["phase"] == "precopy");
        if by_key {
            interrupt(&child);
        } else {
            expect(&a, 0, &["cancel", "m"]);
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        assert_eq!(a.state_of("m"), "running");
        eventually("nothing is left at the destination", || b.names().is_empty());
    }
}

#[test]
fn a_machine_that_is_gone_ends_its_migration_with_4() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::start(), Host::start());
    a.run_full("m");
    let pid = a.pid_of("m");
    let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--api", &a.api(), "migrate", "m", "--to", &b.address(), "--bandwidth", "96KB"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the command line starts");
    eventually("it is on its way", || a.get("/v1/vms/m")["migration"]["phase"] == "precopy");
    let qemu = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(qemu, rustix::process::Signal::KILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("GONE"), "{}", text(&output.stderr));
    eventually("it leaves both lists", || a.names().is_empty() && b.names().is_empty());
}

#[test]
fn watch_follows_a_migration_to_its_end() {
    if cannot_run() {
        return;
    }
    let (a, b) = (Host::configured("bandwidth = '800Kbit'"), Host::start());
    a.run_full("m");
    let id = a.migrate(&["m"], &b.address(), json!({}));
    let mut watch = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--api", &a.api(), "watch", "m", "--json"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the command line starts");
    let (mut lines, stdout) = (Vec::<Value>::new(), watch.stdout.take().unwrap());
    for line in std::io::BufRead::lines(std::io::BufReader::new(stdout)) {
        lines.push(serde_json::from_str(&line.unwrap()).unwrap());
        if lines.last().unwrap()["phase"] == "precopy" {
            // It is watched: now it may come to its end.
            a.hurry();
        }
    }
    assert!(watch.wait().unwrap().success());
    assert_eq!(a.ended(id)[0]["status"], "completed");
    assert!(lines.iter().any(|line| line["phase"] == "precopy"), "{lines:?}");
    assert_eq!(lines.last().unwrap()["phase"], "done");
    assert!(lines.iter().all(|line| line["vm"] == "m"));
}

#[test]
fn a_persons_word_that_a_host_is_off_is_taken_with_its_risks_in_the_help_alone() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    run(&host, "m");
    let (help, _) = expect(&host, 0, &["resume", "--help"]);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["TWO GUESTS WRITE THE SAME DISKS", "ahead of the memory", "logs who said so"] {
        assert!(help.contains(words), "{help}");
    }
    expect(&host, 2, &["resume", "m", "--fenced", "b", "--to", "b:1"]);
    let (_, err) = expect(&host, 1, &["resume", "m", "--fenced", "b"]);
    assert!(err.contains("has not been handed over"), "{err}");
}
