//! The files that hold guests' RAM: which they are is on record, and nothing else is ever taken for them.
//!
//! QEMU, or its user, may put something else in the place of a file that it owns: a link to another guest's RAM, a
//! device. So a path only says where to look. What is there is used where it is the file on record (device and
//! inode), is opened after that was seen and not before, and no link of another user is followed on the way.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_engine::memory::areas;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::file::FileId;
use sterna_sys::pagemap::Pagemap;
use sterna_sys::path::{Place, Root};
use sterna_sys::process::{Mapping, maps};

use super::template::Template;

/// A file that holds RAM of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing {
    /// Where it is, as QEMU's process sees it.
    pub path: PathBuf,
    /// Its device, major and minor number.
    pub device: (u32, u32),
    /// Its inode there.
    pub inode: u64,
    /// It ends with the machine.
    pub owned: bool,
}

impl Backing {
    /// The file itself.
    #[must_use]
    pub fn file(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }
}

/// One RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The back end's id in QEMU.
    pub id: String,
    /// Size.
    pub bytes: u64,
    /// Page size of the file's backing.
    pub page_bytes: u64,
    /// The file that QEMU was given, as its process sees it.
    pub path: PathBuf,
    /// The files that hold its pages: the one that QEMU was given comes first. Records of earlier daemons do not say.
    #[serde(default)]
    pub backings: Vec<Backing>,
    /// The address in QEMU's private memory where its pages are; `None` where they are in the files.
    #[serde(default)]
    pub private: Option<u64>,
    /// What its private pages began as. It is no backing: several machines have it, and it does not end with one.
    #[serde(default)]
    pub template: Option<Template>,
}

impl Block {
    /// A block whose file is not there yet.
    #[must_use]
    pub fn new(id: &str, bytes: u64, page_bytes: u64, path: &Path) -> Self {
        Self {
            id: id.into(),
            bytes,
            page_bytes,
            path: path.into(),
            backings: Vec::new(),
            private: None,
            template: None,
        }
    }

    /// The block as its destination must know it.
    pub(super) fn spec(&self) -> BlockSpec {
        let path = self.path.display().to_string();
        BlockSpec { id: self.id.clone(), bytes: self.bytes, page_bytes: self.page_bytes, path }
    }

    /// Notes that the file with its path is to be this one, which has not got that name yet and ends with the machine.
    ///
    /// # Errors
    /// The file cannot be looked at.
    pub fn is_to_be(&mut self, file: &File) -> io::Result<()> {
        self.note(sterna_sys::file::id(file)?, true);
        Ok(())
    }

    /// Notes which file it is that has its path on this host: one that Sterna made, in a directory of root's.
    ///
    /// # Errors
    /// It is not there.
    pub fn recall_here(&mut self) -> io::Result<()> {
        let file = Root::own()?.find(&self.path)?.id()?;
        self.note(file, true);
        Ok(())
    }

