//! Requests and replies: every struct as it is in a packet.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes kept of a RAM block's path. A longer one is cut; [`Block::path_length`] tells its true length.
pub const PATH_BYTES: usize = 256;

/// The most items in one [`AdviseRequest`] or [`MapRequest`].
pub const MAX_ITEMS: usize = 2048;

/// The operations that the daemon can ask for. Their numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// Asks for the library's state. Empty → [`HelloReply`].
    Hello = 1,
    /// Asks which RAM blocks are mapped. Empty → [`Block`]s.
    Blocks = 2,
    /// Makes a userfaultfd and keeps a duplicate. [`OpenRequest`], with `/dev/userfaultfd` open or without →
    /// [`OpenReply`] with it. It is refused with [`Status::AlreadyOpen`] where one is kept: closing the last descriptor
    /// would let missing pages read as zero.
    OpenUserfaultfd = 3,
    /// Passes the kept userfaultfd again. Empty → empty, with it, or [`Status::NotOpen`].
    TakeUserfaultfd = 4,
    /// Drops the kept duplicate, and ends what [`Self::LendUserfaultfd`] began. Empty → empty, also where there is
    /// none.
    CloseUserfaultfd = 5,
    /// Advises the kernel about guest RAM. [`AdviseRequest`], [`Range`]s → empty.
    Advise = 6,
    /// Maps the file that is passed along over guest RAM, or with [`Sharing::Own`] or [`Sharing::Missing`] none.
    /// [`MapRequest`], [`Run`]s → empty.
    Map = 7,
    /// Passes the log of discards. Empty → empty, with its memory.
    DiscardLog = 8,
    /// Drops the kept duplicate, so that the daemon alone has the userfaultfd. Until [`Self::CloseUserfaultfd`], or
    /// until the next one is made, the library replaces no mapping of guest RAM: it may be registered. Empty → empty,
    /// or [`Status::NotOpen`]. Libraries of earlier versions do not know it.
    LendUserfaultfd = 9,
    /// Puts the file that is passed along in the place of one that QEMU has open, under its number (`dup3(2)`).
    /// [`PutRequest`] → empty. Libraries of earlier versions do not know it.
    PutDescriptor = 10,
    /// Makes private RAM of a block that is a shared mapping of a file. What the file holds stays what the guest reads,
    /// and no write goes to it from then on. The file is passed along, open for reading only. [`MakePrivateRequest`] →
    /// empty; where it is refused, nothing has changed. Libraries of earlier versions do not know it.
    MakePrivate = 11,
    /// Looks where the file that is passed along has data, for a [`Self::MakePrivate`] to come, which then looks only
    /// where there was none. The guest may run. [`LookAheadRequest`] → empty. Libraries of earlier versions do not know
    /// it.
    LookAhead = 12,
    /// The guest runs again: what requests have left to do is done at once, and not when nobody has asked for anything
    /// for a while. Empty → empty, before that is done. Libraries of earlier versions do not know it.
    Finish = 13,
    /// Passes the table of transfers. Empty → empty, with its memory. Libraries of earlier versions do not know it.
    Transfers = 14,
    /// Takes transfers out of the table that have ended without a call of QEMU's. Empty → empty. Libraries of earlier
    /// versions do not know it.
    EndTransfers = 15,
}

impl Operation {
    /// The operation with this number.
    #[must_use]
    pub const fn from_wire(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Blocks,
            3 => Self::OpenUserfaultfd,
            4 => Self::TakeUserfaultfd,
            5 => Self::CloseUserfaultfd,
            6 => Self::Advise,
            7 => Self::Map,
            8 => Self::DiscardLog,
            9 => Self::LendUserfaultfd,
            10 => Self::PutDescriptor,
            11 => Self::MakePrivate,
            12 => Self::LookAhead,
            13 => Self::Finish,
            14 => Self::Transfers,
            15 => Self::EndTransfers,
            _ => return None,
        })
    }
}

/// The ways a request ends. Their numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The request was carried out.
    Done = 0,
    /// The request has not the form that its operation needs.
    Malformed = 1,
    /// The request has another version; the reply's header tells the library's.
    Version = 2,
    /// No such operation.
    Unknown = 3,
    /// The system refused; [`ReplyHeader::errno`] says why. Items before [`ReplyHeader::item`] are done.
    System = 4,
    /// Item [`ReplyHeader::item`] does not lie inside one RAM block, or not at the borders of its pages. Items before
    /// it are done.
    OutsideRam = 5,
    /// A userfaultfd is kept already: the daemon must take or close it first. Of [`Sharing::Own`] it says that one is
    /// open: a new mapping would not be registered.
    AlreadyOpen = 6,
    /// No userfaultfd is kept.
    NotOpen = 7,
}

