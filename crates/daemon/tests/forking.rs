//! Who is not forked, and who is not given memory that a fork was promised. `system-tests` has guests that go on as
//! several.

mod support;

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::pools::{fork, hold, ready};
use support::{BARE, Host, cannot_run, end_machine, eventually, run_request, runs};

/// The room of the host, MiB: with what machines take and a margin of 64 there is some for two clones' QEMUs, of 64
/// each, and for none of these and a machine of 17.
const ROOM: u64 = 206;

/// A host with so much room for guests' memory, and these machines without a network: a card that QEMU adds by itself
/// cannot be told in a clone.
fn small_host(names: &[&str]) -> Host {
    // Small pages: of what a machine touches, no more counts than that.
    let host = Host::on("huge_pages = false\n", |state| {
        let ram = state.join("ram");
        std::fs::create_dir_all(&ram).expect("a directory");
        let size = format!("size={ROOM}m,mode=755");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "sterna-test"]).arg(&ram).status();
        assert!(mounted.expect("mount runs").success(), "a file system");
    });
    for name in names {
        let request = run_request(name, &[&BARE[..], &["-nodefaults"]].concat());
        let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
        assert_eq!(status, 201, "{vm}");
    }
    host
}

fn path(name: &str) -> String {
    format!("/v1/vms/{name}/fork")
}

/// The QEMU that was started for the machine of this name, which may have no record yet.
fn qemu_of(host: &Host, name: &str) -> Option<u32> {
    let directory = format!("{}/", host.state().join("vms").join(name).display());
    let processes = std::fs::read_dir("/proc").expect("it").flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let words = |pid: u32, what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
    numbers.find(|pid| words(*pid, "comm").starts_with("qemu") && words(*pid, "cmdline").contains(&directory))
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    let _ = kill_process(pid, signal);
}

/// Forks a machine into two, of which one's QEMU stands still while `meanwhile` looks at what others are told. Returns
/// the answer. `ends`: that QEMU is killed then.
fn held(host: &Host, name: &str, clones: [&str; 2], ends: bool, meanwhile: impl Fn()) -> (u16, Value) {
    let is_being_forked = || {
        let note = host.get(&format!("/v1/vms/{name}"))["note"].to_string();
        note.contains("being forked")
    };
    std::thread::scope(|scope| {
        let request = json!({ "names": clones });
        let asked = scope.spawn(move || host.ask("POST", &path(name), Some(&request)));
        let mut found = None;
        eventually("the clone's QEMU is there", || {
            found = qemu_of(host, clones[0]);
            found.is_some() || asked.is_finished()
        });
        let qemu = found.expect("nobody looked in time");
        signal(qemu, Signal::STOP);
        assert!(is_being_forked(), "it was held too late");
        meanwhile();
        assert!(is_being_forked());
        signal(qemu, if ends { Signal::KILL } else { Signal::CONT });
        asked.join().expect("it is answered")
    })
}

/// Seen to fail: until the clones' records were there, their memory was given to whoever asked for it.
#[test]
fn memory_that_a_fork_was_promised_is_given_to_nobody_until_its_clones_are_there_or_came_to_nothing() {
    if cannot_run() {
        return;
    }
    let (host, other) = (small_host(&["m", "n"]), Host::start());
    other.run_full("k");
    fork(&host, "n", &json!({ "hold": 0, "template": "t" }));
    let leaves = |code: &str| {
        let reports = other.ended(other.migrate(&["k"], &host.address(), json!({})));
        assert_eq!(reports[0]["error"]["code"].as_str().unwrap_or("none"), code, "{}", reports[0]);
    };
    let nobody_else = || {
        assert_eq!(host.refused("POST", &path("n"), &json!({ "names": ["z", "w"] })), "out-of-memory");
        assert_eq!(host.refused("PUT", "/v1/templates/t", &json!({ "hold": 2 })), "out-of-memory");
        leaves("out-of-memory");
        // Nor are their names.
        assert_eq!(host.refused("POST", &path("n"), &json!({ "names": ["y"] })), "name-taken");
        assert_eq!(host.refused("POST", &path("m"), &json!({ "names": ["z"] })), "vm-busy");
    };
    let (_, answer) = held(&host, "m", ["x", "y"], true, nobody_else);
    // It was killed before the pause, or after it: then the other one runs.
    if answer["clones"].as_array().is_some_and(|clones| !clones.is_empty()) {
        assert_eq!(answer["failed"].as_array().map(Vec::len), Some(1), "{answer}");
        assert_eq!(host.ask("DELETE", "/v1/vms/y?force=true", None).0, 204);
    }
    eventually("nothing is left of it", || host.names() == ["m", "n"] && qemu_of(&host, "y").is_none());
    assert_eq!(host.state_of("m"), "running");
    let (status, answer) = held(&host, "m", ["x", "y"], false, nobody_else);
    assert_eq!((status, answer["clones"].as_array().map(Vec::len)), (200, Some(2)), "{answer}");
    fork(&host, "n", &json!({ "names": ["z", "w"] }));
    assert_eq!(hold(&host, "t", 2)["ready"], 2);
    leaves("none");
    assert_eq!(host.names().len(), 9, "{:?}", host.names());
}

