//! Network cards of clones: taps of their own, links, and other hardware addresses.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};
use support::{Host, cannot_run, eventually, run_request};

/// A network device of this machine, which is gone when this is dropped.
struct Device(String);

impl Device {
    /// Makes it with `ip link add` or the like; none where this machine has no such devices.
    fn make(name: &str, words: &str) -> Option<Self> {
        let status = Command::new("ip").args(words.split_whitespace()).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("skipped: no network device can be made here (ip {words})");
            return None;
        }
        Some(Self(name.into()))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}

fn is_there(device: &str) -> bool {
    std::path::Path::new("/sys/class/net").join(device).exists()
}

/// A QEMU that is not root's cannot make a tap: this failed with `could not configure /dev/net/tun`.
#[test]
fn a_clone_of_a_qemu_that_is_not_root_has_a_tap_of_its_own_which_is_put_into_a_bridge_and_ends_with_it() {
    if cannot_run() {
        return;
    }
    let (tap, bridge) =
        (format!("stap{}", std::process::id() % 100_000), format!("sbr{}", std::process::id() % 100_000));
    let Some(_tap) = Device::make(&tap, &format!("tuntap add dev {tap} mode tap user nobody")) else { return };
    let Some(_bridge) = Device::make(&bridge, &format!("link add {bridge} type bridge")) else { return };
    let host = Host::configured("qemu_user = \"nobody\"");
    std::fs::set_permissions(host.path(""), PermissionsExt::from_mode(0o755)).unwrap();
    let netdev = format!("tap,id=n,ifname={tap},script=no,downscript=no");
    let words = ["-machine", "pc", "-accel", "tcg", "-display", "none", "-vga", "none", "-netdev", &netdev];
    let words = [&words[..], &["-device", "virtio-net-pci,netdev=n,mac=52:54:00:00:00:01"]].concat();
    let (status, answer) = host.ask("POST", "/v1/vms", Some(&run_request("a", &words)));
    if status != 201 && answer.to_string().contains("ermission") {
        return eprintln!("skipped: 'nobody' cannot use the agent or QEMU where they were built: {answer}");
    }
    assert_eq!(status, 201, "{answer}");
    let (status, answer) = host.ask("POST", "/v1/vms/a/fork", Some(&json!({ "names": ["b", "c"] })));
    assert_eq!(status, 200, "{answer}\n{}", host.log());
    let own: Vec<String> = ["a", "b", "c"].iter().map(|name| tap_of(&host, name)).collect();
    assert_eq!(own[0], tap);
    assert!(own[1] != own[2] && own[1..].iter().all(|name| name.starts_with("sterna") && is_there(name)), "{own:?}");
    let uid = std::fs::read_to_string(format!("/proc/{}/status", host.pid_of("b"))).unwrap();
    let uid = uid.lines().find(|line| line.starts_with("Uid:")).unwrap();
    assert!(!uid.split_whitespace().any(|word| word == "0"), "{uid}");

    // Its user brings it up, and says where to.
    let up = json!({ "up": true, "bridge": bridge });
    for _ in 0..2 {
        let (status, cards) = host.ask("PUT", "/v1/vms/b/link", Some(&up));
        assert_eq!((status, cards[0]["tap"].as_str()), (200, Some(own[1].as_str())), "{cards}");
    }
    let member = |name: &str| is_there(&format!("{bridge}/brif/{name}"));
    assert!(member(&own[1]) && !member(&own[2]));
    let (status, answer) = host.ask("PUT", "/v1/vms/b/link", Some(&json!({ "up": true, "bridge": "nowhere" })));
    assert!(status >= 400, "{answer}");
    assert_eq!(host.refused("PUT", "/v1/vms/b/link", &json!({ "up": false, "card": "other" })), "network-card");
    assert_eq!(host.ask("PUT", "/v1/vms/b/link", Some(&json!({ "up": false }))).0, 200);
    // A clone of the clone, too.
    let (status, answer) = host.ask("POST", "/v1/vms/b/fork", Some(&json!({ "names": ["d"] })));
    assert_eq!(status, 200, "{answer}");
    assert!(!own.contains(&tap_of(&host, "d")));

    for name in ["a", "b", "c", "d"] {
        assert_eq!(host.ask("DELETE", &format!("/v1/vms/{name}?force=true"), None).0, 204);
    }
    eventually("the clones' taps are gone", || own[1..].iter().all(|name| !is_there(name)));
    assert!(is_there(&tap), "the source's is its user's");
}

