//! The machines of this host: the table of them, what is on record of each, and how each is reached.
//!
//! Nothing here knows of migrations, balloons or requests. What a machine is busy with says for itself what it is
//! ([`Activity`](crate::machines::hold::Activity)).

/// The files that hold machines' RAM.
pub mod backing;

/// Overlays of machines' disks.
pub mod overlay;

/// A guest's memory hosts, as its machine's record has them.
pub mod borrowed;

/// Images under overlays, and who may use them.
pub mod base;

/// QEMU's process, which holds private memory.
pub mod holder;

/// A machine that changes its QEMU, as it is on record.
pub mod succession;

/// A machine's durable record.
pub mod record;

/// What is being done with a machine.
pub mod hold;

/// A clone that is held ready for whoever takes it.
pub mod held;

/// Pages of a machine that are still to come.
pub mod missing;

/// A machine a part of whose memory is at memory hosts.
pub mod split;

/// What a machine leaves behind.
pub mod files;

/// The files that RAM consists of once it was forked.
pub mod images;

/// The table of machines.
pub mod table;

/// A network card that is to take another's place.
pub mod card;

/// A machine or a name that is claimed for a while.
pub mod claim;

/// The thread that waits for a machine's end.
pub mod watch;

/// Files that machines' private memory begins as.
pub mod template;

/// The agent inside a machine's QEMU.
pub mod agent;

/// What is asked of a machine's QEMU.
pub mod control;

/// What it takes to move a machine, or to take memory from it: QEMU, agent and RAM.
pub mod reach;

/// Starting a machine's QEMU.
pub mod start;

/// Reading machines' records.
pub mod load;
