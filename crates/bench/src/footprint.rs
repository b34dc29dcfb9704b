//! The host memory that guests' RAM takes: frames, each counted once however many guests map it.
//!
//! The kernel says of each page of a process which frame it is in (`/proc/PID/pagemap`, for root). A page that KSM has
//! merged and a page of a file that several guests map are one frame. A file that guests map can have pages that none
//! of them has touched: these take memory too, and are counted by the file's size.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::lab::cgroup::Group;
use crate::ram::{self, is_zero};

const PAGE_BYTES: u64 = 4096;
/// The unit of a file's `st_blocks`.
const BLOCK_BYTES: u64 = 512;
/// Bytes of the page map that are read at once.
const READ_BYTES: usize = 512 << 10;
/// The page map's entries: whether the page is in a frame, whether that is a file's, and the bits of its number.
const PRESENT: u64 = 1 << 63;
const OF_A_FILE: u64 = 1 << 61;
const FRAME: u64 = (1 << 55) - 1;
/// How often a destination's frames are counted: at most so often, and for at most this share of the time.
const COUNT_EVERY: Duration = Duration::from_millis(250);
const COUNT_SHARE: u32 = 10;
/// How often the memory that is charged to a destination is read.
const READ_EVERY: Duration = Duration::from_millis(20);

/// The guest's RAM in a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ram {
    pid: u32,
    /// In ascending order, with no gap between them.
    pieces: Vec<Piece>,
}

/// A part of it: one mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    pages: Range<u64>,
    /// The file's device and inode, and the mapping's own bounds, which name it in `/proc`; `None` for memory of the
    /// process's own.
    file: Option<(FileId, Range<u64>)>,
}

/// A file: device and inode.
type FileId = (String, u64);

/// The memory that some guests' RAM takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Frames, each counted once.
    pub frames: u64,
    /// Pages of the guests' RAM that are in a frame: one that several guests map counts once for each.
    pub pages: u64,
}

impl Ram {
    /// The RAM of a QEMU process.
    ///
    /// RAM is the upper end of what lies writable and without a gap before an address that is not: QEMU puts a guard
    /// behind it. It may be of several mappings, where parts of it come from a file. Code that QEMU translates, of
    /// which there may be more, is executable.
    ///
    /// # Errors
    /// The process has ended, or has no RAM of that size.
    pub fn of(pid: u32, memory_bytes: u64) -> Result<Self> {
        let file = format!("/proc/{pid}/maps");
        let maps = std::fs::read_to_string(&file).context(|| format!("reading {file}"))?;
        let pieces = ram_in(&maps, memory_bytes)
            .ok_or_else(|| Error::Usage(format!("process {pid} has no {memory_bytes} bytes of RAM")))?;
        Ok(Self { pid, pieces })
    }

    /// The RAM of every QEMU in a host's group that has already mapped so much.
    #[must_use]
    pub fn all_in(group: &Group, memory_bytes: u64) -> Vec<Self> {
        let is_qemu = |pid: u32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.starts_with("qemu")
        };
        let pids = group.processes().into_iter().map(|process| process.pid).filter(|pid| is_qemu(*pid));
        pids.filter_map(|pid| Self::of(pid, memory_bytes).ok()).collect()
    }

    /// Shows the page map's entry of each page that has a frame, with the page's piece and address.
    fn each_frame(&self, mut see: impl FnMut(&Piece, u64, u64) -> Result<()>) -> Result<()> {
        let name = format!("/proc/{}/pagemap", self.pid);
        let map = File::open(&name).context(|| format!("opening {name}"))?;
        let mut entries = vec![0; READ_BYTES];
        for piece in &self.pieces {
            let mut at = piece.pages.start;
            while at < piece.pages.end {
                let wanted = ((piece.pages.end - at) as usize * 8).min(entries.len());
                let read = map.read_at(&mut entries[..wanted], at * 8).context(|| format!("reading {name}"))?;
                if read == 0 {
                    return Err(Error::Usage(format!("process {} has ended", self.pid)));
                }
                for (page, entry) in (at..).zip(entries[..read].as_chunks::<8>().0) {
                    let entry = u64::from_ne_bytes(*entry);
                    if entry & PRESENT != 0 {
                        if entry & FRAME == 0 {
                            return Err(Error::Usage("the kernel tells frames to root only".into()));
                        }
                        see(piece, page * PAGE_BYTES, entry)?;
                    }
                }
                at += read as u64 / 8;
            }
        }
        Ok(())
    }
}

