//! Private memory mode: guest RAM that is QEMU's own, anonymous memory, and not the shared file that QEMU maps.
//!
//! QEMU is started as ever, with its RAM in a file on tmpfs. Where it maps that file, `map` puts anonymous memory in
//! the mapping's place, and the file stays empty. The same file mapped `MAP_PRIVATE` would not do:
//!
//! * the first write into a hole of a privately mapped file takes memory twice: a page of the file, and a page of
//!   QEMU's own. Reading a hole takes a page of the file, too
//! * after `MADV_DONTNEED`, which is how QEMU discards, anonymous memory reads as zeros. A privately mapped file shows
//!   what the file holds
//!
//! RAM may begin as a [`template`]: then the parts where that has data are mappings of it.
//!
//! Private RAM stays in small pages: a huge page is memory that the guest did not write, and KSM merges small pages
//! only. It is not merged either, unless that was asked for: KSM knows no groups of guests that trust each other, and
//! QEMU asks for merging by default (`mem-merge=on`).
//!
//! Every mapping that counts as guest RAM is replaced. What else QEMU maps shared, large and writable on tmpfs
//! (ivshmem, a memfd that another program reads) is taken for RAM as well, and nobody else sees what is written there:
//! a QEMU with such a device must not be private.

use core::sync::atomic::{AtomicU8, Ordering};

use libc::{c_int, c_void, off_t};
use sterna_agent_protocol::message::Block;

use crate::blocks::BLOCKS;
use crate::data::Known;
use crate::raw::{self, Fd, KeepErrno};
use crate::{areas, template};

/// The mode of this process, as a [`Mode`]. Set once, before `main`.
static MODE: AtomicU8 = AtomicU8::new(Mode::Shared as u8);

/// How private RAM is mapped. `MAP_NORESERVE`, because QEMU maps a shared file so that it counts as used memory only
/// where it is written.
pub const OWN: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// What QEMU has asked for about private RAM that a new mapping does not have: these bits.
static ASKED: AtomicU8 = AtomicU8::new(0);
const WITHOUT_DUMP: u8 = 1;
const MERGED: u8 = 2;

/// The page size of a file whose RAM can be anonymous memory.
pub const SMALL_PAGE: u64 = 4096;

/// What [`MEMORY_VARIABLE`](sterna_agent_protocol::MEMORY_VARIABLE) asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Mode {
    /// RAM is the file, as QEMU maps it.
    Shared,
    /// RAM is anonymous memory that KSM does not merge.
    Private,
    /// RAM is anonymous memory that KSM may merge.
    Mergeable,
    /// Nobody knows: no RAM is mapped.
    Unknown,
}

impl Mode {
    /// The mode that the variable's value names. Every other value is [`Mode::Unknown`], also an empty one: to take
    /// one mode for another would share a guest's memory that must not be shared.
    fn named(value: Option<&[u8]>) -> Self {
        match value {
            None | Some(b"shared") => Self::Shared,
            Some(b"private") => Self::Private,
            Some(b"private,mergeable") => Self::Mergeable,
            Some(_) => Self::Unknown,
        }
    }

    /// This process's mode.
    fn here() -> Self {
        let mode = MODE.load(Ordering::Relaxed);
        [Self::Shared, Self::Private, Self::Mergeable].into_iter().find(|m| *m as u8 == mode).unwrap_or(Self::Unknown)
    }

    /// What becomes of a writable mapping of guest RAM; `templated`: a template is asked for.
    fn plan(self, flags: c_int, page_size: u64, templated: bool) -> Plan {
        // MAP_SHARED_VALIDATE is shared, too, although it has the bit of MAP_PRIVATE.
        let private_already = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        match self {
            Self::Unknown => Plan::Refuse,
            // What a template holds would not be there.
            Self::Shared if templated => Plan::Refuse,
            Self::Shared => Plan::AsAsked,
            Self::Private | Self::Mergeable if private_already && templated => Plan::Refuse,
            Self::Private | Self::Mergeable if private_already => Plan::AsAsked,
            // QEMU would go on in pages of the file's size, and anonymous memory has none of these.
            Self::Private | Self::Mergeable if page_size > SMALL_PAGE => Plan::Refuse,
            Self::Private | Self::Mergeable => Plan::Anonymous,
        }
    }

