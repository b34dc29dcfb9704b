//! Migrations: the jobs that drive them, and this host's part at either end.

/// Records of what became of migrations.
pub mod records;

/// The answer to daemons that may learn nothing of a migration.
pub mod no_verdict;

/// Addresses of other daemons.
pub mod address;

/// Pauses between two attempts.
pub mod pauses;

/// The migrations that this host began, as the API shows them.
pub mod jobs;

/// Whose turn it is among those that wait for one.
pub mod line;

/// Migrations that wait for their turn.
pub mod queue;

/// Which machines share pages on their way.
pub mod sharing;

/// What of machines that leave is kept for the day when they come back.
pub mod returns;

/// The pools of gangs that come here.
pub mod pools;

/// Memory that is promised to what is being made.
pub mod promises;

/// Giving back what no guest needs of pools.
pub mod sweep;

/// The parts of the daemon that move machines away.
pub mod departures;

/// Machines that are being moved away, as other requests see them.
pub mod leaving;

/// Machines that are moved together.
pub mod gang;

/// One machine's migration, from its claim to its end here.
pub mod outgoing;

/// Machines a part of whose memory stays at memory hosts while they move.
pub mod onward;

/// The estimate of a machine's migration.
pub mod estimate;

/// Machines that were handed over while the peer fell silent.
pub mod waiting;

/// Guests that belong to this host after a migration and do not run yet.
pub mod resuming;

/// Guests that run elsewhere and still need pages from here.
pub mod serving;

/// `resume`: a lost destination, perhaps at another address.
pub mod resume;

/// Checks before a machine comes here.
pub mod prechecks;

/// Machines that are being moved here, as other requests see them.
pub mod arriving;

/// Machines that run here while pages are missing.
pub mod paging;

/// Machines that come here.
pub mod incoming;

/// The port that other daemons call.
pub mod listener;
