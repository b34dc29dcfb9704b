//! A round: the outstanding pages are sent over all connections, by threads that live as long as the round.
//!
//! ```text
//!   straight:  each sender ─▶ takes its own chunks, decides, sends from RAM
//!   encoded:   outstanding chunks ─▶ encoders: each takes the next chunk ─▶ a queue for each connection ─▶ its sender
//! ```
//!
//! Any thread may encode a chunk: it is alone with the chunk, and the frame goes into the queue of the connection that
//! the chunk takes ([`Route`](crate::source::route::Route)). So order is kept where it matters: a chunk goes once in a
//! round, and always by the same connection.
//!
//! **Memory.** A queue holds two frames of at most a chunk, and each sender and each encoder works on one: (encoders +
//! 3 × connections) MiB.
//!
//! **Ends.** Senders and encoders wait for each other at the queues and for nobody else, and each side's end ends the
//! other. Where a sender fails, its queue is gone, and the next encoder that wants to fill it stops the others. Where
//! an encoder fails, it stops the others, and the senders find their queues at an end. Nobody holds a lock while he
//! waits.
//!
//! Threads live for a round, and borrow its data. To start and end a thread takes 25 µs; to wake a kept one would take
//! 6. With two threads that is 4 % of a round of a millisecond, and nothing of a long one. A round of few chunks has
//! fewer threads that encode.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::Instant;

use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::throughput::MEASURABLE_PAGES;
use sterna_sys::socket::SendError;

use super::encode::Encoder;
use super::outbound::{Making, Outbound};
use super::queue::{Inlet, Queue, queue};
use super::route::Route;
use super::select::{Counts, Wanted};
use super::skip::Skips;
use super::stays::{Stays, Turn};
use super::stream::{Stream, link_broke};
use crate::error::MigrateError;
use crate::monitor::Monitor;
use crate::split::holding::Holding;
use crate::transport::pacer::Pacer;

/// The state that all connections share during a round.
pub struct Round<'a> {
    /// Its number, the guest's RAM, and the means to compare and encode its pages.
    pub making: Making<'a>,
    /// What of a split guest that runs does not travel.
    pub stays: Option<&'a Stays>,
    /// The pages that the round must send.
    pub outstanding: &'a PageMap,
    /// Those of them that the guest discarded.
    pub discarded: &'a PageMap,
    /// Pages that the guest held free after they were last collected.
    pub free: &'a PageMap,
    /// The bandwidth limit.
    pub pacer: &'a Pacer,
    /// Reasons to leave pages to a later round; absent where the guest has stopped.
    pub skips: Option<&'a Skips>,
    /// Pages that were written before their turn, and collected since: they are left to the next round, too.
    pub later: &'a PageMap,
    /// The moment when the round ends, all sent or not, if there is one.
    pub until: Option<Instant>,
    /// The moment when it ends, too, unless so few bodies went that they would not measure the link.
    pub cut: Option<Instant>,
    /// Bodies so far.
    pub bodies: AtomicU64,
    /// Progress and cancelling.
    pub monitor: &'a Monitor,
}

/// The result of a round, or of a thread's share of it.
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
    /// Adds the result of another share.
    fn add(&mut self, mut other: Self) {
        self.counts += other.counts;
        self.again.append(&mut other.again);
        self.unsent.append(&mut other.unsent);
    }
}

/// Sends a round over all connections, and returns when all of it is handed to the kernel.
///
/// # Errors
/// The error of any connection or chunk, or [`MigrateError::Cancelled`].
pub fn send_round(streams: &mut [Stream], round: &Round) -> Result<Sent, MigrateError> {
    let encoding = round.making.encoding;
    let encoders = encoding.threads().min(round.outstanding.iter().count());
    if let Some(meter) = encoding.meter() {
        meter.round_begins(encoders, streams.len());
    }
    let result = fan_out(streams, round, encoders);
    if let Some(meter) = encoding.meter() {
        meter.round_ends();
    }
    result
}