impl Status {
    /// The status with this number.
    #[must_use]
    pub const fn from_wire(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Done,
            1 => Self::Malformed,
            2 => Self::Version,
            3 => Self::Unknown,
            4 => Self::System,
            5 => Self::OutsideRam,
            6 => Self::AlreadyOpen,
            7 => Self::NotOpen,
            _ => return None,
        })
    }
}

/// Before every request's body.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// [`crate::MAGIC`].
    pub magic: U32,
    /// [`crate::VERSION`].
    pub version: U16,
    /// An [`Operation`].
    pub operation: U16,
    /// A number that the reply returns.
    pub sequence: U32,
    /// The body's length, bytes.
    pub length: U32,
}

/// Before every reply's body.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReplyHeader {
    /// [`crate::MAGIC`].
    pub magic: U32,
    /// The library's [`crate::VERSION`].
    pub version: U16,
    /// The request's operation.
    pub operation: U16,
    /// The request's sequence number.
    pub sequence: U32,
    /// The body's length, bytes; 0 unless [`Status::Done`].
    pub length: U32,
    /// A [`Status`].
    pub status: U32,
    /// The system's error number where the status is [`Status::System`]; otherwise 0.
    pub errno: U32,
    /// The item that failed, counted from 0.
    pub item: U32,
    /// Reserved: 0.
    pub reserved: U32,
}

/// The reply to [`Operation::Hello`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HelloReply {
    /// The process as it knows itself (its own pid namespace).
    pub pid: U32,
    /// RAM blocks mapped now.
    pub blocks: U32,
    /// The number of RAM blocks that ever found no room in the table. If it is not 0, the list is incomplete and the
    /// guest cannot be moved.
    pub blocks_lost: U64,
    /// 1 where a userfaultfd is kept, else 0.
    pub userfaultfd: U32,
    /// Reserved: 0.
    pub reserved: U32,
}

/// One mapping of a file that is guest RAM. A file may be mapped in several pieces or twice.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Block {
    /// The address at which QEMU maps it.
    pub address: U64,
    /// The length, bytes.
    pub length: U64,
    /// The offset in the file at which it begins, bytes.
    pub offset: U64,
    /// The file's device (`st_dev`).
    pub device: U64,
    /// The file's inode.
    pub inode: U64,
    /// The file's page size: the base page's, or on hugetlbfs the huge page's, bytes.
    pub page_size: U64,
    /// `MAP_SHARED`, `MAP_PRIVATE`, … as QEMU gave them; `MAP_PRIVATE` and `MAP_ANONYMOUS` where the library made the
    /// block private ([`MEMORY_VARIABLE`](crate::MEMORY_VARIABLE)).
    pub flags: U32,
    /// The path's length, which may be more than [`PATH_BYTES`].
    pub path_length: U32,
    /// The file's name, as `/proc/self/fd` shows it: "/memfd:…" for a memfd, "… (deleted)" for a file without a name.
    pub path: [u8; PATH_BYTES],
}

/// The request of [`Operation::OpenUserfaultfd`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenRequest {
    /// `UFFD_FEATURE_*`, for `UFFDIO_API`.
    pub features: U64,
}

/// The reply to [`Operation::OpenUserfaultfd`].
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenReply {
    /// The features the kernel has.
    pub features: U64,
    /// `UFFDIO_*` the kernel offers, one bit each.
    pub ioctls: U64,
}

/// The request of [`Operation::PutDescriptor`], the file beside it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PutRequest {
    /// The number of the descriptor to replace, which is open.
    pub number: U32,
}

/// The request of [`Operation::MakePrivate`], the file beside it. The guest does not run.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MakePrivateRequest {
    /// The address at which the block begins.
    pub address: U64,
    /// The block's length, bytes.
    pub length: U64,
    /// Data that is nearer than this is mapped in one, with the hole between, bytes.
    pub bridged: U64,
    /// The device (`st_dev`) of the file that the block is known by from now on: one that holds nothing.
    pub device: U64,
    /// That file's inode.
    pub inode: U64,
}

/// The request of [`Operation::LookAhead`], the file beside it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LookAheadRequest {
    /// As [`MakePrivateRequest::bridged`]: data that is nearer than this counts as one part, bytes.
    pub bridged: U64,
}

/// The advice that [`Operation::Advise`] can give the kernel. Their numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Advice {
    /// Unmap the pages; the file keeps its contents, private copies are lost.
    DontNeed = 1,
    /// Punch a hole into the file behind a shared mapping.
    Remove = 2,
    /// Let KSM merge private pages.
    Mergeable = 3,
    /// Undo KSM's merging, and allow no more.
    Unmergeable = 4,
    /// These pages go first when memory is short.
    Cold = 5,
    /// Take these pages away now; without swap a shared page is unmapped and stays in its file.
    PageOut = 6,
    /// Huge pages wanted.
    HugePage = 7,
    /// No huge pages.
    NoHugePage = 8,
}

