//! Bodies between guest RAM and a socket, descriptors over a socket, and TCP's settings.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::iovec::{Incoming, Outgoing, advance};

// Descriptors over a unix socket.
mod descriptors;
// TCP's settings, and the kernel's figures of a connection.
mod tcp;

pub use descriptors::{receive_with_descriptors, send_with_descriptors};
pub use tcp::{
    Keepalive, TcpInfo, set_keepalive, set_loss_timers, set_nodelay, set_notsent_lowat, set_pacing_rate,
    set_user_timeout, unacknowledged_bytes,
};

/// Vectors that one call takes (`UIO_MAXIOV`).
pub const VECTORS_PER_CALL: usize = 1024;

/// The reason why sending failed.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The peer took no bytes for the time of the socket's timeout.
    #[error("the peer took nothing for too long")]
    TimedOut,
    /// The memory to send cannot be read: the file was cut off, or no memory is left to fill a hole.
    #[error("guest memory cannot be read")]
    Memory,
    /// The connection is gone.
    #[error("the connection broke while sending")]
    Connection(#[source] io::Error),
}

/// The reason why receiving failed.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The peer has ended the connection.
    #[error("the peer closed the connection, {missing_bytes} bytes too early")]
    Closed {
        /// Bytes that should have come.
        missing_bytes: u64,
    },
    /// No bytes came for the time of the socket's timeout.
    #[error("the peer sent nothing for too long")]
    TimedOut,
    /// There is no memory to receive into: file system, cgroup or host have none left. The bytes before that are
    /// written. The connection is out of step and useless.
    #[error("no memory is left for guest memory")]
    Memory,
    /// The connection is gone.
    #[error("the connection broke while receiving")]
    Connection(#[source] io::Error),
}

/// Sends all of `vectors`, in order, and consumes them.
///
/// # Errors
/// [`SendError`]; part may have been sent. A peer that is gone is an error, not a signal.
pub fn send_all(socket: impl AsFd, mut vectors: &mut [Outgoing<'_>]) -> Result<(), SendError> {
    vectors = advance(vectors, 0);
    while !vectors.is_empty() {
        let batch = vectors.len().min(VECTORS_PER_CALL);
        let message = header(vectors.as_mut_ptr().cast(), batch);
        // SAFETY: `Outgoing` has the layout of `struct iovec`; each is readable for as long as it lives.
        let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        match usize::try_from(sent) {
            Ok(sent) => vectors = advance(vectors, sent),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error if error.kind() == io::ErrorKind::WouldBlock => return Err(SendError::TimedOut),
                error if error.raw_os_error() == Some(libc::EFAULT) => return Err(SendError::Memory),
                error => return Err(SendError::Connection(error)),
            },
        }
    }
    Ok(())
}

/// Fills all of `vectors`, in order, and consumes them.
///
/// # Errors
/// [`ReceiveError`]; part may have been filled.
pub fn receive_exact(socket: impl AsFd, mut vectors: &mut [Incoming<'_>]) -> Result<(), ReceiveError> {
    vectors = advance(vectors, 0);
    while !vectors.is_empty() {
        let batch = vectors.len().min(VECTORS_PER_CALL);
        let mut message = header(vectors.as_mut_ptr().cast(), batch);
        // SAFETY: `Incoming` has the layout of `struct iovec`; each is writable for as long as it lives, and nobody
        // else's.
        let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_WAITALL) };
        match usize::try_from(received) {
            Ok(0) => {
                let missing_bytes = vectors.iter().map(|vector| vector.bytes() as u64).sum();
                return Err(ReceiveError::Closed { missing_bytes });
            }
            Ok(received) => vectors = advance(vectors, received),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error if error.kind() == io::ErrorKind::WouldBlock => return Err(ReceiveError::TimedOut),
                error if error.raw_os_error() == Some(libc::EFAULT) => return Err(ReceiveError::Memory),
                error => return Err(ReceiveError::Connection(error)),
            },
        }
    }
    Ok(())
}

fn header(vectors: *mut libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all zero is a valid `struct msghdr`: no name, no vectors, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors;
    message.msg_iovlen = count as _;
    message
}

/// `setsockopt(2)` with an integer of the width that the kernel expects.
fn set_option<T: Copy>(socket: BorrowedFd<'_>, level: i32, name: i32, value: T) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `value`.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size_of::<T>() as libc::socklen_t)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