/// Starts one thread for each connection and as many encoders as given; this thread takes the first connection. Without
/// encoders each connection's thread makes its own frames.
fn fan_out<'a>(streams: &mut [Stream], round: &'a Round<'a>, encoders: usize) -> Result<Sent, MigrateError> {
    let (encoding, route) = (round.making.encoding, Route::over(streams.len()));
    let outstanding = || round.outstanding.iter().map(|(chunk, pages)| (chunk, *pages));
    let (stopped, chunks) = (AtomicBool::new(false), Mutex::new(outstanding()));
    std::thread::scope(|scope| {
        let (inlets, queues): (Vec<_>, Vec<_>) = streams.iter().map(|_| queue(&stopped, encoding.meter())).unzip();
        let mut encode = Vec::with_capacity(encoders);
        for _ in 0..encoders {
            let (inlets, chunks) = (inlets.clone(), Shared { chunks: &chunks, stopped: &stopped });
            let work = move || {
                let mut makes = Makes { round, chunks, encoder: encoding.begin(), sent: Sent::default() };
                let filled = makes.fill(&inlets, route);
                encoding.end(makes.encoder);
                filled.map(|()| makes.sent)
            };
            let thread = Builder::new().name("encode".into()).spawn_scoped(scope, work);
            encode.push(thread.map_err(MigrateError::host("starting a thread that encodes pages"))?);
        }
        // From here on only the encoders hold the inlets: when the last encoder ends, the queues end too.
        drop(inlets);
        let mut shares = streams.iter_mut().zip(queues).enumerate().map(|(index, (stream, queue))| {
            let chunks = outstanding().filter(move |(chunk, _)| route.of(*chunk) == index);
            let own = || Makes { round, chunks, encoder: Encoder::default(), sent: Sent::default() };
            (stream, if encoders > 0 { Supply::Queue(queue) } else { Supply::Own(Box::new(own())) })
        });
        let first = shares.next();
        let mut others = Vec::new();
        for (stream, supply) in shares {
            others.push(scope.spawn(move || {
                let sent = send(stream, round, supply);
                stream.thread_ends();
                sent
            }));
        }
        let first = first.map(|(stream, supply)| send(stream, round, supply));
        let senders: Vec<_> = first.into_iter().chain(others.into_iter().map(join)).collect();
        let encoders: Vec<_> = encode.into_iter().map(join).collect();
        let mut total = Sent::default();
        // A connection's failure stops the encoders, so the senders' errors come first.
        for sent in senders.into_iter().chain(encoders) {
            total.add(sent?);
        }
        Ok(total)
    })
}

/// The result of a thread. A panic in one is a bug, and is passed on.
fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Sends the frames of one connection's supply, until that ends.
fn send<'a>(
    stream: &mut Stream,
    round: &Round,
    mut supply: Supply<'a, impl Iterator<Item = (ChunkIndex, PageSet)>>,
) -> Result<Sent, MigrateError> {
    let Making { round: number, ram, encoding, .. } = round.making;
    while let Some(outbound) = supply.next()? {
        let turn = round.pacer.wait(outbound.bytes(), || round.monitor.check())?;
        let bytes = stream.send(&outbound).map_err(|error| match error {
            SendError::Memory => MigrateError::host("reading the guest's RAM")(ram.lost(outbound.chunk)),
            error => link_broke(error),
        })?;
        drop(turn);
        round.monitor.sent(outbound.counts.pages(), bytes);
        if let Some(buffer) = outbound.payload.into_buffer() {
            encoding.give_back(buffer);
        }
    }
    let (complete, sent) = match supply {
        Supply::Own(makes) => (true, makes.sent),
        Supply::Queue(queue) => (queue.complete(), Sent::default()),
    };
    if complete {
        stream.end_round(number)?;
    }
    Ok(sent)
}

/// The source of a sender's frames.
enum Supply<'a, C> {
    /// The sender makes them itself.
    Own(Box<Makes<'a, C>>),
    /// Encoders make them.
    Queue(Queue<'a>),
}

impl<'a, C: Iterator<Item = (ChunkIndex, PageSet)>> Supply<'a, C> {
    fn next(&mut self) -> Result<Option<Outbound<'a>>, MigrateError> {
        match self {
            Self::Own(makes) => makes.next(),
            Self::Queue(queue) => Ok(queue.take()),
        }
    }
}

/// Pages of a chunk that travel, and how many do not; nothing of the chunk goes or comes for as long as it is `held`.
struct Going<'a> {
    wanted: Wanted,
    stayed: u64,
    held: Option<Holding<'a>>,
}

/// The maker of frames, which keeps account of them.
struct Makes<'a, C> {
    round: &'a Round<'a>,
    chunks: C,
    encoder: Encoder,
    sent: Sent,
}

impl<'a, C: Iterator<Item = (ChunkIndex, PageSet)>> Makes<'a, C> {
    /// The next frame; `None` where no chunk is left.
    fn next(&mut self) -> Result<Option<Outbound<'a>>, MigrateError> {
        for (chunk, pages) in self.chunks.by_ref() {
            let Some(wanted) = self.round.wanted(chunk, pages, &mut self.sent)? else { continue };
            let Some(Going { wanted, stayed, held }) = self.round.going(wanted, &mut self.sent)? else { continue };
            let (mut counts, outbound) = self.round.making.outbound(&mut self.encoder, &wanted)?;
            drop(held);
            counts.unchanged += stayed;
            self.sent.counts += counts;
            self.round.bodies.fetch_add(counts.bodies(), Ordering::Relaxed);
            if outbound.is_some() {
                return Ok(outbound);
            }
            self.round.monitor.sent(counts.pages(), 0);
        }
        Ok(None)
    }
}

