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

/// Errands: what goes straight to memory hosts.
pub mod errand;

/// Frames on the connections that carry pages.
pub mod frame;

/// Differences between two states of a page.
pub mod xbzrle;

/// Sessions: which message may come when, and who owns the guest when the link is lost.
pub mod session;

/// The residue: maps of pages that the destination lacks.
pub mod residue;

/// Pre-paging: the order of the push after the switchover.
pub mod prepage;

/// The pace of the push, at which faults overtake it.
pub mod pace;

/// Signs of life while pages follow their guest.
pub mod heartbeat;

/// When a lost destination is tried again.
pub mod retry;

/// When a peer that is waited for stands still.
pub mod standstill;

/// Convergence: when to stop the guest.
pub mod convergence;

/// Foresight: whether rounds can reach the limit at all.
pub mod foresight;

/// The speed of pages, from the rounds so far.
pub mod throughput;

/// Self-ballooning: how large a guest's balloon should be.
pub mod balloon;

/// Reclaim: how fast free memory is taken from a guest.
pub mod reclaim;

/// Memory hosts: pages of guests that run elsewhere.
pub mod store;

/// Where the pages of a split guest are.
pub mod split;

/// The map of pages that are used.
pub mod usage;

/// Estimates of what a migration would take.
pub mod estimate;
