//! Memory for tests whose bodies must be copied before they are sent, and some of which looks shared: other memory that
//! says so.

use std::io;
use std::ops::Range;

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::iovec::Outgoing;

use super::shared::SharedMemory;
use super::{Mappings, Memory};

/// A memory that does everything as the one inside it, except [`in_place`](Memory::in_place). These pages of every
/// chunk look shared.
#[derive(Debug)]
pub struct NotInPlace<M = SharedMemory>(pub M, pub PageSet);

impl<M: Memory> Memory for NotInPlace<M> {
    fn in_place(&self, _: ChunkIndex, _: &PageSet) -> Option<Vec<Outgoing<'_>>> {
        None
    }

    fn shared_in(&self, _: ChunkIndex) -> io::Result<PageSet> {
        Ok(self.1)
    }

    fn layout(&self) -> &Layout {
        self.0.layout()
    }

    fn spans(&self) -> Vec<Range<u64>> {
        self.0.spans()
    }

    fn files(&self) -> io::Result<Vec<(u64, u64)>> {
        self.0.files()
    }

    fn intact(&self) -> io::Result<()> {
        self.0.intact()
    }

    fn lost(&self, chunk: ChunkIndex) -> io::Error {
        self.0.lost(chunk)
    }

    fn tracked_coarsely(&self, chunk: ChunkIndex) -> bool {
        self.0.tracked_coarsely(chunk)
    }

    fn allocated(&self) -> io::Result<PageMap> {
        self.0.allocated()
    }

    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        self.0.allocated_in(chunk)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.0.allocated_bytes()
    }

    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.0.read(chunk, pages, bodies)
    }

    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.0.load(chunk, pages, bodies)
    }

    fn load_bytes(&self, block: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.load_bytes(block, offset, bytes)
    }

    fn write(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.0.write(chunk, pages, bodies)
    }

    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.0.discard(chunk, pages)
    }

    fn mappings(&self) -> &'static dyn Mappings {
        self.0.mappings()
    }
}
