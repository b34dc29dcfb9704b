use std::path::{Path, PathBuf};

use sterna_bench::accelerator;
use sterna_bench::process::ProcessId;
use sterna_system_tests::{Point, Proxy, Site, cli};

use crate::with_guest;

/// Kills the destination's QEMU while a message is held back.
fn qemu_killed_at(point: Point) {
    with_guest(|site| {
        let (_, there) = site.names();
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(point);
        let attempt = site.begin(Some(&proxy.address), &[]);
        proxy.wait_until_held();
        let pid = site.qemu_at(there).expect("it has a QEMU by now");
        ProcessId::of(pid).expect("it runs").kill();
        proxy.release();
        let answer = attempt.end();
        answer.expect(1, &["at the destination", "qemu"]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_destination_qemu_killed_in_prepare_leaves_the_guest() {
    qemu_killed_at(Point::Reply("propose"));
}

#[test]
fn a_destination_qemu_killed_in_precopy_leaves_the_guest() {
    qemu_killed_at(Point::Request("round-end"));
}

#[test]
fn a_destination_qemu_killed_in_the_pause_leaves_the_guest() {
    qemu_killed_at(Point::Request("stopped"));
}

#[test]
fn a_destination_qemu_killed_before_its_devices_are_loaded_leaves_the_guest() {
    qemu_killed_at(Point::Request("load"));
}

#[test]
fn a_destination_qemu_that_refuses_the_devices_leaves_the_guest() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.damage_devices();
        let answer = site.attempt(Some(&proxy.address), &[]);
        answer.expect(1, &["at the destination", "qemu"]);
        drop(proxy);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_machine_of_the_same_name_at_the_destination_stays_and_the_guest_too() {
    with_guest(|site| {
        let name = site.guest.name.clone();
        let accelerator = accelerator::chosen().name();
        let run = ["run", &name, "--memory", "32M", "--detach", "--", "-accel", accelerator];
        let run = [&run[..], &["-display", "none", "-vga", "none"]].concat();
        cli::ask(site.there(), &run).expect(0, &[]);
        site.attempt(None, &[]).expect(1, &[&name, "destination"]);
        let (_, there) = site.names();
        assert_eq!(site.state_at(there), "running", "the other machine is left alone");
        cli::ask(site.there(), &["stop", &name, "--force"]).expect(0, &[]);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_destination_without_room_refuses_early_with_the_reason() {
    with_guest(|site| {
        let limit = Limit::set(site, 128 << 20);
        let answer = site.attempt(None, &[]);
        answer.expect(1, &["at the destination", "room", "make room"]);
        assert_eq!(answer.problem(), "out-of-memory");
        assert_eq!(answer.report().expect("a report").pages.sent, 0, "refused before any page went");
        drop(limit);
        site.a_second_attempt_succeeds();
    });
}

#[test]
fn a_destination_that_runs_out_of_memory_on_the_way_gives_up_before_the_kernel_does() {
    with_guest(|site| {
        let proxy = Proxy::start(site.here(), site.there());
        proxy.hold(Point::Reply("propose"));
        let attempt = site.begin(Some(&proxy.address), &["--bandwidth", "100MB"]);
        proxy.wait_until_held();
        // It said yes; now others take the memory.
        let limit = Limit::set(site, site.there().group.memory_bytes().unwrap() + (80 << 20));
        proxy.release();
        let answer = attempt.end();
        answer.expect(1, &["memory", "destination"]);
        assert_eq!(answer.problem(), "out-of-memory", "{answer:#?}");
        drop(limit);
        site.a_second_attempt_succeeds();
    });
}

/// A memory limit on the other host, until it is dropped.
struct Limit(PathBuf, &'static str);

impl Limit {
    fn set(site: &Site, bytes: u64) -> Self {
        let entrance = site.there().group.entrances().swap_remove(0);
        let group = entrance.parent().unwrap_or(Path::new("/"));
        let first = (group.join("memory.limit_in_bytes"), "-1");
        let limit = if first.0.exists() { Self(first.0, first.1) } else { Self(group.join("memory.max"), "max") };
        std::fs::write(&limit.0, bytes.to_string()).expect("a limit");
        limit
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.0, self.1);
    }
}