fn cards(host: &Host, name: &str) -> Value {
    host.get(&format!("/v1/vms/{name}/link"))
}

fn tap_of(host: &Host, name: &str) -> String {
    cards(host, name)[0]["tap"].as_str().unwrap_or_else(|| panic!("{name}: {}", host.log())).into()
}

/// Cards that cannot be unplugged: told before the source is paused, whose QEMU keeps its shared memory then.
#[test]
fn a_card_that_cannot_be_replaced_is_refused_before_anything_is_paused() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let head = |machine| ["-machine", machine, "-accel", "tcg", "-display", "none", "-vga", "none"];
    let net = ["-netdev", "user,id=n"];
    let of_slot = "virtio-net-pci,netdev=n,addr=5.0,multifunction=on";
    let cases: [(&str, &[&str], &str); 4] = [
        ("q35", &[&net[..], &["-device", "virtio-net-pci,netdev=n"]].concat(), "cannot be unplugged"),
        ("microvm", &[&net[..], &["-device", "virtio-net-device,netdev=n"]].concat(), "cannot be unplugged"),
        ("pc", &[&net[..], &["-device", of_slot, "-device", "virtio-rng-pci,addr=5.1"]].concat(), "several functions"),
        ("pc", &["-nic", "user,model=virtio-net-pci"], "not made by -device"),
    ];
    for (number, (machine, words, why)) in cases.into_iter().enumerate() {
        let name = format!("vm{number}");
        let (status, answer) =
            host.ask("POST", "/v1/vms", Some(&run_request(&name, &[&head(machine)[..], words].concat())));
        assert_eq!(status, 201, "{answer}");
        let request = json!({ "names": ["x"], "new_mac": true });
        let (status, problem) = host.ask("POST", &format!("/v1/vms/{name}/fork"), Some(&request));
        assert!(status >= 400 && problem["message"].as_str().unwrap_or_default().contains(why), "{name}: {problem}");
        assert_eq!(host.get(&format!("/v1/vms/{name}"))["memory_mode"], "shared", "it was not forked");
        assert!(!host.names().contains(&"x".into()));
        let request = json!({ "up": true, "new_mac": true });
        assert_eq!(host.refused("PUT", &format!("/v1/vms/{name}/link"), &request), "network-card");
    }
    let held = json!({ "names": ["x"], "new_mac": true, "paused": true });
    assert_eq!(host.refused("POST", "/v1/vms/vm0/fork", &held), "invalid-request");
}

/// A guest without a system lets go of nothing. The daemon dies while it waits: the next one goes on, and until the
/// card is replaced the machine is neither moved nor forked.
#[test]
fn a_guest_that_keeps_its_card_is_told_and_goes_nowhere_until_it_lets_go() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let words = ["-machine", "pc", "-accel", "tcg", "-display", "none", "-vga", "none", "-netdev", "user,id=n"];
    let words = [&words[..], &["-device", "virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,id=card"]].concat();
    let (status, answer) = host.ask("POST", "/v1/vms", Some(&run_request("a", &words)));
    assert_eq!(status, 201, "{answer}");
    let record = host.state().join("vms/a/vm.json");
    let new_cards = || -> Value {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        serde_json::from_str::<Value>(&text).unwrap_or_default()["new_cards"].clone()
    };
    let asked = {
        let socket = host.socket();
        std::thread::spawn(move || {
            let body = json!({ "up": true, "new_mac": true }).to_string();
            let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
            let head = "PUT /v1/vms/a/link HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
            let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
            std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
            let mut answer = String::new();
            let _ = std::io::Read::read_to_string(&mut stream, &mut answer);
        })
    };
    eventually("the new card is on record", || new_cards().as_array().is_some_and(|all| all.len() == 1));
    let wanted = new_cards();
    host.kill_daemon();
    asked.join().unwrap();
    host.start_daemon();
    assert_eq!(host.refused("POST", "/v1/vms/a/fork", &json!({ "names": ["x"] })), "vm-busy");
    // It gives up after a while, and says why.
    eventually("it says that the guest keeps it", || {
        host.get("/v1/vms/a")["note"].as_str().is_some_and(|note| note.contains("let go"))
    });
    assert_eq!(new_cards(), wanted, "the same address");
    assert_eq!(host.refused("POST", "/v1/vms/a/fork", &json!({ "names": ["x"] })), "vm-busy");
    assert_eq!(cards(&host, "a")[0]["mac"], "52:54:00:00:00:01");
}
