//! Migrations: the jobs that drive them, and this host's part at either end.

/// What became of migrations, durably.
pub mod records;

/// The migrations this host began.
pub mod jobs;

/// Those of them that wait for their turn.
pub mod queue;

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

/// Their destinations, looked for where their users say that they are.
pub mod resume;

/// What is checked before a machine comes here.
pub mod prechecks;

/// Machines that come here.
pub mod incoming;

/// The port other daemons call.
pub mod listener;