#[test]
fn clones_for_which_there_is_no_room_are_not_begun_and_fewer_of_them_are() {
    if cannot_run() {
        return;
    }
    let host = small_host(&["m"]);
    let refused = host.refused("POST", &path("m"), &json!({ "hold": 1, "new_mac": true }));
    assert_eq!(refused, "invalid-request", "it would be of no use");
    for request in [json!({ "names": ["x", "y", "z"] }), json!({ "names": ["x"], "hold": 2 }), json!({ "hold": 200 })] {
        let (status, problem) = host.ask("POST", &path("m"), Some(&request));
        assert_eq!((status >= 400, problem["code"].as_str()), (true, Some("out-of-memory")), "{problem}");
        assert_eq!((&problem["guest"], host.names()), (&json!("source"), vec!["m".to_owned()]), "{problem}");
    }
    assert_eq!((host.ram_files(), host.state_of("m").as_str()), (1, "running"), "it was not begun with");
    assert_eq!(host.get("/v1/vms/m")["family"], Value::Null, "nor has it a family");
    fork(&host, "m", &json!({ "names": ["x"], "hold": 1 }));
    assert_eq!((ready(&host, "m"), host.names().len()), (1, 3));
}

/// A fork, and another QEMU, begin with a copy of what a guest in private memory has for its own.
#[test]
fn where_there_is_no_room_for_a_copy_of_a_guests_own_pages_it_is_not_begun() {
    if cannot_run() {
        return;
    }
    let host = small_host(&[]);
    for name in ["p", "q"] {
        let mut request = run_request(name, &[&BARE[..], &["-nodefaults"]].concat());
        request["memory_bytes"] = json!(OWN + (16 << 20));
        request["memory_mode"] = "private".into();
        let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
        assert_eq!(status, 201, "{vm}");
    }
    write_own_pages(host.pid_of("p"), OWN + (16 << 20));
    assert_eq!(host.refused("POST", &path("p"), &json!({ "names": ["x"] })), "out-of-memory");
    assert_eq!(host.refused("POST", "/v1/vms/p/replace", &json!({})), "out-of-memory");
    assert_eq!((host.names(), host.state_of("p").as_str()), (vec!["p".to_owned(), "q".to_owned()], "running"));
    // There is for one that has written as good as nothing.
    fork(&host, "q", &json!({ "names": ["x"] }));
}

/// So much is too much to be copied on a small host, with the margin, and a clone may still write a tenth of it, bytes.
const OWN: u64 = 150 << 20;

/// Writes so much of a QEMU's RAM of this size as if its guest did.
fn write_own_pages(pid: u32, ram: u64) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    let (start, _) = maps.lines().filter_map(range).find(|(start, end)| end - start == ram).expect("its RAM");
    let memory = std::fs::File::options().write(true).open(format!("/proc/{pid}/mem")).expect("its memory");
    memory.write_all_at(&vec![7; OWN as usize], start).expect("it has memory");
}

