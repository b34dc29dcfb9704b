//! What is kept of machines that have left: their RAM as it was then, in files that nobody writes any more.
//!
//! RAM that lies in files outlasts the VMM: the files are kept as they are. Private memory ends with the VMM, so it is
//! copied before that, each content once for all machines of a gang. The files have no names, so they end with this
//! process at the latest. They are root's alone: a VMM's user may have had the file, and could open it again.
//!
//! # Who could write them
//! * the VMM, until its process has ended, and other processes that have its RAM mapped shared. So the kernel is asked
//!   whether anybody has a file open for writing, each time before anything is made of it (`Kept::files`): where that
//!   is so, it is not used. Once it is not so it never is again, because nobody can open the file
//! * this process, which has copies open for writing until the first time that they are asked for

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::fs::Mode;
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_sys::file::{self, nobody_writes};

use super::unneeded::mark_as_pool;
use super::{Memory, for_each_body, is_zero};
use crate::name::{Key, Name, name, random_key};

/// What is kept of one machine, or of those of one gang.
#[derive(Debug)]
pub struct Kept {
    /// A directory on the file system of the machines' RAM.
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Open for reading only.
    files: Vec<File>,
    /// Copies of private memory, to which more may come.
    copies: Option<Copies>,
    /// Nothing is added any more.
    complete: bool,
}

/// Bodies of private memory, once each, at the places that they had in RAM: so they lie in few pieces.
#[derive(Debug)]
struct Copies {
    file: File,
    /// The end of the last machine's part, bytes.
    end: u64,
    key: Key,
    names: HashSet<Name>,
}

impl Kept {
    /// Nothing yet; copies will lie on this directory's file system.
    #[must_use]
    pub fn nothing(dir: PathBuf) -> Self {
        Self { dir, state: Mutex::default() }
    }

    /// Keeps a machine's RAM, whose guest does not run here any more and whose VMM has not ended. Copying takes half of
    /// one processor at most, and goes on for as long as `has_room`; what is not copied then is not kept.
    ///
    /// # Errors
    /// The RAM cannot be read, or no memory is left; what was kept so far stays.
    pub fn keep(&self, ram: &dyn Memory, has_room: &dyn Fn() -> bool) -> io::Result<()> {
        if self.lock().complete {
            return Ok(());
        }
        if let Some(files) = ram.outlasting()? {
            for file in &files {
                rustix::fs::fchown(file, Some(rustix::process::geteuid()), Some(rustix::process::getegid()))?;
                rustix::fs::fchmod(file, Mode::RUSR | Mode::WUSR)?;
            }
            self.lock().files.extend(files);
            return Ok(());
        }
        let start = self.make_part(u64::from(ram.layout().chunks()) * CHUNK_BYTES as u64)?;
        for chunk in (0..ram.layout().chunks()).map(ChunkIndex) {
            if !has_room() {
                return Ok(());
            }
            let begun = Instant::now();
            self.copy(ram, chunk, start + chunk.index() as u64 * CHUNK_BYTES as u64)?;
            std::thread::sleep(begun.elapsed());
        }
        Ok(())
    }

    /// Makes room for a machine of this size in the file of copies. Returns where it begins.
    fn make_part(&self, bytes: u64) -> io::Result<u64> {
        let mut state = self.lock();
        if state.copies.is_none() {
            let file = file::unnamed(&self.dir)?;
            // Pages of it that machines have in their place and no machine needs are given back, as those of a pool.
            mark_as_pool(&file)?;
            state.files.push(file::reader(&file)?);
            state.copies = Some(Copies { file, end: 0, key: random_key(), names: HashSet::new() });
        }
        let copies = state.copies.as_mut().expect("made above");
        let start = copies.end;
        copies.end += bytes;
        copies.file.set_len(copies.end)?;
        Ok(start)
    }

    /// Copies a chunk's pages that no machine of the gang has had so far.
    fn copy(&self, ram: &dyn Memory, chunk: ChunkIndex, start: u64) -> io::Result<()> {
        let Some(key) = self.lock().copies.as_ref().map(|copies| copies.key) else { return Ok(()) };
        let pages = ram.allocated_in(chunk)?;
        let (mut names, mut bodies) = (Vec::with_capacity(pages.len()), Vec::with_capacity(pages.len() * PAGE_BYTES));
        let load = |pages: &PageSet, bodies: &mut [u8]| ram.load(chunk, pages, bodies);
        for_each_body(&pages, load, |page, body| {
            if !is_zero(body) {
                names.push((page, name(&key, body)));
                bodies.extend_from_slice(body);
            }
        })?;
        ram.intact()?;
        // Other machines of the gang wait for their turn here: nobody waits for them.
        let mut state = self.lock();
        let Some(Copies { file, names: known, .. }) = &mut state.copies else { return Ok(()) };
        for ((page, name), body) in names.into_iter().zip(bodies.chunks_exact(PAGE_BYTES)) {
            if known.insert(name) {
                file.write_all_at(body, start + u64::from(page) * PAGE_BYTES as u64)?;
            }
        }
        Ok(())
    }

    /// The files, open for reading only, without those that somebody can write still. Nothing is added afterwards.
    ///
    /// # Errors
    /// The kernel does not tell who can write one.
    pub fn files(&self) -> io::Result<Vec<File>> {
        let mut state = self.lock();
        (state.complete, state.copies) = (true, None);
        let mut files = Vec::with_capacity(state.files.len());
        for file in &state.files {
            // A file that still has a name can be opened by others.
            if rustix::fs::fstat(file)?.st_nlink == 0 && nobody_writes(file)? {
                files.push(file::reader(file)?);
            }
        }
        Ok(files)
    }

    /// The memory that it takes, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().files.iter().map(|file| file::allocated_bytes(file).unwrap_or(0)).sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "kept_tests.rs"]
mod tests;
