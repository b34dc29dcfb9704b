//! A round whose pages are encoded: threads that encode, and short queues to the threads that send.
//!
//! ```text
//!   outstanding chunks ──▶ encoders: each takes the next chunk ──▶ a queue for each connection ──▶ its sender
//! ```
//!
//! Which thread encodes a chunk does not matter: it is alone with it, and the frame goes into the queue of the connection to which the chunk
//! belongs. So order is kept where it counts: a chunk goes once in a round, and always by the same connection.
//!
//! **Memory.** A queue holds two frames of at most a chunk, and a sender and an encoder have one in hand each: (encoders + 3 × connections) MiB.
//!
//! **Ends.** Senders and encoders wait for each other at the queues and for nobody else, and each side's end is the other's: where a
//! sender fails its queue is gone, the next encoder that wants to fill it stops the others; where an encoder fails it stops the others,
//! and the senders find their queues at an end. Nothing is locked while anybody waits.
//!
//! Threads live for a round, and borrow what it is about. To begin and end one takes 25 µs; one that is kept would be woken in 6. With two
//! that is 4 % of a round of a millisecond, and nothing of one that lasts. A round of fewer chunks has fewer threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TryRecvError, TrySendError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::PageSet;

use super::encode::{Encoded, Encoder, Meter};
use super::send::{Round, Sent, Stream};
use crate::error::MigrateError;

/// Frames that wait for a connection: one to go next while another is made.
const QUEUED: usize = 2;

/// The end of a queue at which a sender takes frames.
pub struct Queue<'a> {
    frames: Receiver<Encoded>,
    stopped: &'a AtomicBool,
    meter: Option<&'a Meter>,
    /// Whether a frame was taken. The wait for the first says nothing: there the encoders begin.
    begun: bool,
}

impl Queue<'_> {
    /// The next frame; `None` where no more comes.
    pub fn take(&mut self) -> Option<Encoded> {
        let (frame, waited) = match self.frames.try_recv() {
            Ok(frame) => (frame, Duration::ZERO),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {
                let began = Instant::now();
                (self.frames.recv().ok()?, began.elapsed())
            }
        };
        if let Some(meter) = self.meter
            && std::mem::replace(&mut self.begun, true)
            && !waited.is_zero()
        {
            meter.sender_waited(waited);
        }
        Some(frame)
    }

    /// Whether all of the round came through, once there is no more.
    #[must_use]
    pub fn complete(&self) -> bool {
        !self.stopped.load(Ordering::Acquire)
    }
}

/// What the encoders share.
struct Work<'a, C> {
    round: &'a Round<'a>,
    chunks: Mutex<C>,
    stopped: &'a AtomicBool,
}

/// Encodes a round and sends it over all connections; returns when all of it is handed to the kernel.
///
/// # Errors
/// What went wrong on any connection or with any chunk, or [`MigrateError::Cancelled`].
pub fn send_round(streams: &mut [Stream], round: &Round) -> Result<Sent, MigrateError> {
    let encoding = round.encoding;
    let meter = encoding.meter();
    let encoders = encoding.threads().min(round.outstanding.iter().count());
    let stopped = AtomicBool::new(false);
    let work = Work { round, chunks: Mutex::new(round.outstanding.iter()), stopped: &stopped };
    if let Some(meter) = meter {
        meter.round_begins(encoders, streams.len());
    }
    let result = std::thread::scope(|scope| {
        let (fill, drain): (Vec<_>, Vec<_>) = streams.iter().map(|_| mpsc::sync_channel(QUEUED)).unzip();
        let mut running = Vec::with_capacity(encoders);
        for _ in 0..encoders {
            let (work, fill) = (&work, fill.clone());
            let thread = std::thread::Builder::new().name("encode".into()).spawn_scoped(scope, move || {
                let mut encoder = encoding.begin();
                let result = work.encode(&mut encoder, &fill);
                encoding.end(encoder);
                result
            });
            running.push(thread.map_err(MigrateError::host("starting a thread that encodes pages"))?);
        }
        drop(fill);
        let mut shares = streams.iter_mut().zip(drain.into_iter().map(|frames| Queue {
            frames,
            stopped: &stopped,
            meter,
            begun: false,
        }));
        // The first connection's share is this thread's own.
        let own = shares.next();
        let senders: Vec<_> = shares
            .map(|(stream, queue)| {
                scope.spawn(move || {
                    let sent = stream.send_encoded(round, queue);
                    stream.thread_ends();
                    sent
                })
            })
            .collect();
        let own = own.map_or(Ok(()), |(stream, queue)| stream.send_encoded(round, queue));
        // A panic in a thread is a bug: it is passed on rather than swallowed.
        let senders: Vec<_> =
            senders.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect();
        let encoders: Vec<_> =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect();
        // Where a connection failed, that is why the encoders stopped.
        senders.into_iter().fold(own, Result::and)?;
        let mut total = Sent::default();
        for sent in encoders {
            total.add(sent?);
        }
        Ok(total)
    });
    if let Some(meter) = meter {
        meter.round_ends();
    }
    result
}

impl<'a, C: Iterator<Item = (ChunkIndex, &'a PageSet)>> Work<'_, C> {
    /// Encodes chunks until there are none left, or somebody failed.
    fn encode(&self, encoder: &mut Encoder, queues: &[SyncSender<Encoded>]) -> Result<Sent, MigrateError> {
        let mut sent = Sent::default();
        let result = self.encode_into(encoder, queues, &mut sent);
        if result.is_err() {
            self.stopped.store(true, Ordering::Release);
        }
        result.map(|()| sent)
    }

    fn encode_into(
        &self,
        encoder: &mut Encoder,
        queues: &[SyncSender<Encoded>],
        sent: &mut Sent,
    ) -> Result<(), MigrateError> {
        while let Some((chunk, pages)) = self.next() {
            let Some(wanted) = self.round.wanted(chunk, pages, sent)? else { continue };
            let (counts, encoded) = encoder.encode(self.round, &wanted)?;
            sent.counts += counts;
            let Some(encoded) = encoded else {
                self.round.monitor.sent(counts.pages(), 0);
                continue;
            };
            let Some(waited) = push(&queues[chunk.index() % queues.len()], encoded) else {
                // The connection has failed; its sender says why.
                self.stopped.store(true, Ordering::Release);
                return Ok(());
            };
            if let Some(meter) = self.round.encoding.meter() {
                meter.encoded(counts.bodies(), waited);
            }
        }
        Ok(())
    }

    fn next(&self) -> Option<(ChunkIndex, PageSet)> {
        if self.stopped.load(Ordering::Acquire) {
            return None;
        }
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner).next().map(|(chunk, pages)| (chunk, *pages))
    }
}

/// Puts a frame into a queue; how long it had to wait, or nothing where nobody takes it any more.
fn push(queue: &SyncSender<Encoded>, frame: Encoded) -> Option<Duration> {
    match queue.try_send(frame) {
        Ok(()) => Some(Duration::ZERO),
        Err(TrySendError::Disconnected(_)) => None,
        Err(TrySendError::Full(frame)) => {
            let began = Instant::now();
            queue.send(frame).ok()?;
            Some(began.elapsed())
        }
    }
}
