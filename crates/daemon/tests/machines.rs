//! Machines: started, shown, stopped, found again.

mod support;

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::Signal;
use support::{BARE, Host, cannot_run, eventually, run_request, runs, signal};

#[test]
fn a_machine_is_started_shown_and_stopped_without_a_trace() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let vm = host.run("db1");
    assert_eq!((&vm["state"], &vm["memory_bytes"]), (&"running".into(), &(64 << 20).into()));
    assert_eq!(vm["arguments"].as_array().unwrap().len(), BARE.len() + 2, "the user's, and vmgenid: {vm}");
    eventually("the firmware has written RAM", || host.get("/v1/vms/db1")["allocated_bytes"].as_u64() > Some(0));
    let pid = host.pid_of("db1");
    assert_eq!(host.names(), ["db1"]);
    let (status, _) = host.ask("DELETE", "/v1/vms/db1?force=true", None);
    assert_eq!(status, 204);
    assert!(host.names().is_empty() && !runs(pid));
    assert_eq!(host.ram_files(), 0);
    assert!(!host.state().join("vms/db1").exists());
}

#[test]
fn machine_types_and_memory_above_4_gib_start() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    for (name, machine, bytes) in [("m", "microvm", 64u64 << 20), ("p", "pc,usb=off", 5 << 30), ("d", "", 64 << 20)] {
        let mut arguments = vec!["-accel", "tcg", "-display", "none", "-daemonize"];
        if !machine.is_empty() {
            arguments.extend(["-M", machine]);
        }
        let mut request = run_request(name, &arguments);
        request["memory_bytes"] = bytes.into();
        let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
        assert_eq!(status, 201, "{machine}: {vm}");
        assert_eq!(vm["state"], "running", "{vm}");
    }
}

/// QEMU opens its QMP socket, and then waits for whoever reads its serial line, as it would make much memory. Seen to
/// fail: it was given 5 s to answer, and ended.
#[test]
fn a_qemu_that_takes_longer_to_start_is_waited_for() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let serial = host.state().join("serial");
    let listens = format!("unix:{},server=on,wait=on", serial.display());
    let request = run_request("a", &[&BARE[..], &["-serial", &listens]].concat());
    let (status, vm) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| host.ask("POST", "/v1/vms", Some(&request)));
        let mut reader = None;
        eventually("it listens for its reader", || {
            std::thread::sleep(Duration::from_secs(7));
            reader = UnixStream::connect(&serial).ok();
            reader.is_some() || asked.is_finished()
        });
        asked.join().expect("an answer")
    });
    assert_eq!((status, &vm["state"]), (201, &"running".into()), "{vm}");
}

#[test]
fn what_cannot_be_run_is_refused_with_a_code_and_leaves_nothing() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("taken");
    let refused = |name: &str, arguments: &[&str]| host.refused("POST", "/v1/vms", &run_request(name, arguments));
    assert_eq!(refused("taken", &BARE), "name-taken");
    assert_eq!(refused("a", &["-m", "1G"]), "argument-conflict");
    assert_eq!(refused("a", &["-object", "memory-backend-ram,id=x,size=1M"]), "argument-conflict");
    assert_eq!(refused("a", &["-incoming", "defer"]), "argument-conflict");
    assert_eq!(refused("a", &["-kernel", "vmlinuz"]), "relative-path");
    // Memory that is locked, or that another process maps by its file, cannot be private.
    for words in [["-overcommit", "mem-lock=on"], ["-device", "ivshmem-doorbell,vectors=1,chardev=c"]] {
        let mut private = run_request("a", &words);
        private["memory_mode"] = "private".into();
        assert_eq!(host.refused("POST", "/v1/vms", &private), "argument-conflict", "{words:?}");
    }
    for (qemu, code) in [("/nowhere/qemu", "qemu-not-found"), ("/bin/true", "not-qemu")] {
        let mut request = run_request("a", &BARE);
        request["qemu"] = qemu.into();
        assert_eq!(host.refused("POST", "/v1/vms", &request), code);
    }
    let (_, problem) = host.ask("POST", "/v1/vms", Some(&run_request("a", &["-no-such-option"])));
    assert_eq!(problem["code"], "qemu-failed");
    assert!(problem["cause"].to_string().contains("no-such-option"), "QEMU's own words are missing: {problem}");
    assert_eq!(host.names(), ["taken"]);
    assert_eq!(host.ram_files(), 1);
}

