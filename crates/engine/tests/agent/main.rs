//! The library inside a real QEMU (and inside a plain program), asked by the daemon's client.
//!
//! No guest runs in most of these: QEMU stands before its first instruction. Needs root, /dev/userfaultfd and
//! qemu-system-x86_64; where one is absent a test says so and passes.

/// Building the library, and a QEMU or a program with it inside.
mod fixture;

/// The program that some tests run in QEMU's place.
mod program;

/// Reads into RAM by each of QEMU's ways.
mod reader;

/// What is told of reads into RAM.
mod transfers;

/// Which RAM is found.
mod blocks;

/// Files in the place of others that QEMU has open.
mod descriptors;

/// What is logged as discarded.
mod discards;

/// QEMU's confinement, `-daemonize`, children.
mod confinement;

/// A QEMU without a daemon, and one whose socket is abused.
mod robustness;

/// Tracking and keeping a userfaultfd.
mod userfaultfd;

/// What becomes of threads that wait for pages when whoever fills them is killed.
mod duplicate;

/// Advising and remapping.
mod remap;

/// RAM that is made private.
mod private;

/// Shared RAM that becomes private.
mod make_private;

/// RAM that begins as a template, and what is discarded of it.
mod templates;

/// Both ends of a migration, for the hostile.
#[path = "../support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

/// Agents, and processes around them, that are in their guest's hands.
mod hostile;
