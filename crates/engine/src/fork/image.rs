//! A guest's RAM at one moment, in files that nobody writes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_sys::file::{FileId, nobody_writes, reader};
use sterna_sys::process::open_mapping;

use crate::agent::{AddressRange, Agent, AgentError, MapRun};
use crate::error::MigrateError;
use crate::memory::areas::{Area, Areas};

/// How long the VMM may take to unmap what its guest's RAM was before.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which part of which file lies where in a guest's RAM. What no file is behind reads as zeros.
#[derive(Debug, Default)]
pub struct Image {
    files: Vec<ImageFile>,
    /// It was seen that nobody can write them: nobody ever can again.
    nobody_writes: Mutex<bool>,
}

/// A file of an image, and what of it lies in RAM.
#[derive(Debug)]
struct ImageFile {
    /// The file, open for reading only.
    file: File,
    pieces: Vec<Piece>,
}

/// A part of a file that lies in a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The block's number.
    pub block: usize,
    /// Where in the block, bytes.
    pub within: Range<u64>,
    /// Where in the file it begins, bytes.
    pub offset: u64,
}

impl Image {
    /// What lies in the RAM of a process, which is at these addresses and has no page of its own. The guest does not
    /// run.
    ///
    /// # Errors
    /// The process cannot be looked into, or a file of its RAM cannot be opened.
    pub fn of(pid: u32, ram: &[Range<u64>]) -> io::Result<Self> {
        let (areas, mappings) = Areas::and_mappings(pid, ram)?;
        let mut image = Self::default();
        let mut known: HashMap<FileId, usize> = HashMap::new();
        for area in areas.iter() {
            let at = match known.get(&area.file) {
                Some(at) => *at,
                None => {
                    image.files.push(ImageFile { file: open(pid, &mappings, area.file)?, pieces: Vec::new() });
                    *known.entry(area.file).or_insert(image.files.len() - 1)
                }
            };
            image.files[at].pieces.extend(pieces(area, ram));
        }
        Ok(image)
    }

    /// What lies in the RAM of a process under a layer, and the layer, which is `runs` of a file. Nothing changes under
    /// it meanwhile.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(super) fn under(pid: u32, ram: &[Range<u64>], layer: &File, runs: &[MapRun]) -> io::Result<Self> {
        let mut image = Self::of(pid, ram)?;
        let file = sterna_sys::file::id(layer)?;
        let area =
            |run: &MapRun| Area { addresses: run.at.address..run.at.address + run.at.length, file, offset: run.offset };
        let all = runs.iter().map(area).flat_map(|area| pieces(&area, ram).collect::<Vec<_>>());
        // The last one: it is laid over the others.
        image.files.push(ImageFile { file: reader(layer)?, pieces: all.collect() });
        Ok(image)
    }

    /// The same without what lies under its last file, the layer.
    pub(super) fn without_what_is_under(mut self) -> Self {
        let layer = self.files.len().saturating_sub(1);
        self.files[..layer].iter_mut().for_each(|file| file.pieces.clear());
        self
    }

    /// An image of these files, which are open for reading only, and what of each lies in RAM.
    #[must_use]
    pub fn of_files(files: Vec<(File, Vec<Piece>)>) -> Self {
        let files = files.into_iter().map(|(file, pieces)| ImageFile { file, pieces });
        Self { files: files.collect(), nobody_writes: Mutex::default() }
    }

    /// Its files, and what of each lies in RAM.
    pub fn files(&self) -> impl Iterator<Item = (&File, &[Piece])> {
        self.files.iter().map(|file| (&file.file, file.pieces.as_slice()))
    }

    /// How many mappings it takes to have it.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.files.iter().map(|file| file.pieces.len()).sum()
    }

    /// Waits until nobody can write a file of it: what the VMM has unmapped, it has given up a moment later.
    ///
    /// # Errors
    /// Somebody else can: the clones would see what is written. Or the kernel does not tell.
    pub fn wait_until_nobody_writes(&self) -> Result<(), MigrateError> {
        // One after the other: a lease is the file's, whoever asks for it.
        let mut seen = self.nobody_writes.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen {
            return Ok(());
        }
        let deadline = Instant::now() + PATIENCE;
        for ImageFile { file, .. } in &self.files {
            while !nobody_writes(file).map_err(MigrateError::kernel("asking who writes a file of the guest's RAM"))? {
                if Instant::now() > deadline {
                    return Err(MigrateError::WrittenByOthers);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        *seen = true;
        Ok(())
    }

    /// Makes it the RAM of a guest that has never run, in private memory at these addresses: whatever was there goes.
    ///
    /// # Errors
    /// The agent does not do so: the RAM is undefined then.
    pub fn lay(&self, agent: &mut Agent, ram: &[Range<u64>]) -> Result<(), MigrateError> {
        let all: Vec<_> = ram.iter().map(|block| span(block.clone())).collect();
        agent.map_own(&all).map_err(not_laid)?;
        self.lay_rest(agent, ram)
    }

    /// Lays it over what was laid there of the same guest before. Otherwise as [`lay`](Self::lay).
    ///
    /// # Errors
    /// As [`lay`](Self::lay).
    pub fn lay_rest(&self, agent: &mut Agent, ram: &[Range<u64>]) -> Result<(), MigrateError> {
        for ImageFile { file, pieces } in &self.files {
            let runs: Vec<_> = pieces.iter().filter_map(|piece| piece.at(ram)).collect();
            agent.map(file.as_fd(), crate::agent::Sharing::Private, &runs).map_err(not_laid)?;
        }
        Ok(())
    }
}

fn not_laid(source: AgentError) -> MigrateError {
    MigrateError::Agent { doing: "laying a guest's memory", source: Box::new(source) }
}

impl Piece {
    /// Whether it is whole pages of a block, where blocks have these sizes, and of a file of this length, bytes.
    #[must_use]
    pub fn is_within(&self, blocks: &[u64], length: u64) -> bool {
        let Range { start, end } = self.within;
        let whole = [start, end, self.offset].iter().all(|at| at.is_multiple_of(PAGE_BYTES as u64));
        let in_block = start < end && blocks.get(self.block).is_some_and(|bytes| end <= *bytes);
        whole && in_block && self.offset.checked_add(end - start).is_some_and(|end| end <= length)
    }

    fn at(&self, ram: &[Range<u64>]) -> Option<MapRun> {
        let start = ram.get(self.block)?.start;
        Some(MapRun { at: span(start + self.within.start..start + self.within.end), offset: self.offset })
    }
}

fn span(range: Range<u64>) -> AddressRange {
    AddressRange { address: range.start, length: range.end - range.start }
}

/// The parts of an area that lie in blocks at these addresses.
fn pieces(area: &Area, ram: &[Range<u64>]) -> impl Iterator<Item = Piece> {
    ram.iter().enumerate().filter_map(|(block, addresses)| {
        let start = area.addresses.start.max(addresses.start);
        let end = area.addresses.end.min(addresses.end);
        let within = start.checked_sub(addresses.start)?..end.checked_sub(addresses.start)?;
        let offset = area.offset + (start - area.addresses.start);
        (start < end).then_some(Piece { block, within, offset })
    })
}

/// A file that a process has mapped there, for reading only.
fn open(pid: u32, mappings: &HashMap<FileId, Range<u64>>, id: FileId) -> io::Result<File> {
    let changed = || io::Error::other("the mappings of the guest's RAM changed while it stood still");
    let file = open_mapping(pid, mappings.get(&id).ok_or_else(changed)?)?;
    if sterna_sys::file::id(&file)? != id {
        return Err(changed());
    }
    Ok(reader(&file)?)
}