    /// Whether this advice about private RAM is left out.
    fn leaves_out(self, advice: c_int) -> bool {
        match advice {
            libc::MADV_HUGEPAGE => true,
            libc::MADV_MERGEABLE => self != Self::Mergeable,
            _ => false,
        }
    }
}

/// What becomes of a mapping of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// It is made as QEMU asks for it.
    AsAsked,
    /// [`map`] makes it.
    Anonymous,
    /// It fails with `EINVAL`, and QEMU does not start.
    Refuse,
}

/// Sets the mode from the variable's value; `None` where it is unset. Before `main` only.
pub fn set_mode(value: Option<&[u8]>) {
    MODE.store(Mode::named(value) as u8, Ordering::Relaxed);
}

/// What becomes of a writable mapping of this guest RAM.
pub fn plan(block: &Block) -> Plan {
    Mode::here().plan(block.flags.get() as c_int, block.page_size.get(), template::is_asked_for())
}

/// Maps the file as QEMU asks, then puts anonymous memory in its place: so the kernel has found everything right about
/// the file, and has chosen the address. Sets `errno` where it fails; then nothing is mapped there.
///
/// # Safety
/// As `mmap(2)`.
pub unsafe fn map(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // These two would fill the file.
    let flags = flags & !(libc::MAP_POPULATE | libc::MAP_LOCKED);
    // SAFETY: the caller's promise.
    let mapped = unsafe { raw::mmap(address, length, protection, flags, fd, offset) };
    if mapped == libc::MAP_FAILED {
        return mapped;
    }
    // SAFETY: over the mapping just made, which nobody else knows yet.
    let made = unsafe { make(mapped, length, protection) };
    if let Err(errno) = made {
        // QEMU must not go on with the file. Its own reservation around this is unmapped by itself where this fails.
        // SAFETY: as above.
        unsafe { raw::munmap(mapped, length) };
        raw::set_errno(errno);
        return libc::MAP_FAILED;
    }
    let _keep = KeepErrno::new();
    // SAFETY: as above.
    unsafe { advise(mapped, length) };
    mapped
}

/// Puts anonymous memory there, and over it what the template holds, if there is one. The error is an `errno`.
///
/// # Safety
/// The memory is a mapping of that length that nobody else knows.
unsafe fn make(place: *mut c_void, length: usize, protection: c_int) -> Result<(), c_int> {
    let template = template::take()?;
    // SAFETY: the caller's promise.
    if unsafe { raw::mmap(place, length, protection, OWN | libc::MAP_FIXED, -1, 0) } == libc::MAP_FAILED {
        return Err(raw::errno());
    }
    let Some(template) = template else { return Ok(()) };
    areas::expect();
    // SAFETY: the caller's promise.
    let laid = unsafe { template::lay(&template, None, place, length, protection, 0) };
    laid.inspect_err(|_| template::refuse())
}

