//! The files that guests' RAM consists of once it was forked. Nobody writes them, and they have names.
//!
//! A file without a name is its processes' alone: it ends with the last one that maps it. With a name it can be had
//! again by a daemon started anew, when its source has gone, for another clone. So a file has a name from its fork on:
//! `image@RANDOM`, beside machines' RAM. A name says nothing of who needs the file: it goes when no process maps the
//! file and no record *keeps* it (`KeptImage`). Of a kept file no page is given back, whoever maps it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, linkat};
use serde::{Deserialize, Serialize};
use sterna_engine::fork::{Image, Piece};
use sterna_sys::file::{self, FileId, unnamed};
use sterna_sys::host::random_u128;
use sterna_sys::path::Place;
use sterna_sys::process::{each_mapping, numbers};

/// No machine's RAM file has a name that begins so: machines have no '@' in their names.
const PREFIX: &str = "image@";

/// The most that the devices' state of a kept image may be, bytes.
const MAX_DEVICE_BYTES: u64 = 1 << 30;

/// The files of images on this host.
#[derive(Debug)]
pub struct Images {
    /// The directory of machines' RAM.
    dir: PathBuf,
    /// By how many records each is kept.
    kept: Mutex<HashMap<FileId, usize>>,
}

/// A file by its name, and which it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedFile {
    /// Its path.
    pub path: PathBuf,
    /// Its device, major and minor number.
    pub device: (u32, u32),
    /// Its inode there.
    pub inode: u64,
}

impl NamedFile {
    fn id(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }

    /// Opens it for reading only.
    fn open(&self) -> io::Result<File> {
        let file = Place::at(&self.path)?.open(false)?;
        if file::id(&file)? != self.id() {
            let message = format!("{} is another file than the one on record", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(file)
    }
}

/// A guest's RAM and devices at one moment, as a record keeps them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptImage {
    files: Vec<KeptFile>,
    /// The state of the devices.
    devices: NamedFile,
}

/// A file of an image, and what of it lies in RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KeptFile {
    file: NamedFile,
    pieces: Vec<Piece>,
}

impl KeptImage {
    /// The RAM, for machines with blocks of these sizes.
    ///
    /// # Errors
    /// A file is gone, or another; or the record is of no such machine.
    pub fn open(&self, blocks: &[u64]) -> io::Result<Image> {
        let open = |KeptFile { file, pieces }: &KeptFile| {
            let opened = file.open()?;
            let length = opened.metadata()?.len();
            if !pieces.iter().all(|piece| piece.is_within(blocks, length)) {
                return Err(io::Error::other(format!("{} does not have what is on record", file.path.display())));
            }
            Ok((opened, pieces.clone()))
        };
        Ok(Image::of_files(self.files.iter().map(open).collect::<io::Result<_>>()?))
    }

    /// The state of the devices.
    ///
    /// # Errors
    /// Its file is gone, or another.
    pub fn devices(&self) -> io::Result<Vec<u8>> {
        let mut devices = Vec::new();
        self.devices.open()?.take(MAX_DEVICE_BYTES).read_to_end(&mut devices)?;
        Ok(devices)
    }

    /// The memory that its files take, bytes, whoever else has them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let taken = |file: &NamedFile| file.open().ok().and_then(|file| file::allocated_bytes(file).ok()).unwrap_or(0);
        self.all().map(taken).sum()
    }

    fn all(&self) -> impl Iterator<Item = &NamedFile> {
        self.files.iter().map(|file| &file.file).chain([&self.devices])
    }
}

