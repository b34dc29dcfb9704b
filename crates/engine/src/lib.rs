//! Drives one virtual machine's migration: tracking, selection, transfer, faults.
//!
//! Knows no QEMU beyond [`vmm`]: another VMM is another implementation of its two traits.

/// "Pause, resume, device state": what the engine needs of a VMM.
pub mod vmm;

/// What the engine needs of the daemon it runs in.
pub mod host;

/// The client of the library inside QEMU.
pub mod agent;
