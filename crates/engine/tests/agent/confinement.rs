//! QEMU's confinement, `-daemonize`, children.

use serde_json::json;
use sterna_agent_protocol::message::Status;
use sterna_engine::agent::AgentError;
use sterna_sys::userfaultfd::Features;

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use crate::fixture::{Qemu, Start, cannot_run, device, eventually, library, with_each_qemu};
use crate::program::Program;

const SANDBOX: &str = "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
const NOBODY: [&str; 6] = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];

/// Everything that the daemon does with a QEMU works with this one.
fn is_usable(qemu: &Qemu) {
    let mut agent = qemu.agent();
    assert_eq!(agent.hello().expect("hello").pid, qemu.pid);
    assert_eq!(agent.blocks().expect("blocks").len(), 1);
    agent.discard_log().expect("the log");
    let opened = agent.open_userfaultfd(Some(device().as_fd()), Features::TRACKING.bits()).expect("a userfaultfd");
    assert_ne!(opened.features & Features::WP_ASYNC.bits(), 0);
    agent.close_userfaultfd().expect("close");
}

#[test]
fn a_sandboxed_qemu_is_usable() {
    with_each_qemu(|start| is_usable(&start.ram(64).with(SANDBOX).go()));
}

#[test]
fn a_daemonized_qemu_is_usable() {
    with_each_qemu(|start| {
        // With more denied QEMU does not become a daemon: it could not fork or leave its session.
        let start = start.ram(64).with("-sandbox on,obsolete=deny,resourcecontrol=deny -daemonize -pidfile");
        let pid = start.file("pid");
        is_usable(&start.with(&pid).go());
    });
}

#[test]
fn a_sandboxed_qemu_of_an_unprivileged_user_is_usable_with_the_device_passed_in() {
    if cannot_run() {
        return;
    }
    if !library().ancestors().all(|part| part.metadata().is_ok_and(|meta| meta.mode() & 1 == 1)) {
        return println!("skipped: an unprivileged user cannot reach {}", library().display());
    }
    let qemu = Start::new().ram(64).with(SANDBOX).under(&NOBODY).go();
    is_usable(&qemu);
    let socket = std::fs::metadata(qemu.dir.path().join("agent")).expect("the socket is there");
    assert_eq!((socket.uid(), socket.mode() & 0o777), (65534, 0o600));
    match qemu.agent().open_userfaultfd(None, 0) {
        Err(AgentError::Refused { status: Status::System, errno, .. }) => assert_eq!(errno, libc::EPERM as u32),
        other => panic!("without the device it has no privilege, but: {other:?}"),
    }
}

#[test]
fn a_privileged_qemu_needs_no_device() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).go();
    qemu.agent().open_userfaultfd(None, Features::TRACKING.bits()).expect("a userfaultfd");
}

#[test]
fn the_sockets_file_is_for_its_owner_only_whatever_the_umask() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).under(&["sh", "-c", "umask 0; exec \"$@\"", "sh"]).go();
    qemu.agent();
    let mode = std::fs::metadata(qemu.dir.path().join("agent")).expect("the socket is there").mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_childs_environment_has_nothing_of_the_library() {
    let mut program = Program::start();
    assert_eq!(program.tell("environment"), "");
}

#[test]
fn a_child_of_qemu_does_not_inherit_the_library() {
    if cannot_run() {
        return;
    }
    let mut qemu = Start::new().ram(64).go();
    qemu.agent();
    let environment = qemu.dir.path().join("environment");
    let maps = qemu.dir.path().join("maps");
    let command = format!("exec:env > {}; cat /proc/self/maps > {}", environment.display(), maps.display());
    qemu.qmp("migrate", json!({"uri": command}));
    let maps =
        eventually("QEMU's child", || std::fs::read_to_string(&maps).ok().filter(|maps| maps.contains("[stack]")));
    let environment = std::fs::read_to_string(&environment).expect("written before");
    assert!(environment.contains("PATH="));
    assert!(!environment.contains("LD_PRELOAD") && !environment.contains("STERNA_AGENT_SOCKET"), "{environment}");
    assert!(!maps.contains(library().file_name().and_then(|name| name.to_str()).expect("a name")));
}

#[test]
fn another_preloaded_library_stays_for_qemus_children() {
    // The test's own preload list: a library that every glibc system has, beside ours.
    let other = "/lib/x86_64-linux-gnu/libdl.so.2";
    if cannot_run() || !std::path::Path::new(other).exists() {
        eprintln!("skipped: needs {other}");
        return;
    }
    let preload = format!("LD_PRELOAD={other}:{}", library().display());
    let mut qemu = Start::new().ram(64).under(&["env", &preload]).go();
    qemu.agent();
    let environment = qemu.dir.path().join("environment");
    qemu.qmp("migrate", json!({"uri": format!("exec:env > {}", environment.display())}));
    let environment = eventually("QEMU's child", || {
        std::fs::read_to_string(&environment).ok().filter(|environment| environment.contains("PATH="))
    });
    assert!(environment.lines().any(|line| line == format!("LD_PRELOAD={other}")), "{environment}");
}
