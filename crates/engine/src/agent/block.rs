//! A RAM block as the library sees it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use sterna_agent_protocol::message::{Block, PATH_BYTES, Sharing};

/// One mapping of a file that is guest RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentBlock {
    /// Where QEMU maps it.
    pub address: u64,
    /// Bytes, not 0.
    pub length: u64,
    /// Where in the file it begins, bytes.
    pub offset: u64,
    /// The file's device (`st_dev`).
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// The file's page size, bytes: more than 4,096 on hugetlbfs.
    pub page_size: u64,
    /// How it is mapped: as QEMU asked, or private where the library was told to make it so.
    pub sharing: Sharing,
    /// The file's name, as the library saw it. Device and inode decide; this is for people and refusals.
    pub backing: Backing,
}

/// What kind of file backs a RAM block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// A file with a name: the only kind whose guest can be moved.
    Named(PathBuf),
    /// A memfd of this name: QEMU from 8.1 on sends its contents in its own stream.
    Memfd(PathBuf),
    /// A file whose name is gone.
    Unlinked(PathBuf),
    /// A name too long to tell.
    Unknown,
}

impl AgentBlock {
    /// A block that makes sense, or `None`.
    pub(super) fn parse(block: &Block) -> Option<Self> {
        let (address, length, offset) = (block.address.get(), block.length.get(), block.offset.get());
        let page_size = block.page_size.get();
        let sensible = page_size.is_power_of_two()
            && (4096..=1 << 34).contains(&page_size)
            && length != 0
            && [address, length, offset].iter().all(|value| value.is_multiple_of(4096))
            && address.checked_add(length).is_some()
            && offset.checked_add(length).is_some();
        if !sensible {
            return None;
        }
        let private = block.flags.get() & libc::MAP_PRIVATE.unsigned_abs() != 0;
        Some(Self {
            address,
            length,
            offset,
            device: block.device.get(),
            inode: block.inode.get(),
            page_size,
            sharing: if private { Sharing::Private } else { Sharing::Shared },
            backing: Backing::parse(block.path.get(..block.path_length.get() as usize)),
        })
    }
}

impl Backing {
    /// By the name that `/proc/PID/fd` gives a file; `None` where it was cut.
    fn parse(name: Option<&[u8]>) -> Self {
        let path = |name: &[u8]| PathBuf::from(OsStr::from_bytes(name));
        let Some(name) = name.filter(|name| (1..PATH_BYTES + 1).contains(&name.len())) else { return Self::Unknown };
        let without_end = name.strip_suffix(b" (deleted)");
        match (name.strip_prefix(b"/memfd:"), without_end) {
            (Some(memfd), _) => Self::Memfd(path(memfd.strip_suffix(b" (deleted)").unwrap_or(memfd))),
            (None, Some(gone)) => Self::Unlinked(path(gone)),
            (None, None) => Self::Named(path(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn block(path: &str) -> Block {
        let mut block = Block::new_zeroed();
        (block.address, block.length, block.page_size) = (0x10_0000.into(), 0x10_0000.into(), 4096.into());
        block.path_length = (path.len() as u32).into();
        block.path.iter_mut().zip(path.bytes()).for_each(|(to, from)| *to = from);
        block
    }

    #[test]
    fn a_files_name_tells_what_backs_the_block() {
        let backing = |path: &str| AgentBlock::parse(&block(path)).expect("the block makes sense").backing;
        assert_eq!(backing("/dev/shm/ram"), Backing::Named("/dev/shm/ram".into()));
        assert_eq!(backing("/memfd:ram (deleted)"), Backing::Memfd("ram".into()));
        assert_eq!(backing("/dev/shm/ram (deleted)"), Backing::Unlinked("/dev/shm/ram".into()));
        assert_eq!(backing(""), Backing::Unknown);
        assert_eq!(backing(&"x".repeat(257)), Backing::Unknown);
        assert_eq!(backing(&"x".repeat(256)), Backing::Named("x".repeat(256).into()));
    }

    #[test]
    fn a_block_that_makes_no_sense_is_refused() {
        let changes: [fn(&mut Block); 6] = [
            |block| block.length = 0.into(),
            |block| block.length = (u64::MAX - 4095).into(),
            |block| block.offset = (u64::MAX - 4095).into(),
            |block| block.address = 1.into(),
            |block| block.page_size = 0.into(),
            |block| block.page_size = 12288.into(),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut wrong = block("/dev/shm/ram");
            change(&mut wrong);
            assert_eq!(AgentBlock::parse(&wrong), None, "change {index}");
        }
    }
}
