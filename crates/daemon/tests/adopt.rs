//! Machines that were started by other means.

mod support;

use support::{Host, Stranger, cannot_run};

const PLAIN: [&str; 6] = ["-accel", "tcg", "-display", "none", "-vga", "none"];

fn with_ram(backend: &str) -> Vec<String> {
    let ram = ["-m", "64M", "-object", backend, "-machine", "q35,memory-backend=ram"];
    PLAIN.iter().chain(&ram).map(|word| (*word).to_string()).collect()
}

fn start(host: &Host, backend: &str, with_agent: bool) -> Stranger {
    let arguments = with_ram(backend);
    Stranger::start(&host.path(""), &arguments.iter().map(String::as_str).collect::<Vec<_>>(), with_agent)
}

/// A directory on tmpfs.
fn tmpfs() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("sterna-adopt-").tempdir_in("/dev/shm").unwrap()
}

#[test]
fn an_adopted_machine_is_kept_over_a_restart_and_its_ram_file_is_left_alone() {
    if cannot_run() {
        return;
    }
    let (mut host, ram) = (Host::start(), tmpfs());
    let file = ram.path().join("ram");
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", file.display());
    let stranger = start(&host, &backend, true);
    let (status, vm) = host.ask("POST", "/v1/vms/adopt", Some(&stranger.request("a")));
    assert_eq!((status, &vm["state"]), (201, &"running".into()), "{vm}");
    assert_eq!(vm["memory_bytes"], 64 << 20);
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &stranger.request("b")), "already-known");
    host.kill_daemon();
    host.start_daemon();
    assert_eq!(host.state_of("a"), "running");
    let (status, _) = host.ask("DELETE", "/v1/vms/a?force=true", None);
    assert_eq!(status, 204);
    assert!(host.names().is_empty() && file.exists());
}

#[test]
fn ram_that_cannot_be_moved_is_refused_with_the_reason() {
    if cannot_run() {
        return;
    }
    let ram = tmpfs();
    let file = ram.path().join("ram").display().to_string();
    let disk = tempfile::tempdir_in("/var/tmp").unwrap();
    let on_disk = disk.path().join("ram").display().to_string();
    let cases = [
        ("memfd-ram", "memory-backend-memfd,id=ram,size=64M,share=on".to_string()),
        ("anonymous-ram", "memory-backend-ram,id=ram,size=64M".to_string()),
        ("private-ram", format!("memory-backend-file,id=ram,size=64M,mem-path={file},share=off")),
        ("unnamed-ram", format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", ram.path().display())),
        ("disk-ram", format!("memory-backend-file,id=ram,size=64M,mem-path={on_disk},share=on")),
    ];
    for (code, backend) in cases {
        let host = Host::start();
        let stranger = start(&host, &backend, true);
        assert_eq!(host.refused("POST", "/v1/vms/adopt", &stranger.request("a")), code, "{backend}");
        assert!(host.names().is_empty());
    }
}

#[test]
fn a_qemu_without_agent_or_qmp_is_refused() {
    if cannot_run() {
        return;
    }
    let (host, ram) = (Host::start(), tmpfs());
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", ram.path().join("ram").display());
    let stranger = start(&host, &backend, false);
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &stranger.request("a")), "agent-missing");
    drop(stranger);
    let stranger = start(&host, &backend, true);
    let mut request = stranger.request("a");
    request["qmp"] = "/nowhere/qmp.sock".into();
    assert_eq!(host.refused("POST", "/v1/vms/adopt", &request), "qmp-unreachable");
    assert!(host.names().is_empty());
}

#[test]
fn an_adopted_machine_can_be_moved_and_moved_back() {
    if cannot_run() {
        return;
    }
    let (a, b, ram) = (Host::start(), Host::start(), tmpfs());
    let backend = format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", ram.path().join("ram").display());
    let stranger = start(&a, &backend, true);
    let (status, vm) = a.ask("POST", "/v1/vms/adopt", Some(&stranger.request("m")));
    assert_eq!(status, 201, "{vm}");
    for (from, to) in [(&a, &b), (&b, &a)] {
        let reports = from.ended(from.migrate(&["m"], &to.address(), serde_json::json!({ "verify": true })));
        assert_eq!(reports[0]["status"], "completed", "{}", reports[0]);
        assert_eq!((from.names().len(), to.state_of("m")), (0, "running".into()));
    }
    assert_eq!((a.ram_files(), b.ram_files()), (1, 0));
}
