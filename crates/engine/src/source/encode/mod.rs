//! Encoding of a chunk's pages: as deltas to what the destination holds, compressed, or plain.
//!
//! Plain bodies with a quick hash go straight from the guest's RAM to the socket, without encoding. For anything more
//! expensive, a thread of the [`round`](crate::source::round) takes the chunk: it copies each page once and decides on
//! it ([`select`](crate::source::select)), and it hashes, digests, encodes and sends this copy. So a body fits its
//! digest, whatever the guest writes meanwhile, and the destination takes a body that does not for damage.

/// Compression of pages.
pub mod compress;

/// Deltas: pages as differences.
pub mod delta;

/// The choice of a compression level.
pub mod level;

/// The level in use, and the waits by which it is chosen.
mod meter;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_api::options::{Compress, Delta};
use sterna_api::{MigrateOptions, report};
use sterna_protocol::frame::packed::{Block, Codec};
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout};
use sterna_protocol::pages::PageSet;

use self::compress::{Compressor, Did, Method};
use self::delta::{DeltaCache, Sending};
pub use self::meter::Meter;
use super::content::Content;
use super::copies::Copies;
use super::select::Selected;
use super::sent::Last;

/// The most threads that encode where the options name no number: a link that keeps more of them busy is rare.
const MOST_THREADS: usize = 4;

/// The encoding of one migration's pages: what is kept over all rounds.
pub struct Encoding {
    content: Content,
    delta: Option<DeltaCache>,
    compression: Option<Meter>,
    threads: usize,
    /// The encoders that no thread uses, with what their compressors keep.
    idle: Mutex<Vec<Encoder>>,
    /// Payloads that were sent: their memory is used again.
    payloads: Mutex<Vec<Vec<u8>>>,
    cpu: Mutex<Duration>,
}

/// How copies are encoded.
#[derive(Clone, Copy)]
pub struct Packing<'a> {
    /// The cache that deltas are made against, where they are made.
    pub delta: Option<&'a DeltaCache>,
    /// How pages that travel whole are compressed.
    pub method: Method,
}

impl Encoding {
    /// The encoding that the options ask for.
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

    /// The number of threads that encode; 0 where bodies go straight from the guest's RAM.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether bodies go plain, and no thread is needed to hash them.
    #[must_use]
    pub fn is_straight(&self) -> bool {
        self.threads == 0
    }

    /// How copies are encoded now; `None` where they go plain.
    #[must_use]
    pub fn packing(&self) -> Option<Packing<'_>> {
        let (delta, meter) = (self.delta.as_ref(), self.compression.as_ref());
        let method = meter.map_or(Method::Plain, Meter::method);
        (delta.is_some() || meter.is_some()).then_some(Packing { delta, method })
    }

    /// The way to find pages whose content is what was last sent.
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

    /// Takes back the encoder of this thread, which ends, and notes the thread's processor time.
    pub(super) fn end(&self, encoder: Encoder) {
        lock(&self.idle).push(encoder);
        *lock(&self.cpu) += sterna_sys::process::thread_cpu_time();
    }

    /// Takes back a payload that was sent.
    pub fn give_back(&self, payload: Vec<u8>) {
        lock(&self.payloads).push(payload);
    }

    /// The processor time of the threads that encode.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        *lock(&self.cpu)
    }

    /// What was done so far. Call it between rounds, when no thread encodes.
    #[must_use]
    pub fn report(&self) -> report::Encoding {
        let mut did = Did::default();
        lock(&self.idle).iter().for_each(|encoder| did += encoder.did());
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

    /// Memory for a payload, with any content.
    pub(super) fn payload(&self) -> Vec<u8> {
        lock(&self.payloads).pop().unwrap_or_default()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An encoder: it copies and encodes for one thread at a time.
#[derive(Default)]
pub struct Encoder {
    /// Pages that travel whole.
    whole: Copies,
    differences: Vec<u8>,
    compressor: Compressor,
}

impl Encoder {
    /// The copies that will be encoded.
    pub fn copies(&mut self) -> &mut Copies {
        &mut self.whole
    }

    /// Encodes the copies that are kept, which are of the full pages, and adds the blocks' bytes to `payload`. Returns
    /// the pages that travel as deltas, and the blocks. The digests are put into the order of the bodies.
    ///
    /// # Errors
    /// No memory for a compressor.
    pub fn pack(
        &mut self,
        Packing { delta, method }: Packing,
        at: (u32, ChunkIndex),
        selected: &mut Selected,
        payload: &mut Vec<u8>,
    ) -> io::Result<(PageSet, Vec<Block>)> {
        let differ = delta.map_or(PageSet::EMPTY, |cache| self.take_differences(cache, at, selected));
        let mut blocks = Vec::with_capacity(CHUNK_PAGES / 16 + 1);
        self.compressor.encode(method, self.whole.bodies(), &mut blocks, payload)?;
        if !differ.is_empty() {
            let (pages, bytes) = (differ.len() as u16, self.differences.len() as u32);
            blocks.push(Block { codec: Codec::Xbzrle, pages, bytes });
            payload.extend_from_slice(&self.differences);
        }
        Ok((differ, blocks))
    }

    /// What the compressor has done so far.
    #[must_use]
    pub fn did(&self) -> Did {
        self.compressor.did()
    }

    /// Takes the pages that travel as deltas out of those that travel whole, and puts the digests into their new order.
    /// Returns these pages.
    fn take_differences(
        &mut self,
        cache: &DeltaCache,
        (round, chunk): (u32, ChunkIndex),
        selected: &mut Selected,
    ) -> PageSet {
        self.differences.clear();
        let Selected { full, digests, held, .. } = selected;
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
        *digests = of_whole;
        delta
    }
}
