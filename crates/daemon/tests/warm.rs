//! Warm pools: clones that are held ready are taken, made anew and ended, and what a restarted daemon makes of those
//! that its predecessor died with. The records are put as a daemon leaves them that is killed there.

mod support;

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use serde_json::{Value, json};
use support::pools::{fork, held, hold, ready, take};
use support::{BARE, Host, cannot_run, eventually, run_request, runs};

/// Starts the machine `m`, which has no network: a card that QEMU adds by itself cannot be told in a clone.
fn run(host: &Host) {
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&run_request("m", &[&BARE[..], &["-nodefaults"]].concat())));
    assert_eq!(status, 201, "{vm}");
}

fn stop(host: &Host, name: &str) {
    let (status, answer) = host.ask("DELETE", &format!("/v1/vms/{name}?force=true"), None);
    assert_eq!(status, 204, "{answer}");
}

fn directory(host: &Host, name: &str) -> PathBuf {
    host.state().join("vms").join(name)
}

/// Has a machine's record say that it is being taken. As text: a JSON value cannot hold a number as wide as the boot's.
fn write_taking(host: &Host, from: &str, to: &str) {
    let path = directory(host, from).join("vm.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let changed = text.replacen("\"taking\": null", &format!(r#""taking": {{ "from": "{from}", "to": "{to}" }}"#), 1);
    assert_ne!(changed, text);
    std::fs::write(&path, changed).unwrap();
}

#[test]
fn a_taking_in_which_a_daemon_died_is_undone_before_the_directory_has_its_new_name_and_done_after_it() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    run(&host);
    let forked = fork(&host, "m", &json!({ "hold": 3, "template": "t" }));
    assert_eq!((forked["template"]["ready"].as_u64(), forked["clones"].as_array().map(Vec::len)), (Some(3), Some(0)));
    let before = held(&host);
    host.kill_daemon();
    let [(a, _), (b, _), (c, _)] = before.as_slice() else { panic!("{before:?}") };
    write_taking(&host, a, "x");
    for (held, name) in [(b, "y"), (c, "z")] {
        write_taking(&host, held, name);
        std::fs::rename(directory(&host, held), directory(&host, name)).unwrap();
    }
    // One came as far as to its record under its new name.
    let path = directory(&host, "z").join("vm.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let (old, new) = (directory(&host, c).display().to_string(), directory(&host, "z").display().to_string());
    let text = text.replacen(&format!("\"name\": \"{c}\""), "\"name\": \"z\"", 1).replace(&old, &new);
    std::fs::write(&path, text).unwrap();
    host.start_daemon();
    for (name, (_, pid)) in [("y", &before[1]), ("z", &before[2])] {
        assert_eq!((host.state_of(name).as_str(), host.pid_of(name)), ("running", *pid));
        let vm = host.get(&format!("/v1/vms/{name}"));
        assert!(vm["held_for"].is_null() && vm["forked_from"] == "m", "{vm}");
    }
    assert!(held(&host).contains(&before[0]), "it is held on");
    eventually("the pool is full again", || ready(&host, "t") == 3);
    stop(&host, "y");
    stop(&host, "z");

    // A template whose record is gone: its removal had begun.
    host.kill_daemon();
    let left = before[0].1;
    std::fs::remove_file(host.state().join("templates/t.json")).unwrap();
    host.start_daemon();
    assert_eq!((held(&host), runs(left)), (Vec::new(), false));
    assert_eq!(host.state_of("m"), "running");
    stop(&host, "m");
    eventually("no file of the image is left", || host.ram_files() == 0);
}

/// The only RAM file of the host.
fn ram_file(host: &Host) -> PathBuf {
    std::fs::read_dir(host.state().join("ram")).unwrap().next().expect("a file").unwrap().path()
}

/// Failed while a daemon that died before it had said so of a file left its pages there until the machine ended.
#[test]
fn what_a_fork_has_made_common_can_be_given_back_by_the_next_daemon() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    run(&host);
    let ram = std::fs::File::open(ram_file(&host)).unwrap();
    let mode = || ram.metadata().unwrap().mode() & 0o7777;
    fork(&host, "m", &json!({ "names": ["x"] }));
    assert_eq!(mode(), 0o1600);
    host.kill_daemon();
    ram.set_permissions(Permissions::from_mode(0o600)).unwrap();
    host.start_daemon();
    eventually("the file is known to be common", || mode() == 0o1600);
    assert_eq!([host.state_of("m"), host.state_of("x")], ["running", "running"]);
}

#[test]
fn no_clone_runs_while_somebody_can_write_what_it_has() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    run(&host);
    let writer = std::fs::File::options().write(true).open(ram_file(&host)).unwrap();
    assert_eq!(host.refused("POST", "/v1/vms/m/fork", &json!({ "names": ["x"] })), "foreign-writers");
    assert_eq!((host.state_of("m").as_str(), host.names()), ("running", vec!["m".to_owned()]));
    drop(writer);
    fork(&host, "m", &json!({ "names": ["x"] }));
    assert_eq!([host.state_of("m"), host.state_of("x")], ["running", "running"]);
}

