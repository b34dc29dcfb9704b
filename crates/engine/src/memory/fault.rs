//! What can be wrong with a machine's RAM.

use std::io;

use sterna_protocol::layout::LayoutError;

/// RAM that could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Its blocks are invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A file could not be mapped.
    #[error("cannot map RAM block '{id}'")]
    Map {
        /// The block.
        id: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The process that has it could not be reached.
    #[error("cannot reach the memory of process {process}")]
    Process {
        /// The process.
        process: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file is smaller than its block.
    #[error(transparent)]
    Fault(#[from] RamFault),
}

/// RAM that was taken away. The [`io::Error`]s of [`Memory`](super::Memory) carry this error in that case
/// ([`RamFault::of`]).
#[derive(Debug, Clone, thiserror::Error)]
pub enum RamFault {
    /// The VMM took it away: nobody else has the file open.
    #[error("QEMU has cut the file of RAM block '{id}' short: it has {file_bytes} bytes, the block {bytes}")]
    CutShort {
        /// The block.
        id: String,
        /// The bytes that are left.
        file_bytes: u64,
        /// The block's size.
        bytes: u64,
    },
    /// The process whose private memory it is has ended.
    #[error("the process that has the guest's RAM in its memory has ended")]
    ProcessGone,
    /// A page of private memory is there, and the kernel does not let it be read.
    #[error("a page of RAM block '{id}' is there and cannot be read: the host's memory may be damaged")]
    Unreadable {
        /// The block.
        id: String,
    },
    /// A discarded page was read, and no memory was left for it.
    #[error("the file system of RAM block '{id}' has no memory left for its pages")]
    NoMemory {
        /// The block.
        id: String,
    },
}

impl RamFault {
    /// The fault of the RAM itself that an error of [`Memory`](super::Memory) carries.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}
