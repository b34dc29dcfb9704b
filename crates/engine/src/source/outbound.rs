//! Outbound: what goes of a chunk, and how. It is made here for all senders: rounds, the push after the switchover, and
//! requested pages.
//!
//! Which pages go was decided before ([`Selected`](crate::source::select::Selected)): in rounds by
//! [`select`](crate::source::select), afterwards by [`bodies`](crate::source::postcopy). The rest is the same for all:
//! bodies straight from the guest's RAM, plain copies or encoded copies, and the frame that describes them. Pages
//! that go as references to other pages' content ([`gang`](crate::source::gang)) are named in a frame of their own.

use sterna_protocol::frame::packed::PackedFrame;
use sterna_protocol::frame::{ChunkFrame, Frame};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;
use sterna_sys::iovec::Outgoing;

use super::encode::{Encoder, Encoding, Packing};
use super::gang::Member;
use super::select::{Counts, Keep, Selected, Wanted, select};
use super::sent::SentTable;
use crate::error::MigrateError;
use crate::memory::Memory;

/// What goes of a chunk, ready to be sent.
pub struct Outbound<'a> {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The frame before the other: what the gang shares of the chunk, if anything.
    pub shared: Option<Frame>,
    /// The frame of all pages but references, if there are any.
    pub frame: Option<Frame>,
    /// The digests of its bodies.
    pub digests: Vec<u64>,
    /// The payload that follows: bodies or blocks.
    pub payload: Payload<'a>,
    /// The counts of all its pages, including those that do not travel.
    pub counts: Counts,
}

/// The bodies or blocks of a frame.
pub enum Payload<'a> {
    /// In the guest's own memory, from which they are sent.
    InPlace(Vec<Outgoing<'a>>),
    /// In a buffer, which can be used again.
    Buffer(Vec<u8>),
}

impl Payload<'_> {
    /// Its length, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::InPlace(runs) => runs.iter().map(Outgoing::bytes).sum(),
            Self::Buffer(buffer) => buffer.len(),
        }
    }

    /// Adds the payload's memory to what is sent.
    pub fn add_to<'b>(&'b self, vectors: &mut Vec<Outgoing<'b>>) {
        match self {
            Self::InPlace(runs) => vectors.extend(runs),
            Self::Buffer(buffer) => vectors.push(Outgoing::from(buffer.as_slice())),
        }
    }

    /// The buffer, if the payload is in one, for another use.
    #[must_use]
    pub fn into_buffer(self) -> Option<Vec<u8>> {
        match self {
            Self::InPlace(_) => None,
            Self::Buffer(buffer) => Some(buffer),
        }
    }
}

/// The means by which a round's pages are read, compared and encoded.
#[derive(Clone, Copy)]
pub struct Making<'a> {
    /// The round's number.
    pub round: u32,
    /// The guest's RAM.
    pub ram: &'a dyn Memory,
    /// The table of what was sent before.
    pub sent: &'a SentTable,
    /// How pages are encoded.
    pub encoding: &'a Encoding,
    /// The gang that the machine shares pages with; absent where the guest has stopped, so that nobody has to map
    /// anything in the pause.
    pub member: Option<&'a Member>,
    /// Whether a page may be taken away between now and its sending, as one of a split guest that runs.
    pub may_leave: bool,
}

impl<'a> Making<'a> {
    /// By these alone.
    #[must_use]
    pub fn of(round: u32, ram: &'a dyn Memory, sent: &'a SentTable, encoding: &'a Encoding) -> Self {
        Self { round, ram, sent, encoding, member: None, may_leave: false }
    }

