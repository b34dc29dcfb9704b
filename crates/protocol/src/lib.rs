//! The rules of a migration: frames, messages, versions, both sessions' state machines, convergence.
//!
//! No socket, clock, thread or `unsafe`: what happens over time is driven from outside, so that two sessions can run in
//! one process against a simulated clock and link.
#![forbid(unsafe_code)]

/// The virtual machine as one daemon describes it to another.
pub mod spec;

/// Pages, chunks and how RAM blocks lie behind one another.
pub mod layout;
