//! QEMU's process as the holder of its guest's private memory.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_engine::agent::Agent;
use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::Holder;

/// How long the agent inside it has for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Who gives the kernel advice about a machine's private memory in its QEMU's name.
///
/// # Errors
/// The agent does not answer.
pub fn holder(socket: &Path, pid: u32) -> io::Result<Holder> {
    let agent = Agent::connect(socket, TIMEOUT).map_err(io::Error::other)?;
    if u32::try_from(agent.peer().pid) != Ok(pid) {
        return Err(io::Error::other("another process than QEMU answers in the agent's place"));
    }
    Ok(Holder { pid, inside: Arc::new(Mutex::new(InsideQemu::new(agent))) })
}
