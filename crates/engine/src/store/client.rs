use std::io::Read;
use std::time::Duration;

use sterna_protocol::frame::{ChunkFrame, Digester, Frame, FrameReader, FrameWriter};
use sterna_protocol::hello::{Features, Role, VERSION};
use sterna_protocol::layout::{ChunkIndex, Layout, PAGE_BYTES};
use sterna_protocol::pages::PageSet;
use sterna_protocol::store::{Claim, InventoryEntry, Refusal, StoreReply, StoreRequest, Summary};
use sterna_sys::iovec::Outgoing;

use crate::error::MigrateError;
use crate::source::stream::link_broke;
use crate::transport::credentials::Credentials;
use crate::transport::frames::next_frame;
use crate::transport::messages::Messages;
use crate::transport::{SessionKey, call};

/// How long an answer may take.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a memory host did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It refused. The connection goes on.
    #[error("the memory host refused: {0}")]
    Refused(#[from] Refusal),
    /// The connection is of no use any more.
    #[error(transparent)]
    Connection(#[from] MigrateError),
}

/// Pages that came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// Pages with a body, which was compared with its digest.
    pub full: PageSet,
    /// Pages of zeros.
    pub zero: PageSet,
    /// The bodies, in order.
    pub bodies: Vec<u8>,
    /// Their digests, in order.
    pub digests: Vec<u64>,
}

impl Pages {
    /// Whether these are among them.
    #[must_use]
    pub fn has(&self, pages: &PageSet) -> bool {
        pages.without(&self.full.or(&self.zero)).is_empty()
    }
}

/// The parity of pages of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summed {
    /// The parity itself; pages of zeros are in it as such.
    pub parity: Pages,
    /// The digests of the chunk's own pages with a body, in order.
    pub digests: Vec<u64>,
    /// The other chunks that are in it, and which of these pages.
    pub others: Vec<(ChunkIndex, PageSet)>,
}

/// The owner's end of a connection to a memory host: one request at a time. For requests side by side there are more
/// connections, all of the same claim.
#[derive(Debug)]
pub struct MemoryHost {
    messages: Messages,
    reader: FrameReader,
    writer: FrameWriter,
    digester: Digester,
    layout: Layout,
    /// The host's name.
    name: String,
    /// The chunks of which it had anything when it was opened.
    held: u32,
    /// How long it may say nothing when it is asked about one chunk.
    patience: Duration,
}