#[test]
fn a_template_outlives_its_source_and_the_daemon_and_its_pool_comes_back_to_its_number() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    run(&host);
    fork(&host, "m", &json!({ "hold": 1 }));
    let family = host.get("/v1/vms/m")["family"].clone();
    assert!(family.is_string());
    // Failed while files with names were not taken for what RAM consists of.
    for name in ["once", "more"] {
        fork(&host, "m", &json!({ "names": [name] }));
        fork(&host, name, &json!({ "names": ["of-it"] }));
        ["of-it", name].iter().for_each(|name| stop(&host, name));
    }
    // The source's memory is what it is: with its source gone the template's is still there.
    stop(&host, "m");
    host.kill_daemon();
    host.start_daemon();
    assert_eq!(take(&host, "m", "one")["was_held"], true);
    assert_eq!(host.get("/v1/vms/one")["family"], family);
    eventually("another is ready", || ready(&host, "m") == 1);
    // One that dies is made up for.
    let (name, pid) = held(&host).remove(0);
    support::end_machine(pid);
    eventually("another is ready in its place", || held(&host).iter().any(|(other, _)| *other != name));
    eventually("and only that", || ready(&host, "m") == 1 && !host.names().contains(&name));
    // Without one that is ready, one is made.
    hold(&host, "m", 0);
    assert_eq!((held(&host), take(&host, "m", "two")["was_held"].clone()), (Vec::new(), json!(false)));
    assert_eq!(hold(&host, "m", 2)["ready"], 2);
    for (method, path, body, code) in [
        ("POST", "/v1/templates/m/run", json!({ "name": "one" }), "name-taken"),
        ("POST", "/v1/templates/m/run", json!({ "name": "../x" }), "invalid-name"),
        ("POST", "/v1/templates/n/run", json!({ "name": "x" }), "unknown-template"),
        ("PUT", "/v1/templates/m", json!({ "hold": 1000 }), "invalid-request"),
        ("POST", "/v1/vms/one/fork", json!({ "hold": 1, "template": "m" }), "name-taken"),
        ("POST", "/v1/vms/one/fork", json!({ "names": ["x"], "template": "n" }), "invalid-request"),
        ("DELETE", &format!("/v1/vms/{}?force=true", held(&host)[0].0), Value::Null, "vm-busy"),
    ] {
        assert_eq!(host.refused(method, path, &body), code, "{method} {path} {body}");
    }
    let processes: Vec<u32> = held(&host).into_iter().map(|(_, pid)| pid).collect();
    let (status, _) = host.ask("DELETE", "/v1/templates/m", None);
    assert_eq!(status, 204);
    assert!(held(&host).is_empty() && processes.iter().all(|pid| !runs(*pid)));
    assert_eq!(host.get("/v1/templates"), json!([]));
    for name in ["one", "two"] {
        assert_eq!(host.state_of(name), "running");
        stop(&host, name);
    }
    eventually("no file of the image is left", || host.ram_files() == 0);
}