    /// Notes which file it is that has its path where QEMU sees it, and that QEMU has mapped by the kernel's word;
    /// `owned`: it ends with the machine.
    ///
    /// # Errors
    /// It is not there, or QEMU has mapped another.
    pub fn recall_mapped(&mut self, pid: u32, owned: bool) -> io::Result<()> {
        let file = Root::of(pid)?.find(&self.path)?.id()?;
        if stretches(&maps(pid)?, file).iter().all(|stretch| stretch.length < self.bytes) {
            let message = format!("QEMU has not mapped {} as the guest's RAM", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        self.note(file, owned);
        Ok(())
    }

    fn note(&mut self, file: FileId, owned: bool) {
        let FileId { device, inode } = file;
        self.backings = vec![Backing { path: self.path.clone(), device, inode, owned }];
    }

    /// The file that QEMU was given.
    ///
    /// # Errors
    /// The record does not say.
    pub fn file(&self) -> io::Result<FileId> {
        let unknown = || io::Error::other(format!("which file {} was is not on record", self.path.display()));
        self.backings.first().map(Backing::file).ok_or_else(unknown)
    }

    /// Opens the file for reading and writing through QEMU's root: its mounts may differ from the daemon's.
    ///
    /// # Errors
    /// Where it is gone, another, or of another size.
    pub fn open(&self, pid: u32) -> io::Result<File> {
        self.open_below(&Root::of(pid)?)
    }

    /// The same by the path that it has on this host, after QEMU has ended.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_here(&self) -> io::Result<File> {
        self.open_below(&Root::own()?)
    }

    fn open_below(&self, root: &Root) -> io::Result<File> {
        let file = self.look_below(root)?.open(true)?;
        let length = file.metadata()?.len();
        if length < self.bytes {
            return Err(io::Error::other(format!("{} has {length} bytes, not {}", self.path.display(), self.bytes)));
        }
        Ok(file)
    }

    /// What has its path, where that is the file on record.
    fn look_below(&self, root: &Root) -> io::Result<Place> {
        let (expected, place) = (self.file()?, root.find(&self.path)?);
        if place.id()? != expected {
            let message = format!("{} is another file than the machine's RAM: it was replaced", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(place)
    }

    /// What of it the host has given memory for, for this machine alone, bytes; none where it cannot be looked at.
    #[must_use]
    pub fn allocated_bytes(&self, pid: u32) -> u64 {
        let in_file = || -> io::Result<u64> { Ok(self.look_below(&Root::of(pid)?)?.stat()?.st_blocks as u64 * 512) };
        let in_process = |address: u64| -> io::Result<u64> {
            Ok(Pagemap::open(pid)?.content_bytes(address..address.saturating_add(self.bytes))?)
        };
        self.private.map_or_else(in_file, in_process).unwrap_or(0)
    }
}

impl Block {
    /// What of it the guest has content in, its own and what it shares with others, bytes: what it takes where it
    /// shares with nobody. None where it cannot be looked at.
    #[must_use]
    pub fn content_bytes(&self, pid: u32) -> u64 {
        let Some(address) = self.private else { return self.allocated_bytes(pid) };
        areas::content_bytes(pid, address..address.saturating_add(self.bytes)).unwrap_or(0)
    }
}

/// A part of a process's memory that is a file from its start on, shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

/// Where `file` is mapped from its start on. The kernel lists a stretch in pieces where advice or a userfaultfd was
/// given for a part of it.
#[must_use]
pub fn stretches(maps: &[Mapping], file: FileId) -> Vec<Stretch> {
    let mut found: Vec<Stretch> = Vec::new();
    for mapping in maps.iter().filter(|mapping| mapping.file == Some(file) && mapping.permissions.shared) {
        let length = mapping.range.end.saturating_sub(mapping.range.start);
        match found.last_mut() {
            Some(last) if (last.address + last.length, last.length) == (mapping.range.start, mapping.offset) => {
                last.length += length;
            }
            _ if mapping.offset == 0 => found.push(Stretch { address: mapping.range.start, length }),
            _ => {}
        }
    }
    found
}

/// Whether a file is mapped shared, from its start on, at all of these addresses.
#[must_use]
pub fn is_shared(maps: &[Mapping], addresses: &Range<u64>, file: FileId) -> bool {
    let whole = |part: &Stretch| part.address == addresses.start && part.length >= addresses.end - addresses.start;
    stretches(maps, file).iter().any(whole)
}

/// Whether all these addresses are private memory of the process's own, which it may write: anonymous, or with a file
/// behind it that may be there, or with one that has no name, as pools have none.
#[must_use]
pub fn is_private(maps: &[Mapping], addresses: &Range<u64>, may_be: impl Fn(FileId) -> bool) -> bool {
    let mut covered = addresses.start;
    for mapping in maps.iter().filter(|mapping| mapping.range.end > addresses.start) {
        let known = mapping.deleted || mapping.file.is_none_or(&may_be);
        let own = known && !mapping.permissions.shared && mapping.permissions.write;
        if covered >= addresses.end || mapping.range.start > covered || !own {
            break;
        }
        covered = mapping.range.end;
    }
    covered >= addresses.end
}

/// A file that ends with its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnFile {
    /// Where it is.
    pub path: PathBuf,
    /// Which it is, where that is on record.
    pub file: Option<FileId>,
}

impl OwnFile {
    /// Removes it. What was put in its place stays: it may be another machine's.
    ///
    /// # Errors
    /// What the file system says; another file has its name. One that is gone already is none.
    pub fn remove(&self) -> io::Result<()> {
        let gone = |result: io::Result<()>| match result {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        gone(self.is_itself().and_then(|()| fs::remove_file(&self.path)))
    }

    /// Checks that what has its path is the file itself.
    ///
    /// # Errors
    /// It is gone, or another has its name.
    pub fn is_itself(&self) -> io::Result<()> {
        match self.file {
            Some(file) if Place::at(&self.path)?.id()? != file => Err(io::Error::other("another file has its name")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use sterna_sys::process::parse_maps;

    use super::*;

    fn block(path: &Path) -> Block {
        Block::new("ram", 4096, 4096, path)
    }

    /// Failed while a path was opened as it was: with the other guest's RAM.
    #[test]
    fn another_file_in_the_place_of_ram_is_neither_opened_nor_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (ram, other) = (dir.path().join("ram"), dir.path().join("other"));
        fs::write(&ram, [1; 4096]).unwrap();
        fs::write(&other, [2; 4096]).unwrap();
        let mut block = block(&ram);
        assert!(block.open_here().unwrap_err().to_string().contains("not on record"));
        block.recall_here().unwrap();
        block.open_here().unwrap();
        let own = OwnFile { path: ram.clone(), file: Some(block.file().unwrap()) };
        // Kept under another name: its inode must not be given to a new file.
        fs::rename(&ram, dir.path().join("kept")).unwrap();
        own.remove().expect("what is gone already is no error");
        symlink(&other, &ram).unwrap();
        assert!(block.open_here().unwrap_err().to_string().contains("it was replaced"));
        assert!(own.remove().is_err());
        fs::remove_file(&ram).unwrap();
        fs::hard_link(&other, &ram).unwrap();
        assert!(block.open_here().unwrap_err().to_string().contains("it was replaced"));
        assert!(own.remove().is_err() && ram.exists());
    }

    #[test]
    fn a_file_that_is_mapped_in_pieces_is_one_stretch_and_half_of_it_is_none() {
        let text = b"7f0000000000-7f0000001000 rw-s 00000000 00:1f 77 /ram\n\
            7f0000001000-7f0000003000 rw-s 00001000 00:1f 77 /ram\n\
            7f0000003000-7f0000004000 rw-s 00007000 00:1f 77 /ram\n\
            7f0000005000-7f0000006000 rw-s 00000000 00:1f 78 /other\n\
            7f0000007000-7f0000008000 rw-p 00000000 00:1f 77 /ram\n";
        let file = FileId { device: (0, 0x1f), inode: 77 };
        let found = stretches(&parse_maps(text), file);
        assert_eq!(found, [Stretch { address: 0x7f00_0000_0000, length: 0x3000 }]);
    }

    #[test]
    fn private_memory_is_all_of_a_range_and_the_process_s_own() {
        let text = b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n\
            7f0000001000-7f0000003000 rw-p 00000000 00:00 0 [anon:ram]\n\
            7f0000003000-7f0000004000 rw-s 00000000 00:1f 77 /ram\n\
            7f0000005000-7f0000006000 r--p 00000000 00:00 0\n\
            7f0000006000-7f0000007000 rw-p 00000000 00:1f 78 /other\n";
        let maps = parse_maps(text);
        let with = |behind, start: u64, end: u64| {
            let may_be = |file| Some(file) == behind;
            is_private(&maps, &(0x7f00_0000_0000 + start..0x7f00_0000_0000 + end), may_be)
        };
        let is = |start, end| with(None, start, end);
        assert!(is(0, 0x3000) && is(0x800, 0x1800));
        for (start, end) in [(0, 0x4000), (0x3000, 0x4000), (0x4000, 0x5000), (0x5000, 0x6000), (0x6000, 0x7000)] {
            assert!(!is(start, end), "{start:x} to {end:x}");
        }
        let file = |inode| Some(FileId { device: (0, 0x1f), inode });
        assert!(with(file(78), 0x6000, 0x7000) && !with(file(77), 0x6000, 0x7000), "only its template is behind it");
        assert!(!with(file(77), 0x3000, 0x4000), "it is shared");
    }

    /// Fails where the agent is believed: nothing of that file is mapped at all.
    #[test]
    fn a_file_that_the_process_has_not_mapped_is_not_its_ram() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("ram");
        fs::write(&path, [1; 4096]).unwrap();
        let error = block(&path).recall_mapped(std::process::id(), false).unwrap_err();
        assert!(error.to_string().contains("has not mapped"), "{error}");
    }
}
