//! How the pages of a chunk travel: as differences to what the destination holds, compressed, or as they are.
//!
//! Bodies that go as they are and are hashed quickly go straight from the guest's RAM to the socket and never come here
//! ([`send`](crate::source::send)). Where anything dearer is asked for, a thread of the [`pipeline`](crate::source::pipeline) takes the chunk: it copies
//! each page once and decides on it ([`select`](crate::source::select)), and what it copied is what it hashes, digests, encodes and sends. So whatever the guest writes
//! meanwhile, a body fits its digest, and the destination takes one that does not for damage.

/// Pages compressed.
pub mod compress;

/// Pages as differences.
pub mod delta;

/// How hard to compress.
pub mod level;

/// The level in use, and what it is chosen by.
mod meter;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::options::{Compress, Delta};
use sterna_api::{MigrateOptions, report};
use sterna_protocol::frame::packed::{Block, Codec, PackedFrame};
use sterna_protocol::frame::{ChunkFrame, Frame};
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout};
use sterna_protocol::pages::PageSet;

use self::compress::{Compressor, Did};
use self::delta::{DeltaCache, Sending};
pub use self::meter::Meter;
use super::content::Content;
use super::copies::Copies;
use super::select::{Counts, Keep, Selected, Wanted, select};
use super::send::Round;
use super::sent::Last;
use crate::error::MigrateError;

/// The most threads that encode where no number is asked for: more rarely find a link that keeps them busy.
const MOST_THREADS: usize = 4;

/// How one migration's pages are encoded: what is kept of them over all rounds.
pub struct Encoding {
    content: Content,
    delta: Option<DeltaCache>,
    compression: Option<Meter>,
    threads: usize,
    /// Those no thread is using, with what their compressors keep.
    idle: Mutex<Vec<Encoder>>,
    /// Payloads that were sent: their memory is used again.
    payloads: Mutex<Vec<Vec<u8>>>,
    cpu: Mutex<Duration>,
}

/// What of a chunk travels, ready to be sent.
#[derive(Debug)]
pub struct Encoded {
    /// The frame.
    pub frame: Frame,
    /// The digests of its bodies.
    pub digests: Vec<u64>,
    /// What follows: bodies or blocks.
    pub payload: Vec<u8>,
    /// Pages dealt with, also those that do not travel.
    pub pages: u64,
}

impl Encoding {
    /// As the options ask.
    #[must_use]
    pub fn new(options: &MigrateOptions, layout: &Layout) -> Self {
        let options = options.resolved();
        let content = Content::new(options.content_hash, layout);
        let delta = match options.delta {
            Delta::Off => None,
            Delta::Xbzrle => Some(DeltaCache::new(options.delta_cache_bytes.unwrap_or_default())),
        };
        let compression =
            (options.compress != Compress::Off).then(|| Meter::new(options.compress, options.compress_level));
        let straight = delta.is_none() && compression.is_none() && !matches!(content, Content::Hashes(_));
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = match options.compress_threads {
            _ if straight => 0,
            Some(threads) => (threads as usize).max(1),
            None => cpus.min(MOST_THREADS),
        };
        let (idle, payloads) = (Mutex::default(), Mutex::default());
        Self { content, delta, compression, threads, idle, payloads, cpu: Mutex::default() }
    }

    /// Threads that encode; none where bodies go straight from the guest's RAM.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How pages whose content is what was last sent are found.
    #[must_use]
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The choice of a level, where pages are compressed.
    #[must_use]
    pub fn meter(&self) -> Option<&Meter> {
        self.compression.as_ref()
    }

    /// An encoder for a thread that begins.
    pub(super) fn begin(&self) -> Encoder {
        lock(&self.idle).pop().unwrap_or_default()
    }

    /// Takes the encoder of a thread that ends, this one, and notes what processor time it took.
    pub(super) fn end(&self, encoder: Encoder) {
        lock(&self.idle).push(encoder);
        *lock(&self.cpu) += sterna_sys::process::thread_cpu_time();
    }

    /// Takes a payload that was sent.
    pub fn give_back(&self, payload: Vec<u8>) {
        lock(&self.payloads).push(payload);
    }

