//! Machines that begin as a memory template.

mod support;

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use support::{BARE, Host, cannot_run, run_request};

/// A part of the machine's RAM that its firmware leaves alone.
const UNTOUCHED: u64 = 48 << 20;

/// The memory of the machines here, bytes.
const BYTES: u64 = 64 << 20;

fn request(name: &str, template: &Path) -> Value {
    let mut request = run_request(name, &BARE);
    request["memory_bytes"] = BYTES.into();
    request["memory_mode"] = "private".into();
    request["memory_template"] = template.to_str().unwrap().into();
    request
}

/// The word at a place of a file that is mapped by a process.
fn mapped_word(pid: u64, file: &Path, place: u64) -> [u8; 8] {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.ends_with(file.to_str().unwrap())).expect("it is mapped");
    assert!(line.contains(" rw-p "), "{line}");
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |digits: &str| u64::from_str_radix(digits, 16).unwrap();
    let (start, offset) = (number(words[0].split('-').next().unwrap()), number(words[2]));
    let mut word = [0; 8];
    File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut word, start + place - offset).unwrap();
    word
}

#[test]
fn machines_begin_as_their_template_outlive_a_daemon_and_are_not_moved_once_it_was_changed() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("template");
    let file = File::create(&path).unwrap();
    file.set_len(BYTES).unwrap();
    file.write_all_at(&[7; 8 << 20], UNTOUCHED).unwrap();
    for name in ["a", "b"] {
        let (status, vm) = host.ask("POST", "/v1/vms", Some(&request(name, &path)));
        assert_eq!(status, 201, "{vm}");
        assert_eq!(vm["memory_template"], path.to_str().unwrap(), "{vm}");
        assert_eq!(mapped_word(vm["pid"].as_u64().unwrap(), &path, UNTOUCHED), [7; 8]);
    }
    assert_eq!(host.refused("POST", "/v1/vms", &request("a", &path)), "name-taken");

    // Both are found again: that they have one file in common is no fault of their records.
    host.kill_daemon();
    host.start_daemon();
    assert_eq!(host.names(), ["a", "b"]);
    let estimate = || host.ask("GET", "/v1/vms/a/estimate?bandwidth_bytes_per_s=100000000&duration_ms=200", None);
    let (status, seen) = estimate();
    assert_eq!(status, 200, "{seen}");
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    file.set_modified(before + Duration::from_nanos(1)).unwrap();
    let (_, problem) = estimate();
    assert_eq!(problem["code"], "memory-template", "{problem}");
    assert!(problem["message"].as_str().unwrap().contains("MAY BE DAMAGED"), "{problem}");
    file.set_modified(before).unwrap();
    assert_eq!(estimate().0, 200);
    for name in ["a", "b"] {
        assert_eq!(host.ask("DELETE", &format!("/v1/vms/{name}?force=true"), None).0, 204);
    }
    assert_eq!(host.ram_files(), 0);
    assert_eq!(fs::metadata(&path).expect("it is its owner's").len(), BYTES);
}

#[test]
fn what_is_no_template_is_refused_and_leaves_nothing() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("template");
    File::create(&path).unwrap().set_len(BYTES).unwrap();
    let mut shared = request("a", &path);
    shared["memory_mode"] = "shared".into();
    assert_eq!(host.refused("POST", "/v1/vms", &shared), "invalid-request");
    assert_eq!(host.refused("POST", "/v1/vms", &request("a", Path::new("template"))), "invalid-request");
    assert_eq!(host.refused("POST", "/v1/vms", &request("a", &dir.path().join("none"))), "memory-template");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(BYTES / 2).unwrap();
    assert_eq!(host.refused("POST", "/v1/vms", &request("a", &path)), "memory-template");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(BYTES).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    assert_eq!(host.refused("POST", "/v1/vms", &request("a", &path)), "memory-template");
    assert!(host.names().is_empty());
    assert_eq!(host.ram_files(), 0);
}
