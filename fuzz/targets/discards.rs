//! The log of discards: memory that QEMU can write at any moment.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sterna_agent_protocol::log::{CAPACITY, LOG_MAGIC, LogEntry, LogHeader, claimed, published};
use sterna_engine::agent::Discards;
use sterna_fuzz::{Answer, Library, sealed_memory};
use zerocopy::IntoBytes;

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::start);

const BYTES: u64 = (size_of::<LogHeader>() + CAPACITY as usize * size_of::<LogEntry>()) as u64;

/// An entry: how far behind the head, how finished, offset, length.
type Entry = (u8, u8, u64, u64);

/// Where the head stands when the log is opened, how far it moves, by how much `lost` changes, and what is written.
type Given = (u64, u16, u8, Vec<Entry>);

fuzz_target!(|given: Given| {
    let (start, moves, lost, entries) = given;
    let header = |head, lost| LogHeader { magic: LOG_MAGIC, capacity: CAPACITY, head, lost, reserved: [0; 4] };
    let memory = sealed_memory(header(start, 0).as_bytes(), BYTES);
    let file = File::from(memory.try_clone().expect("a descriptor"));
    let mut client = LIBRARY.client(vec![Answer { descriptor: Some(memory), ..Answer::default() }]);
    let mut log = client.discard_log().expect("a log");

    let head = start.wrapping_add(u64::from(moves));
    for (back, state, offset, length) in &entries {
        let number = head.wrapping_sub(u64::from(*back));
        let sequence = match state % 4 {
            0 => published(number),
            1 => claimed(number),
            2 => published(number.wrapping_sub(CAPACITY)),
            _ => *offset,
        };
        let entry = LogEntry { sequence, device: 1, inode: 2, offset: *offset, length: *length };
        let place = size_of::<LogHeader>() as u64 + number % CAPACITY * size_of::<LogEntry>() as u64;
        file.write_all_at(entry.as_bytes(), place).expect("inside the log");
    }
    file.write_all_at(header(head, u64::from(lost)).as_bytes(), 0).expect("inside the log");
    match log.drain() {
        Discards::Ranges(ranges) => assert!(lost == 0 && ranges.len() == usize::from(moves), "every entry once"),
        Discards::Everything => assert!(moves > 0 || lost > 0, "nothing happened"),
    }
    assert_eq!(log.drain(), Discards::Ranges(Vec::new()), "what was told once is not told again");
});
