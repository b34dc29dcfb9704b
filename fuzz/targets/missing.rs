//! The map of missing pages that an earlier daemon left, cut anywhere and with any content.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;

use libfuzzer_sys::fuzz_target;
use sterna_engine::paging::whereabouts::Whereabouts;
use sterna_protocol::layout::Layout;
use sterna_protocol::pages::PageMap;
use sterna_protocol::spec::BlockSpec;

fuzz_target!(|given: (u16, Vec<(u16, u8)>)| {
    let (length, bytes) = given;
    let block = BlockSpec { id: "ram".into(), bytes: 3 << 20, page_bytes: 4096, path: String::new() };
    let layout = Layout::new(&[block]).expect("a layout");
    // Its beginning is what this machine's map begins with; where a byte makes it one of the earlier version, that is
    // read.
    let whole = memory();
    Whereabouts::all_here(whole.try_clone().expect("a descriptor"), &layout)
        .begin(PageMap::empty(&layout), &layout)
        .expect("room");
    for (at, byte) in bytes {
        whole.write_all_at(&[byte], u64::from(at)).expect("room");
    }
    whole.set_len(u64::from(length)).expect("room");
    if let Ok(Some(found)) = Whereabouts::recover(whole, &layout) {
        let counted: usize = layout.iter().map(|chunk| found.away_in(chunk).len()).sum();
        assert_eq!(found.away(), counted as u64);
    }
});

fn memory() -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    File::from(rustix::fs::memfd_create("map", flags).expect("a memory file"))
}
