//! The connections that carry pages, and one round over them.

use std::time::{Duration, Instant};

use sterna_protocol::frame::{ChunkFrame, Digester, Frame, FrameWriter};
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::iovec::Outgoing;
use sterna_sys::socket::{SendError, TcpInfo};

use super::copies::Copies;
use super::encode::{Encoded, Encoding};
use super::fake_dirty::FakeDirtyPages;
use super::pipeline::{self, Queue};
use super::select::{Counts, Keep, Wanted, select};
use super::sent::SentTable;
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::transport::connection::Connection;
use crate::transport::pacer::Pacer;

/// One connection that carries pages.
#[derive(Debug)]
pub struct Stream {
    connection: Connection,
    writer: FrameWriter,
    digester: Digester,
    bytes: u64,
    cpu: Duration,
}

/// What all connections share during a round.
pub struct Round<'a> {
    /// Its number.
    pub number: u32,
    /// The pages to deal with.
    pub outstanding: &'a PageMap,
    /// Those of them that the guest gave back.
    pub discarded: &'a PageMap,
    /// Pages that the guest held free after they were last collected.
    pub free: &'a PageMap,
    /// The guest's RAM.
    pub ram: &'a dyn Memory,
    /// What was sent before.
    pub sent: &'a SentTable,
    /// The bandwidth limit.
    pub pacer: &'a Pacer,
    /// Finds the pages that were written again before their turn; absent where the guest has stopped.
    pub fake_dirty: Option<&'a FakeDirtyPages>,
    /// How pages are encoded.
    pub encoding: &'a Encoding,
    /// When the round ends, sent or not, where there is such a moment.
    pub until: Option<Instant>,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
}

/// What a round, or a connection's share of it, did.
#[derive(Debug, Default)]
pub struct Sent {
    /// Where the pages went.
    pub counts: Counts,
    /// Pages left to the next round because they were written again.
    pub again: Vec<(ChunkIndex, PageSet)>,
    /// Pages whose turn did not come in time.
    pub unsent: Vec<(ChunkIndex, PageSet)>,
}

impl Sent {
    /// Adds another share.
    pub fn add(&mut self, mut other: Self) {
        self.counts += other.counts;
        self.again.append(&mut other.again);
        self.unsent.append(&mut other.unsent);
    }
}

impl Round<'_> {
    /// What of a chunk's outstanding pages is to be decided about now; `None` where its turn came too late. Notes in `sent` what is not.
    ///
    /// # Errors
    /// As [`FakeDirtyPages::again`], or [`MigrateError::Cancelled`].
    pub fn wanted(&self, chunk: ChunkIndex, pages: PageSet, sent: &mut Sent) -> Result<Option<Wanted>, MigrateError> {
        self.monitor.check()?;
        if self.until.is_some_and(|until| Instant::now() >= until) {
            sent.unsent.push((chunk, pages));
            return Ok(None);
        }
        let again = self.fake_dirty.map_or(Ok(PageSet::EMPTY), |found| found.again(chunk))?.and(&pages);
        // A free page that is written again is the next collection's: it has been dealt with, whatever it becomes.
        let free = self.free.chunk(chunk).and(&pages);
        let again = again.without(&free);
        if !again.is_empty() {
            sent.again.push((chunk, again));
        }
        Ok(Some(Wanted { chunk, pages, discarded: *self.discarded.chunk(chunk), free, again }))
    }
}

impl Stream {
    /// On a connection that has exchanged hellos.
    #[must_use]
    pub fn new(connection: Connection, key: u64, digester: Digester) -> Self {
        Self { connection, writer: FrameWriter::new(key), digester, bytes: 0, cpu: Duration::ZERO }
    }

    /// How its pages are digested.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// Bytes sent so far, and processor time the sending threads took (the caller's own excluded).
    #[must_use]
    pub fn cost(&self) -> (u64, Duration) {
        (self.bytes, self.cpu)
    }