/// Whoever has it in hand goes on, and so does it.
#[test]
fn a_machine_with_a_device_that_qemu_does_not_save_is_refused_while_it_runs() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let request = run_request("m", &[&BARE[..], &["-nodefaults", "-device", "amd-iommu"]].concat());
    let (status, vm) = host.ask("POST", "/v1/vms", Some(&request));
    assert_eq!(status, 201, "{vm}");
    let pid = host.pid_of("m");
    for (path, request) in [
        (path("m"), json!({ "names": ["x"] })),
        (path("m"), json!({ "hold": 1 })),
        ("/v1/vms/m/replace".into(), json!({})),
    ] {
        let (status, problem) = host.ask("POST", &path, Some(&request));
        assert_eq!((status, problem["code"].as_str()), (400, Some("qemu-blocks")), "{problem}");
        assert!(problem["message"].as_str().is_some_and(|message| message.contains("amd-iommu")), "{problem}");
    }
    assert_eq!((host.pid_of("m"), host.state_of("m").as_str(), host.names().len()), (pid, "running", 1));
    assert_eq!(host.ram_files(), 1);
}

#[test]
fn a_machine_that_others_have_in_hand_is_not_forked() {
    if cannot_run() {
        return;
    }
    let (host, other) = (Host::start(), Host::start());
    host.run_full("m");
    let pid = host.pid_of("m");
    let busy_with = |what: &str| {
        for request in
            [json!({ "names": ["x"] }), json!({ "hold": 1 }), json!({ "names": ["x"], "to": [other.address()] })]
        {
            let (status, problem) = host.ask("POST", &path("m"), Some(&request));
            assert_eq!((status, problem["code"].as_str()), (409, Some("vm-busy")), "{problem}");
            assert!(problem["message"].as_str().is_some_and(|message| message.contains(what)), "{problem}");
        }
        assert_eq!((host.names(), runs(pid)), (vec!["m".to_owned()], true));
    };
    // It is being moved.
    let id = host.migrate(&["m"], &other.address(), json!({ "bandwidth_bytes_per_s": 96 * 1024 }));
    eventually("it is on its way", || host.get("/v1/vms/m")["migration"]["phase"] == "precopy");
    busy_with("moved");
    assert_eq!(host.ask("POST", "/v1/vms/m/cancel", None).0, 202);
    assert_eq!(host.ended(id)[0]["status"], "cancelled");
    // Memory that it holds free is being taken, or would be: a stranger has its QEMU's ear, for which it waits a while.
    let stranger = occupy(&host.state().join("vms/m/run/qmp.sock"));
    let met = || {
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| host.ask("POST", "/v1/vms/m/reclaim", Some(&json!({ "method": "vmi" }))));
            std::thread::sleep(Duration::from_millis(300));
            let (_, problem) = host.ask("POST", &path("m"), Some(&json!({ "names": ["x"] })));
            assert_ne!(taking.join().expect("it ends").0, 200);
            problem["code"] == "vm-busy" && problem["message"].to_string().contains("being taken")
        })
    };
    eventually("its free memory is being taken while it is to be forked", met);
    drop(stranger);
    // It is being stopped, which its firmware does not hear of.
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| {
            // Who asks whether it is forked has it for a moment.
            let stopped = || host.ask("DELETE", "/v1/vms/m", None).0;
            std::iter::repeat_with(stopped).find(|status| *status != 409)
        });
        // Until then it is refused because of the name.
        let is_stopped = || host.refused("POST", &path("m"), &json!({ "names": ["m"] })) == "vm-busy";
        eventually("it is being stopped", is_stopped);
        busy_with("being stopped");
        end_machine(pid);
        assert_eq!(stopping.join().expect("it ends"), Some(204));
    });
    assert_eq!(host.refused("POST", &path("m"), &json!({ "names": ["x"] })), "unknown-vm");
    assert!(host.names().is_empty());
}

/// QEMU talks to nobody else while this is there.
fn occupy(socket: &Path) -> UnixStream {
    let mut stranger = UnixStream::connect(socket).expect("QEMU's socket");
    stranger.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    stranger.read_exact(&mut [0]).expect("QEMU greets it");
    stranger
}