    /// Decides about the wanted pages of a chunk. Returns their counts, and what goes of them, if anything does.
    ///
    /// # Errors
    /// As [`select`], or no memory is left for a compressor.
    pub fn outbound(
        &self,
        encoder: &mut Encoder,
        wanted: &Wanted,
    ) -> Result<(Counts, Option<Outbound<'a>>), MigrateError> {
        let (ram, encoding, at) = (self.ram, self.encoding, (self.round, wanted.chunk));
        // Bodies that are not encoded and have a quick hash are sent in place, if this kind of memory allows it.
        // What may go as a reference is looked at first.
        let looked_at = self.member.is_some_and(Member::has_offers);
        let copied = looked_at || self.may_leave;
        let straight = encoding.is_straight() && !copied && ram.in_place(wanted.chunk, &PageSet::EMPTY).is_some();
        let keep = if straight { Keep::Nothing } else { Keep::Full };
        let copies = encoder.copies();
        copies.clear();
        let mut selected = select(ram, self.sent, encoding.content(), wanted, copies, keep)
            .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        if selected.full.is_empty() && selected.zero.is_empty() {
            return Ok((selected.counts, None));
        }
        // Memory that is sent in place is the file that the VMM maps, of which no page is shared.
        let shared = self.member.filter(|_| !straight).map(|member| member.share(ram, at, &mut selected, copies));
        let shared = shared.transpose().map_err(MigrateError::host("looking for pages that the gang shares"))?;
        let mut outbound = if straight {
            let runs = ram.in_place(wanted.chunk, &selected.full).expect("it said so of the chunk");
            Outbound::plain(at, selected, Payload::InPlace(runs))
        } else {
            Outbound::of_copies(at, selected, encoder, encoding.packing(), encoding.payload())?
        };
        outbound.shared = shared.flatten().map(Frame::Shared);
        Ok((outbound.counts, Some(outbound)))
    }
}

impl Outbound<'_> {
    /// The bytes that count for the pacer: all except the frame's header.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.payload.bytes() + self.digests.len() * 8) as u64
    }

    /// The pages that go as references.
    #[must_use]
    pub fn references(&self) -> PageSet {
        if let Some(Frame::Shared(frame)) = &self.shared { frame.referring() } else { PageSet::EMPTY }
    }

    /// A chunk's pages, whose full bodies are the copies that the encoder keeps. The copies, if there are any, are
    /// encoded by `packed`, where it is given. They replace the content of `buffer`.
    ///
    /// # Errors
    /// No memory for a compressor.
    pub fn of_copies(
        at: (u32, ChunkIndex),
        mut selected: Selected,
        encoder: &mut Encoder,
        packed: Option<Packing>,
        mut buffer: Vec<u8>,
    ) -> Result<Self, MigrateError> {
        let Some(packing) = packed.filter(|_| !selected.full.is_empty()) else {
            encoder.copies().exchange(&mut buffer);
            return Ok(Self::plain(at, selected, Payload::Buffer(buffer)));
        };
        buffer.clear();
        let packed = encoder.pack(packing, at, &mut selected, &mut buffer);
        let (delta, blocks) = packed.map_err(MigrateError::host("compressing the guest's pages"))?;
        let Selected { full, zero, digests, mut counts, .. } = selected;
        counts.full -= delta.len() as u64;
        counts.delta += delta.len() as u64;
        let (round, chunk) = at;
        let frame = Frame::Packed(PackedFrame { round, chunk, full: full.without(&delta), delta, zero, blocks });
        Ok(Self { chunk, shared: None, frame: Some(frame), digests, payload: Payload::Buffer(buffer), counts })
    }
}

impl<'a> Outbound<'a> {
    /// An outbound with plain bodies.
    fn plain((round, chunk): (u32, ChunkIndex), selected: Selected, payload: Payload<'a>) -> Self {
        let Selected { full, zero, digests, counts, .. } = selected;
        let frame = ChunkFrame { round, chunk, full, zero };
        let frame = (!full.is_empty() || !zero.is_empty()).then_some(Frame::Chunk(frame));
        Self { chunk, shared: None, frame, digests, payload, counts }
    }
}

#[cfg(test)]
mod tests {
    use sterna_api::MigrateOptions;
    use sterna_api::options::Compress;
    use sterna_protocol::frame::Digester;
    use sterna_protocol::layout::PAGE_BYTES;
    use sterna_protocol::spec::BlockSpec;
    use sterna_sys::map::Access;

    use super::*;
    use crate::memory::BlockFile;
    use crate::memory::not_in_place::NotInPlace;
    use crate::memory::shared::SharedMemory;

    /// Pages 3, 4 and 9 hold their numbers, page 5 zeros; all are wanted, and so is a hole.
    fn ram() -> SharedMemory {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let spec = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        let ram =
            SharedMemory::open(&[BlockFile { spec, file, address: 0, process: None }], Access::ReadWrite).unwrap();
        for page in [3, 4, 9] {
            ram.write(ChunkIndex(0), &[page].into_iter().collect(), &[page; PAGE_BYTES]).unwrap();
        }
        ram.write(ChunkIndex(0), &[5].into_iter().collect(), &[0; PAGE_BYTES]).unwrap();
        ram
    }

