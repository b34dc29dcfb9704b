//! Tracking and keeping a userfaultfd.

use std::os::fd::AsFd;
use std::time::Duration;

use serde_json::json;
use sterna_agent_protocol::message::Status;
use sterna_engine::agent::AgentError;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::userfaultfd::{Features, Modes, Userfaultfd};

use crate::fixture::{Start, cannot_run, device, eventually, with_each_qemu};

const PAGE: usize = 4096;

#[test]
fn every_page_that_the_running_machine_changes_is_tracked() {
    with_each_qemu(|start| {
        let mut qemu = start.ram(32).go();
        let mut agent = qemu.agent();
        let block = agent.blocks().expect("blocks").remove(0);
        let extent = block.address..block.address + block.length;
        let opened = agent.open_userfaultfd(Some(device().as_fd()), Features::TRACKING.bits()).expect("a userfaultfd");
        let tracking = Userfaultfd::from(opened.descriptor);
        tracking.register(extent.clone(), Modes::WP).expect("register");
        let pagemap = Pagemap::open(qemu.pid).expect("pagemap");
        let mut regions = Vec::new();
        pagemap.written_and_arm(extent.clone(), &mut regions).expect("arm");
        pagemap.written(extent.clone(), &mut regions).expect("look");
        assert!(regions.is_empty(), "nothing runs yet");

        let ram = qemu.dir.path().join("ram");
        let before = std::fs::read(&ram).expect("RAM");
        qemu.qmp("cont", json!({}));
        eventually("the firmware writes RAM", || (std::fs::read(&ram).expect("RAM") != before).then_some(()));
        // And some more.
        std::thread::sleep(Duration::from_millis(300));
        qemu.qmp("stop", json!({}));
        let after = std::fs::read(&ram).expect("RAM");
        pagemap.written_and_arm(extent.clone(), &mut regions).expect("look");

        let changed: Vec<_> = before
            .chunks(PAGE)
            .zip(after.chunks(PAGE))
            .enumerate()
            .filter(|(_, (before, after))| before != after)
            .map(|(index, _)| block.address + (index * PAGE) as u64)
            .collect();
        assert!(!changed.is_empty(), "the firmware writes RAM");
        let missed: Vec<_> =
            changed.iter().filter(|page| !regions.iter().any(|region| region.range().contains(page))).collect();
        assert!(missed.is_empty(), "{} of {} changed pages were not seen", missed.len(), changed.len());
        let seen: u64 = regions.iter().map(|region| region.pages()).sum();
        assert!(seen < block.length / PAGE as u64, "tracking is by the page");
    });
}

#[test]
fn a_kept_userfaultfd_outlives_the_daemon_that_asked_for_it() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(32).go();
    let mut agent = qemu.agent();
    assert!(agent.take_userfaultfd().expect("take").is_none());
    let block = agent.blocks().expect("blocks").remove(0);
    let extent = block.address..block.address + block.length;
    let opened = agent.open_userfaultfd(Some(device().as_fd()), Features::TRACKING.bits()).expect("a userfaultfd");
    Userfaultfd::from(opened.descriptor).register(extent.clone(), Modes::WP).expect("register");
    // All of this daemon's descriptors are closed now.
    drop(agent);

    let mut agent = qemu.agent();
    assert!(agent.hello().expect("hello").userfaultfd);
    match agent.open_userfaultfd(Some(device().as_fd()), 0) {
        Err(AgentError::Refused { status: Status::AlreadyOpen, .. }) => {}
        other => panic!("it keeps one, but: {other:?}"),
    }
    let taken = agent.take_userfaultfd().expect("take").expect("it keeps one");
    let pagemap = Pagemap::open(qemu.pid).expect("pagemap");
    let mut regions = Vec::new();
    pagemap.written_and_arm(extent.clone(), &mut regions).expect("the registration is still there");

    agent.close_userfaultfd().expect("close");
    assert!(agent.take_userfaultfd().expect("take").is_none());
    drop(taken);
    assert!(pagemap.written_and_arm(extent, &mut regions).is_err(), "with the last descriptor the registration goes");
    agent.open_userfaultfd(Some(device().as_fd()), 0).expect("a second one");
}

#[test]
fn a_descriptor_that_is_not_the_device_is_refused() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(32).go();
    let mut agent = qemu.agent();
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    match agent.open_userfaultfd(Some(null.as_fd()), 0) {
        Err(AgentError::Refused { status: Status::System, errno, .. }) => assert_eq!(errno, libc::ENOTTY as u32),
        other => panic!("/dev/null makes no userfaultfd, but: {other:?}"),
    }
    match agent.open_userfaultfd(Some(device().as_fd()), 1 << 63) {
        Err(AgentError::Refused { status: Status::System, errno, .. }) => assert_eq!(errno, libc::EINVAL as u32),
        other => panic!("no kernel has this feature, but: {other:?}"),
    }
    assert!(!agent.hello().expect("hello").userfaultfd);
}
