//! What the engine needs of a VMM (pause, resume, device state): one trait for each end.
//!
//! The order at the source is `prepare` → `begin` → `stopped` → `save_devices` → `saved`, and `rollback` from anywhere
//! in between; at the destination `prepare` → `loaded` → `start`, and `quit` from anywhere. Memory never passes here.

/// A client of QEMU's control protocol.
pub mod qmp;

/// QEMU as a VMM.
pub mod qemu;

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sterna_introspect::PageTables;

/// A moment by the clock of the VMM's host, microseconds since the epoch, from the VMM's own events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventTime(pub u64);

/// When the guest stopped and when the VMM was ready for the last pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// The moment of the guest's last instruction.
    pub stop: EventTime,
    /// The moment when all its I/O was drained and its devices were not yet saved.
    pub ready: EventTime,
}

/// RAM as the guest's processors see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedRam {
    /// Its guest-physical addresses: whole pages, at least one.
    pub guest_physical: Range<u64>,
    /// The block's id, or the VMM's own name for RAM that is no block of the machine's, such as a screen's.
    pub block: String,
    /// Where in the block it begins, bytes: a whole page.
    pub offset: u64,
}

/// A VMM that did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The VMM refused a command.
    #[error("QEMU refused '{command}': {reason}")]
    Refused {
        /// The command.
        command: String,
        /// The VMM's reason.
        reason: String,
    },
    /// The VMM's side of the migration failed.
    #[error("QEMU could not move the device state: {reason}")]
    Migration {
        /// The VMM's reason.
        reason: String,
    },
    /// The VMM ended.
    #[error("QEMU has ended{}", if *.guest_off { " because the guest switched itself off" } else { "" })]
    Gone {
        /// The guest powered itself off.
        guest_off: bool,
    },
    /// The VMM's mappings are not what they should be.
    #[error("QEMU's mappings of its guest's RAM are not what they should be: {doing} failed")]
    Mappings {
        /// The operation that failed.
        doing: &'static str,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// The VMM said nothing for too long.
    #[error("QEMU did not answer '{waiting_for}' within {seconds} s")]
    Silent {
        /// The command or event that was waited for.
        waiting_for: String,
        /// The time limit, seconds.
        seconds: u64,
    },
    /// The connection to the VMM broke or carried nonsense.
    #[error("the connection to QEMU failed while {doing}")]
    Connection {
        /// The operation that failed.
        doing: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// How long the VMM may take to stop the guest: a disk may drain slowly.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits until the guest has stopped that [`Source::begin`] has the VMM stop.
///
/// # Errors
/// [`VmmError`]; call `rollback`.
pub fn wait_until_stopped(source: &mut dyn Source) -> Result<Stopped, VmmError> {
    let silent = || VmmError::Silent { waiting_for: "stop".into(), seconds: STOP_TIMEOUT.as_secs() };
    source.stopped(STOP_TIMEOUT)?.ok_or_else(silent)
}

/// Who writes a guest's RAM past its VMM's page tables, where write tracking does not see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Untracked {
    /// Nobody.
    #[default]
    Nobody,
    /// The kernel, for reads of the VMM's (direct I/O). A VMM that tells of its reads tells of these
    /// ([`Tracker::reads`](crate::source::track::Tracker::reads)); of one that does not only content shows what was
    /// written.
    Reads,
    /// Others, too: only content shows what was written.
    Others,
}

/// The VMM at the source.
pub trait Source: Send {
    /// Prepares the switchover without touching the guest.
    ///
    /// # Errors
    /// [`VmmError`]; the guest runs on.
    fn prepare(&mut self) -> Result<(), VmmError>;

    /// Whether the guest runs now (and was not stopped by its user).
    ///
    /// # Errors
    /// [`VmmError`].
    fn running(&mut self) -> Result<bool, VmmError>;

    /// The numbers of the threads that run the guest's processors; a single one where the VMM runs them in turn.
    ///
    /// # Errors
    /// [`VmmError`].
    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError>;

    /// The number of the VMM's process, where it has one that has not ended.
    fn process(&self) -> Option<u32> {
        None
    }

    /// Where the guest sees RAM, in order and disjoint. Hotplug and firmware change it.
    ///
    /// # Errors
    /// [`VmmError`]; refused where the VMM does not tell.
    fn memory_map(&mut self) -> Result<Vec<MappedRam>, VmmError> {
        Err(VmmError::Refused { command: "memory map".to_owned(), reason: "it does not tell".to_owned() })
    }

    /// The page tables of every processor that uses any, at this moment. Empty where none does, or where one is in a
    /// state that leaves in doubt what the guest runs.
    ///
    /// # Errors
    /// [`VmmError`]; refused where the VMM does not tell.
    fn page_tables(&mut self) -> Result<Vec<PageTables>, VmmError> {
        Err(VmmError::Refused { command: "registers".to_owned(), reason: "it does not tell".to_owned() })
    }

    /// Whether the guest was reset since the last call, or at some time before. A reset is seen once
    /// [`page_tables`](Self::page_tables) has answered a call made after it.
    ///
    /// # Errors
    /// [`VmmError`].
    fn was_reset(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    /// Who writes, or may write, the guest's RAM past the VMM's page tables now. Where one look finds somebody, he is
    /// there for the whole migration.
    ///
    /// # Errors
    /// [`VmmError`]; refused where content would not show what was written either.
    fn writes_untracked(&mut self) -> Result<Untracked, VmmError> {
        Ok(Untracked::Nobody)
    }

    /// Asks the VMM to stop the guest and to have its devices ready; the stream yields the device state from now on
    /// (some of it before the guest stops) and ends with it. The holder of the stream must keep reading.
    ///
    /// # Errors
    /// [`VmmError`]; call `rollback`.
    fn begin(&mut self) -> Result<UnixStream, VmmError>;

    /// Waits until the guest is stopped and its I/O drained. `None` where `timeout` passed first: then call again.
    ///
    /// # Errors
    /// [`VmmError`]; call `rollback`.
    fn stopped(&mut self, timeout: Duration) -> Result<Option<Stopped>, VmmError>;

    /// Makes the VMM write the devices' state into the stream of `begin`.
    ///
    /// # Errors
    /// [`VmmError`]; call `rollback`.
    fn save_devices(&mut self) -> Result<(), VmmError>;

    /// Waits until all of it is written. The guest stays stopped, and `rollback` still gives it back.
    ///
    /// # Errors
    /// [`VmmError`]; call `rollback`.
    fn saved(&mut self, timeout: Duration) -> Result<(), VmmError>;

    /// Gives the guest back: cancels what was begun, waits until the VMM is idle again, and lets the guest run if it
    /// ran when `begin` was called. Does nothing where nothing was begun. A later migration can succeed.
    ///
    /// # Errors
    /// [`VmmError`]; then the guest is stopped or gone.
    fn rollback(&mut self) -> Result<(), VmmError>;

    /// When the guest ran again after `rollback`, by the VMM's own event; `None` where it does not, or the VMM does not
    /// tell.
    fn resumed(&mut self) -> Option<EventTime> {
        None
    }

    /// Whether the guest has switched itself off or the VMM has ended, without waiting.
    fn ended(&mut self) -> Option<VmmError>;

    /// Ends the VMM, whose guest now runs elsewhere. Waits until its process is gone.
    fn quit(&mut self);
}

/// The VMM at the destination, started so that it waits for device state and does not run the guest by itself.
pub trait Destination: Send {
    /// Makes the VMM listen for device state and returns the stream to write it to; shut down its writing side at the
    /// end.
    ///
    /// # Errors
    /// [`VmmError`].
    fn prepare(&mut self) -> Result<UnixStream, VmmError>;

    /// Waits until the devices are loaded; the guest is stopped.
    ///
    /// # Errors
    /// [`VmmError`]: [`VmmError::Migration`] or [`VmmError::Gone`] where the VMM refuses the state.
    fn loaded(&mut self, timeout: Duration) -> Result<(), VmmError>;

    /// Checks that the VMM still lives, with the guest loaded and stopped. It is called just before the VMM gets the
    /// guest, so it must not take long.
    ///
    /// # Errors
    /// [`VmmError`].
    fn alive(&mut self) -> Result<(), VmmError>;

    /// The number of the VMM's process, where it has one that has not ended.
    fn process(&self) -> Option<u32> {
        None
    }

    /// As [`Source::processor_threads`].
    ///
    /// # Errors
    /// [`VmmError`].
    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        Ok(Vec::new())
    }

    /// Lets the guest run. Returns when it started, by the VMM's own event.
    ///
    /// # Errors
    /// [`VmmError`].
    fn start(&mut self) -> Result<EventTime, VmmError>;

    /// Ends the VMM; the guest never ran here. Waits until its process is gone.
    fn quit(&mut self);
}
