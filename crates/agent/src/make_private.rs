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
use crate::private::{self, SMALL_PAGE};
use crate::raw::{self, Fd, errno};
use crate::watched::{self, Watch};
use crate::{areas, discards, remap, template};

/// What a page table of each level covers, bytes: a mapping moves table by table where both places lie alike in one.
const TABLES: [u64; 2] = [1 << 30, 2 << 20];

/// Address space that is unmapped when this is dropped.
pub struct Left {
    start: u64,
    length: u64,
}

impl Left {
    /// Address space for a mapping that begins at `like`, and where in it that mapping goes. The error is an `errno`.
    fn reserve(like: u64, length: u64) -> Result<(Self, u64), c_int> {
        let table = TABLES.into_iter().find(|table| length >= *table).unwrap_or(SMALL_PAGE);
        let all = length.checked_add(table).ok_or(libc::EINVAL)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { raw::mmap(core::ptr::null_mut(), all as usize, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(errno());
        }
        let start = start as u64;
        // A table covers a power of two.
        Ok((Self { start, length: all }, start.wrapping_add(like.wrapping_sub(start) & table.wrapping_sub(1))))
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        // SAFETY: address space of this library's own, which nobody else knows.
        unsafe { raw::munmap(self.start as *mut c_void, self.length as usize) };
    }
}

/// Makes the block private that is exactly there, and yields what is left to be unmapped. `None` where there is no such
/// block; the error is an `errno`, `EBUSY` where somebody watches RAM. Nothing has changed then.
pub fn make(request: &MakePrivateRequest, file: &Fd) -> Option<Result<Left, c_int>> {
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
        let (left, away) = Left::reserve(address, length)?;
        // From here on QEMU's discards of private RAM are known as such.
        discards::expect_private_pages();
        areas::expect();
        // SAFETY: the block's own mapping, which the guest does not use now; the other place is reserved.
        unsafe { raw::move_mapping(address, length as usize, away)? };
        let private = as_known(block, request);
        // SAFETY: the addresses are free until this returns.
        match unsafe { private::begin_as(file, address, length, request.bridged.get()) } {
            Ok(()) if BLOCKS.change(block, &private) => Ok(left),
            made => {
                // SAFETY: back to where it was; what was made there meanwhile goes.
                unsafe { raw::move_mapping(away, length as usize, address)? };
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