impl<'a, C: Iterator<Item = (ChunkIndex, PageSet)>> Makes<'a, Shared<'_, C>> {
    /// Fills the connections' queues until no chunk is left or a thread has failed. A thread that fails stops the
    /// others.
    fn fill<'q>(&mut self, inlets: &[Inlet<'q>], route: Route) -> Result<(), MigrateError>
    where
        'a: 'q,
    {
        let filled = self.try_fill(inlets, route);
        if !matches!(filled, Ok(true)) {
            self.chunks.stopped.store(true, Ordering::Release);
        }
        filled.map(drop)
    }

    /// Fills the queues, and returns whether nobody has failed: a failed connection's sender reports the error.
    fn try_fill<'q>(&mut self, inlets: &[Inlet<'q>], route: Route) -> Result<bool, MigrateError>
    where
        'a: 'q,
    {
        while let Some(outbound) = self.next()? {
            let (chunk, bodies) = (outbound.chunk, outbound.counts.bodies());
            let Some(waited) = inlets[route.of(chunk)].put(outbound) else { return Ok(false) };
            if let Some(meter) = self.round.making.encoding.meter() {
                meter.encoded(bodies, waited);
            }
        }
        Ok(true)
    }
}

/// Chunks that several threads take, until one of them stops all.
struct Shared<'a, C> {
    chunks: &'a Mutex<C>,
    stopped: &'a AtomicBool,
}

impl<C: Iterator> Iterator for Shared<'_, C> {
    type Item = C::Item;

    fn next(&mut self) -> Option<C::Item> {
        if self.stopped.load(Ordering::Acquire) {
            return None;
        }
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl Round<'_> {
    /// Whether the turns that have not come yet come too late.
    fn is_over(&self) -> bool {
        let has_come = |moment: Option<Instant>| moment.is_some_and(|moment| Instant::now() >= moment);
        has_come(self.until) || (has_come(self.cut) && self.bodies.load(Ordering::Relaxed) >= MEASURABLE_PAGES)
    }

    /// Those of these pages that travel, of a split guest; `None` where pages of the chunk are on their way: all are
    /// left to the next round.
    ///
    /// # Errors
    /// As [`Stays::turn`](super::stays::Stays::turn).
    fn going(&self, wanted: Wanted, sent: &mut Sent) -> Result<Option<Going<'_>>, MigrateError> {
        let Some(stays) = self.stays else { return Ok(Some(Going { wanted, stayed: 0, held: None })) };
        let Turn::Now(stay, held) = stays.turn(wanted.chunk, &wanted.pages)? else {
            let counts = Counts { again: wanted.pages.len() as u64, ..Counts::default() };
            sent.again.push((wanted.chunk, wanted.pages));
            sent.counts += counts;
            self.monitor.sent(counts.pages(), 0);
            return Ok(None);
        };
        let pages = wanted.pages.without(&stay);
        let stayed = (wanted.pages.len() - pages.len()) as u64;
        // What is not away may be a hole: it was zeros when it was to leave.
        Ok(Some(Going { wanted: Wanted { pages, discarded: pages, ..wanted }, stayed, held: Some(held) }))
    }

    /// The outstanding pages of a chunk to decide about now; `None` where the chunk's turn came too late. Notes the
    /// others in `sent`.
    ///
    /// # Errors
    /// As [`Skips::before_turn`], or [`MigrateError::Cancelled`].
    fn wanted(&self, chunk: ChunkIndex, pages: PageSet, sent: &mut Sent) -> Result<Option<Wanted>, MigrateError> {
        self.monitor.check()?;
        if self.is_over() {
            sent.unsent.push((chunk, pages));
            return Ok(None);
        }
        let again = self.skips.map_or(Ok(PageSet::EMPTY), |skips| {
            skips.before_turn(chunk).map(|again| again.or(self.later.chunk(chunk)).and(&pages))
        })?;
        // A free page that is written again comes with the next collection: for this round it is done.
        let free = self.free.chunk(chunk).and(&pages);
        let again = again.without(&free);
        if !again.is_empty() {
            sent.again.push((chunk, again));
        }
        Ok(Some(Wanted { chunk, pages, discarded: *self.discarded.chunk(chunk), free, again }))
    }
}