#[test]
fn a_missing_agent_is_told_before_qemu_is_started() {
    if cannot_run() {
        return;
    }
    let host = Host::with_agent(std::path::Path::new("/nowhere/agent.so"));
    assert_eq!(host.refused("POST", "/v1/vms", &run_request("a", &BARE)), "agent-not-found");
    assert_eq!(host.ram_files(), 0);
}

#[test]
fn machines_outlive_a_killed_daemon() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("a");
    host.run("b");
    let pid = host.pid_of("a");
    host.kill_daemon();
    assert!(runs(pid));
    host.start_daemon();
    assert_eq!(host.names(), ["a", "b"]);
    assert_eq!((host.state_of("a"), host.pid_of("a")), ("running".into(), pid));
    let (status, _) = host.ask("DELETE", "/v1/vms/a?force=true", None);
    assert_eq!(status, 204);
    assert!(host.stop_daemon().success());
    host.start_daemon();
    assert_eq!(host.names(), ["b"]);
}

#[test]
fn a_machine_that_ended_while_the_daemon_was_away_leaves_the_list() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    host.run("a");
    let pid = host.pid_of("a");
    host.kill_daemon();
    signal(pid, Signal::KILL);
    eventually("QEMU has ended", || !runs(pid));
    host.start_daemon();
    assert!(host.names().is_empty());
    assert_eq!(host.ram_files(), 0);
}

#[test]
fn a_machine_whose_qemu_dies_leaves_the_list_and_its_log_stays() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("a");
    // QEMU writes a line about the signal that ends it.
    signal(host.pid_of("a"), Signal::TERM);
    eventually("it is forgotten", || host.names().is_empty());
    assert_eq!(host.ram_files(), 0);
    let log = std::fs::read_to_string(host.state().join("logs/a.log")).unwrap();
    assert!(log.contains("terminating"), "{log}");
}

#[test]
fn a_stopped_guest_is_not_asked_to_switch_itself_off() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let mut arguments = BARE.to_vec();
    arguments.push("-S");
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&run_request("a", &arguments)));
    assert_eq!((status, &vm["state"]), (201, &"paused".into()));
    assert_eq!(host.refused("DELETE", "/v1/vms/a", &serde_json::Value::Null), "not-running");
    assert_eq!(host.names(), ["a"], "it can be stopped by force still");
}

#[test]
fn two_daemons_on_one_machine_do_not_disturb_each_other() {
    if cannot_run() {
        return;
    }
    let (mut a, b) = (Host::start(), Host::start());
    a.run("same");
    b.run("same");
    assert_ne!(a.pid_of("same"), b.pid_of("same"));
    a.kill_daemon();
    a.start_daemon();
    let (status, _) = a.ask("DELETE", "/v1/vms/same?force=true", None);
    assert_eq!(status, 204);
    assert_eq!((a.names().len(), b.names().len()), (0, 1));
    assert_eq!(b.state_of("same"), "running");
}

#[test]
fn qemu_runs_as_the_configured_user() {
    if cannot_run() {
        return;
    }
    let host = Host::configured("qemu_user = \"nobody\"");
    // The library must be readable to that user; a build directory need not be.
    let readable = std::process::Command::new("setpriv")
        .args(["--reuid=nobody", "--regid=nogroup", "--clear-groups", "test", "-r"])
        .arg(support::agent())
        .status();
    if !readable.is_ok_and(|status| status.success()) {
        return eprintln!("skipped: 'nobody' cannot read the agent where it was built");
    }
    std::fs::set_permissions(host.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    host.run("a");
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid_of("a"))).unwrap();
    let uid = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
    assert!(!uid.split_whitespace().any(|word| word == "0"), "{uid}");
}
