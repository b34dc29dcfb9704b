//! TCP's settings, and the kernel's figures of a connection.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use linux_raw_sys::net::tcp_info;

use super::set_option;
use crate::error::{Error, Result};

/// Sets how long sent bytes may stay unacknowledged before the connection is given up; zero means the kernel's default
/// (minutes).
///
/// # Errors
/// Not a TCP socket.
pub fn set_user_timeout(socket: impl AsFd, timeout: Duration) -> Result<()> {
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(socket, millis)
        .map_err(|error| Error::new("set a connection's user timeout", error))
}

/// The times at which an idle connection is probed and given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe; whole seconds.
    pub idle: Duration,
    /// Time between probes; whole seconds.
    pub interval: Duration,
    /// Unanswered probes after which the connection is given up.
    pub probes: u32,
}

/// Probes the connection while it is idle.
///
/// # Errors
/// Not a TCP socket, or the kernel's limits are exceeded (32,767 s, 127 probes).
pub fn set_keepalive(socket: impl AsFd, keepalive: Keepalive) -> Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(&socket, true)
        .and_then(|()| sockopt::set_tcp_keepidle(&socket, keepalive.idle))
        .and_then(|()| sockopt::set_tcp_keepintvl(&socket, keepalive.interval))
        .and_then(|()| sockopt::set_tcp_keepcnt(&socket, keepalive.probes))
        .map_err(|error| Error::new("set a connection's keepalive", error))
}

/// Sets whether small messages go at once.
///
/// # Errors
/// Not a TCP socket.
pub fn set_nodelay(socket: impl AsFd, nodelay: bool) -> Result<()> {
    rustix::net::sockopt::set_tcp_nodelay(socket, nodelay)
        .map_err(|error| Error::new("set a connection's no-delay option", error))
}

/// Sets the number of bytes that may wait unsent in the kernel before the socket counts as full.
///
/// # Errors
/// Not a TCP socket.
pub fn set_notsent_lowat(socket: impl AsFd, bytes: u32) -> Result<()> {
    set_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes)
        .map_err(|error| Error::new("set a connection's limit of unsent bytes", error))
}

/// Sets the most bytes a second that the kernel sends on this connection; `None` means as many as it can.
///
/// # Errors
/// Not a socket, or a kernel before 4.20 and a rate above 4 GiB/s.
pub fn set_pacing_rate(socket: impl AsFd, rate: Option<u64>) -> Result<()> {
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, rate.unwrap_or(u64::MAX))
        .map_err(|error| Error::new("set a connection's rate", error))
}

/// The bytes that were sent on this connection and that the peer's kernel has not acknowledged yet, those that wait
/// here among them (`SIOCOUTQ`, tcp(7)).
///
/// # Errors
/// Not a TCP socket.
pub fn unacknowledged_bytes(socket: impl AsFd) -> Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`. `SIOCOUTQ` and `TIOCOUTQ` are one number (`linux/sockios.h`).
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match result {
        0 => Ok(u64::try_from(bytes).unwrap_or(0)),
        _ => Err(Error::new("ask what a connection still holds", io::Error::last_os_error())),
    }
}

/// `TCP_RTO_MIN_US` and `TCP_DELACK_MAX_US` of `include/uapi/linux/tcp.h`, Linux 6.15 and later.
const TCP_RTO_MIN_US: i32 = 45;
const TCP_DELACK_MAX_US: i32 = 46;

/// Sets the timers for lost segments. A segment is sent again once it was not acknowledged for `retransmit` longer than
/// usual (the kernel's default is 200 ms), and what comes is acknowledged within `acknowledge` (by default 40 ms and
/// more). Where a message is one segment, only this time tells the kernel that it was lost. The kernel rounds both to
/// its ticks. `false` where it knows neither option.
///
/// # Errors
/// Not a TCP socket, or times that are longer than the defaults.
pub fn set_loss_timers(socket: impl AsFd, retransmit: Duration, acknowledge: Duration) -> Result<bool> {
    let set = |name, time: Duration| {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        match set_option(socket.as_fd(), libc::IPPROTO_TCP, name, micros) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(false),
            set => set.map(|()| true).map_err(|error| Error::new("set a connection's timers for loss", error)),
        }
    };
    Ok(set(TCP_RTO_MIN_US, retransmit)? & set(TCP_DELACK_MAX_US, acknowledge)?)
}

/// The kernel's figures of a TCP connection (`TCP_INFO`). A field that an older kernel does not report is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// Smoothed round-trip time.
    pub round_trip: Duration,
    /// The shortest recent round-trip time (`tcp_min_rtt_wlen`: minutes).
    pub least_round_trip: Duration,
    /// The mean deviation of the smoothed round-trip time.
    pub round_trip_deviation: Duration,
    /// The time that a segment may stay unacknowledged before it is sent again.
    pub retransmit_after: Duration,
    /// Bytes of a segment that is sent; one acknowledgement stands for at least this many.
    pub segment_bytes: u32,
    /// The congestion window, segments.
    pub congestion_window: u32,
    /// Latest measured rate of delivery, bytes a second.
    pub delivery_rate: u64,
    /// Bytes that the peer has acknowledged.
    pub acknowledged_bytes: u64,
    /// Bytes in the socket's buffer that were not sent yet.
    pub unsent_bytes: u32,
    /// Segments sent again, ever.
    pub retransmitted: u32,
    /// Time during which there was something to send.
    pub busy: Duration,
    /// Part of it during which the peer's window was full.
    pub window_limited: Duration,
}

impl TcpInfo {
    /// Asks the kernel for the figures of `socket`.
    ///
    /// # Errors
    /// Not a TCP socket.
    pub fn of(socket: impl AsFd) -> Result<Self> {
        // Zeros stand for what an older, shorter structure leaves out; a longer one is cut off.
        let mut info = [0u8; size_of::<tcp_info>()];
        let mut length = info.len() as libc::socklen_t;
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: the kernel writes no more than `length` bytes into `info`.
        let result = unsafe {
            libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
        };
        if result != 0 {
            return Err(Error::new("ask about a connection", io::Error::last_os_error()));
        }
        let word = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().expect("8 bytes"));
        let micros = |at: usize| Duration::from_micros(word(at).into());
        Ok(Self {
            round_trip: micros(offset_of!(tcp_info, tcpi_rtt)),
            least_round_trip: micros(offset_of!(tcp_info, tcpi_min_rtt)),
            round_trip_deviation: micros(offset_of!(tcp_info, tcpi_rttvar)),
            retransmit_after: micros(offset_of!(tcp_info, tcpi_rto)),
            segment_bytes: word(offset_of!(tcp_info, tcpi_snd_mss)),
            congestion_window: word(offset_of!(tcp_info, tcpi_snd_cwnd)),
            delivery_rate: long(offset_of!(tcp_info, tcpi_delivery_rate)),
            acknowledged_bytes: long(offset_of!(tcp_info, tcpi_bytes_acked)),
            unsent_bytes: word(offset_of!(tcp_info, tcpi_notsent_bytes)),
            retransmitted: word(offset_of!(tcp_info, tcpi_total_retrans)),
            busy: Duration::from_micros(long(offset_of!(tcp_info, tcpi_busy_time))),
            window_limited: Duration::from_micros(long(offset_of!(tcp_info, tcpi_rwnd_limited))),
        })
    }
}
