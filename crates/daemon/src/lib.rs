//! `sternad`: the virtual machines of one host, their migrations, and the API.
//!
//! Everything that must outlive the daemon is a file of its state directory; everything else can be asked of QEMU
//! again.

/// The configuration file and the command line.
pub mod config;

/// The state directory: lock, RAM file system, durable records.
pub mod state;

/// The identity of this daemon.
pub mod identity;

/// Processes by identity, not by number alone.
pub mod process;

/// Work on several machines at a time.
pub mod several;

/// How much memory this host can still give.
pub mod room;

/// How often something is looked at that costs the more the more there is to see.
pub mod pace;

/// What is kept of machines that have left.
pub mod kept;

/// What is done when memory is short.
pub mod shortage;

/// QEMU's arguments, its binary, and how it is started.
pub mod qemu;

/// The machines of this host: the table of them, their records, and how each is reached.
pub mod machines;

/// Balloons.
pub mod balloon;

/// Care for machines that belong here.
pub mod care;

/// Huge pages for machines at rest.
pub mod huge;

/// Starting machines.
pub mod run;

/// Taking over machines that were started by other means.
pub mod adopt;

/// Another QEMU for a running guest.
pub mod replace;

/// A part of a machine's memory leaves for memory hosts, and comes back.
pub mod split;

/// A running guest goes on as several.
pub mod fork;

/// The guest's clock, set by a program inside it.
pub mod guest_agent;

/// Letting guests go on that were paused, or held.
pub mod go_on;

/// The images of machines' disks, made fewer.
pub mod disk_images;

/// The links of machines' network cards, and their hardware addresses.
pub mod link;

/// Reclaim of guests' free memory.
pub mod reclaim;

/// Migrations: the jobs that drive them, and this host's part at either end.
pub mod migration;

/// Stopping machines.
pub mod stop;

/// Showing machines.
pub mod show;

/// Recovery of what a restarted daemon finds.
pub mod recover;

/// The daemon's parts, put together.
pub mod daemon;

/// The API on its socket.
pub mod http;

/// The caller of the API.
pub mod caller;

/// Metrics: what the daemon counts.
pub mod metrics;

/// The errors of the API, in one place.
pub mod problems;

/// The process from its start to its end.
pub mod serve;
