//! A Linux guest in a QEMU: its kernel, its programs and QEMU's own threads touch what is away.

use std::os::unix::fs::MetadataExt;

use sterna_engine::inside::InsideQemu;

use super::linux::{Guest as Linux, Kernel, Plan};
use super::*;

const MIB: u64 = 256;
/// How often all of its memory is sent away.
const ROUNDS: usize = 3;

/// Waits until its checker has said three times more that all is as it was written.
fn is_well(linux: &Linux) {
    let from = linux.console().len();
    loop {
        let console = linux.console();
        assert!(
            !console.contains("CHECKER BAD") && !console.contains("Oops") && !console.contains("panic"),
            "{console}"
        );
        let said = console.get(from..).unwrap_or_default().lines();
        if said.filter(|line| line.contains("CHECKER ok") && line.contains(" bad=0 ")).count() > 3 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn a_linux_guest_runs_on_and_finds_what_it_wrote_while_its_pages_go_and_come() {
    if !tracking_works() {
        return;
    }
    let words = "sterna.run=checker:--mib,48,--rate,4";
    let plan = Plan { kernel: Kernel::Image, qemu_10: false, machine: "q35", memory_mib: MIB, cpu: "max", words };
    let booted = Linux::boot_with(&plan, |command, directory| {
        command.env("LD_PRELOAD", fixture::library()).env("STERNA_AGENT_SOCKET", directory.join("agent"));
    });
    let Some(linux) = booted else { return };
    is_well(&linux);
    let chunks = u32::try_from((MIB << 20) / CHUNK_BYTES as u64).unwrap();
    let lending = [LendingHost::to_guests_of(chunks), LendingHost::to_guests_of(chunks)];
    let mut agent = fixture::connect(&linux.directory().join("agent"));
    let file = linux.ram();
    let inode = file.metadata().unwrap().ino();
    let at = agent.blocks().unwrap().into_iter().find(|at| at.inode == inode && at.length == MIB << 20);
    let address = at.expect("its RAM").address;
    let blocks = [BlockFile { spec: block(MIB << 20), file, address, process: None }];
    let record = tempfile::tempfile_in("/dev/shm").unwrap();
    let means = PagingMeans { inside: Box::new(InsideQemu::new(agent)), missing: record };
    let pager = Pager::open(kind::open(&blocks, Access::ReadWrite).unwrap(), means, None).unwrap();
    let lenders = lending.iter().map(LendingHost::lender).collect();
    let split = Split::begin(pager, lenders, GUEST, Box::new(Counter::default())).unwrap();
    let here = || split.pager().ram().allocated_bytes().unwrap() >> 20;
    let mut way = split.way_out().unwrap();
    let whole = here();
    for round in 0..ROUNDS {
        let mut least = whole;
        for chunk in 0..chunks {
            way.send(ChunkIndex(chunk), (chunk % 2) as usize).unwrap();
            least = least.min(here());
        }
        is_well(&linux);
        println!("round {round}: {whole} MiB, {least} here at least, {} now, {:?}", here(), split.account());
        assert!(least < whole / 2, "too little of it left");
    }
    drop(way);
    split.bring_back().unwrap();
    is_well(&linux);
    assert_eq!(split.pager().missing(), 0);
    println!("{:?}", split.pager().faults());
    split.end();
    is_well(&linux);
}