impl Images {
    /// The images of a host whose machines' RAM lies in this directory.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, kept: Mutex::default() }
    }

    /// Whether a file of this name, in the directory of RAM, is an image's.
    #[must_use]
    pub fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<FileId, usize>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a record keeps this file.
    #[must_use]
    pub fn is_kept(&self, file: FileId) -> bool {
        self.kept().contains_key(&file)
    }

    /// Gives a file its image's name in the place of the one that it has.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn rename(&self, path: &Path) -> io::Result<()> {
        fs::rename(path, self.new_path())
    }

    /// Gives a file a name, unless it has one.
    ///
    /// # Errors
    /// It cannot have one any more: it had one, and lost it.
    pub fn name(&self, file: impl AsFd) -> io::Result<NamedFile> {
        self.name_alone(&self.kept(), file)
    }

    /// The same; nobody removes a name meanwhile.
    fn name_alone(&self, _alone: &HashMap<FileId, usize>, file: impl AsFd) -> io::Result<NamedFile> {
        let FileId { device, inode } = file::id(&file)?;
        let known = self.named()?.into_iter().find(|(_, id)| *id == FileId { device, inode });
        if let Some((path, _)) = known {
            return Ok(NamedFile { path, device, inode });
        }
        let path = self.new_path();
        linkat(CWD, format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()), CWD, &path, AtFlags::SYMLINK_FOLLOW)?;
        Ok(NamedFile { path, device, inode })
    }

    /// Keeps an image, with the state of the devices, for a record that is to be written: until
    /// [`forget`](Self::forget).
    ///
    /// # Errors
    /// A file of it cannot have a name, or no memory is left; nothing is kept then.
    pub fn keep(&self, image: &Image, devices: &[u8]) -> io::Result<KeptImage> {
        let file = unnamed(&self.dir)?;
        (&file).write_all(devices)?;
        let mut kept = self.kept();
        let name = |(file, pieces): (&File, &[Piece])| {
            Ok(KeptFile { file: self.name_alone(&kept, file)?, pieces: pieces.to_vec() })
        };
        let files = image.files().map(name).collect::<io::Result<_>>()?;
        let image = KeptImage { files, devices: self.name_alone(&kept, &file)? };
        image.all().for_each(|file| *kept.entry(file.id()).or_default() += 1);
        Ok(image)
    }

    /// Notes that a record keeps this image.
    pub fn know(&self, image: &KeptImage) {
        let mut kept = self.kept();
        image.all().for_each(|file| *kept.entry(file.id()).or_default() += 1);
    }

    /// A record that kept this image is gone.
    pub fn forget(&self, image: &KeptImage) {
        let mut kept = self.kept();
        for file in image.all() {
            if let Some(records) = kept.get_mut(&file.id()) {
                *records -= 1;
                if *records == 0 {
                    kept.remove(&file.id());
                }
            }
        }
    }

    /// Removes the names of files that no record keeps, no process maps and nobody may still be asked to map, as `held`
    /// says. `first` are processes that may map some: once all are found, nobody else is asked. A file that somebody
    /// maps after he was asked has lost its name then, and nothing else.
    ///
    /// # Errors
    /// A process of `first` cannot be looked into: all names stay.
    pub fn forget_unused(&self, first: &[u32], held: impl Fn(FileId) -> bool) -> io::Result<()> {
        let mut unused: HashMap<FileId, PathBuf> = self.named()?.into_iter().map(|(path, id)| (id, path)).collect();
        unused.retain(|id, _| !self.is_kept(*id) && !held(*id));
        let mut ask = |pids: Vec<u32>| {
            for pid in pids {
                if unused.is_empty() {
                    return Ok(());
                }
                let mut mapped = HashSet::new();
                let asked = each_mapping(pid, |mapping| mapped.extend(mapping.file));
                unused.retain(|id, _| !mapped.contains(id));
                // One that has ended maps nothing; and one that this daemon may not look into never got such a file.
                if let Err(error) = asked.map_err(io::Error::from)
                    && !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
                    && first.contains(&pid)
                {
                    return Err(error);
                }
            }
            Ok(())
        };
        ask(first.to_vec())?;
        ask(numbers()?.into_iter().filter(|pid| !first.contains(pid)).collect())?;
        let kept = self.kept();
        for (id, path) in unused {
            if !kept.contains_key(&id) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// The files with an image's name.
    fn named(&self) -> io::Result<Vec<(PathBuf, FileId)>> {
        let mut named = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if Self::is_name(&entry.file_name().to_string_lossy()) {
                let path = entry.path();
                let id = Place::at(&path)?.id()?;
                named.push((path, id));
            }
        }
        Ok(named)
    }

    fn new_path(&self) -> PathBuf {
        self.dir.join(format!("{PREFIX}{:016x}", random_u128() as u64))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use sterna_engine::memory::unneeded::mark_as_pool;
    use sterna_sys::map::PrivateMapping;

    use super::*;

    const BYTES: u64 = 64 << 10;

    fn images() -> (tempfile::TempDir, Images) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let images = Images::new(dir.path().into());
        (dir, images)
    }

    fn layer(images: &Images, byte: u8) -> File {
        let file = unnamed(&images.dir).unwrap();
        (&file).write_all(&vec![byte; BYTES as usize]).unwrap();
        mark_as_pool(&file).unwrap();
        file::reader(&file).unwrap()
    }

    fn names(images: &Images) -> usize {
        fs::read_dir(&images.dir).unwrap().count()
    }

    fn image(file: &File, within: Range<u64>) -> Image {
        let piece = Piece { block: 0, within, offset: 0 };
        Image::of_files(vec![(file.try_clone().unwrap(), vec![piece])])
    }

    #[test]
    fn a_name_goes_when_no_process_maps_the_file_and_no_record_keeps_it() {
        let (_dir, images) = images();
        let file = layer(&images, 7);
        let named = images.name(&file).unwrap();
        assert_eq!(images.name(&file).unwrap(), named, "it has one");
        let guest = PrivateMapping::new(BYTES).unwrap();
        guest.lay(0, &file, 0..BYTES).unwrap();
        images.forget_unused(&[], |_| false).unwrap();
        assert_eq!(names(&images), 1, "this process maps it");
        let kept = images.keep(&image(&file, 0..BYTES), b"devices").unwrap();
        drop(guest);
        images.forget_unused(&[std::process::id()], |_| false).unwrap();
        assert_eq!(names(&images), 2, "the RAM and the devices are kept");
        images.forget(&kept);
        assert!(!images.is_kept(named.id()));
        images.forget_unused(&[], |_| false).unwrap();
        assert_eq!(names(&images), 0);
        // It had a name, and the kernel gives it no other.
        assert!(images.keep(&image(&file, 0..BYTES), b"devices").is_err());
        assert_eq!(images.kept().len(), 0);
    }

    #[test]
    fn what_is_kept_is_found_by_its_record_and_nothing_else_is_taken_for_it() {
        let (_dir, images) = images();
        let file = layer(&images, 7);
        let kept = images.keep(&image(&file, 4096..BYTES), b"devices").unwrap();
        let record = serde_json::to_string(&kept).unwrap();
        let read: KeptImage = serde_json::from_str(&record).unwrap();
        assert_eq!((read.devices().unwrap(), read.bytes()), (b"devices".to_vec(), BYTES + 4096));
        assert_eq!(read.open(&[BYTES]).unwrap().mappings(), 1);
        assert!(read.open(&[BYTES / 2]).is_err(), "a machine with less RAM");
        assert!(read.open(&[]).is_err(), "a machine without RAM");
        // By another daemon, which begins with what is on record.
        let next = Images::new(images.dir.clone());
        next.know(&read);
        next.forget_unused(&[], |_| false).unwrap();
        assert_eq!(names(&next), 2);
        let path = read.files[0].file.path.clone();
        fs::rename(&path, images.dir.join("elsewhere")).unwrap();
        fs::write(&path, vec![1; BYTES as usize]).unwrap();
        assert!(read.open(&[BYTES]).unwrap_err().to_string().contains("another file"));
    }
}
