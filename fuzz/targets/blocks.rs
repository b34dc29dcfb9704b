//! The payload of a packed frame: plain, compressed, differences, as they come.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use sterna_engine::destination::decode::Decoder;
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::shared::SharedMemory;
use sterna_fuzz::sealed_memory;
use sterna_protocol::frame::packed::{Block, Codec, PackedFrame};
use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::Access;

thread_local! {
    /// As a connection has them: kept from one frame to the next.
    static RECEIVER: RefCell<(Decoder, SharedMemory)> = RefCell::new((Decoder::new(Digester::UNSEEDED), ram()));
}

fuzz_target!(|bytes: &[u8]| {
    let [first, payload @ ..] = bytes else { return };
    let codec = Codec::new(first & 3).expect("there are four");
    let pages = usize::from(first >> 2) % 16 + 1;
    let mut payload = payload.to_vec();
    if codec == Codec::Plain {
        payload.resize(pages * PAGE_BYTES, 0);
    }
    let (none, some) = (PageSet::EMPTY, PageSet::first(pages));
    let (full, delta) = if codec == Codec::Xbzrle { (none, some) } else { (some, none) };
    let blocks = vec![Block { codec, pages: pages as u16, bytes: payload.len() as u32 }];
    let frame = PackedFrame { round: 0, chunk: ChunkIndex(0), full, delta, zero: none, blocks };
    RECEIVER.with_borrow_mut(|(decoder, ram)| {
        // Ones are what RAM holds, so that some input fits its digests: differences that change nothing.
        let digests = vec![Digester::UNSEEDED.page(&[1; PAGE_BYTES]); pages];
        if let Ok(bodies) = decoder.decode(&frame, &digests, &payload, ram) {
            assert!(bodies.len() == pages * PAGE_BYTES && bodies.iter().all(|byte| *byte == 1));
        }
    });
});

/// RAM of one chunk of ones.
fn ram() -> SharedMemory {
    let spec = BlockSpec { id: "ram".into(), bytes: CHUNK_BYTES as u64, page_bytes: 4096, path: String::new() };
    let file = sealed_memory(&vec![1; CHUNK_BYTES], CHUNK_BYTES as u64).into();
    SharedMemory::open(&[BlockFile { spec, file, address: 0, process: None }], Access::ReadWrite).expect("RAM")
}
