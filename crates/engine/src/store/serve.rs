use std::io::Read;
use std::sync::Arc;

use sterna_protocol::frame::{ChunkFrame, Digester, Frame, FrameReader, FrameWriter};
use sterna_protocol::hello::{Features, VERSION};
use sterna_protocol::layout::{CHUNK_BYTES, ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, Refusal, StoreReply, StoreRequest};
use sterna_sys::iovec::Outgoing;

use super::Store;
use super::parity::Summed;
use super::shelf::{Got, Shelf};
use crate::error::MigrateError;
use crate::source::stream::link_broke;
use crate::transport::connection::Connection;
use crate::transport::frames::next_frame;
use crate::transport::messages::Messages;

/// Serves one connection to its end; `room_bytes` is what this host can still give to anybody. A connection has one
/// frame's memory and one guest, and each guest what was granted to it: whoever asks much takes from nobody else.
///
/// # Errors
/// The link broke, or the peer sent what may not come.
pub fn serve(
    connection: Connection,
    key: u64,
    store: &Store,
    room_bytes: impl Fn() -> u64,
) -> Result<(), MigrateError> {
    let mut serving = Serving {
        messages: Messages::new(connection, key),
        reader: FrameReader::new(key, Features::NONE),
        writer: FrameWriter::new(key),
        buffer: Vec::new(),
        digester: Digester::of(VERSION, 0),
    };
    let Some((shelf, claim, layout)) = serving.open(store, room_bytes)? else { return Ok(()) };
    serving.digester = Digester::of(VERSION, claim.key);
    while let Some(request) = serving.next()? {
        if matches!(request, StoreRequest::Close) {
            return serving.end(store, &claim);
        }
        serving.answer(&shelf, &claim, &layout, request)?;
    }
    Ok(())
}

struct Serving {
    messages: Messages,
    reader: FrameReader,
    writer: FrameWriter,
    /// The bodies of a put; it grows to a chunk with the first one.
    buffer: Vec<u8>,
    /// The guest's, once it is known.
    digester: Digester,
}

impl Serving {
    /// The next request; `None` where the owner has hung up.
    fn next(&mut self) -> Result<Option<StoreRequest>, MigrateError> {
        if !self.messages.connection_mut().sends_more() {
            return Ok(None);
        }
        self.messages.receive(None).map(Some)
    }

    fn reply(&mut self, reply: &StoreReply) -> Result<(), MigrateError> {
        self.messages.send(reply)
    }

    /// The first request: what is asked for, and for whom. `None` where it was refused.
    fn open(
        &mut self,
        store: &Store,
        room_bytes: impl Fn() -> u64,
    ) -> Result<Option<(Arc<Shelf>, Claim, Layout)>, MigrateError> {
        let Some(request) = self.next()? else { return Ok(None) };
        let opened = match request {
            StoreRequest::Open { claim, bytes, chunks } => {
                store.grant(&claim, bytes, (chunks, 1), room_bytes()).map(|shelf| (shelf, claim, chunks))
            }
            StoreRequest::OpenParity { claim, bytes, chunks, stripe } => {
                let stripe = Some(stripe).filter(|stripe| *stripe > 1);
                let stripe = stripe.ok_or_else(|| Refusal::Request("parity of single chunks".into()));
                let shelf = stripe.and_then(|stripe| store.grant(&claim, bytes, (chunks, stripe), room_bytes()));
                shelf.map(|shelf| (shelf, claim, chunks))
            }
            StoreRequest::Reopen { claim, chunks } => store.granted(&claim, chunks).map(|shelf| (shelf, claim, chunks)),
            other => Err(Refusal::Request(format!("{} before open", other.name()))),
        };
        match opened {
            Ok((shelf, claim, chunks)) => {
                let held = shelf.held_chunks();
                self.reply(&StoreReply::Opened { host: store.host.clone(), held })?;
                Ok(Some((shelf, claim, Layout::of_chunks(chunks)?)))
            }
            Err(refusal) => self.reply(&StoreReply::Refused(refusal)).map(|()| None),
        }
    }

