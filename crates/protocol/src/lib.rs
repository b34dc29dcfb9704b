//! The rules of a migration: frames, messages, versions, both sessions' state machines, convergence.
//!
//! No socket, clock, thread or `unsafe`: what happens over time is driven from outside, so that two sessions can run in
//! one process against a simulated clock and link.
#![forbid(unsafe_code)]

/// The virtual machine as one daemon describes it to another.
pub mod spec;

/// Pages, chunks and how RAM blocks lie behind one another.
pub mod layout;

/// Sets of pages, of a chunk and of a machine.
pub mod pages;

/// The first bytes of every connection: version, role, features.
pub mod hello;

/// Requests and replies on the control connection.
pub mod message;

/// Frames on the connections that carry pages.
pub mod frame;

/// Differences between two states of a page.
pub mod xbzrle;

/// What may be said when, and who owns the guest when the link is lost.
pub mod session;

/// Maps of pages on their way.
pub mod residue;

/// The order of the push after the switchover.
pub mod prepage;

/// How fast to push, so that faults overtake.
pub mod pace;

/// When a lost destination is tried again.
pub mod retry;

/// When to stop the guest.
pub mod convergence;

/// How quickly pages go.
pub mod throughput;

/// How large a guest's balloon should be.
pub mod balloon;

/// How fast free memory is taken from a guest.
pub mod reclaim;

/// Which pages are used.
pub mod usage;

/// What a migration would take.
pub mod estimate;