    /// Sends this connection's share of a round: always the same chunks, so that what is sent later of a page arrives later.
    fn send(&mut self, round: &Round, own: impl Fn(ChunkIndex) -> bool) -> Result<Sent, MigrateError> {
        let (mut sent, mut copies) = (Sent::default(), Copies::default());
        for (chunk, pages) in round.outstanding.iter().filter(|(chunk, _)| own(*chunk)) {
            let Some(wanted) = round.wanted(chunk, *pages, &mut sent)? else { continue };
            let copied = round.ram.in_place(chunk, &PageSet::EMPTY).is_none();
            let keep = if copied { Keep::Full } else { Keep::Nothing };
            copies.clear();
            let selected = select(round.ram, round.sent, round.encoding.content(), &wanted, (&mut copies, keep))
                .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
            let before = self.bytes;
            if !selected.full.is_empty() || !selected.zero.is_empty() {
                let frame = ChunkFrame { round: round.number, chunk, full: selected.full, zero: selected.zero };
                round.pacer.wait((frame.body_bytes() + selected.digests.len() * 8) as u64, || round.monitor.check())?;
                let in_place = round.ram.in_place(chunk, &frame.full);
                let bodies = in_place.unwrap_or_else(|| vec![Outgoing::from(copies.bodies())]);
                let sent = self.write(&Frame::Chunk(frame), &selected.digests, bodies);
                sent.map_err(|error| match error {
                    SendError::Memory => MigrateError::host("reading the guest's RAM")(round.ram.lost(chunk)),
                    error => failed(error),
                })?;
            }
            sent.counts += selected.counts;
            round.monitor.sent(selected.counts.pages(), self.bytes - before);
        }
        self.write(&Frame::RoundEnd { round: round.number }, &[], Vec::new()).map_err(failed)?;
        Ok(sent)
    }

    /// Sends this connection's share of a round as it comes out of a queue, already encoded, until that ends.
    pub(super) fn send_encoded(&mut self, round: &Round, mut queue: Queue) -> Result<(), MigrateError> {
        while let Some(Encoded { frame, digests, payload, pages }) = queue.take() {
            round.pacer.wait((payload.len() + digests.len() * 8) as u64, || round.monitor.check())?;
            let before = self.bytes;
            self.write(&frame, &digests, vec![Outgoing::from(payload.as_slice())]).map_err(failed)?;
            round.monitor.sent(pages, self.bytes - before);
            round.encoding.give_back(payload);
        }
        if queue.complete() {
            self.write(&Frame::RoundEnd { round: round.number }, &[], Vec::new()).map_err(failed)?;
        }
        Ok(())
    }

    /// Sends one frame outside of any round; its bytes.
    ///
    /// # Errors
    /// The link broke.
    pub fn send_frame(&mut self, frame: &Frame, digests: &[u64], payload: &[u8]) -> Result<u64, MigrateError> {
        let before = self.bytes;
        self.write(frame, digests, vec![Outgoing::from(payload)]).map_err(failed)?;
        Ok(self.bytes - before)
    }

    /// Bytes that the destination's kernel has taken.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        TcpInfo::of(self.connection.socket()).map_or(0, |info| info.acknowledged_bytes)
    }

    /// Its connection, for its settings and to wait for it.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Notes the processor time of a thread of its own that ends now.
    pub(super) fn thread_ends(&mut self) {
        self.cpu += sterna_sys::process::thread_cpu_time();
    }

    /// Writes a frame: its header and digests from here, its bodies straight from the guest's RAM or from where they were encoded.
    fn write(&mut self, frame: &Frame, digests: &[u64], bodies: Vec<Outgoing>) -> Result<(), SendError> {
        let head = self.writer.head(frame, digests);
        let mut vectors = vec![Outgoing::from(head.as_slice())];
        vectors.extend(bodies);
        let bytes: usize = vectors.iter().map(Outgoing::bytes).sum();
        self.connection.send(&mut vectors)?;
        self.bytes += bytes as u64;
        Ok(())
    }
}

/// Sending from memory of this process failed: it is the link.
fn failed(error: SendError) -> MigrateError {
    MigrateError::Link { doing: "sending pages", source: std::io::Error::other(error) }
}

/// Sends a round over all connections, and returns when all of it is handed to the kernel.
///
/// # Errors
/// What went wrong on any connection, or [`MigrateError::Cancelled`].
pub fn send_round(streams: &mut [Stream], round: &Round) -> Result<Sent, MigrateError> {
    if round.encoding.threads() > 0 {
        return pipeline::send_round(streams, round);
    }
    let count = streams.len() as u32;
    let mut total = Sent::default();
    let share = |index: usize| move |chunk: ChunkIndex| chunk.0 % count == index as u32;
    if let [only] = streams {
        return only.send(round, share(0));
    }
    std::thread::scope(|scope| {
        let senders: Vec<_> = streams
            .iter_mut()
            .enumerate()
            .map(|(index, stream)| {
                scope.spawn(move || {
                    let sent = stream.send(round, share(index));
                    stream.thread_ends();
                    sent
                })
            })
            .collect();
        for sender in senders {
            // A panic in a sender is a bug: it is passed on rather than swallowed.
            total.add(sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(total)
    })
}
