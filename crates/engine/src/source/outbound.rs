//! Outbound: what of a chunk goes on its way, and how. Made here for all who send: rounds, the push after the
//! switchover, and the pages that faults ask for.
//!
//! Which pages go has been decided before ([`Selected`]): in rounds by [`select`](super::select), afterwards by
//! [`bodies`](super::postcopy). What is left is the same for all: bodies straight from the guest's RAM, or copies of
//! them as they are, or copies encoded; and the frame that says so. A page that goes as a reference to another page's
//! content would be one more set beside the full ones, the differences and the zeros.

use sterna_protocol::frame::packed::PackedFrame;
use sterna_protocol::frame::{ChunkFrame, Frame};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;
use sterna_sys::iovec::Outgoing;

use super::encode::{Encoder, Encoding, Packing};
use super::select::{Counts, Keep, Selected, Wanted, select};
use super::sent::SentTable;
use crate::error::MigrateError;
use crate::memory::Memory;

/// What of a chunk goes, ready to be sent.
pub struct Outbound<'a> {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The frame.
    pub frame: Frame,
    /// The digests of its bodies.
    pub digests: Vec<u64>,
    /// What follows: bodies or blocks.
    pub payload: Payload<'a>,
    /// Where the pages went that it is about, also those that do not travel.
    pub counts: Counts,
}

/// Where the bodies or blocks of a frame are.
pub enum Payload<'a> {
    /// In memory that they are sent from: the guest's own.
    InPlace(Vec<Outgoing<'a>>),
    /// In a buffer, which can be had back.
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

    /// Adds where it is to what is sent.
    pub fn add_to<'b>(&'b self, vectors: &mut Vec<Outgoing<'b>>) {
        match self {
            Self::InPlace(runs) => vectors.extend(runs),
            Self::Buffer(buffer) => vectors.push(Outgoing::from(buffer.as_slice())),
        }
    }

    /// The buffer, where it is in one, to be used again.
    #[must_use]
    pub fn into_buffer(self) -> Option<Vec<u8>> {
        match self {
            Self::InPlace(_) => None,
            Self::Buffer(buffer) => Some(buffer),
        }
    }
}

/// What a round's pages are read, compared and encoded with.
#[derive(Clone, Copy)]
pub struct Making<'a> {
    /// The round's number.
    pub round: u32,
    /// The guest's RAM.
    pub ram: &'a dyn Memory,
    /// What was sent before.
    pub sent: &'a SentTable,
    /// How pages are encoded.
    pub encoding: &'a Encoding,
}

impl<'a> Making<'a> {
    /// Decides about the wanted pages of a chunk; where they went, and what goes of them, where anything does.
    ///
    /// # Errors
    /// As [`select`], or no memory for a compressor.
    pub fn outbound(
        &self,
        encoder: &mut Encoder,
        wanted: &Wanted,
    ) -> Result<(Counts, Option<Outbound<'a>>), MigrateError> {
        let (ram, encoding, at) = (self.ram, self.encoding, (self.round, wanted.chunk));
        // Where bodies are neither encoded nor dear to hash they are sent from where they are, if this kind of memory
        // lets them.
        let straight = encoding.is_straight() && ram.in_place(wanted.chunk, &PageSet::EMPTY).is_some();
        let keep = if straight { Keep::Nothing } else { Keep::Full };
        let copies = encoder.copies();
        copies.clear();
        let selected = select(ram, self.sent, encoding.content(), wanted, (copies, keep))
            .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        if selected.full.is_empty() && selected.zero.is_empty() {
            return Ok((selected.counts, None));
        }
        let outbound = if straight {
            let runs = ram.in_place(wanted.chunk, &selected.full).expect("it said so of the chunk");
            Outbound::plain(at, selected, Payload::InPlace(runs))
        } else {
            Outbound::of_copies(at, selected, encoder, encoding.packing(), encoding.payload())?
        };
        Ok((outbound.counts, Some(outbound)))
    }
}

impl Outbound<'_> {
    /// What the pacer is asked for, bytes: all but the frame's header.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.payload.bytes() + self.digests.len() * 8) as u64
    }

    /// A chunk's pages, the bodies of the full ones being the copies that the encoder keeps. They are `packed` where it
    /// is said how and there is any, and take the place of what is in `buffer`.
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
        Ok(Self { chunk, frame, digests, payload: Payload::Buffer(buffer), counts })
    }
}

impl<'a> Outbound<'a> {
    /// Bodies as they are.
    fn plain((round, chunk): (u32, ChunkIndex), selected: Selected, payload: Payload<'a>) -> Self {
        let Selected { full, zero, digests, counts, .. } = selected;
        Self { chunk, frame: Frame::Chunk(ChunkFrame { round, chunk, full, zero }), digests, payload, counts }
    }
}