    fn wanted() -> Wanted {
        let pages: PageSet = [3, 4, 5, 9, 77].into_iter().collect();
        let discarded = [77].into_iter().collect();
        Wanted { chunk: ChunkIndex(0), pages, discarded, free: PageSet::EMPTY, again: PageSet::EMPTY }
    }

    fn made<'a>(ram: &'a dyn Memory, sent: &'a SentTable, encoding: &'a Encoding) -> Outbound<'a> {
        let making = Making::of(7, ram, sent, encoding);
        let (counts, outbound) = making.outbound(&mut Encoder::default(), &wanted()).unwrap();
        let outbound = outbound.expect("three pages go");
        assert_eq!((counts, counts.full, counts.zero, counts.unallocated), (outbound.counts, 3, 1, 1));
        outbound
    }

    fn bytes(outbound: &Outbound) -> Vec<u8> {
        let mut vectors = Vec::new();
        outbound.payload.add_to(&mut vectors);
        let mut out = vec![0; outbound.payload.bytes()];
        let (rest, _) = sterna_sys::iovec::copy_out(&mut vectors, &mut out);
        assert!(rest.is_empty());
        out
    }

    #[test]
    fn bodies_go_from_where_they_are_only_where_the_memory_lets_them_and_else_what_was_digested_goes() {
        let (ram, copied) = (ram(), NotInPlace(ram(), PageSet::EMPTY));
        let tables = [(); 2].map(|()| SentTable::new(ram.layout(), Digester::UNSEEDED));
        let encoding = Encoding::new(&MigrateOptions::default(), ram.layout());
        assert!(encoding.is_straight());
        let straight = made(&ram, &tables[0], &encoding);
        let buffered = made(&copied, &tables[1], &encoding);
        assert_eq!((&straight.frame, &straight.digests), (&buffered.frame, &buffered.digests));
        assert_eq!(bytes(&straight), [[3; PAGE_BYTES], [4; PAGE_BYTES], [9; PAGE_BYTES]].concat());
        assert_eq!(bytes(&straight), bytes(&buffered));
        assert_eq!(straight.bytes(), 3 * (PAGE_BYTES as u64 + 8));
        // The guest writes before the send: a body that is sent in place is suspect then, and a copy never is.
        for ram in [&ram as &dyn Memory, &copied] {
            ram.write(ChunkIndex(0), &[4].into_iter().collect(), &[1; PAGE_BYTES]).unwrap();
        }
        let fits = |outbound: &Outbound| {
            let sent = bytes(outbound);
            let digests: Vec<_> = sent.chunks(PAGE_BYTES).map(|body| Digester::UNSEEDED.page(body)).collect();
            digests == outbound.digests
        };
        assert!(!fits(&straight) && fits(&buffered));
        assert!(straight.payload.into_buffer().is_none() && buffered.payload.into_buffer().is_some());
    }

    #[test]
    fn encoded_pages_are_a_packed_frame_and_zeros_alone_an_ordinary_one() {
        let ram = ram();
        let options = MigrateOptions { compress: Compress::Lz4, ..MigrateOptions::default() };
        let (encoding, sent) =
            (Encoding::new(&options, ram.layout()), SentTable::new(ram.layout(), Digester::UNSEEDED));
        let outbound = made(&ram, &sent, &encoding);
        let Some(Frame::Packed(frame)) = &outbound.frame else { panic!("{:?}", outbound.frame) };
        assert_eq!((frame.full.len(), frame.delta.len(), outbound.digests.len()), (3, 0, 3));
        assert!(outbound.payload.bytes() < PAGE_BYTES);
        ram.discard(ChunkIndex(0), &wanted().pages).unwrap();
        let making = Making::of(8, &ram, &sent, &encoding);
        let discarded = wanted().pages;
        let (counts, outbound) = making.outbound(&mut Encoder::default(), &Wanted { discarded, ..wanted() }).unwrap();
        let outbound = outbound.expect("the destination holds something else");
        let Some(Frame::Chunk(frame)) = &outbound.frame else { panic!("{:?}", outbound.frame) };
        assert_eq!((counts.unallocated, frame.zero.len(), outbound.payload.bytes()), (5, 3, 0));
    }
}
