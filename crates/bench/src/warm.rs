//! Memory of this machine that its own host has not taken back.
//!
//! Where the machine is itself a virtual one, memory that nobody uses goes back to *its* host, and the first touch
//! costs ten times the later ones (seen: 3 to 5 s for a GiB, against 0.4 to 0.6). Whoever measures first would pay for
//! all.

use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Context, Error, Result};

const PAGE_BYTES: usize = 4096;
/// What is left free, bytes: below the first something is given back, above the second something is filled. What is
/// free goes back to the host, so it is little.
const LEAST_FREE: u64 = 1 << 30;
const MOST_FREE: u64 = LEAST_FREE + (512 << 20);
/// How much is filled or given back at once, bytes.
const STEP: u64 = 128 << 20;
/// How often it is looked what is free, while there is nothing to do.
const LOOK: Duration = Duration::from_millis(20);

const FREE: &str = "MemFree:";

/// The memory that this machine could give to programs now, bytes.
///
/// # Errors
/// Where the kernel does not say.
pub fn available_bytes() -> Result<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(name: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context(|| "reading /proc/meminfo".into())?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Error::Usage(format!("/proc/meminfo has no {name}")))
}

/// Memory that has been touched, and goes to whoever takes memory next once this is dropped: it stays warm for seconds
/// then.
#[derive(Debug)]
pub struct Touched {
    memory: NonNull<c_void>,
    length: NonZeroUsize,
    pages: File,
}

// SAFETY: nobody but the owner uses the mapping.
unsafe impl Send for Touched {}

impl Touched {
    /// Touches this much memory of this machine, twice over: in huge pages, because QEMU's plain RAM wants them, and in
    /// single ones, of which Sterna's RAM files are made. This takes a processor for a second or more for each GiB, so
    /// it is to be done before anything is measured.
    ///
    /// # Errors
    /// This machine has less memory.
    pub fn new(bytes: u64) -> Result<Self> {
        let context = || format!("touching {bytes} bytes of memory");
        let length = NonZeroUsize::new(bytes as usize).unwrap_or(NonZeroUsize::MIN);
        let pages = File::from(memfd_create(c"sterna-warm", MFdFlags::MFD_CLOEXEC).context(context)?);
        let (access, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: a mapping of its own at an address of the kernel's choice.
        let memory = unsafe { mmap_anonymous(None, length, access, flags) }.context(context)?;
        // Unmapped whatever comes.
        let touched = Self { memory, length, pages };
        // SAFETY: advice on that mapping, which holds nothing yet.
        unsafe { madvise(memory, length.get(), MmapAdvise::MADV_HUGEPAGE) }.context(context)?;
        let block = vec![1; 1 << 20];
        for offset in (0..bytes).step_by(block.len()) {
            touched.pages.write_all_at(&block, offset).context(context)?;
        }
        for offset in (0..length.get()).step_by(PAGE_BYTES) {
            // SAFETY: within the mapping, which nobody else knows.
            unsafe { memory.cast::<u8>().add(offset).write_volatile(1) };
        }
        Ok(touched)
    }
}

impl Drop for Touched {
    fn drop(&mut self) {
        // SAFETY: exactly that mapping, to which nothing points any more.
        let _ = unsafe { munmap(self.memory, self.length.get()) };
    }
}

/// Memory that stays warm until this is dropped, and that whoever needs memory gets: what is free is filled with pages
/// of a file without content, which the kernel may drop at any time, and they are dropped as memory is needed.
#[derive(Debug)]
pub struct Kept {
    ended: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Kept {
    /// Fills what is free, which takes seconds for each GiB that has gone back to the host.
    ///
    /// # Errors
    /// No file can be made, or the kernel does not say what is free.
    pub fn start() -> Result<Self> {
        let total = meminfo("MemTotal:")?;
        // Not in a file system that is memory itself.
        let file = tempfile::tempfile_in("/var/tmp").context(|| "making a file in /var/tmp".into())?;
        file.set_len(2 * total).context(|| "making a file without content".into())?;
        let mut filled = Filled { file, pages: 0..0, end: 2 * total };
        while filled.step(meminfo(FREE)?)? {}
        let (ended, end) = mpsc::channel();
        let keep = move || {
            while end.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                while meminfo(FREE).and_then(|free| filled.step(free)).unwrap_or(false) {}
            }
        };
        let thread = std::thread::Builder::new().name("warm".into()).spawn(keep);
        let thread = thread.context(|| "starting a thread".into())?;
        Ok(Self { ended: Some(ended), thread: Some(thread) })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.ended.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A file without content, some pages of which are in the kernel's cache.
struct Filled {
    file: File,
    pages: std::ops::Range<u64>,
    end: u64,
}

impl Filled {
    /// Fills or gives back a little, where too much or too little is free; whether it did.
    fn step(&mut self, free: u64) -> Result<bool> {
        if free > MOST_FREE && self.pages.end < self.end {
            let mut block = vec![0; 1 << 20];
            let to = (self.pages.end + STEP).min(self.end);
            while self.pages.end < to {
                let read = self.file.read_at(&mut block, self.pages.end).context(|| "reading holes".into())?;
                self.pages.end += (read as u64).max(1);
            }
            return Ok(true);
        }
        if free < LEAST_FREE && !self.pages.is_empty() {
            let bytes = STEP.min(self.pages.end - self.pages.start);
            let (from, length) = (self.pages.start as i64, bytes as i64);
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            posix_fadvise(&self.file, from, length, advice).context(|| "dropping pages of a file".into())?;
            self.pages.start += bytes;
            return Ok(true);
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_filled_and_given_back_as_it_is_needed() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(2 * STEP + 4096).unwrap();
        let mut filled = Filled { file, pages: 0..0, end: 2 * STEP + 4096 };
        assert!(!filled.step(LEAST_FREE - 1).unwrap(), "there is nothing to give back");
        assert!(!filled.step(MOST_FREE).unwrap(), "enough is free, and not too much");
        let up_to: Vec<_> = (0..4).map(|_| (filled.step(u64::MAX).unwrap(), filled.pages.end)).collect();
        assert_eq!(up_to, [(true, STEP), (true, 2 * STEP), (true, filled.end), (false, filled.end)]);
        let from: Vec<_> = (0..4).map(|_| (filled.step(0).unwrap(), filled.pages.start)).collect();
        assert_eq!(from, [(true, STEP), (true, 2 * STEP), (true, filled.end), (false, filled.end)]);
    }
}
