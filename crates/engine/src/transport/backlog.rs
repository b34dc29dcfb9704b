//! Backlog: what migrations have handed to the kernel and what has not arrived yet. It stands before the last pages of
//! a guest that stops, in sockets and in the link's queue.

use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use sterna_sys::socket::unacknowledged_bytes;

use super::connection::Connection;
use super::fair::Flow;

/// The connections over which migrations send pages.
#[derive(Debug, Default)]
pub(super) struct Backlog(Mutex<Vec<(Flow, Weak<TcpStream>)>>);

impl Backlog {
    /// A flow sends over these connections, too.
    pub fn add<'a>(&self, flow: Flow, connections: impl Iterator<Item = &'a Connection>) {
        self.lock().extend(connections.map(|connection| (flow, connection.observed())));
    }

    /// A flow has ended.
    pub fn remove(&self, flow: Flow) {
        self.lock().retain(|(other, _)| *other != flow);
    }

    /// The bytes of these flows that the destinations' kernels do not have yet. A connection that is gone has none.
    pub fn bytes(&self, of: impl Fn(Flow) -> bool) -> u64 {
        let sockets = self.lock();
        let theirs = sockets.iter().filter(|(flow, _)| of(*flow));
        theirs.filter_map(|(_, socket)| unacknowledged_bytes(socket.upgrade()?).ok()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Flow, Weak<TcpStream>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