/// Makes private RAM there that begins as this file, with what the file has mapped as [`template::lay`] maps it;
/// `known`: what is known of its data. The error is an `errno`; what is mapped there is undefined then.
///
/// # Safety
/// Nobody uses these addresses.
pub unsafe fn begin_as(file: &Fd, known: Option<&Known>, address: u64, length: u64, bridged: u64) -> Result<(), c_int> {
    let (place, length) = (address as *mut c_void, length as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller's promise.
    unsafe {
        if raw::mmap(place, length, protection, OWN | libc::MAP_FIXED, -1, 0) == libc::MAP_FAILED {
            return Err(raw::errno());
        }
        template::lay(file, known, place, length, protection, bridged)?;
        advise_again(place, length);
    }
    Ok(())
}

/// Advises what private RAM needs from its start.
///
/// # Safety
/// The addresses are private RAM, or about to become it.
unsafe fn advise(place: *mut c_void, length: usize) {
    // A kernel without huge pages or without KSM refuses, and then does not need to be told.
    // SAFETY: it changes no content.
    unsafe { raw::madvise(place, length, libc::MADV_NOHUGEPAGE) };
    if Mode::here() != Mode::Mergeable {
        // All of a process's memory can be mergeable from its start (PR_SET_MEMORY_MERGE, systemd's MemoryKSM=).
        // SAFETY: as above.
        unsafe { raw::madvise(place, length, libc::MADV_UNMERGEABLE) };
    }
}

/// Advises for a new mapping of private RAM what the one had that it has replaced, QEMU's own advice, too.
///
/// # Safety
/// The addresses are private RAM.
pub unsafe fn advise_again(place: *mut c_void, length: usize) {
    let asked = ASKED.load(Ordering::Relaxed);
    // SAFETY: the caller's promise; it changes no content. QEMU asks for DONTFORK for all guest RAM. A failure is
    // ignored, as in QEMU.
    unsafe {
        advise(place, length);
        raw::madvise(place, length, libc::MADV_DONTFORK);
        if asked & WITHOUT_DUMP != 0 {
            raw::madvise(place, length, libc::MADV_DONTDUMP);
        }
        if asked & MERGED != 0 && Mode::here() == Mode::Mergeable {
            raw::madvise(place, length, libc::MADV_MERGEABLE);
        }
    }
}

/// Notes advice of QEMU's that the kernel has taken, for [`advise_again`]. QEMU gives the same for all of its RAM. That
/// of shared RAM counts, too: it may become private.
pub fn note_advice(address: u64, length: u64, advice: c_int) {
    let bit = match advice {
        libc::MADV_DONTDUMP => WITHOUT_DUMP,
        libc::MADV_MERGEABLE => MERGED,
        _ => return,
    };
    if BLOCKS.touching(address, length).next().is_some() {
        ASKED.fetch_or(bit, Ordering::Relaxed);
    }
}

/// The block as it is once [`map`] has mapped it there. Its file is the empty one: device, inode and offsets name its
/// pages as they name those of shared RAM.
pub fn mapped_at(address: *mut c_void, block: &Block) -> Block {
    let asked = block.flags.get() & !libc::MAP_TYPE.unsigned_abs();
    Block { address: (address as u64).into(), flags: (asked | OWN.unsigned_abs()).into(), ..*block }
}

/// Whether the block is private RAM of this mode, whatever stands behind its parts. A private mapping of QEMU's own is
/// one of a file.
pub fn is_anonymous(block: &Block) -> bool {
    block.flags.get() & libc::MAP_ANONYMOUS.unsigned_abs() != 0
}

/// Whether QEMU's advice is to be left out, and QEMU told that it was taken. Advice may be left out, so a call that
/// touches private RAM and more is left out whole; QEMU advises block by block.
pub fn leaves_out(address: u64, length: u64, advice: c_int) -> bool {
    // What the kernel refuses is the kernel's to refuse.
    let valid = address.is_multiple_of(SMALL_PAGE) && address.checked_add(length).is_some();
    valid && Mode::here().leaves_out(advice) && BLOCKS.touching(address, length).any(|block| is_anonymous(&block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn a_mode_is_known_by_its_exact_name() {
        assert_eq!(Mode::named(None), Mode::Shared);
        assert_eq!(Mode::named(Some(b"shared")), Mode::Shared);
        assert_eq!(Mode::named(Some(b"private")), Mode::Private);
        assert_eq!(Mode::named(Some(b"private,mergeable")), Mode::Mergeable);
        let unknown: [&[u8]; 6] = [b"", b"Private", b"private ", b"private,", b"mergeable", b"private,mergable"];
        for value in unknown {
            assert_eq!(Mode::named(Some(value)), Mode::Unknown, "{}", value.escape_ascii());
        }
    }

    #[test]
    fn the_mode_is_kept_and_advice_that_touches_private_ram_is_left_out_whole() {
        for (value, mode) in [
            (Some(&b"private"[..]), Mode::Private),
            (Some(b"private,mergeable"), Mode::Mergeable),
            (Some(b"?"), Mode::Unknown),
            (None, Mode::Shared),
        ] {
            set_mode(value);
            assert_eq!(Mode::here(), mode);
        }
        // In the same test, because the mode is this process's.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        for (address, flags) in [(0x10_0000_u64, flags), (0x20_0000, libc::MAP_SHARED)] {
            let flags = flags.unsigned_abs().into();
            let length = 0x10_0000.into();
            BLOCKS.add(&Block { address: address.into(), length, flags, ..Block::new_zeroed() });
        }
        let left_out = |address, length| leaves_out(address, length, libc::MADV_HUGEPAGE);
        assert!(left_out(0x10_0000, 0x10_0000) && left_out(0x1f_f000, 0x1000));
        assert!(left_out(0x1f_f000, 0x2000) && left_out(0, 0x10_1000), "it touches private RAM");
        assert!(!left_out(0x20_0000, 0x10_0000) && !left_out(0, 0x10_0000), "it touches none");
        assert!(!left_out(0x10_0001, 0x1000) && !left_out(0x10_0000, u64::MAX), "the kernel refuses it");
    }

    #[test]
    fn shared_ram_of_small_pages_becomes_anonymous_and_huge_pages_are_refused() {
        let shared = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        for mode in [Mode::Private, Mode::Mergeable] {
            assert_eq!(mode.plan(shared, 4096, false), Plan::Anonymous);
            assert_eq!(mode.plan(libc::MAP_SHARED_VALIDATE, 4096, true), Plan::Anonymous);
            assert_eq!(mode.plan(shared, 2 << 20, false), Plan::Refuse);
            assert_eq!(mode.plan(libc::MAP_PRIVATE, 4096, false), Plan::AsAsked);
            assert_eq!(mode.plan(libc::MAP_PRIVATE, 4096, true), Plan::Refuse);
            assert_eq!(mode.plan(libc::MAP_PRIVATE, 2 << 20, false), Plan::AsAsked);
        }
        for (flags, page_size) in [(shared, 4096), (shared, 2 << 20), (libc::MAP_PRIVATE, 4096)] {
            assert_eq!(Mode::Shared.plan(flags, page_size, false), Plan::AsAsked);
            assert_eq!(Mode::Shared.plan(flags, page_size, true), Plan::Refuse);
            assert_eq!(Mode::Unknown.plan(flags, page_size, false), Plan::Refuse);
        }
    }

    #[test]
    fn huge_pages_are_never_asked_for_and_merging_only_on_request() {
        let left_out = |mode: Mode| {
            [libc::MADV_HUGEPAGE, libc::MADV_MERGEABLE, libc::MADV_UNMERGEABLE, libc::MADV_DONTNEED]
                .map(|advice| mode.leaves_out(advice))
        };
        assert_eq!(left_out(Mode::Private), [true, true, false, false]);
        assert_eq!(left_out(Mode::Mergeable), [true, false, false, false]);
    }

    #[test]
    fn a_block_that_was_replaced_is_private_and_keeps_its_file() {
        let asked = (libc::MAP_SHARED | libc::MAP_FIXED).unsigned_abs();
        let block = Block { offset: 0x5000.into(), inode: 7.into(), flags: asked.into(), ..Block::new_zeroed() };
        let mapped = mapped_at(core::ptr::without_provenance_mut(0x10_0000), &block);
        assert!(is_anonymous(&mapped) && !is_anonymous(&block));
        assert_eq!(mapped.flags.get() as c_int & libc::MAP_TYPE, libc::MAP_PRIVATE);
        assert_eq!((mapped.address.get(), mapped.offset.get(), mapped.inode.get()), (0x10_0000, 0x5000, 7));
    }
}
