//! Who is said to be at fault.

mod support;

use serde_json::json;
use support::{BARE, Host, cannot_run, qemu};

/// Seen to fail: QEMU was started, and "another QMP client may hold the socket".
#[test]
fn more_memory_than_the_host_has_is_refused_by_what_the_host_has() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let request = json!({ "name": "a", "memory_bytes": 5000u64 << 30, "qemu": qemu(), "arguments": BARE });
    let (status, problem) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!((status, &problem["code"], &problem["blame"]), (400, &"too-much-memory".into(), &"request".into()));
    let message = problem["message"].as_str().unwrap();
    assert!(message.contains("4.88 TiB"), "{message}");
    assert!(message.contains("this host has"), "{message}");
    assert!(host.names().is_empty());
}

/// A display that is not there, a device whose network does not exist: QEMU opens its QMP socket, and ends some moments
/// later. Seen to fail: "QEMU does not answer", with the hint that another client may hold the socket.
#[test]
fn a_qemu_that_ends_while_it_starts_has_the_last_word() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let late: Vec<&str> = BARE.iter().copied().chain(["-device", "virtio-net-pci,netdev=nowhere"]).collect();
    for (arguments, word) in [(&["-accel", "tcg", "-display", "gtk"][..], "gtk"), (&late[..], "nowhere")] {
        for attempt in 0..5 {
            let request = json!({ "name": "a", "memory_bytes": 64 << 20, "qemu": qemu(), "arguments": arguments });
            let (_, problem) = host.ask("POST", "/v1/vms", Some(&request));
            assert_eq!((&problem["code"], &problem["blame"]), (&"qemu-failed".into(), &"qemu".into()), "{problem}");
            assert!(problem["cause"].to_string().contains(word), "{attempt}: {problem}");
            assert!(host.names().is_empty() && host.ram_files() == 0);
        }
    }
}
