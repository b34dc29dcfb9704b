//! Which pages are not here yet, in a file that outlives the daemon.
//!
//! ```text
//!   0         8        12      16                                  16 + 32 × chunks
//!   +---------+--------+-------+-----------------------------------+
//!   | STPAGES1| chunks | begun | a set for each chunk, 32 bytes    |
//!   +---------+--------+-------+-----------------------------------+
//! ```
//!
//! The file lies in memory (tmpfs): what is written there is there for the next daemon however this one ends. A page's bit is cleared only
//! after its content is in the RAM file, so a daemon killed between the two asks for the page once more, and never takes a stale page for
//! a current one. Numbers are little-endian.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

const MAGIC: &[u8; 8] = b"STPAGES1";
const HEADER_BYTES: usize = 16;

/// The map and its file.
#[derive(Debug)]
pub struct Missing {
    file: File,
    pages: PageMap,
    left: u64,
}

impl Missing {
    /// Nothing is missing, and the file says nothing yet.
    #[must_use]
    pub fn none(file: File, layout: &Layout) -> Self {
        Self { file, pages: PageMap::empty(layout), left: 0 }
    }

    /// What an earlier daemon left; `None` where the guest was never let run before its pages were here.
    ///
    /// # Errors
    /// The file cannot be read, or is of another machine.
    pub fn recover(file: File, layout: &Layout) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        if file.metadata()?.len() == 0 {
            return Ok(None);
        }
        file.read_exact_at(&mut header, 0)?;
        if header != Self::header(layout) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it is not the map of this machine's missing pages",
            ));
        }
        let mut sets = vec![0; layout.chunks() as usize * PageSet::BYTES];
        file.read_exact_at(&mut sets, HEADER_BYTES as u64)?;
        let mut pages = PageMap::empty(layout);
        for (chunk, set) in layout.iter().zip(sets.as_chunks().0) {
            *pages.chunk_mut(chunk) = PageSet::from_bytes(set);
        }
        let left = pages.len();
        Ok(Some(Self { file, pages, left }))
    }

    /// From now on these pages are missing.
    ///
    /// # Errors
    /// No memory for the file.
    pub fn begin(&mut self, pages: PageMap, layout: &Layout) -> io::Result<()> {
        let sets: Vec<u8> = layout.iter().flat_map(|chunk| pages.chunk(chunk).to_bytes()).collect();
        self.file.write_all_at(&sets, HEADER_BYTES as u64)?;
        // Last: a file without it says nothing.
        self.file.write_all_at(&Self::header(layout), 0)?;
        self.left = pages.len();
        self.pages = pages;
        Ok(())
    }

    /// Whether the page is missing.
    #[must_use]
    pub fn contains(&self, chunk: ChunkIndex, page: u8) -> bool {
        self.pages.chunk(chunk).contains(page)
    }

    /// The missing pages of a chunk.
    #[must_use]
    pub fn chunk(&self, chunk: ChunkIndex) -> &PageSet {
        self.pages.chunk(chunk)
    }

    /// All of them.
    #[must_use]
    pub fn pages(&self) -> &PageMap {
        &self.pages
    }

    /// How many.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// These pages are here: their content is in the RAM file.
    ///
    /// # Errors
    /// The file cannot be written; then they count as missing still.
    pub fn arrived(&mut self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let set = self.pages.chunk(chunk);
        let (rest, came) = (set.without(pages), set.and(pages).len());
        self.file.write_all_at(&rest.to_bytes(), (HEADER_BYTES + chunk.index() * PageSet::BYTES) as u64)?;
        *self.pages.chunk_mut(chunk) = rest;
        self.left -= came as u64;
        Ok(())
    }

    fn header(layout: &Layout) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&layout.chunks().to_le_bytes());
        header[12..].copy_from_slice(&1u32.to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    fn layout(bytes: u64) -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    #[test]
    fn another_daemon_finds_what_the_last_one_left() {
        let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
        assert!(Missing::recover(file.try_clone().unwrap(), &layout).unwrap().is_none());
        let mut missing = Missing::none(file.try_clone().unwrap(), &layout);
        let mut pages = PageMap::empty(&layout);
        pages.insert_all(ChunkIndex(2), &PageSet::first(10));
        pages.insert_all(ChunkIndex(7), &PageSet::first(256));
        missing.begin(pages, &layout).unwrap();
        missing.arrived(ChunkIndex(2), &PageSet::first(4)).unwrap();
        missing.arrived(ChunkIndex(2), &PageSet::first(5)).unwrap();
        assert_eq!(missing.left(), 5 + 256);
        let found = Missing::recover(file, &layout).unwrap().unwrap();
        assert_eq!((found.pages(), found.left()), (missing.pages(), 261));
        assert!(!found.contains(ChunkIndex(2), 4) && found.contains(ChunkIndex(2), 5));
    }

    #[test]
    fn a_map_of_another_machine_or_cut_short_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let small = layout(8 << 20);
        Missing::none(file.try_clone().unwrap(), &small).begin(PageMap::empty(&small), &small).unwrap();
        assert!(Missing::recover(file.try_clone().unwrap(), &layout(16 << 20)).is_err());
        file.set_len(100).unwrap();
        assert!(Missing::recover(file, &small).is_err());
    }
}
