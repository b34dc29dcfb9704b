//! Changing guest RAM's mapping on the daemon's request, while QEMU may be unmapping it.
//!
//! The server says that it is at work, then looks the block up; QEMU's thread removes the block, then looks whether the
//! server is at work. With a full fence between the two steps on both sides at least one sees the other: either the
//! server finds no block, or QEMU's thread waits for that one system call, as the kernel's own lock would make it wait.

use core::sync::atomic::{AtomicBool, Ordering, fence};

use sterna_agent_protocol::message::Block;

use crate::blocks::BLOCKS;
use crate::{raw, watched};

/// Whether the server changes a mapping now.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// Does `work` while the addresses stay mapped. They must lie within one block and at the borders of its pages; `None`
/// if they do not. Only the server's thread may call this.
pub fn within_block<R>(address: u64, length: u64, work: impl FnOnce(&Block) -> R) -> Option<R> {
    AT_WORK.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    let result = BLOCKS.holding(address, length).filter(|block| on_borders(block, address, length)).map(|b| work(&b));
    AT_WORK.store(false, Ordering::SeqCst);
    result
}

/// Removes RAM from the table just before QEMU unmaps it, and lets the server finish its work there.
pub fn before_unmap(address: u64, length: u64) {
    if !BLOCKS.remove(address, length) {
        return;
    }
    fence(Ordering::SeqCst);
    while AT_WORK.load(Ordering::SeqCst) {
        raw::yield_now();
    }
    // Another thread of QEMU's may be putting zeros there, which looks the block up with this lock.
    watched::wait();
}

fn on_borders(block: &Block, address: u64, length: u64) -> bool {
    let page = block.page_size.get();
    page != 0 && length != 0 && address.is_multiple_of(page) && length.is_multiple_of(page)
}
