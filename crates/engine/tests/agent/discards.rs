//! What is logged as discarded.

use std::time::Duration;

use sterna_agent_protocol::log::CAPACITY;
use sterna_engine::agent::{Discard, Discards};

use crate::fixture::{identity, with_each_qemu};
use crate::program::{Program, RAM_BYTES};

/// Offsets and lengths, all of this program's RAM.
fn ranges(program: &Program, discards: Discards) -> Vec<(u64, u64)> {
    let Discards::Ranges(ranges) = discards else { panic!("the log is complete") };
    let of_ram = identity(&program.ram);
    assert!(ranges.iter().all(|range| (range.device, range.inode) == of_ram));
    ranges.iter().map(|range| (range.offset, range.length)).collect()
}

#[test]
fn holes_punched_into_ram_are_logged_once() {
    let mut program = Program::start();
    program.tell("punch 4096 4096");
    let mut log = program.agent().discard_log().expect("the log");
    assert_eq!(log.drain(), Discards::Ranges(vec![]), "the log begins when it is got");
    assert_eq!(program.tell("punch 8192 12288"), "0");
    assert_eq!(program.tell(&format!("advise {} 65536 4096", libc::MADV_REMOVE)), "0");
    assert_eq!(ranges(&program, log.drain()), [(8192, 12288), (65536, 4096)]);
    assert_eq!(log.drain(), Discards::Ranges(vec![]));
}

#[test]
fn dropping_pages_of_a_shared_mapping_is_no_discard_but_of_a_private_one_is() {
    let mut program = Program::start();
    let mut log = program.agent().discard_log().expect("the log");
    let order = format!("advise {} 0 4096", libc::MADV_DONTNEED);
    assert_eq!(program.tell(&order), "0");
    assert_eq!(log.drain(), Discards::Ranges(vec![]));
    program.tell("map private 0 0");
    assert_eq!(program.tell(&order), "0");
    assert_eq!(ranges(&program, log.drain()), [(0, 4096)]);
}

#[test]
fn errors_come_back_as_the_kernel_gave_them() {
    let mut program = Program::start();
    assert_eq!(program.tell("advise 9999 0 4096"), format!("errno {}", libc::EINVAL));
    assert_eq!(program.tell("unmap 1 4096"), "-1");
    assert_eq!(program.agent().blocks().expect("blocks").len(), 1, "what was not unmapped is still listed");
}

#[test]
fn more_discards_than_the_log_holds_mean_everything() {
    let mut program = Program::start();
    let mut log = program.agent().discard_log().expect("the log");
    program.tell(&format!("punch-each-page {CAPACITY}"));
    assert_eq!(ranges(&program, log.drain()).len() as u64, CAPACITY);
    program.tell(&format!("punch-each-page {}", CAPACITY + 1));
    assert_eq!(log.drain(), Discards::Everything);
    program.tell("punch 4096 4096");
    assert_eq!(ranges(&program, log.drain()), [(4096, 4096)], "and then it goes on");
}

/// How many rounds may fail to be a try, for each that has to be one.
const TRIES: u64 = 20;

#[test]
fn a_reader_beside_a_writer_misses_nothing() {
    let mut program = Program::start();
    let mut log = program.agent().discard_log().expect("the log");
    let pages = RAM_BYTES / 4096;
    let expected: Vec<_> = (0..CAPACITY).map(|index| index * 4096 % RAM_BYTES).collect();
    // No more at a time than the log holds: a reader that has to wait for a processor loses nothing either. A writer
    // that waits for one in the middle of an entry makes the log say *everything*: such a round is none.
    let (rounds, order) = (4 * pages / CAPACITY + 1, format!("punch-each-page {CAPACITY}"));
    let mut complete = 0;
    for _ in 0..TRIES * rounds {
        let mut offsets = Some(Vec::new());
        let mut drain = || match (log.drain(), &mut offsets) {
            (Discards::Ranges(ranges), Some(offsets)) => offsets.extend(ranges.iter().map(|range| range.offset)),
            (Discards::Ranges(_), None) => {}
            (Discards::Everything, _) => offsets = None,
        };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| program.tell(&order));
            while !writer.is_finished() {
                drain();
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        drain();
        let Some(offsets) = offsets else { continue };
        assert!(offsets == expected, "{} of {} discards", offsets.len(), expected.len());
        complete += 1;
        if complete == rounds {
            return;
        }
    }
    panic!("{complete} of {rounds} rounds were read without an entry that was being written for long");
}

#[test]
fn what_qemu_itself_discards_is_logged() {
    with_each_qemu(|start| {
        let mut qemu = start.ram(128).with("-M pc -m 128M,slots=4,maxmem=1G").go();
        let mut log = qemu.agent().discard_log().expect("the log");
        let bytes = 128 << 20;
        let more = qemu.plug_memory(bytes);
        let (device, inode) = identity(&more);
        let Discards::Ranges(ranges) = log.drain() else { panic!("the log is complete") };
        assert!(ranges.contains(&Discard { device, inode, offset: 0, length: bytes }), "{ranges:?}");
    });
}
