//! Pages as they travel after the switchover: the source's guest stands still, so what is read is what is digested and sent.

use sterna_protocol::frame::packed::PackedFrame;
use sterna_protocol::frame::{ChunkFrame, Digester, Frame};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use crate::error::MigrateError;
use crate::memory::{Memory, is_zero};
use crate::source::copies::Copies;
use crate::source::encode::compress::{Compressor, Method};

/// Makes frames for one thread.
pub struct Bodies {
    digester: Digester,
    copies: Copies,
    payload: Vec<u8>,
    compressor: Compressor,
}

/// A frame, ready to be sent.
pub struct Made<'a> {
    /// The frame.
    pub frame: Frame,
    /// The digests of its bodies.
    pub digests: Vec<u64>,
    /// What follows.
    pub payload: &'a [u8],
    /// Pages of it that have a body.
    pub full: u64,
    /// Pages of zeros: a bit each.
    pub zero: u64,
    /// Pages that go as such because they are free.
    pub free: u64,
}

impl Bodies {
    /// That digests its pages so.
    #[must_use]
    pub fn new(digester: Digester) -> Self {
        Self { digester, copies: Copies::default(), payload: Vec::new(), compressor: Compressor::default() }
    }

    /// The frame of some pages of a chunk. Those that are `free` go as zeros, whatever they hold.
    ///
    /// They are read from the file and not through the mapping: a page that the guest gave back stays a hole, and reads as the zeros it
    /// stands for.
    ///
    /// # Errors
    /// The file cannot be read, or no memory for a compressor.
    pub fn make(
        &mut self,
        ram: &dyn Memory,
        (round, chunk): (u32, ChunkIndex),
        pages: &PageSet,
        free: &PageSet,
        method: Option<Method>,
    ) -> Result<Made<'_>, MigrateError> {
        let (pages, free) = (&pages.without(free), pages.and(free));
        self.copies.clear();
        let read = ram.load(chunk, pages, self.copies.room(pages.len()));
        read.map_err(MigrateError::host("reading the guest's RAM"))?;
        let (mut full, mut zero, mut digests) = (PageSet::EMPTY, PageSet::EMPTY, Vec::with_capacity(pages.len()));
        let mut places = Vec::with_capacity(pages.len());
        for (place, page) in pages.iter().enumerate() {
            let body = self.copies.beyond(place);
            if is_zero(body) {
                zero.insert(page);
                continue;
            }
            digests.push(self.digester.page(body));
            full.insert(page);
            places.push(place);
        }
        self.copies.keep(places);
        let counts = (full.len() as u64, zero.len() as u64);
        let zero = zero.or(&free);
        let (frame, payload) = match method {
            Some(method) if !full.is_empty() => {
                let mut blocks = Vec::with_capacity(1);
                self.payload.clear();
                self.compressor
                    .encode(method, self.copies.bodies(), &mut blocks, &mut self.payload)
                    .map_err(MigrateError::host("compressing the guest's pages"))?;
                let delta = PageSet::EMPTY;
                (Frame::Packed(PackedFrame { round, chunk, full, delta, zero, blocks }), self.payload.as_slice())
            }
            _ => (Frame::Chunk(ChunkFrame { round, chunk, full, zero }), self.copies.bodies()),
        };
        Ok(Made { frame, digests, payload, full: counts.0, zero: counts.1, free: free.len() as u64 })
    }

    /// What was compressed so far.
    #[must_use]
    pub fn did(&self) -> crate::source::encode::compress::Did {
        self.compressor.did()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use sterna_protocol::layout::PAGE_BYTES;
    use sterna_protocol::spec::BlockSpec;
    use sterna_sys::map::Access;

    use super::*;
    use crate::memory::BlockFile;
    use crate::memory::shared::SharedMemory;

    #[test]
    fn zeros_and_holes_are_bits_and_a_hole_stays_one() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        for page in [3u64, 4, 9] {
            file.write_all_at(&[page as u8; PAGE_BYTES], page * 4096).unwrap();
        }
        file.write_all_at(&[0; PAGE_BYTES], 5 * 4096).unwrap();
        let spec = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        let ram = SharedMemory::open(&[BlockFile { spec, file, address: 0 }], Access::Read).unwrap();
        let pages: PageSet = (3..11).collect();
        let before = ram.allocated().unwrap().len();
        let mut bodies = Bodies::new(Digester::UNSEEDED);
        for method in [None, Some(Method::Lz4), Some(Method::Plain)] {
            let made = bodies.make(&ram, (0, ChunkIndex(0)), &pages, &PageSet::EMPTY, method).unwrap();
            assert_eq!((made.full, made.zero, made.free), (3, 5, 0));
            let expected: Vec<u64> = [3u8, 4, 9].map(|byte| Digester::UNSEEDED.page(&[byte; PAGE_BYTES])).into();
            assert_eq!(made.digests, expected);
            if method != Some(Method::Lz4) {
                assert_eq!(made.payload, [[3u8; PAGE_BYTES], [4; PAGE_BYTES], [9; PAGE_BYTES]].concat());
            }
        }
        // Free ones, whatever they hold; those that were not asked for are no matter.
        let free: PageSet = [1, 4, 5].into_iter().collect();
        let made = bodies.make(&ram, (0, ChunkIndex(0)), &pages, &free, None).unwrap();
        assert_eq!((made.full, made.zero, made.free), (2, 4, 2));
        assert_eq!(made.payload, [[3u8; PAGE_BYTES], [9; PAGE_BYTES]].concat());
        let Frame::Chunk(frame) = made.frame else { panic!() };
        assert_eq!(frame.full.or(&frame.zero), pages);
        assert!(frame.zero.contains(4) && frame.full.and(&frame.zero).is_empty());
        assert_eq!(ram.allocated().unwrap().len(), before);
    }
}
