//! The messages between the daemon and the library inside QEMU, typed once.
//!
//! One packet of a `SOCK_SEQPACKET` unix socket is one message: a header, then a body, at most [`MAX_MESSAGE_BYTES`],
//! with at most one descriptor beside it. Every request gets exactly one reply. Integers are little-endian; structs
//! have no padding. The daemon asks and the library answers; the library never speaks first. Discards are not sent:
//! they are in a shared [`log`].

#![cfg_attr(not(test), no_std)]

#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("guest RAM of another process is addressed with 64-bit little-endian integers");

/// Requests and replies.
pub mod message;

/// The log of discards: memory that the library writes and the daemon reads.
pub mod log;

/// The table of transfers: memory that the library writes and the daemon reads.
pub mod transfers;

/// The beginning of every message: "STRA".
pub const MAGIC: u32 = u32::from_le_bytes(*b"STRA");

/// The version of messages and log. The headers and [`message::Operation::Hello`] stay as they are in every version.
pub const VERSION: u16 = 1;

/// The longest message, header included, bytes: below the smallest default send buffer of a unix socket.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;

/// Environment variable: path of the unix socket where the library listens. Without it the library does nothing.
pub const SOCKET_VARIABLE: &str = "STERNA_AGENT_SOCKET";

/// Environment variable: file name of the program that the library is meant for. Without it the library is meant for
/// any whose name contains "qemu". In other programs (a wrapper that starts QEMU) the library does nothing and lets the
/// environment pass on.
pub const PROGRAM_VARIABLE: &str = "STERNA_AGENT_PROGRAM";

/// Environment variable: what guest RAM is. "shared", or no variable: the file that QEMU maps. "private": anonymous
/// memory of QEMU's own, and the file stays empty. "private,mergeable": the same, and QEMU may let KSM merge it. With
/// any other value QEMU's mapping of guest RAM fails with `EINVAL`, and so QEMU does not start.
pub const MEMORY_VARIABLE: &str = "STERNA_AGENT_MEMORY";

/// Environment variable: the number of an inherited descriptor, in decimal digits: a file that private guest RAM begins
/// as. It is a regular file of exactly the RAM block's length, open for reading only; what it holds is mapped
/// copy-on-write. With anything else there, or where guest RAM is shared, QEMU's mapping of guest RAM fails with
/// `EINVAL`, and so QEMU does not start.
pub const TEMPLATE_VARIABLE: &str = "STERNA_AGENT_TEMPLATE";

/// The most RAM blocks that the library can keep; further ones are counted in [`message::HelloReply::blocks_lost`].
pub const MAX_BLOCKS: usize = 64;

/// The least length of a file mapping that counts as guest RAM, bytes.
pub const MIN_BLOCK_BYTES: u64 = 1 << 20;
