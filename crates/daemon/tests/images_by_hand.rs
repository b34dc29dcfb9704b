//! Disks whose user has told QEMU by other ways than Sterna's to go on with other images: another QEMU would open the
//! wrong ones, and so none gets the machine until its arguments name them.

#[path = "support/disks.rs"]
mod disks;
mod support;

use std::time::Duration;

use disks::Disks;
use serde_json::{Value, json};
use support::{Host, cannot_run, eventually};

/// How long QEMU has for an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// Neither moved, nor forked, nor replaced; and it goes on.
fn is_left_alone(disks: &Disks, other: &Host) {
    let host = &disks.host;
    let reports = host.ended(host.migrate(&["a"], &other.address(), json!({})));
    assert_eq!(reports[0]["error"]["code"], "disk-images", "{}", reports[0]);
    let fork = json!({ "names": ["b"], "overlay_disks": true });
    for (what, request) in [("fork", fork), ("replace", json!({}))] {
        assert_eq!(host.refused("POST", &format!("/v1/vms/a/{what}"), &request), "disk-images", "{what}");
    }
    assert_eq!((host.state_of("a").as_str(), host.names(), other.names()), ("running", vec!["a".to_owned()], vec![]));
}

/// Another QEMU takes it over, with these words of its arguments in the place of those.
fn replaced(disks: &Disks, was: &str, is: &str) {
    let arguments = disks.host.get("/v1/vms/a")["arguments"].clone();
    let words = arguments.as_array().expect("a list").iter().filter_map(Value::as_str);
    let words: Vec<String> = words.map(|word| word.replace(was, is)).collect();
    let (status, answer) = disks.host.ask("POST", "/v1/vms/a/replace", Some(&json!({ "arguments": words })));
    assert_eq!(status, 200, "{answer}\n{}", disks.host.log());
}

#[test]
fn a_machine_whose_disks_are_on_other_images_than_it_names_gets_no_other_qemu_until_it_names_them() {
    if cannot_run() {
        return;
    }
    let (disks, other) = (Disks::start(), Host::start());
    let (snapshot, image) = (disks.dir.path().join("snapshot"), disks.image());
    let taken = json!({ "device": "d", "snapshot-file": snapshot, "format": "qcow2" });
    disks.qmp("a").execute("blockdev-snapshot-sync", taken, ANSWER).expect("a snapshot");
    disks.io("a", "write -P 7 0 1M");
    is_left_alone(&disks, &other);

    let raw = format!("format=raw,file={}", image.display());
    let overlay = format!("format=qcow2,file={}", snapshot.display());
    replaced(&disks, &raw, &overlay);
    assert_eq!(disks.images("a"), [snapshot, image.clone()]);
    disks.holds(&[(0, 1, 1)]);

    // And back: what was written over the image goes into it, which is the disk again.
    let device = json!({ "job-id": "commit", "device": "d" });
    disks.qmp("a").execute("block-commit", device, ANSWER).expect("it begins");
    eventually("the image is the disk again", || {
        let _ = disks.qmp("a").execute("block-job-complete", json!({ "device": "commit" }), ANSWER);
        disks.images("a") == [image.clone()]
    });
    disks.holds(&[(0, 1, 7)]);
    is_left_alone(&disks, &other);
    replaced(&disks, &overlay, &raw);
    disks.fork("a", "b");
    let reports = disks.host.ended(disks.host.migrate(&["a"], &other.address(), json!({})));
    assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
    assert_eq!(other.state_of("a"), "running");
}
