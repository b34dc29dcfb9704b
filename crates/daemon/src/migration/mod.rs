//! Migrations: the jobs that drive them, and this host's part at either end.

/// What became of migrations, durably.
pub mod records;

/// Daemons that learn nothing of a migration.
pub mod no_verdict;

/// Where other daemons are.
pub mod address;

/// How long is waited between two attempts.
pub mod pauses;

/// The migrations this host began, as they are seen.
pub mod jobs;

/// Whose turn it is among those that wait for one.
pub mod line;

/// Migrations that wait for their turn.
pub mod queue;

/// What it takes to move machines away.
pub mod departures;

/// Machines that are being moved away, for all others.
pub mod leaving;

/// Machines that are moved together.
pub mod gang;

/// One machine's way from its claim to its end here.
pub mod outgoing;

/// What a machine's migration would take.
pub mod estimate;

/// Machines that were handed over while the peer fell silent.
pub mod waiting;

/// Guests that are this host's after a migration and do not run yet.
pub mod resuming;

/// Guests that run elsewhere and still need pages of here.
pub mod serving;

/// `resume`: a lost destination, perhaps at another address.
pub mod resume;

/// What is checked before a machine comes here.
pub mod prechecks;

/// Machines that are being moved here, for all others.
pub mod arriving;

/// Machines that run here before all their pages are here.
pub mod paging;

/// Machines that come here.
pub mod incoming;

/// The port other daemons call.
pub mod listener;
