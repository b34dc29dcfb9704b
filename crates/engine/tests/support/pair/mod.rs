//! Both ends of a migration in one process, with real sockets, real mappings, real write tracking, and a "guest" of
//! threads.

/// A guest: RAM, and threads that write it.
pub mod guest;

/// The source: a VMM and a daemon.
pub mod source;

/// The destination: a VMM and a daemon.
pub mod destination;

/// A foot inside the VMM's process.
pub mod inside;

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_engine::host::MigrationId;
use sterna_engine::memory::BlockFile;
use sterna_engine::source::Outgoing;
use sterna_engine::source::pauses::Place;
use sterna_engine::source::throttle::ProcessThrottle;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::vmm::Untracked;
use sterna_protocol::spec::{BlockSpec, VmSpec};

use guest::GuestRam;
use inside::InsideSelf;
use source::SourceVmm;

/// Skips, saying why, where this kernel or this user cannot track writes.
pub fn tracking_works() -> bool {
    let missing = sterna_sys::probe::missing();
    if !missing.is_empty() {
        println!("skipped: {}", missing.join("; "));
    }
    missing.is_empty()
}

/// A block of so many bytes.
pub fn block(bytes: u64) -> BlockSpec {
    BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() }
}

/// A machine of one block.
pub fn spec(block: BlockSpec) -> VmSpec {
    VmSpec {
        name: "guest".into(),
        memory_bytes: block.bytes,
        private: false,
        trust_group: None,
        qemu_version: (7, 2, 0),
        qemu_path: String::new(),
        machine: "none".into(),
        arguments: vec![],
        managed_ram: true,
        blocks: vec![block],
        cpu: None,
        allocated_bytes: 0,
        balloon: sterna_api::BalloonSetting::default(),
        running: true,
        from: "a".into(),
        kin: None,
        split: None,
        small_pages: false,
    }
}

/// A machine of one block, to be moved by `migrate`.
pub fn outgoing(ram: &GuestRam, vmm: SourceVmm, inside: InsideSelf) -> Outgoing {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // The lower half seeds the digests, and is drawn at random in earnest. A small number is a weak seed: of some,
    // pages that were made to have one digest without a seed still have it.
    let seed = u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let id = u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64 | u128::from(seed);
    let block = block(ram.bytes);
    Outgoing {
        id: MigrationId(id),
        spec: spec(block.clone()),
        vmm: Box::new(vmm),
        blocks: vec![BlockFile {
            spec: block,
            file: ram.file.try_clone().expect("a descriptor"),
            address: ram.mapping.addresses().start,
            process: None,
        }],
        throttle: Box::new(ProcessThrottle::new(std::process::id())),
        tracker: Box::new(WriteProtect::new(std::process::id(), inside).expect("our own page tables")),
        untracked: Untracked::Nobody,
        trust_first_look: false,
        bandwidth: std::sync::Arc::default(),
        gang: None,
        tickets: sterna_engine::source::tickets::Tickets::default(),
        clone: None,
        split: None,
        pause: Place::alone(),
        here: sterna_api::report::Host::default(),
    }
}
