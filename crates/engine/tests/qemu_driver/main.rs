//! The switchover of real QEMUs, driven through the two traits, in all that can go wrong. Needs QEMU; says what it
//! skips.

/// QEMUs to drive.
#[path = "../support/machine.rs"]
mod machine;

/// A switchover, step by step.
mod fixture;

/// Guests that run on at the destination.
mod moves;

/// Guests that are given back at the source.
mod given_back;

/// Device state that the destination refuses.
mod refused;

/// QEMUs that are killed or hang, and guests that switch themselves off or panic.
mod gone;

/// A QEMU that somebody else used, or uses.
mod others;