impl Advice {
    /// The advice with this number.
    #[must_use]
    pub const fn from_wire(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::DontNeed,
            2 => Self::Remove,
            3 => Self::Mergeable,
            4 => Self::Unmergeable,
            5 => Self::Cold,
            6 => Self::PageOut,
            7 => Self::HugePage,
            8 => Self::NoHugePage,
            _ => return None,
        })
    }
}

/// The request of [`Operation::Advise`]; up to [`MAX_ITEMS`] [`Range`]s follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AdviseRequest {
    /// An [`Advice`].
    pub advice: U32,
    /// The number of ranges that follow.
    pub count: U32,
}

/// Guest RAM, by QEMU's addresses.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Range {
    /// The address at which it begins, at the border of a page of the block.
    pub address: U64,
    /// The length, bytes: whole pages of the block, not 0.
    pub length: U64,
}

/// The ways in which [`Operation::Map`] maps. Their numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Sharing {
    /// `MAP_SHARED`: writes go to the file.
    Shared = 1,
    /// `MAP_PRIVATE`: writes make a copy that is QEMU's own. The file must be open for reading only.
    Private = 2,
    /// `MAP_PRIVATE` and no file, so that the memory reads as zeros: in private RAM, while no userfaultfd is open. No
    /// descriptor is passed, and offsets mean nothing.
    Own = 3,
    /// As `Own`, also while a userfaultfd is open: the new memory is not registered with it, which is the daemon's to
    /// do. Only where the guest does not run: what it writes before that is seen by nobody.
    Missing = 4,
    /// As `Private`. The pages that were there are moved out of the way, and freed when nobody has asked for anything
    /// for a while: to free them takes longer than to map. Only where the guest does not run, and over memory that is
    /// registered with a userfaultfd. Libraries of earlier versions do not know it: the request is malformed to them.
    Over = 5,
}

impl Sharing {
    /// The sharing with this number.
    #[must_use]
    pub const fn from_wire(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Shared,
            2 => Self::Private,
            3 => Self::Own,
            4 => Self::Missing,
            5 => Self::Over,
            _ => return None,
        })
    }
}

/// The request of [`Operation::Map`], the file beside it; up to [`MAX_ITEMS`] [`Run`]s follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MapRequest {
    /// A [`Sharing`].
    pub sharing: U32,
    /// The number of runs that follow.
    pub count: U32,
}

/// Guest RAM and the part of a file to map there.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Run {
    /// The address at which it begins, at the border of a page of the block.
    pub address: U64,
    /// The length, bytes: whole pages of the block, not 0.
    pub length: U64,
    /// The offset in the file at which it begins, bytes.
    pub offset: U64,
}

const _: () = {
    use core::mem::size_of;
    assert!(size_of::<ReplyHeader>() + crate::MAX_BLOCKS * size_of::<Block>() <= crate::MAX_MESSAGE_BYTES);
    let requests = size_of::<RequestHeader>() + size_of::<MapRequest>();
    assert!(requests + MAX_ITEMS * size_of::<Run>() <= crate::MAX_MESSAGE_BYTES);
    assert!(size_of::<Block>().is_multiple_of(8));
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_on_the_wire_comes_back_as_what_it_was() {
        for number in 0..=u16::MAX {
            assert!(Operation::from_wire(number).is_none_or(|known| known as u16 == number));
            let number = u32::from(number);
            assert!(Status::from_wire(number).is_none_or(|known| known as u32 == number));
            assert!(Advice::from_wire(number).is_none_or(|known| known as u32 == number));
            assert!(Sharing::from_wire(number).is_none_or(|known| known as u32 == number));
        }
    }

    #[test]
    fn the_layout_of_version_1_does_not_change() {
        assert_eq!(size_of::<RequestHeader>(), 16);
        assert_eq!(size_of::<ReplyHeader>(), 32);
        assert_eq!(size_of::<HelloReply>(), 24);
        assert_eq!(size_of::<Block>(), 312);
        let header = RequestHeader {
            magic: U32::new(crate::MAGIC),
            version: U16::new(1),
            operation: U16::new(Operation::Map as u16),
            sequence: U32::new(0x0102_0304),
            length: U32::new(24),
        };
        assert_eq!(header.as_bytes(), b"STRA\x01\x00\x07\x00\x04\x03\x02\x01\x18\x00\x00\x00");
    }
}
