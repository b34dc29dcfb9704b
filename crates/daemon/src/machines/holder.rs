//! QEMU's process as the holder of its guest's private memory.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::Holder;

use super::agent;

/// Who gives the kernel advice about a machine's private memory in its QEMU's name.
///
/// # Errors
/// The agent inside it was not reached.
pub fn holder(socket: &Path, pid: u32) -> io::Result<Holder> {
    let agent = agent::connect(socket, pid).map_err(io::Error::other)?;
    Ok(Holder { pid, inside: Arc::new(Mutex::new(InsideQemu::new(agent))) })
}
