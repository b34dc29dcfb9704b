//! The memory of another process, by its addresses.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::error::{Error, Result};
use crate::map::Access;

/// The memory of a process (`/proc/PID/mem`, `proc_pid_mem(5)`). It stays with the memory that the process had: after
/// `execve` or exit it never shows another's.
///
/// An access never waits for a userfaultfd: where a page that is registered as missing is not there, it ends. (The
/// calls `process_vm_readv` and `process_vm_writev` are faster, and wait: for ever, where the waiting thread is the one
/// that would bring the page.)
#[derive(Debug)]
pub struct ProcessMemory {
    file: File,
}

impl ProcessMemory {
    /// The memory of a process. As [`Pagemap::open`](crate::pagemap::Pagemap::open), never of a child that was just
    /// spawned.
    ///
    /// # Errors
    /// No such process, or this one may not trace it.
    pub fn open(pid: u32, access: Access) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let opened = File::options().read(true).write(access == Access::ReadWrite).open(&path);
        opened.map(|file| Self { file }).map_err(|error| Error::new(format!("open {path}"), error))
    }

    /// Copies bytes from `address` on. Returns how many, fewer than asked for only where the page behind them cannot be
    /// read: nothing is mapped there, or it is missing and registered with a userfaultfd. Reading a page that was never
    /// written maps the page of zeros there.
    ///
    /// # Errors
    /// `ESRCH`: the process's memory is gone.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<usize> {
        let length = bytes.len();
        let read = |done| self.file.read_at(&mut bytes[done..], address + done as u64);
        as_far_as_it_goes("read the memory of a process", length, read)
    }

    /// Copies bytes to `address` and behind, as the process itself would write them: a private page becomes its own.
    /// Returns how many, fewer than given only where [`read`](Self::read) would return fewer.
    ///
    /// # Errors
    /// `ESRCH`: the process's memory is gone.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<usize> {
        let write = |done| self.file.write_at(&bytes[done..], address + done as u64);
        as_far_as_it_goes("write the memory of a process", bytes.len(), write)
    }
}

/// Copies `length` bytes, or those before the first that the kernel does not reach. `copy` gets the number of bytes
/// that are done, and returns how many more it did.
fn as_far_as_it_goes(
    doing: &'static str,
    length: usize,
    mut copy: impl FnMut(usize) -> io::Result<usize>,
) -> Result<usize> {
    let mut done = 0;
    while done < length {
        match copy(done) {
            // The memory that was opened is gone.
            Ok(0) => return Err(Error::new(doing, rustix::io::Errno::SRCH)),
            Ok(copied) => done += copied,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(libc::EIO) => break,
            Err(error) => return Err(Error::new(doing, error)),
        }
    }
    Ok(done)
}
