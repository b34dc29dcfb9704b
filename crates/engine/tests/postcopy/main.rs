//! Guests that run at the destination before all their pages are there: with real faults, over links that break.

/// Both ends.
#[path = "../support/pair/mod.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod pair;

/// The network between them.
#[path = "../support/relay.rs"]
#[allow(dead_code, reason = "each test program uses its own part")]
mod relay;

/// A guest that looks at all its pages, and what a report says of them.
mod fixture;

/// Which pages follow, and when they are used.
mod pages;

/// Pages that the guest gives back, and pages that vanish.
mod given_back;

/// Pages and the devices' state at the same time.
mod devices;

/// Comparisons that go on while the guest runs, where no page follows it.
mod compared;

/// Clones of a guest that runs on.
mod clones;

/// Links that break, peers that begin anew, guests that end.
mod links;
