//! Packets with a descriptor beside them.

use libc::{c_int, c_void};

use crate::raw::{Fd, errno};

const DESCRIPTOR_BYTES: u32 = size_of::<c_int>() as u32;

/// Room for one control message; aligned as `cmsghdr` must be.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// A packet that was received.
pub struct Received {
    /// The number of its bytes; 0 where the peer has closed.
    pub length: usize,
    /// The descriptor beside it.
    pub descriptor: Option<Fd>,
    /// Whether a part of it did not fit. Then it is no message of this protocol.
    pub cut: bool,
}

/// Receives one packet, without waiting. The error is an `errno`.
pub fn receive(socket: &Fd, buffer: &mut [u8]) -> Result<Received, c_int> {
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // SAFETY: arithmetic only. CMSG_LEN, not CMSG_SPACE: its padding would have room for a second descriptor.
    message.msg_controllen = unsafe { libc::CMSG_LEN(DESCRIPTOR_BYTES) } as usize;
    // SAFETY: `message` describes buffers that outlive the call.
    let length = unsafe { libc::recvmsg(socket.number(), &mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| errno())?;
    Ok(Received {
        length,
        descriptor: descriptor_in(&message),
        cut: message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
    })
}

/// The descriptor in a received message's control part, which has room for no more than one.
fn descriptor_in(message: &libc::msghdr) -> Option<Fd> {
    // SAFETY: the kernel has filled in `msg_control` and its length.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    if header.is_null() {
        return None;
    }
    // SAFETY: CMSG_FIRSTHDR gives null unless a whole header is there.
    let (level, kind, length) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
    // SAFETY: arithmetic only.
    let whole = length >= unsafe { libc::CMSG_LEN(DESCRIPTOR_BYTES) } as usize;
    if level != libc::SOL_SOCKET || kind != libc::SCM_RIGHTS || !whole {
        return None;
    }
    // SAFETY: the header's length covers one descriptor.
    let number = unsafe { libc::CMSG_DATA(header).cast::<c_int>().read_unaligned() };
    Fd::from_call(number.into()).ok()
}

/// Sends one packet, without waiting: a peer that does not read loses its connection. The error is an `errno`.
pub fn send(socket: &Fd, header: &[u8], body: &[u8], descriptor: Option<c_int>) -> Result<(), c_int> {
    let mut control = Control([0; 64]);
    let mut parts =
        [header, body].map(|part| libc::iovec { iov_base: part.as_ptr() as *mut c_void, iov_len: part.len() });
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    if let Some(descriptor) = descriptor {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: arithmetic only; 24 bytes of the 64.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(DESCRIPTOR_BYTES) } as usize;
        // SAFETY: the control buffer has room for the header and one descriptor, so CMSG_FIRSTHDR is not null.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(DESCRIPTOR_BYTES) as _;
            libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(descriptor);
        }
    }
    // SAFETY: `message` describes buffers that outlive the call, which only reads them.
    let sent = unsafe { libc::sendmsg(socket.number(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(errno()) } else { Ok(()) }
}