    /// Processor time of the threads that encode.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        *lock(&self.cpu)
    }

    /// What was done; between rounds, when no thread is at it.
    #[must_use]
    pub fn report(&self) -> report::Encoding {
        let mut did = Did::default();
        lock(&self.idle).iter().for_each(|encoder| did += encoder.compressor.did());
        report::Encoding {
            hash_bytes_per_page: self.content.bytes_per_page(),
            threads: self.threads as u32,
            cpu_s: self.cpu().as_secs_f64(),
            delta: self.delta.as_ref().map(DeltaCache::used).unwrap_or_default(),
            compression: self.compression.as_ref().map_or_else(report::Compression::default, |meter| {
                report::Compression {
                    pages: did.pages,
                    bytes: did.bytes,
                    plain_pages: did.plain_pages,
                    level: meter.method().level(),
                }
            }),
        }
    }

    /// Memory for a payload, empty.
    fn payload(&self) -> Vec<u8> {
        let mut payload = lock(&self.payloads).pop().unwrap_or_default();
        payload.clear();
        payload
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Encodes for one thread at a time.
#[derive(Default)]
pub struct Encoder {
    /// Pages that travel whole.
    whole: Copies,
    differences: Vec<u8>,
    compressor: Compressor,
}

impl Encoder {
    /// Decides about the wanted pages of a chunk and encodes those that travel; where the pages went, and the frame where there is one.
    ///
    /// # Errors
    /// As [`select`], or no memory for a compressor.
    pub fn encode(&mut self, round: &Round, wanted: &Wanted) -> Result<(Counts, Option<Encoded>), MigrateError> {
        let encoding = round.encoding;
        self.whole.clear();
        let selected = select(round.ram, round.sent, &encoding.content, wanted, (&mut self.whole, Keep::Full))
            .map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
        let Selected { full, zero, digests, held, mut counts } = selected;
        let (number, chunk, pages) = (round.number, wanted.chunk, counts.pages());
        if full.is_empty() && zero.is_empty() {
            return Ok((counts, None));
        }
        let mut payload = encoding.payload();
        if encoding.delta.is_none() && encoding.compression.is_none() {
            // Only the hashing was wanted elsewhere.
            self.whole.exchange(&mut payload);
            let frame = Frame::Chunk(ChunkFrame { round: number, chunk, full, zero });
            return Ok((counts, Some(Encoded { frame, digests, payload, pages })));
        }
        let (delta, digests) = match &encoding.delta {
            Some(cache) => self.differences(cache, (number, chunk), &full, &digests, &held),
            None => (PageSet::EMPTY, digests),
        };
        counts.full -= delta.len() as u64;
        counts.delta += delta.len() as u64;
        let mut blocks = Vec::with_capacity(CHUNK_PAGES / 16 + 1);
        let method = encoding.compression.as_ref().map_or(compress::Method::Plain, Meter::method);
        self.compressor
            .encode(method, self.whole.bodies(), &mut blocks, &mut payload)
            .map_err(MigrateError::host("compressing the guest's pages"))?;
        if !delta.is_empty() {
            blocks.push(Block {
                codec: Codec::Xbzrle,
                pages: delta.len() as u16,
                bytes: self.differences.len() as u32,
            });
            payload.extend_from_slice(&self.differences);
        }
        let frame =
            Frame::Packed(PackedFrame { round: number, chunk, full: full.without(&delta), delta, zero, blocks });
        Ok((counts, Some(Encoded { frame, digests, payload, pages })))
    }

    /// Takes the pages that travel as differences out of those that travel whole; which they are, and all digests in their new order.
    fn differences(
        &mut self,
        cache: &DeltaCache,
        (round, chunk): (u32, ChunkIndex),
        full: &PageSet,
        digests: &[u64],
        held: &[Last],
    ) -> (PageSet, Vec<u64>) {
        self.differences.clear();
        let (mut delta, differences) = (PageSet::EMPTY, &mut self.differences);
        let (mut of_whole, mut of_delta) = (Vec::with_capacity(digests.len()), Vec::new());
        let mut pages = full.iter();
        self.whole.take_out(|at, body| {
            let page = pages.next().expect("a body was copied for each full page");
            let held = match held[at] {
                Last::Content(digest) => Some(digest),
                Last::Never | Last::Zero | Last::Unknown => None,
            };
            let sending = Sending { round, chunk, page, held, body, digest: super::sent::stored(digests[at]) };
            let differs = cache.encode(&sending, differences);
            if differs {
                delta.insert(page);
            }
            if differs { &mut of_delta } else { &mut of_whole }.push(digests[at]);
            differs
        });
        of_whole.extend(of_delta);
        (delta, of_whole)
    }
}
