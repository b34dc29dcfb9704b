//! Making private RAM of a shared mapping, while the guest does not run: what its file holds is what it begins as.
//!
//! The pause must not grow with RAM, and to unmap a shared mapping the kernel goes through all of its page tables. So
//! the mapping is moved out of the way, which moves whole tables at once; the file is mapped anew in its place, as a
//! [`template`] is; and the old mapping is unmapped when the daemon has asked for nothing else for a while, and the
//! guest runs already. The file can be written through it until then, but nobody knows where it is.
//!
//! QEMU's own threads do not touch guest RAM meanwhile: the guest's processors are stopped, and its disks are drained.

use core::ffi::c_void;

use libc::c_int;
use sterna_agent_protocol::message::{Block, MakePrivateRequest};

use crate::blocks::BLOCKS;
use crate::data::Known;
use crate::left::Left;
use crate::private::{self, SMALL_PAGE};
use crate::raw::Fd;
use crate::watched::{self, Watch};
use crate::{areas, discards, remap, template};

/// Makes the block private that is exactly there, and yields what is left to be unmapped. `None` where there is no such
/// block; the error is an `errno`, `EBUSY` where somebody watches RAM. Nothing has changed then. `known`: what is known
/// of the file's data, if anything.
pub fn make(request: &MakePrivateRequest, file: &Fd, known: Option<&Known>) -> Option<Result<Left, c_int>> {
    let (address, length) = (request.address.get(), request.length.get());
    remap::within_block(address, length, |block| {
        let whole = block.address.get() == address && block.length.get() == length && block.offset.get() == 0;
        if !whole || private::is_anonymous(block) || block.page_size.get() != SMALL_PAGE {
            return Err(libc::EINVAL);
        }
        template::check(file, length)?;
        let watched = watched::lock();
        if watched.state() != Watch::Nobody {
            return Err(libc::EBUSY);
        }
        let left = Left::reserve(address, length)?;
        // From here on QEMU's discards of private RAM are known as such.
        discards::expect_private_pages();
        areas::expect();
        // SAFETY: the block's own mapping, which the guest does not use now.
        unsafe { left.take(address, length)? };
        let private = as_known(block, request);
        // SAFETY: the addresses are free until this returns.
        match unsafe { private::begin_as(file, known, address, length, request.bridged.get()) } {
            Ok(()) if BLOCKS.change(block, &private) => Ok(left),
            made => {
                // SAFETY: it was taken, and the guest does not use it yet.
                unsafe { left.give_back(address, length)? };
                Err(made.err().unwrap_or(libc::EAGAIN))
            }
        }
    })
}

/// The block as it is known once it is private.
fn as_known(block: &Block, request: &MakePrivateRequest) -> Block {
    let private = private::mapped_at(block.address.get() as *mut c_void, block);
    Block { device: request.device, inode: request.inode, ..private }
}
