//! What is told of reads into RAM, for as long as they are under way.

use std::os::fd::AsFd;

use serde_json::json;
use sterna_engine::agent::{Agent, TransferTable, UnderWay};
use sterna_sys::userfaultfd::{Event, Features, Modes, Userfaultfd};

use crate::fixture::{Start, cannot_run, device, eventually};
use crate::program::{PAGE, Program};

/// The read's place in RAM: three pages from the third on.
const AT: u64 = 2 * PAGE;
const BYTES: u64 = 3 * PAGE;

fn nothing() -> UnderWay {
    UnderWay::Ranges(Vec::new())
}

/// Takes what has ended out of the table, and looks.
fn look(agent: &mut Agent, table: &TransferTable) -> UnderWay {
    agent.end_transfers().expect("the library looks");
    table.look().expect("a table")
}

/// A read that waits, in the kernel, for a page of RAM that is missing: it is under way for as long as the test wants.
#[test]
fn a_read_into_ram_is_told_of_for_as_long_as_it_is_under_way_whatever_the_call() {
    if cannot_run() {
        return;
    }
    for (way, in_halves) in
        [("pread", false), ("preadv", true), ("preadv2", true), ("aio", false), ("aio-vector", true)]
    {
        let mut program = Program::start();
        let mut agent = program.agent();
        let address = agent.blocks().expect("blocks")[0].address;
        let table = agent.transfers().expect("a table");
        assert_eq!(table.look().expect("a table"), nothing());
        let features = Features::TRACKING.bits();
        let opened = agent.open_userfaultfd(Some(device().as_fd()), features).expect("a userfaultfd");
        let userfaultfd = Userfaultfd::from(opened.descriptor);
        let ram = address..address + 16 * PAGE;
        userfaultfd.register(ram.clone(), Modes::MISSING).expect("register");
        program.tell(&format!("begin-read {way} {AT} {BYTES}"));
        let mut events: [Event; 1] = Default::default();
        eventually("the kernel wants the page", || (userfaultfd.read_events(&mut events).ok()? == 1).then_some(()));
        let read = address + AT..address + AT + BYTES;
        let half = BYTES / 2;
        let read = match in_halves {
            // Whole pages: both have the page in the middle.
            true => {
                vec![read.start + half / PAGE * PAGE..read.end, read.start..read.start + half.next_multiple_of(PAGE)]
            }
            false => vec![read],
        };
        assert_eq!(look(&mut agent, &table), UnderWay::Ranges(read), "{way}");
        // Whoever waits there finds a page.
        userfaultfd.unregister(ram).expect("unregister");
        assert_eq!(program.tell("end-read"), BYTES.to_string(), "{way}");
        assert_eq!(look(&mut agent, &table), nothing(), "{way}");
        assert!(table.is_complete().expect("a table"));
        assert!(!table.has_queued().expect("a table"));
        assert_eq!(program.tell("read 2"), u64::from_le_bytes([7; 8]).to_string(), "{way}: what was read is there");
    }
}

#[test]
fn what_the_kernel_does_not_take_and_what_is_read_elsewhere_is_not_under_way() {
    let mut program = Program::start();
    let mut agent = program.agent();
    let table = agent.transfers().expect("a table");
    program.tell(&format!("begin-read aio-refused {AT} {BYTES}"));
    assert_eq!(program.tell("end-read"), (-libc::EBADF).to_string());
    assert_eq!(table.look().expect("a table"), nothing());
    assert!(!table.has_queued().expect("a table") && table.is_complete().expect("a table"));
}

#[test]
fn a_read_by_io_uring_ends_what_is_known_and_nothing_else_of_it_does() {
    const POLL_ADD: u8 = 6;
    const WRITEV: u8 = 2;
    const READV: u8 = 1;
    let mut program = Program::start();
    let table = program.agent().transfers().expect("a table");
    for operation in [POLL_ADD, WRITEV] {
        assert_eq!(program.tell(&format!("uring {operation}")), (-libc::ENOSYS).to_string());
        assert_eq!(table.look().expect("a table"), nothing());
    }
    program.tell(&format!("uring {READV}"));
    assert_eq!(table.look().expect("a table"), UnderWay::Lost);
    assert!(!table.is_complete().expect("a table"));
}

/// The firmware reads the boot sector of a disk, by each of QEMU's ways.
#[test]
fn a_real_qemu_reads_its_disk_with_the_library_in_each_way_and_tells_of_all_but_io_uring() {
    if cannot_run() {
        return;
    }
    for (way, told) in [("threads", true), ("native", true), ("io_uring", false)] {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let disk = dir.path().join("disk");
        // A sector that is no boot sector: the firmware reads it, and goes on.
        std::fs::write(&disk, vec![0_u8; 1 << 20]).unwrap();
        let drive = format!("-drive if=virtio,format=raw,cache=none,aio={way},file={}", disk.display());
        let mut qemu = Start::new().ram(64).with(&drive).go();
        let table = qemu.agent().transfers().expect("a table");
        qemu.qmp("cont", json!({}));
        let reads = |qemu: &mut crate::fixture::Qemu| {
            let stats = qemu.qmp("query-blockstats", json!({}));
            stats[0]["stats"]["rd_operations"].as_u64().unwrap_or(0)
        };
        eventually("the firmware reads the disk", || (reads(&mut qemu) > 0).then_some(()));
        qemu.qmp("stop", json!({}));
        assert_eq!(table.is_complete().expect("a table"), told, "{way}");
        if told {
            // QEMU has drained its requests.
            assert_eq!(look(&mut qemu.agent(), &table), nothing(), "{way}");
        }
    }
}