/// The mappings of the smallest RAM of at least that size; `None` where there is none.
fn ram_in(maps: &str, memory_bytes: u64) -> Option<Vec<Piece>> {
    let mut runs: Vec<Vec<Piece>> = Vec::new();
    let mut end = None;
    for (bytes, file) in maps.lines().filter_map(writable) {
        let piece = Piece {
            pages: bytes.start / PAGE_BYTES..bytes.end / PAGE_BYTES,
            file: file.map(|file| (file, bytes.clone())),
        };
        match runs.last_mut().filter(|_| end == Some(bytes.start)) {
            Some(run) => run.push(piece),
            None => runs.push(vec![piece]),
        }
        end = Some(bytes.end);
    }
    let wanted = memory_bytes / PAGE_BYTES;
    let bounds = |run: &[Piece]| Some((run.first()?.pages.start, run.last()?.pages.end));
    let large = runs.into_iter().filter_map(|run| {
        let (start, end) = bounds(&run)?;
        (end - start >= wanted).then(|| (end - start, end - wanted, run))
    });
    let (_, start, run) = large.min_by_key(|(pages, ..)| *pages)?;
    let inside = run.into_iter().filter(|piece| piece.pages.end > start);
    Some(inside.map(|piece| Piece { pages: piece.pages.start.max(start)..piece.pages.end, ..piece }).collect())
}

/// The bounds and the file of a mapping from a line of `/proc/PID/maps`; `None` where it is executable or not writable.
fn writable(line: &str) -> Option<(Range<u64>, Option<FileId>)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| u64::from_str_radix(text, 16).ok();
    let bytes = address(start)?..address(end)?;
    let access = words.next()?;
    let (device, inode) = (words.nth(1)?, words.next()?.parse::<u64>().ok()?);
    access.starts_with("rw-").then_some((bytes, (inode != 0).then(|| (device.to_owned(), inode))))
}

/// A set of frames, by their numbers.
#[derive(Default)]
struct Frames {
    bits: Vec<u64>,
    count: u64,
}

impl Frames {
    /// Adds a frame; false where it was there.
    fn add(&mut self, frame: u64) -> bool {
        let (word, bit) = ((frame / 64) as usize, 1 << (frame % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        let new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        self.count += u64::from(new);
        new
    }
}

/// A file of which guests map pages.
#[derive(Default)]
struct SharedFile {
    /// Its pages that somebody maps.
    mapped: Frames,
    /// All pages that it has memory for.
    allocated: u64,
}

/// The memory that the RAM of these guests takes together.
///
/// # Errors
/// One of the processes has ended, or the kernel does not say: root may know frames.
pub fn of(rams: &[Ram]) -> Result<Footprint> {
    let (mut frames, mut pages) = (Frames::default(), 0);
    let mut files: HashMap<FileId, SharedFile> = HashMap::new();
    for ram in rams {
        for (id, bytes) in ram.pieces.iter().filter_map(|piece| piece.file.as_ref()) {
            let file = files.entry(id.clone()).or_default();
            if file.allocated == 0 {
                // A mapping can be gone again: then it is the next one that tells.
                let found = std::fs::metadata(mapped_file(ram.pid, bytes));
                file.allocated = found.map_or(0, |file| file.blocks() * BLOCK_BYTES / PAGE_BYTES);
            }
        }
        ram.each_frame(|piece, _, entry| {
            let frame = entry & FRAME;
            pages += 1;
            if frames.add(frame)
                && entry & OF_A_FILE != 0
                && let Some((id, _)) = &piece.file
                && let Some(file) = files.get_mut(id)
            {
                file.mapped.add(frame);
            }
            Ok(())
        })?;
    }
    let untouched: u64 = files.values().map(|file| file.allocated.saturating_sub(file.mapped.count)).sum();
    Ok(Footprint { frames: frames.count + untouched, pages })
}

/// Of the frames of these guests' RAM those that do not hold zeros alone. Every one is read, also those of a file's
/// pages that none of the guests has touched.
///
/// # Errors
/// As [`of`].
pub fn nonzero_frames(rams: &[Ram]) -> Result<u64> {
    let (mut frames, mut nonzero) = (Frames::default(), 0);
    let mut files: HashMap<&FileId, PathBuf> = HashMap::new();
    let mut page = [0; PAGE_BYTES as usize];
    for ram in rams {
        for (id, bytes) in ram.pieces.iter().filter_map(|piece| piece.file.as_ref()) {
            files.entry(id).or_insert_with(|| mapped_file(ram.pid, bytes));
        }
        let name = format!("/proc/{}/mem", ram.pid);
        let memory = File::open(&name).context(|| format!("opening {name}"))?;
        ram.each_frame(|piece, address, entry| {
            let is_files = entry & OF_A_FILE != 0 && piece.file.is_some();
            if !is_files && frames.add(entry & FRAME) {
                memory.read_exact_at(&mut page, address).context(|| format!("reading {name}"))?;
                nonzero += u64::from(!is_zero(&page));
            }
            Ok(())
        })?;
    }
    files.values().try_fold(nonzero, |sum, file| Ok(sum + ram::usage(file)?.nonzero_pages))
}

/// The file behind the mapping of a process with these bounds, whatever its name is and whether it still has one.
fn mapped_file(pid: u32, bytes: &Range<u64>) -> PathBuf {
    format!("/proc/{pid}/map_files/{:x}-{:x}", bytes.start, bytes.end).into()
}

/// The most that a host's guests took while somebody watched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    /// Frames of the guests' RAM.
    pub frames: u64,
    /// Memory charged to the host's group, bytes: the guests' RAM and everything else on the host.
    pub memory_bytes: u64,
    /// How often frames were counted.
    pub counts: u64,
}

/// A watch on the guests of a host; dropping it ends it.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Peak>>,
}