    fn answer(
        &mut self,
        shelf: &Shelf,
        claim: &Claim,
        layout: &Layout,
        request: StoreRequest,
    ) -> Result<(), MigrateError> {
        let epoch = claim.epoch;
        let reply = match request {
            StoreRequest::Put { chunk, version, base } => {
                let (full, zero) = self.frame(chunk, layout)?;
                let kept = match shelf.stripe() {
                    Ok(1) => shelf.put(epoch, (chunk, version, base), (full, zero), &self.buffer),
                    Ok(_) => shelf.fold(epoch, (chunk, version, base), (full, zero), &self.buffer, None),
                    Err(refusal) => Err(refusal),
                };
                kept.map(|digests| StoreReply::Kept { digests })
            }
            StoreRequest::Unfold { chunk, version } => {
                let (full, zero) = self.frame(chunk, layout)?;
                let unfolded = shelf.unfold(epoch, (chunk, version), (full, zero), &self.buffer, None);
                unfolded.map(|()| StoreReply::Unfolded)
            }
            StoreRequest::Sum { chunk, pages } => match shelf.sum(epoch, chunk, &PageSet::from_bytes(&pages)) {
                Ok(summed) => return self.summed(chunk, summed),
                Err(refusal) => Err(refusal),
            },
            StoreRequest::Reset { chunk } => shelf.reset(epoch, chunk, None).map(|()| StoreReply::Unfolded),
            StoreRequest::Get { chunk, version, pages } => {
                match shelf.get(epoch, chunk, version, &PageSet::from_bytes(&pages)) {
                    Ok(got) => return self.pages(chunk, &got),
                    Err(refusal) => Err(refusal),
                }
            }
            StoreRequest::Release { chunk, version, pages } => {
                let released = shelf.release(epoch, chunk, version, &PageSet::from_bytes(&pages));
                released.map(|()| StoreReply::Released)
            }
            StoreRequest::Inventory { first, most } => shelf.inventory(epoch, first, most).map(StoreReply::Inventory),
            StoreRequest::Prepare => shelf.prepare(epoch).map(StoreReply::Prepared),
            StoreRequest::Open { .. }
            | StoreRequest::OpenParity { .. }
            | StoreRequest::Reopen { .. }
            | StoreRequest::Close => Err(Refusal::Request(format!("{} at this moment", request.name()))),
        };
        self.reply(&reply.unwrap_or_else(StoreReply::Refused))
    }

    /// The frame that follows a put: its pages with a body, which are in the buffer then, and those of zeros.
    fn frame(&mut self, chunk: ChunkIndex, layout: &Layout) -> Result<(PageSet, PageSet), MigrateError> {
        let connection = self.messages.connection_mut();
        let frame = match next_frame(connection, &mut self.reader, layout)? {
            Some((Frame::Chunk(frame), _)) if frame.chunk == chunk => frame,
            _ => return Err(MigrateError::Request("a put without the pages of its chunk")),
        };
        self.buffer.reserve_exact(CHUNK_BYTES.saturating_sub(self.buffer.capacity()));
        self.buffer.resize(frame.body_bytes(), 0);
        connection.read_exact(&mut self.buffer).map_err(MigrateError::link("receiving pages"))?;
        Ok((frame.full, frame.zero))
    }

    fn pages(&mut self, chunk: ChunkIndex, got: &Got) -> Result<(), MigrateError> {
        self.reply(&StoreReply::Pages)?;
        self.bodies(chunk, (got.full, got.zero), &got.digests, &got.bodies)
    }

    fn summed(&mut self, chunk: ChunkIndex, Summed { sum, digests, bodies }: Summed) -> Result<(), MigrateError> {
        let others = sum.others.iter().map(|(other, pages)| (*other, pages.to_bytes())).collect();
        self.reply(&StoreReply::Summed { digests, others })?;
        // Those of the pages say nothing of the parity.
        let parity: Vec<u64> = bodies.chunks_exact(PAGE_BYTES).map(|body| self.digester.page(body)).collect();
        self.bodies(chunk, (sum.full, sum.zero), &parity, &bodies)
    }

    fn bodies(
        &mut self,
        chunk: ChunkIndex,
        (full, zero): (PageSet, PageSet),
        digests: &[u64],
        bodies: &[u8],
    ) -> Result<(), MigrateError> {
        let frame = Frame::Chunk(ChunkFrame { round: 0, chunk, full, zero });
        let head = self.writer.head(&frame, digests);
        let mut vectors = [Outgoing::from(head.as_slice()), Outgoing::from(bodies)];
        self.messages.connection_mut().send(&mut vectors).map_err(link_broke)
    }

    /// The last request: everything is given back.
    fn end(&mut self, store: &Store, claim: &Claim) -> Result<(), MigrateError> {
        let closed = store.close(claim.guest, Some(claim));
        self.reply(&closed.map_or_else(StoreReply::Refused, |_| StoreReply::Closed))
    }
}
