//! A socket's timeouts: how long a connection waits for its peer, and when the kernel counts a segment as lost.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use sterna_sys::socket::set_loss_timers;

/// How much longer than usual an acknowledgement may take before a segment counts as lost. Most messages are one
/// segment, behind which nothing comes that would tell the kernel of the loss sooner, and in the pause each of them
/// costs the guest this time.
const RETRANSMIT: Duration = Duration::from_millis(20);
/// How long the kernel may keep an acknowledgement back: well below [`RETRANSMIT`] of the peer.
const ACKNOWLEDGE: Duration = Duration::from_millis(5);
/// How long the peer may take to answer a hello, and to be reached at all.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may make no progress before it is given up: a peer that is alive reads and answers.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(15);

/// Sets the timeouts of a connection: no read or write may stall for longer, and a dead host is noticed.
pub(super) fn prepare(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // An older kernel has its own: a message that is lost alone then costs a fifth of a second, in the pause too.
    set_loss_timers(stream, RETRANSMIT, ACKNOWLEDGE)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(STALL_TIMEOUT))?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(2))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}
