//! A whole migration in one process: real sockets, real mappings, real write tracking, a guest of threads that keep
//! writing. What needs a VMM is in `qemu_driver/`; what needs hosts is in the whole-system tests.

/// Both ends.
#[allow(dead_code, reason = "each test program uses its own part")]
#[path = "../support/pair/mod.rs"]
mod pair;

/// Options and outcomes.
mod fixture;

/// Guests that arrive whole, and what is counted on the way.
mod whole;

/// Guests that come back to a host which has kept what their memory was.
mod returns;

/// Changes of RAM that tracking does not see: discards, writes past the page tables.
mod unseen;

/// Migrations that fail, are cancelled or do not converge.
mod ends;

/// Peers that misbehave, and links that break or damage what they carry.
mod links;
