//! `libsterna_agent.so`: loaded into QEMU by `LD_PRELOAD` for what only QEMU's own process can do.
//!
//! It notes where guest RAM is mapped, what QEMU discards of it and what QEMU reads into it, and answers the daemon
//! on a unix socket. If [`MEMORY_VARIABLE`](sterna_agent_protocol::MEMORY_VARIABLE) says so, it makes guest RAM
//! private, and a copy of a template where [`TEMPLATE_VARIABLE`](sterna_agent_protocol::TEMPLATE_VARIABLE) names one.
//! Because the process is QEMU's, the library does not allocate, wait in QEMU's threads, unwind or exit, and does
//! nothing at all without [`SOCKET_VARIABLE`](sterna_agent_protocol::SOCKET_VARIABLE).

#![cfg_attr(not(test), no_std)]
#![cfg_attr(
    test,
    allow(dead_code, reason = "nothing is exported to the test program: it would interpose the program's own")
)]

/// The code that runs when the library is loaded.
mod entry;

/// The libc functions that QEMU calls through this library.
mod hooks;

/// The functions by which QEMU reads into guest RAM.
mod reads;

/// Reads into guest RAM that are under way.
mod transfers;

/// The table of RAM blocks: which guest RAM is mapped where.
mod blocks;

/// The log of discards.
mod discards;

/// Private memory mode: guest RAM that is QEMU's own, anonymous memory.
mod private;

/// The file that private guest RAM begins as.
mod template;

/// Making private RAM of RAM that is shared.
mod make_private;

/// Where a file has data, told without going through all of it.
mod data;

/// Mappings that are moved out of the way, to be unmapped later.
mod left;

/// Parts of private guest RAM that a file stands behind, and zeros in the place of what is discarded there.
mod areas;

/// Whether somebody may have guest RAM registered with a userfaultfd.
mod watched;

/// How many more mappings guest RAM may be cut into.
mod mappings;

/// The thread that serves the socket.
mod server;

/// Changing guest RAM's mapping while QEMU may be unmapping it.
mod remap;

/// The requests of the daemon.
mod requests;

/// Packets with a descriptor beside them.
mod packet;

/// Making a userfaultfd.
mod userfaultfd;

/// System calls past libc's wrappers, `errno`, descriptors.
mod raw;

/// Ends the thread that panics, so that QEMU goes on. Nothing here panics on purpose.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    if server::is_this_thread() {
        raw::end_thread();
    }
    loop {
        raw::sleep_ms(1000);
    }
}
