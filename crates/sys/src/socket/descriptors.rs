//! Descriptors over a unix socket (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::error::{Error, Result};

/// Descriptors that one message carries (`SCM_MAX_FD`).
const MOST: usize = 253;

/// Sends `bytes` (at least one) and, with the first of them, `descriptors`.
///
/// # Errors
/// The connection is gone; more descriptors than a message can carry (`EINVAL`).
pub fn send_with_descriptors(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let doing = "send descriptors over a socket";
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if bytes.is_empty() || descriptors.len() > MOST {
        return Err(Error::new(doing, rustix::io::Errno::INVAL));
    }
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::new(doing, rustix::io::Errno::INVAL));
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                rest = &rest[sent..];
                // The descriptors went with the first byte; the other bytes go without them.
                control.clear();
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::new(doing, error)),
        }
    }
    Ok(())
}

/// Receives once into `buffer`. Returns the number of bytes (0: the peer has closed) and the descriptors that came with
/// them, close-on-exec.
///
/// # Errors
/// The connection is gone; `EMSGSIZE`: descriptors were lost, because this process has too many open.
pub fn receive_with_descriptors(socket: impl AsFd, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let doing = "receive descriptors over a socket";
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut vectors = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut vectors, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::new(doing, error)),
        }
    };
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::new(doing, rustix::io::Errno::MSGSIZE));
    }
    Ok((received.bytes, descriptors))
}
