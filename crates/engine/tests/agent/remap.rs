//! Advising and remapping.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use sterna_agent_protocol::message::{MAX_ITEMS, Status};
use sterna_engine::agent::{AddressRange, Advice, AgentError, MapRun, Sharing};

use crate::fixture::{Start, cannot_run, scratch};

const PAGE: u64 = 4096;

fn refused_item(result: Result<(), AgentError>) -> (Status, usize) {
    match result {
        Err(AgentError::Refused { status, item, .. }) => (status, item),
        other => panic!("should be refused: {other:?}"),
    }
}

#[test]
fn runs_of_a_file_are_mapped_over_ram_and_back() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).go();
    let mut agent = qemu.agent();
    let block = agent.blocks().expect("blocks").remove(0);
    let memory = std::fs::File::open(format!("/proc/{}/mem", qemu.pid)).expect("QEMU's memory");
    let byte = |page: u64| {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, block.address + page * PAGE).expect("a mapped page");
        byte[0]
    };
    let ram = std::fs::OpenOptions::new().read(true).write(true).open(qemu.dir.path().join("ram")).expect("RAM");
    ram.write_all_at(&vec![b'r'; 64 << 20], 0).expect("fill");
    let dir = scratch();
    let pool = std::fs::File::create_new(dir.path().join("pool")).expect("a pool");
    drop(pool);
    let pool = std::fs::OpenOptions::new().read(true).write(true).open(dir.path().join("pool")).expect("a pool");
    pool.write_all_at(&vec![b'p'; 8192], 0).expect("fill");
    // Nobody who maps it private may be able to write it.
    let pool = std::fs::File::open(dir.path().join("pool")).expect("a pool");

    let page = |index: u64| AddressRange { address: block.address + index * PAGE, length: PAGE };
    // Every second page, more than a message holds.
    let count = MAX_ITEMS as u64 + 10;
    let runs: Vec<_> = (0..count).map(|index| MapRun { at: page(2 * index), offset: index % 2 * PAGE }).collect();
    agent.map(pool.as_fd(), Sharing::Private, &runs).expect("map");
    assert_eq!([0, 1, 2, 3, 2 * count - 2, 2 * count - 1, 2 * count].map(byte), *b"prprprr");
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", qemu.pid)).expect("QEMU runs");
    let mapped = maps.split_once(&format!("{:x}-", block.address)).expect("the first page has a mapping").1;
    let flags = mapped.lines().find(|line| line.starts_with("VmFlags")).expect("smaps has flags");
    assert!(flags.contains(" dc"), "QEMU's children must not get guest RAM: {flags}");

    let back: Vec<_> = (0..2 * count).map(|index| MapRun { at: page(index), offset: index * PAGE }).collect();
    agent.map(ram.as_fd(), Sharing::Shared, &back).expect("map");
    assert_eq!([0, 1, 2, 3].map(byte), *b"rrrr");
    assert_eq!(agent.blocks().expect("blocks"), [block], "for QEMU it is the same block all the time");
}

#[test]
fn advice_reaches_the_pages() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).go();
    let mut agent = qemu.agent();
    let mut log = agent.discard_log().expect("the log");
    let block = agent.blocks().expect("blocks").remove(0);
    let ram = std::fs::OpenOptions::new().read(true).write(true).open(qemu.dir.path().join("ram")).expect("RAM");
    ram.write_all_at(&[b'r'; 3 * PAGE as usize], 0).expect("fill");
    agent.advise(Advice::Remove, &[AddressRange { address: block.address + PAGE, length: PAGE }]).expect("advise");
    let mut after = [0; 3 * PAGE as usize];
    ram.read_exact_at(&mut after, 0).expect("RAM");
    assert_eq!([0, 1, 2].map(|page| after[page * PAGE as usize]), [b'r', 0, b'r']);
    assert_eq!(log.drain(), sterna_engine::agent::Discards::Ranges(vec![]), "what the daemon asked for it knows");
}

#[test]
fn nothing_outside_of_ram_is_touched() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(64).go();
    let mut agent = qemu.agent();
    let block = agent.blocks().expect("blocks").remove(0);
    let good = AddressRange { address: block.address, length: PAGE };
    let end = block.address + block.length;
    for bad in [
        AddressRange { address: block.address - PAGE, length: PAGE },
        AddressRange { address: end, length: PAGE },
        AddressRange { address: end - PAGE, length: 2 * PAGE },
        AddressRange { address: block.address, length: u64::MAX - 4095 },
        AddressRange { address: block.address + 1, length: PAGE },
        AddressRange { address: block.address, length: PAGE - 1 },
        AddressRange { address: block.address, length: 0 },
        AddressRange { address: 0, length: PAGE },
    ] {
        assert_eq!(refused_item(agent.advise(Advice::DontNeed, &[good, bad])), (Status::OutsideRam, 1), "{bad:?}");
        let ram = std::fs::OpenOptions::new().read(true).write(true).open(qemu.dir.path().join("ram")).expect("RAM");
        let runs = [good, bad].map(|at| MapRun { at, offset: 0 });
        assert_eq!(refused_item(agent.map(ram.as_fd(), Sharing::Shared, &runs)), (Status::OutsideRam, 1), "{bad:?}");
    }
    let many: Vec<_> = (0..MAX_ITEMS + 5).map(|_| good).chain([AddressRange { address: 0, length: PAGE }]).collect();
    assert_eq!(refused_item(agent.advise(Advice::DontNeed, &many)), (Status::OutsideRam, MAX_ITEMS + 5));
    agent.advise(Advice::DontNeed, &[good]).expect("a refusal does not end the connection");
}
