//! Which RAM is found.

use std::path::Path;

use serde_json::json;
use sterna_agent_protocol::MAX_BLOCKS;
use sterna_engine::agent::{AgentBlock, Backing, Sharing};

use crate::fixture::{Start, cannot_run, eventually, identity, with_each_qemu};
use crate::program::{Program, RAM_BYTES};

const MIB: u64 = 1 << 20;

/// The block that maps this file.
fn of_file<'a>(blocks: &'a [AgentBlock], path: &Path) -> &'a AgentBlock {
    let (device, inode) = identity(path);
    let block = blocks.iter().find(|block| (block.device, block.inode) == (device, inode)).expect("the file is mapped");
    assert_eq!(block.backing, Backing::Named(path.to_owned()));
    assert_eq!((block.offset, block.page_size, block.sharing), (0, 4096, Sharing::Shared));
    block
}

/// Whether the kernel, too, says that the process maps the block's file there.
fn kernel_agrees(pid: u32, block: &AgentBlock) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    let extent = format!("{:x}-{:x} rw-s", block.address, block.address + block.length);
    maps.lines().any(|line| line.starts_with(&extent) && line.contains(&format!(" {} ", block.inode)))
}

#[test]
fn the_machines_ram_is_found() {
    with_each_qemu(|start| {
        let qemu = start.ram(256).go();
        let mut agent = qemu.agent();
        let hello = agent.hello().expect("hello");
        assert_eq!((hello.pid, hello.blocks, hello.blocks_lost, hello.userfaultfd), (qemu.pid, 1, 0, false));
        assert_eq!(agent.peer().pid as u32, qemu.pid);
        let blocks = agent.blocks().expect("blocks");
        let block = of_file(&blocks, &qemu.dir.path().join("ram"));
        assert_eq!((blocks.len(), block.length), (1, 256 * MIB));
        assert!(kernel_agrees(qemu.pid, block));
    });
}

#[test]
fn ram_above_4_gib_is_found_whole() {
    if cannot_run() {
        return;
    }
    let qemu = Start::new().ram(6 << 10).go();
    let blocks = qemu.agent().blocks().expect("blocks");
    let block = of_file(&blocks, &qemu.dir.path().join("ram"));
    assert_eq!(block.length, (6 << 10) * MIB);
    assert!(kernel_agrees(qemu.pid, block));
}

#[test]
fn several_blocks_are_found() {
    if cannot_run() {
        return;
    }
    let mut start = Start::new().with("-M q35 -m 192M");
    for (id, mebibytes) in [("a", 128), ("b", 64)] {
        let file = start.file(id);
        start = start
            .with(&format!("-object memory-backend-file,id={id},size={mebibytes}M,mem-path={file},share=on"))
            .with(&format!("-numa node,memdev={id}"));
    }
    let qemu = start.go();
    let blocks = qemu.agent().blocks().expect("blocks");
    assert_eq!(blocks.len(), 2);
    for (id, mebibytes) in [("a", 128), ("b", 64)] {
        let block = of_file(&blocks, &qemu.dir.path().join(id));
        assert_eq!(block.length, mebibytes * MIB);
        assert!(kernel_agrees(qemu.pid, block));
    }
}

#[test]
fn memory_plugged_into_a_running_machine_is_found_and_forgotten_when_it_goes() {
    with_each_qemu(|start| {
        let mut qemu = start.ram(128).with("-m 128M,slots=4,maxmem=1G").go();
        let mut agent = qemu.agent();
        assert_eq!(agent.blocks().expect("blocks").len(), 1);
        let more = qemu.dir.path().join("more");
        let backend = json!({"qom-type": "memory-backend-file", "id": "more", "size": 256 * MIB, "mem-path": more, "share": true});
        qemu.qmp("object-add", backend.clone());
        qemu.qmp("device_add", json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}));
        let blocks = agent.blocks().expect("blocks");
        let block = of_file(&blocks, &more);
        assert_eq!((blocks.len(), block.length), (2, 256 * MIB));
        assert!(kernel_agrees(qemu.pid, block));

        let other = qemu.dir.path().join("other");
        let backend = json!({"qom-type": "memory-backend-file", "id": "other", "size": 64 * MIB, "mem-path": other, "share": true});
        qemu.qmp("object-add", backend);
        assert_eq!(agent.blocks().expect("blocks").len(), 3);
        qemu.qmp("object-del", json!({"id": "other"}));
        // QEMU unmaps it in a thread of its own.
        eventually("the block's end", || (agent.blocks().expect("blocks").len() == 2).then_some(()));
        assert_eq!(agent.hello().expect("hello").blocks_lost, 0);
    });
}

#[test]
fn a_memfd_is_told_from_a_file() {
    with_each_qemu(|start| {
        let qemu =
            start.with("-M q35,memory-backend=ram -m 64M -object memory-backend-memfd,id=ram,size=64M,share=on").go();
        let blocks = qemu.agent().blocks().expect("blocks");
        assert!(matches!(&blocks[..], [block] if matches!(block.backing, Backing::Memfd(_))), "{blocks:?}");
    });
}

#[test]
fn private_ram_is_told_from_shared() {
    if cannot_run() {
        return;
    }
    let start = Start::new();
    let file = start.file("ram");
    let qemu = start
        .with("-M q35,memory-backend=ram -m 64M")
        .with(&format!("-object memory-backend-file,id=ram,size=64M,mem-path={file},share=off"))
        .go();
    let blocks = qemu.agent().blocks().expect("blocks");
    assert!(matches!(&blocks[..], [block] if block.sharing == Sharing::Private), "{blocks:?}");
}

#[test]
fn a_file_mapped_twice_and_unmapped_in_part_is_listed_as_it_is() {
    let mut program = Program::start();
    let mut agent = program.agent();
    let first = agent.blocks().expect("blocks").remove(0);
    let second: u64 = program.tell("map shared 0 0").parse().expect("an address");
    program.tell("unmap 8192 4096");
    let mut extents: Vec<_> =
        agent.blocks().expect("blocks").iter().map(|block| (block.address, block.length, block.offset)).collect();
    extents.sort_unstable();
    let mut expected =
        vec![(first.address, RAM_BYTES, 0), (second, 8192, 0), (second + 12288, RAM_BYTES - 12288, 12288)];
    expected.sort_unstable();
    assert_eq!(extents, expected);
    // Mapped over in place: the old is gone, the new is there.
    program.tell(&format!("map private {second} 0"));
    let blocks = agent.blocks().expect("blocks");
    let over: Vec<_> =
        blocks.iter().filter(|block| block.address >= second && block.address < second + RAM_BYTES).collect();
    assert!(matches!(over[..], [block] if block.sharing == Sharing::Private && block.length == RAM_BYTES), "{over:?}");
}

#[test]
fn more_blocks_than_fit_are_reported() {
    let mut program = Program::start();
    for _ in 0..MAX_BLOCKS + 2 {
        program.tell("map shared 0 0");
    }
    let mut agent = program.agent();
    assert_eq!(agent.blocks().expect("blocks").len(), MAX_BLOCKS);
    assert_eq!(agent.hello().expect("hello").blocks_lost, 3);
}