impl Watch {
    /// Watches the host of this group, to which guests of that size may come.
    #[must_use]
    pub fn start(group: Group, memory_bytes: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || watch(&group, memory_bytes, &stopped));
        Self { stop, thread: Some(thread) }
    }

    /// What was seen.
    #[must_use]
    pub fn finish(mut self) -> Peak {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<Peak> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

fn watch(group: &Group, memory_bytes: u64, stopped: &AtomicBool) -> Peak {
    let mut peak = Peak::default();
    let mut due = Instant::now();
    while !stopped.load(Ordering::Relaxed) {
        peak.memory_bytes = peak.memory_bytes.max(group.memory_bytes().unwrap_or(0));
        if Instant::now() >= due {
            let begin = Instant::now();
            // A process that ends just now is in the next count no more.
            if let Ok(now) = of(&Ram::all_in(group, memory_bytes)) {
                peak.frames = peak.frames.max(now.frames);
                peak.counts += 1;
            }
            due = Instant::now() + COUNT_EVERY.max(begin.elapsed() * COUNT_SHARE);
        }
        std::thread::sleep(READ_EVERY);
    }
    peak
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::ptr::NonNull;

    use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
    use nix::unistd::Uid;

    use super::*;
    use crate::ksm::Ksm;

    const PAGES: usize = 64;
    const BYTES: usize = PAGES * PAGE_BYTES as usize;

    /// Memory of this process, unmapped at the end.
    struct Mapped(NonNull<std::ffi::c_void>);

    impl Mapped {
        fn new(file: Option<&File>) -> Self {
            let (length, access) = (NonZeroUsize::new(BYTES).unwrap(), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
            // SAFETY: mappings of their own at addresses of the kernel's choice.
            let mapped = unsafe {
                match file {
                    Some(file) => mmap(None, length, access, MapFlags::MAP_PRIVATE, file, 0),
                    None => mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE),
                }
            };
            Self(mapped.unwrap())
        }

        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: the whole mapping, which nobody else has.
            unsafe { std::slice::from_raw_parts_mut(self.0.cast().as_ptr(), BYTES) }
        }

        /// Makes pages that are not equal.
        fn fill(&mut self) {
            for (number, page) in self.bytes().chunks_mut(PAGE_BYTES as usize).enumerate() {
                page.fill(number as u8 + 1);
            }
        }

        fn read(&mut self) -> u64 {
            self.bytes().iter().map(|byte| u64::from(*byte)).sum()
        }

        fn ram(&self, pid: u32, file: Option<FileId>) -> Ram {
            let start = self.0.as_ptr() as u64;
            let bytes = start..start + BYTES as u64;
            let pages = bytes.start / PAGE_BYTES..bytes.end / PAGE_BYTES;
            Ram { pid, pieces: vec![Piece { pages, file: file.map(|file| (file, bytes)) }] }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: exactly that mapping; no slice of it is left.
            unsafe { munmap(self.0, BYTES) }.unwrap();
        }
    }

    fn not_root() -> bool {
        let not_root = !Uid::effective().is_root();
        if not_root {
            eprintln!("skipped: the kernel tells frames to root only");
        }
        not_root
    }

    fn frames(rams: &[Ram]) -> (u64, u64) {
        let Footprint { frames, pages } = of(rams).unwrap();
        (frames, pages)
    }

    #[test]
    fn a_page_of_a_file_counts_once_however_often_it_is_mapped_and_a_written_one_for_itself() {
        if not_root() {
            return;
        }
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all_at(&[7; BYTES], 0).unwrap();
        let id = Some(("0:0".to_owned(), file.metadata().unwrap().ino()));
        let mut both = [Mapped::new(Some(&file)), Mapped::new(Some(&file))];
        let rams: Vec<Ram> = both.iter().map(|memory| memory.ram(std::process::id(), id.clone())).collect();
        assert_eq!(frames(&rams[..1]), (64, 0), "pages that nobody maps take memory, too");
        assert_eq!(nonzero_frames(&rams).unwrap(), 64, "and hold what must travel");
        let read: u64 = both.iter_mut().map(Mapped::read).sum();
        assert_eq!(read, 2 * 7 * BYTES as u64);
        let before = frames(&rams);
        both[0].bytes()[..10 * PAGE_BYTES as usize].fill(0);
        assert_eq!((before, frames(&rams)), ((64, 128), (74, 128)));
        assert_eq!(nonzero_frames(&rams).unwrap(), 64, "ten pages hold zeros");
    }

    #[test]
    fn a_process_that_has_ended_has_no_frames() {
        if not_root() {
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let ram = Ram { pid: child.id(), pieces: vec![Piece { pages: 0..PAGES as u64, file: None }] };
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of(std::slice::from_ref(&ram)).unwrap_err().to_string().contains(&child.id().to_string()));
    }

    #[test]
    fn pages_that_ksm_has_merged_count_once() {
        if not_root() {
            return;
        }
        let ksm = match Ksm::take() {
            Ok(ksm) => ksm,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let mut both = [Mapped::new(None), Mapped::new(None)];
        both.iter_mut().for_each(Mapped::fill);
        let rams: Vec<Ram> = both.iter().map(|memory| memory.ram(std::process::id(), None)).collect();
        assert_eq!(frames(&rams), (128, 128));
        for memory in &both {
            // SAFETY: advice on exactly that mapping.
            unsafe { madvise(memory.0, BYTES, MmapAdvise::MADV_MERGEABLE) }.unwrap();
        }
        let settled = ksm.settle(Duration::from_secs(60), || Ok(of(&rams)?.frames)).unwrap();
        assert_eq!((settled, of(&rams).unwrap().pages), (64, 128));
        assert_eq!(nonzero_frames(&rams).unwrap(), 64);
        both[1].bytes()[0] = 99;
        assert_eq!(frames(&rams).0, 65, "a written page is the writer's own");
    }

    #[test]
    fn ram_is_the_end_of_what_lies_writable_and_without_a_gap_and_code_is_none() {
        let maps = "\
            100000000-100100000 rw-p 00000000 00:00 0\n\
            100100000-100200000 rw-p 00000000 00:01 77 /memfd:pool (deleted)\n\
            100200000-100300000 rw-p 00000000 00:00 0\n\
            100300000-100301000 ---p 00000000 00:00 0\n\
            200000000-210000000 rwxp 00000000 00:00 0\n\
            300000000-300280000 r--p 00000000 08:01 12 /lib/libc.so.6\n";
        let file = Some((("00:01".to_owned(), 77), 0x1_0010_0000..0x1_0020_0000));
        let piece = |pages: Range<u64>, file: Option<_>| Piece { pages, file };
        let expected = vec![
            piece(0x10_0080..0x10_0100, None),
            piece(0x10_0100..0x10_0200, file),
            piece(0x10_0200..0x10_0300, None),
        ];
        assert_eq!(ram_in(maps, 0x28_0000), Some(expected));
        assert_eq!(ram_in(maps, 0x2_0000).map(|pieces| pieces.len()), Some(1));
        assert_eq!(ram_in(maps, 0x30_0001 << 4), None);
        assert!(Ram::of(std::process::id(), 1 << 50).is_err());
    }
}