impl MemoryHost {
    /// Calls a memory host and asks for `bytes` of it, for a guest of so many chunks. `session` names the connection;
    /// `key` seeds its checksums.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(
        peer: &str,
        credentials: Option<&Credentials>,
        session: (u128, u64),
        claim: Claim,
        bytes: u64,
        chunks: u32,
    ) -> Result<Self, StoreError> {
        Self::call(peer, credentials, session, (claim, chunks), |_| StoreRequest::Open { claim, bytes, chunks })
    }

    /// Calls a memory host that has granted so much before. One that has not grants nothing; one of an older version
    /// does. Otherwise as [`open`](Self::open).
    ///
    /// # Errors
    /// [`StoreError`]; [`Refusal::Closed`] where nothing is granted.
    pub fn reopen(
        peer: &str,
        credentials: Option<&Credentials>,
        session: (u128, u64),
        claim: Claim,
        bytes: u64,
        chunks: u32,
    ) -> Result<Self, StoreError> {
        Self::call(peer, credentials, session, (claim, chunks), |features| match features.contains(Features::REOPENS) {
            true => StoreRequest::Reopen { claim, chunks },
            false => StoreRequest::Open { claim, bytes, chunks },
        })
    }

    /// Calls a memory host for the parity of a guest's chunks, `stripe` of them together. Otherwise as
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open_parity(
        peer: &str,
        credentials: Option<&Credentials>,
        session: (u128, u64),
        claim: Claim,
        bytes: u64,
        (chunks, stripe): (u32, u32),
    ) -> Result<Self, StoreError> {
        let needed = Features::STORES.and(Features::PARITY);
        let request = |_| StoreRequest::OpenParity { claim, bytes, chunks, stripe };
        Self::call_needing(needed, peer, credentials, session, (claim, chunks), request)
    }

    fn call(
        peer: &str,
        credentials: Option<&Credentials>,
        session: (u128, u64),
        of: (Claim, u32),
        request: impl FnOnce(Features) -> StoreRequest,
    ) -> Result<Self, StoreError> {
        Self::call_needing(Features::STORES, peer, credentials, session, of, request)
    }

    fn call_needing(
        needed: Features,
        peer: &str,
        credentials: Option<&Credentials>,
        (session, key): (u128, u64),
        (claim, chunks): (Claim, u32),
        request: impl FnOnce(Features) -> StoreRequest,
    ) -> Result<Self, StoreError> {
        let session = SessionKey { session, key, needed };
        let connection = call(peer, session, Role::Store, credentials)?;
        let request = request(connection.features());
        let mut host = Self {
            messages: Messages::new(connection, key),
            reader: FrameReader::new(key, Features::NONE),
            writer: FrameWriter::new(key),
            digester: Digester::of(VERSION, claim.key),
            layout: Layout::of_chunks(chunks).map_err(MigrateError::from)?,
            name: String::new(),
            held: 0,
            patience: ANSWER_TIMEOUT,
        };
        match host.ask(&request)? {
            StoreReply::Opened { host: name, held } => {
                (host.name, host.held) = (name, held);
                Ok(host)
            }
            _ => Err(other().into()),
        }
    }

    /// From now on it is given up for dead once it takes nothing, or says nothing, for so long, when it is asked about
    /// one chunk.
    pub fn wait_for(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The host's name, and the number of chunks of which it had anything when it was opened.
    #[must_use]
    pub fn opened(&self) -> (&str, u32) {
        (&self.name, self.held)
    }

    /// The digest of a page, as the memory host makes it.
    #[must_use]
    pub fn digester(&self) -> Digester {
        self.digester
    }

    /// Has it keep pages of a chunk: those of `full` with the `bodies`, in order, which a guest may be writing, and
    /// `zero` without. With `base` the others of that version stay. Returns the digests of the bodies as they are kept,
    /// in order.
    ///
    /// # Errors
    /// [`StoreError`].
    ///
    /// # Panics
    /// Where `bodies` are not those of `full`.
    pub fn put(
        &mut self,
        chunk: ChunkIndex,
        (version, base): (u64, Option<u64>),
        (full, zero): (PageSet, PageSet),
        bodies: &[Outgoing<'_>],
    ) -> Result<Vec<u64>, StoreError> {
        self.send_pages(&StoreRequest::Put { chunk, version, base }, (chunk, full, zero), bodies)?;
        match self.answer(self.patience)? {
            StoreReply::Kept { digests } if digests.len() == full.len() => Ok(digests),
            _ => Err(other().into()),
        }
    }

    /// Has it fold pages of a chunk out of its parity, which must be of this version: those of `full` with the
    /// `bodies`, in order, as they were put.
    ///
    /// # Errors
    /// [`StoreError`]; [`Refusal::Absent`] where it was given others.
    ///
    /// # Panics
    /// Where `bodies` are not those of `full`.
    pub fn unfold(
        &mut self,
        (chunk, version): (ChunkIndex, u64),
        (full, zero): (PageSet, PageSet),
        bodies: &[u8],
    ) -> Result<(), StoreError> {
        let bodies: Vec<_> = bodies.chunks_exact(PAGE_BYTES).map(Outgoing::from).collect();
        self.send_pages(&StoreRequest::Unfold { chunk, version }, (chunk, full, zero), &bodies)?;
        match self.answer(self.patience)? {
            StoreReply::Unfolded => Ok(()),
            _ => Err(other().into()),
        }
    }

    /// Has it forget the parity of a chunk's stripe.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn reset(&mut self, chunk: ChunkIndex) -> Result<(), StoreError> {
        match self.ask_within(self.patience, &StoreRequest::Reset { chunk })? {
            StoreReply::Unfolded => Ok(()),
            _ => Err(other().into()),
        }
    }

    /// Its parity of pages of a chunk.
    ///
    /// # Errors
    /// [`StoreError`]; also where what came is not what its digest says.
    pub fn sum(&mut self, patience: Duration, chunk: ChunkIndex, pages: &PageSet) -> Result<Summed, StoreError> {
        let reply = self.ask_within(patience, &StoreRequest::Sum { chunk, pages: pages.to_bytes() })?;
        let StoreReply::Summed { digests, others } = reply else { return Err(other().into()) };
        let parity = self.pages(chunk, pages)?;
        if digests.len() != parity.full.len() {
            return Err(other().into());
        }
        let others = others.into_iter().map(|(chunk, pages)| (chunk, PageSet::from_bytes(&pages))).collect();
        Ok(Summed { parity, digests, others })
    }

    fn send_pages(
        &mut self,
        request: &StoreRequest,
        (chunk, full, zero): (ChunkIndex, PageSet, PageSet),
        bodies: &[Outgoing<'_>],
    ) -> Result<(), StoreError> {
        let frame = ChunkFrame { round: 0, chunk, full, zero };
        assert_eq!(bodies.iter().map(Outgoing::bytes).sum::<usize>(), frame.body_bytes(), "the pages' bodies");
        let limited = self.messages.connection_mut().set_write_timeout(Some(self.patience));
        limited.map_err(MigrateError::link("limiting how long pages may take"))?;
        self.messages.send(request)?;
        // Digests of what a guest may change on its way say nothing: those that count come back.
        let head = self.writer.head(&Frame::Chunk(frame), &vec![0; full.len()]);
        let mut vectors: Vec<_> =
            std::iter::once(Outgoing::from(head.as_slice())).chain(bodies.iter().copied()).collect();
        Ok(self.messages.connection_mut().send(&mut vectors).map_err(link_broke)?)
    }

    /// Pages of a chunk, which must be of this version.
    ///
    /// # Errors
    /// [`StoreError`]; also where what came is not what its digest says.
    pub fn get(&mut self, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<Pages, StoreError> {
        self.get_within(self.patience, chunk, version, pages)
    }

    /// The same, where it is given up for dead once it says nothing for so long.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn get_within(
        &mut self,
        patience: Duration,
        chunk: ChunkIndex,
        version: u64,
        pages: &PageSet,
    ) -> Result<Pages, StoreError> {
        self.ask_for(chunk, version, pages)?;
        self.got(patience, chunk, pages)
    }

    /// Asks for pages of a chunk, and does not wait: [`got`](Self::got) is the answer, and comes before any other.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn ask_for(&mut self, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<(), StoreError> {
        Ok(self.messages.send(&StoreRequest::Get { chunk, version, pages: pages.to_bytes() })?)
    }

    /// The pages that were [asked for](Self::ask_for).
    ///
    /// # Errors
    /// [`StoreError`]; also where what came is not what its digest says.
    pub fn got(&mut self, patience: Duration, chunk: ChunkIndex, pages: &PageSet) -> Result<Pages, StoreError> {
        let StoreReply::Pages = self.answer(patience)? else { return Err(other().into()) };
        self.pages(chunk, pages)
    }

    /// The frame with these pages of a chunk.
    fn pages(&mut self, chunk: ChunkIndex, pages: &PageSet) -> Result<Pages, StoreError> {
        let connection = self.messages.connection_mut();
        let (frame, digests) = match next_frame(connection, &mut self.reader, &self.layout)? {
            Some((Frame::Chunk(frame), digests)) if frame.chunk == chunk && frame.full.or(&frame.zero) == *pages => {
                (frame, digests)
            }
            _ => return Err(MigrateError::Reply("other pages than those that were asked for").into()),
        };
        let mut bodies = vec![0; frame.body_bytes()];
        connection.read_exact(&mut bodies).map_err(MigrateError::link("receiving pages"))?;
        if !bodies.chunks_exact(PAGE_BYTES).map(|body| self.digester.page(body)).eq(digests.iter().copied()) {
            return Err(MigrateError::Reply("pages that are not what their digests say").into());
        }
        Ok(Pages { full: frame.full, zero: frame.zero, bodies, digests })
    }

    /// These pages of a chunk are not needed any more, where it is of this version or an older one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn release(&mut self, chunk: ChunkIndex, version: u64, pages: &PageSet) -> Result<(), StoreError> {
        match self.ask_within(self.patience, &StoreRequest::Release { chunk, version, pages: pages.to_bytes() })? {
            StoreReply::Released => Ok(()),
            _ => Err(other().into()),
        }
    }

    /// All that it has, chunk by chunk.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn inventory(&mut self) -> Result<Vec<InventoryEntry>, StoreError> {
        let mut all: Vec<InventoryEntry> = Vec::new();
        loop {
            let first = all.last().map_or(0, |last| last.chunk.0 + 1);
            let request = StoreRequest::Inventory { first: ChunkIndex(first), most: u32::MAX };
            let StoreReply::Inventory(more) = self.ask(&request)? else { return Err(other().into()) };
            if more.is_empty() {
                return Ok(all);
            }
            // In order, so that they are no more than the guest's chunks.
            let chunks = || std::iter::once(first).chain(more.iter().map(|entry| entry.chunk.0 + 1));
            if !chunks().zip(&more).all(|(least, entry)| (least..self.layout.chunks()).contains(&entry.chunk.0)) {
                return Err(MigrateError::Reply("an inventory that is in no order").into());
            }
            all.extend(more);
        }
    }

    /// What it has of a chunk: the version and the pages; `None` where it has nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn held(&mut self, chunk: ChunkIndex) -> Result<Option<(u64, PageSet)>, StoreError> {
        let request = StoreRequest::Inventory { first: chunk, most: 1 };
        let StoreReply::Inventory(entries) = self.ask_within(self.patience, &request)? else {
            return Err(other().into());
        };
        let entry = entries.first().filter(|entry| entry.chunk == chunk);
        Ok(entry.map(|entry| (entry.version, PageSet::from_bytes(&entry.pages))))
    }

    /// Asks whether the guest may rely on it: all that it has was looked through, and is summed up.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn prepare(&mut self) -> Result<Summary, StoreError> {
        match self.ask(&StoreRequest::Prepare)? {
            StoreReply::Prepared(summary) => Ok(summary),
            _ => Err(other().into()),
        }
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn close(mut self) -> Result<(), StoreError> {
        match self.ask(&StoreRequest::Close)? {
            StoreReply::Closed => Ok(()),
            _ => Err(other().into()),
        }
    }

    fn ask(&mut self, request: &StoreRequest) -> Result<StoreReply, StoreError> {
        self.ask_within(ANSWER_TIMEOUT, request)
    }

    fn ask_within(&mut self, patience: Duration, request: &StoreRequest) -> Result<StoreReply, StoreError> {
        self.messages.send(request)?;
        self.answer(patience)
    }

    fn answer(&mut self, patience: Duration) -> Result<StoreReply, StoreError> {
        match self.messages.receive(Some(patience))? {
            StoreReply::Refused(refusal) => Err(refusal.into()),
            reply => Ok(reply),
        }
    }
}

fn other() -> MigrateError {
    MigrateError::Reply("another reply than was asked for")
}
