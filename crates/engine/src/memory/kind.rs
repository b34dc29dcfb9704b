//! The RAM of a machine, opened as the kind that it is.

use std::sync::Arc;

use sterna_sys::map::Access;

use super::fault::RamError;
use super::private::PrivateMemory;
use super::shared::SharedMemory;
use super::{BlockFile, Memory};

/// Opens the RAM of a machine, of whichever kind it is.
///
/// # Errors
/// [`RamError`].
pub fn open(blocks: &[BlockFile], access: Access) -> Result<Arc<dyn Memory>, RamError> {
    match blocks.first().and_then(|block| block.process.clone()) {
        Some(holder) => Ok(Arc::new(PrivateMemory::open(blocks, holder, access)?)),
        None => Ok(Arc::new(SharedMemory::open(blocks, access)?)),
    }
}
