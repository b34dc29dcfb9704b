//! Bodies of pages after the switchover: the source's guest stands still, so the bytes read are those digested and
//! sent.

use std::sync::Arc;

use sterna_protocol::frame::{Digester, Frame};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use crate::error::MigrateError;
use crate::memory::{Memory, is_zero};
use crate::source::encode::compress::Method;
use crate::source::encode::{Encoder, Packing};
use crate::source::gang::Member;
use crate::source::outbound::Outbound;
use crate::source::select::Selected;
use crate::source::sent::Last;

/// The maker of bodies for one thread: it chooses and encodes.
pub struct Bodies {
    digester: Digester,
    member: Option<Arc<Member>>,
    encoder: Encoder,
    buffer: Vec<u8>,
}

impl Bodies {
    /// A maker that uses this digester. What the gang of `member` shares goes once.
    #[must_use]
    pub fn new(digester: Digester, member: Option<Arc<Member>>) -> Self {
        Self { digester, member, encoder: Encoder::default(), buffer: Vec::new() }
    }

    /// Makes what goes of some pages of a chunk. All of them go, because the destination may hold anything there. Pages
    /// in `free` go as zeros, whatever they hold.
    ///
    /// The pages are loaded, not read: a page that the guest discarded stays without content, and loads as zeros.
    ///
    /// # Errors
    /// The RAM cannot be read, or no memory is left for a compressor.
    pub fn make(
        &mut self,
        ram: &dyn Memory,
        at: (u32, ChunkIndex),
        pages: &PageSet,
        free: &PageSet,
        method: Option<Method>,
    ) -> Result<Outbound<'static>, MigrateError> {
        let (pages, free) = (pages.without(free), pages.and(free));
        let loaded = self.load(ram, at.1, &pages);
        let mut selected = loaded.map_err(MigrateError::host("reading the guest's RAM"))?;
        selected.counts.free = free.len() as u64;
        selected.zero = selected.zero.or(&free);
        let copies = self.encoder.copies();
        let shared = self.member.as_ref().map(|member| member.share(ram, at, &mut selected, copies)).transpose();
        let shared = shared.map_err(MigrateError::host("looking for pages that the gang shares"))?.flatten();
        let packing = method.map(|method| Packing { delta: None, method });
        let buffer = std::mem::take(&mut self.buffer);
        let made = Outbound::of_copies(at, selected, &mut self.encoder, packing, buffer)?;
        Ok(Outbound { shared: shared.map(Frame::Shared), ..made })
    }

    /// Takes back what was sent, to use its memory again.
    pub fn give_back(&mut self, sent: Outbound) {
        self.buffer = sent.payload.into_buffer().unwrap_or_default();
    }

    /// Finds the full pages and the zeros among these, and keeps copies of the full ones.
    fn load(&mut self, ram: &dyn Memory, chunk: ChunkIndex, pages: &PageSet) -> std::io::Result<Selected> {
        let (mut selected, copies) = (Selected::default(), self.encoder.copies());
        copies.clear();
        ram.load(chunk, pages, copies.room(pages.len()))?;
        let mut full = Vec::with_capacity(pages.len());
        for (place, page) in pages.iter().enumerate() {
            let body = copies.beyond(place);
            if is_zero(body) {
                selected.zero.insert(page);
                continue;
            }
            selected.digests.push(self.digester.page(body));
            selected.full.insert(page);
            selected.held.push(Last::Never);
            full.push(place);
        }
        copies.keep(full);
        selected.counts.full = selected.full.len() as u64;
        selected.counts.zero = selected.zero.len() as u64;
        Ok(selected)
    }

    /// What the compressor has done so far.
    #[must_use]
    pub fn did(&self) -> crate::source::encode::compress::Did {
        self.encoder.did()
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
        let ram = SharedMemory::open(&[BlockFile { spec, file, address: 0, process: None }], Access::Read).unwrap();
        let pages: PageSet = (3..11).collect();
        let before = ram.allocated().unwrap().len();
        let mut bodies = Bodies::new(Digester::UNSEEDED, None);
        for method in [None, Some(Method::Lz4), Some(Method::Plain)] {
            let made = bodies.make(&ram, (0, ChunkIndex(0)), &pages, &PageSet::EMPTY, method).unwrap();
            assert_eq!((made.counts.full, made.counts.zero, made.counts.free), (3, 5, 0));
            let expected: Vec<u64> = [3u8, 4, 9].map(|byte| Digester::UNSEEDED.page(&[byte; PAGE_BYTES])).into();
            assert_eq!(made.digests, expected);
            if method != Some(Method::Lz4) {
                assert_eq!(
                    made.payload.into_buffer().unwrap(),
                    [[3u8; PAGE_BYTES], [4; PAGE_BYTES], [9; PAGE_BYTES]].concat()
                );
            }
        }
        // Some of them are free, whatever they hold; free pages that were not asked for do not matter.
        let free: PageSet = [1, 4, 5].into_iter().collect();
        let made = bodies.make(&ram, (0, ChunkIndex(0)), &pages, &free, None).unwrap();
        assert_eq!((made.counts.full, made.counts.zero, made.counts.free), (2, 4, 2));
        assert_eq!(made.payload.into_buffer().unwrap(), [[3u8; PAGE_BYTES], [9; PAGE_BYTES]].concat());
        let Some(Frame::Chunk(frame)) = made.frame else { panic!() };
        assert_eq!(frame.full.or(&frame.zero), pages);
        assert!(frame.zero.contains(4) && frame.full.and(&frame.zero).is_empty());
        assert_eq!(ram.allocated().unwrap().len(), before);
    }
}
