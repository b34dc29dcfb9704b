//! Requests of the source and replies of the destination, on the control connection.
//!
//! Each request gets one reply, in order; `Reply::Failed` can stand for any. A message is a 4-byte length
//! (little-endian, at most `MAX_MESSAGE_BYTES`), an 8-byte checksum (XXH3-64 seeded with the session's key) and the
//! message in postcard's form.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sterna_api::Problem;
use twox_hash::XxHash3_64;

use crate::errand::{Errand, Put};
use crate::layout::{ChunkIndex, PageIndex};
use crate::pages::PageSet;
pub use crate::residue::ResiduePart;
use crate::spec::{GangSpec, Kin, SplitParity, SplitSpec, Ticket, VmSpec};

/// The most bytes a message may have.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Bytes before a message: its length and its checksum.
pub const PREFIX_BYTES: usize = 12;
/// The most suspect pages that one reply names; the next reply names the others.
pub const MAX_SUSPECTS: usize = 65_536;
/// The most chunks one request may ask digests of.
pub const MAX_DIGEST_CHUNKS: u32 = 65_536;

/// The most offered pages that one reply names.
pub const MAX_OFFERS: usize = 131_072;

/// Requests of the source, in the order in which they may come (`docs/protocol.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Asks whether the destination takes this machine. The destination checks, starts its VMM, and waits for the
    /// connections.
    Propose {
        /// The migration's number, drawn at random.
        id: u128,
        /// The machine to move.
        spec: Box<VmSpec>,
        /// How many connections will carry pages.
        streams: u16,
        /// Whether the guest may run there before all its pages are there. Then the session also has the roles `Faults`
        /// and `Urgent`, unless the destination says that it cannot do so.
        postcopy: bool,
        /// Whether both sides will be compared. After the switchover this needs digests of pages as the guest first saw
        /// them.
        verify: bool,
    },
    /// Asks for the destination's time.
    Clock,
    /// Says that all connections have sent all of this round.
    RoundEnd {
        /// The round's number.
        round: u32,
    },
    /// Says that the guest has stopped: from now on device state must wait until the last pages are in place.
    Stopped,
    /// As `RoundEnd`, with the guest stopped: where no page is suspect, the devices may be loaded from now on.
    FinalRoundEnd {
        /// The round's number.
        round: u32,
    },
    /// Asks for digests of these chunks, for the comparison of both sides.
    ChunkDigests {
        /// The first chunk.
        first: ChunkIndex,
        /// The number of chunks, at most [`MAX_DIGEST_CHUNKS`].
        count: u32,
    },
    /// Asks for digests of the pages of one chunk.
    PageDigests {
        /// The chunk that is asked about.
        chunk: ChunkIndex,
    },
    /// After `Complete`, or after `Commit` where no page follows the guest and both sides know
    /// [`Features::VERIFY_AFTER`](crate::hello::Features::VERIFY_AFTER): asks which pages of this chunk the guest
    /// discarded since its start. The guest may have seen
    /// zeros in them.
    GivenBack {
        /// The chunk that is asked about.
        chunk: ChunkIndex,
    },
    /// Says that all of the device state is sent. The reply comes when it is loaded.
    Load,
    /// A part of the residue: pages that are not there, or stale, when the guest starts. The guest has stopped, and its
    /// devices may still be being saved. The parts come in order; the last comes with `LoadPostcopy`.
    Residue(ResiduePart),
    /// The last part of the residue. From now on the devices are loaded as their state comes, and a page of the residue
    /// is shown to the guest only once it has arrived. The reply comes when the devices are loaded.
    LoadPostcopy(ResiduePart),
    /// The point of no return: gives the guest to the destination.
    Commit,
    /// Ends the migration. The guest stays with the source, and the destination forgets it.
    Abort,
    /// After the switchover, now and then: asks whether the destination is there, and how far it is.
    Paging,
    /// After the switchover: says that every page of the residue is sent. The reply comes when all of them are there.
    Complete {
        /// Whether both sides are to be compared afterwards, by digests of the pages as the guest first saw them.
        verify: bool,
    },
    /// After `Complete`, or after such a comparison: says that the source asks for nothing more.
    Release,
    /// Says that the source is back after a lost link or a restart, and goes on with the pages. It is the first request
    /// of a new session, after `Identify`.
    Resume {
        /// The migration's number.
        id: u128,
        /// How many connections will carry pages.
        streams: u16,
    },
    /// After `Resume`: asks which pages from this chunk on are still missing.
    Missing {
        /// The first chunk.
        first: ChunkIndex,
    },
    /// Asks what became of a migration, on a connection of its own.
    Verdict {
        /// The migration's number.
        id: u128,
    },
    /// Asks who the destination is. Since 1.1 this is the first request of its connection: the source goes on only with
    /// the daemon that it means.
    Identify,
    /// Before `Propose`, where both sides know [`Features::SHARING`](crate::hello::Features::SHARING): says that the
    /// machine to be proposed is a member of a gang that shares pages, so that shared frames will come.
    Join {
        /// The gang.
        gang: Box<GangSpec>,
        /// Which of them the machine is, counted from 0.
        member: u16,
    },
    /// After `Join`, where both sides know [`Features::OFFERS`](crate::hello::Features::OFFERS): asks which bodies the
    /// gang can refer to without sending them.
    Offers {
        /// The key of the gang's digests.
        key: [u8; 32],
        /// The number of the first offered page to be named, counted from 0.
        first: u32,
    },
    /// Before `Join` and `Propose`, where both sides know [`Features::RETURNS`](crate::hello::Features::RETURNS): the
    /// tickets that the machine takes along, and those that it shows.
    Tickets {
        /// Tickets of hosts that may keep what its memory was, at most [`MAX_TICKETS`](crate::spec::MAX_TICKETS).
        given: Vec<Ticket>,
        /// The numbers of the destination's own tickets that the machine, or another one of its gang, has been given.
        shown: Vec<u128>,
    },
    /// Before `Propose`, where both sides know [`Features::FAMILIES`](crate::hello::Features::FAMILIES): says what the
    /// machine to be proposed is related to.
    Kin(Kin),
    /// Before `Propose`, and `Join` where there is one; only where both sides know
    /// [`Features::CLONES`](crate::hello::Features::CLONES): says that the machine to be proposed is a clone of one
    /// that runs on.
    Clone {
        /// Its network cards are connected, because its user said to what. Else they have no link there.
        connected: bool,
    },
    /// Before `Propose`; only where both sides know [`Features::SPLIT`](crate::hello::Features::SPLIT): says that some
    /// pages of the machine to be proposed are at memory hosts, and stay there.
    Split(Box<SplitSpec>),
    /// Of a machine that is split: a part of the map of its pages that are at one of its memory hosts. The guest has
    /// stopped; what is on this map does not travel.
    Away {
        /// The memory host, as an entry of the map of missing pages names it.
        holder: u8,
        /// Its pages.
        part: ResiduePart,
    },
    /// All parts have been named. The reply comes at once: the memory hosts are asked once the last pages have come.
    AwayEnd {
        /// In which epoch the destination asks them, until the guest is its own.
        epoch: u64,
        /// How many pages were named.
        pages: u64,
    },
    /// Before `Propose`, where both sides know [`Features::SMALL_PAGES`](crate::hello::Features::SMALL_PAGES): says
    /// that the machine to be proposed is to be in small pages.
    SmallPages,
    /// After `Split`; only where both sides know [`Features::SPLIT_PARITY`](crate::hello::Features::SPLIT_PARITY): says
    /// that the memory hosts have parity.
    SplitParity(SplitParity),
    /// While pages follow a guest that is split; only where both sides know
    /// [`Features::STRAIGHT`](crate::hello::Features::STRAIGHT): says what the source has put at memory hosts since the
    /// last such request, and asks what it is to put there next.
    Straight {
        /// Of errands that are done, at most [`MAX_ERRANDS`](crate::errand::MAX_ERRANDS).
        put: Vec<Put>,
    },
}

impl Request {
    /// The request's name, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Propose { .. } => "propose",
            Self::Clock => "clock",
            Self::RoundEnd { .. } => "round-end",
            Self::Stopped => "stopped",
            Self::FinalRoundEnd { .. } => "final-round-end",
            Self::ChunkDigests { .. } => "chunk-digests",
            Self::PageDigests { .. } => "page-digests",
            Self::GivenBack { .. } => "given-back",
            Self::Load => "load",
            Self::Residue(_) => "residue",
            Self::LoadPostcopy(_) => "load-postcopy",
            Self::Paging => "paging",
            Self::Complete { .. } => "complete",
            Self::Release => "release",
            Self::Resume { .. } => "resume",
            Self::Missing { .. } => "missing",
            Self::Commit => "commit",
            Self::Abort => "abort",
            Self::Verdict { .. } => "verdict",
            Self::Identify => "identify",
            Self::Join { .. } => "join",
            Self::Offers { .. } => "offers",
            Self::Tickets { .. } => "tickets",
            Self::Kin(_) => "kin",
            Self::Clone { .. } => "clone",
            Self::Split(_) => "split",
            Self::Away { .. } => "away",
            Self::AwayEnd { .. } => "away-end",
            Self::SmallPages => "small-pages",
            Self::SplitParity(_) => "split-parity",
            Self::Straight { .. } => "straight",
        }
    }
}

/// Replies of the destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Propose`: the destination takes the machine.
    Accepted {
        /// The destination's name.
        host: String,
        /// Its QEMU's version.
        qemu: String,
        /// Its Sterna's version.
        sterna: String,
        /// The digest of the RAM layout that it made.
        layout: u64,
        /// The reason why the guest cannot run there before all its pages are there, where that was proposed.
        no_postcopy: Option<Problem>,
    },
    /// To `Clock`: the destination's time.
    Clock {
        /// Microseconds since the epoch.
        now_us: u64,
    },
    /// To `RoundEnd` and `FinalRoundEnd`: all of it arrived.
    Arrived {
        /// Pages whose bodies did not fit their digests. The source sends them again.
        suspects: Vec<PageIndex>,
    },
    /// To `Stopped`: device state waits from now on.
    Holding,
    /// To `ChunkDigests` and `PageDigests`, in order.
    Digests(Vec<u64>),
    /// To `GivenBack`: the set's bytes (`PageSet::from_bytes`).
    GivenBack([u8; PageSet::BYTES]),
    /// To `Load` and `LoadPostcopy`: the devices are loaded.
    Loaded,
    /// To `Residue` and `Away`: the next part may come. To `Kin`, `Clone`, `Split` and `AwayEnd`.
    Noted,
    /// To `Paging`: how far the destination is.
    Paging {
        /// Pages still missing.
        missing: u64,
        /// Faults that asked for pages so far.
        faults: u64,
    },
    /// To `Complete`: every page is there.
    Completed(Box<PostcopyAccount>),
    /// To `Release`: the destination has ended its side.
    Released,
    /// To `Resume`: the source may go on.
    Resumed {
        /// The digest of the machine's RAM layout.
        layout: u64,
    },
    /// To `Missing`: a part of the map of missing pages.
    Missing(ResiduePart),
    /// To `Commit`: the guest runs (or stays paused, as its user had it).
    Running {
        /// When it started, by the VMM's event, microseconds since the epoch at the destination.
        start_us: u64,
        /// Processor time the migration took at the destination, microseconds.
        cpu_us: u64,
    },
    /// To `Abort`: the destination has forgotten the migration.
    Aborted {
        /// What went wrong at the destination, if anything did.
        problem: Option<Problem>,
    },
    /// To `Verdict`: what became of the migration.
    Verdict {
        /// Whether the guest belongs to the destination. If not, it never ran there and never will.
        committed: bool,
    },
    /// To any request: the destination could not do it.
    Failed(Problem),
    /// To `Identify`: who the destination is.
    Identity {
        /// The identity of the daemon that answers, drawn at random once for each state directory. Only this daemon can
        /// tell what became of a migration that it accepted.
        identity: u128,
    },
    /// To `Join`: the destination keeps what the gang shares.
    Joined,
    /// To `Offers`: digests of the offered pages from the asked number on, at most [`MAX_OFFERS`]. None: there are no
    /// more.
    Offered(Vec<[u8; 16]>),
    /// To `Tickets`.
    Ticketed {
        /// Whether the destination has kept anything that the tickets shown stand for.
        kept: bool,
    },
    /// To `Join`, where both sides know [`Features::POOLS`](crate::hello::Features::POOLS): the destination keeps what
    /// the gang shares.
    JoinedPool {
        /// The number of the pool that it lies in, drawn at random. Another one than an earlier member got: what that
        /// one has sent is not there.
        pool: u64,
    },
    /// To `Straight`.
    Straight {
        /// Of each put, in order, the pages (`PageSet::from_bytes`) that are at the memory host from now on. The others
        /// are the source's to send, as if they had not been put there.
        taken: Vec<[u8; PageSet::BYTES]>,
        /// The epoch in which the source asks memory hosts, in the destination's name.
        epoch: u64,
        /// What it is to put there, with what is not done yet; at most
        /// [`MAX_ERRANDS`](crate::errand::MAX_ERRANDS).
        errands: Vec<Errand>,
    },
}

/// What the destination saw after the switchover.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PostcopyAccount {
    /// Processor time that the pages took there, microseconds.
    pub cpu_us: u64,
    /// From the guest's start to the last page, microseconds.
    pub took_us: u64,
    /// Pages that arrived though they had arrived before.
    pub duplicate: u64,
    /// What the guest's faults cost.
    pub faults: sterna_api::report::Faults,
    /// Whether the comparison is possible. It is not where the daemon was restarted meanwhile.
    pub verifiable: bool,
}

/// A page request: a fault at the destination asks for a page. It travels on the connection of role
/// [`Faults`](crate::hello::Role::Faults), in the form of a message (prefix and body). The page itself is the only
/// reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRequest {
    /// The page that the guest touched.
    pub page: PageIndex,
    /// The thread of the VMM that waits.
    pub thread: u32,
}

/// A message that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Longer than any message.
    #[error("a message of {0} bytes: at most {MAX_MESSAGE_BYTES} are allowed")]
    Length(usize),
    /// It differs from what was sent.
    #[error("a message arrived damaged: its checksum does not fit")]
    Checksum,
    /// It arrived whole, and this version cannot decode it.
    #[error("a message that this version does not understand: {0}")]
    Nonsense(String),
}

/// The bytes of a message, prefix included.
///
/// # Errors
/// [`MessageError::Length`] where the message would be too long.
pub fn encode<M: Serialize>(message: &M, key: u64) -> Result<Vec<u8>, MessageError> {
    let body = postcard::to_stdvec(message).map_err(|error| MessageError::Nonsense(error.to_string()))?;
    if body.len() > MAX_MESSAGE_BYTES {
        return Err(MessageError::Length(body.len()));
    }
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + body.len());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&XxHash3_64::oneshot_with_seed(key, &body).to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// The number of bytes that follow a prefix, and their checksum.
///
/// # Errors
/// [`MessageError::Length`]: before anything is allocated.
pub fn decode_prefix(prefix: [u8; PREFIX_BYTES]) -> Result<(usize, u64), MessageError> {
    let [a, b, c, d, checksum @ ..] = prefix;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(MessageError::Length(length));
    }
    Ok((length, u64::from_le_bytes(checksum)))
}

/// The message in `body`.
///
/// # Errors
/// [`MessageError::Checksum`] where the message was damaged, [`MessageError::Nonsense`] where it cannot be decoded.
pub fn decode<M: DeserializeOwned>(body: &[u8], checksum: u64, key: u64) -> Result<M, MessageError> {
    if XxHash3_64::oneshot_with_seed(key, body) != checksum {
        return Err(MessageError::Checksum);
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(MessageError::Nonsense(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(MessageError::Nonsense(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read<M: DeserializeOwned>(bytes: &[u8], key: u64) -> Result<M, MessageError> {
        let (prefix, body) = bytes.split_first_chunk().unwrap();
        let (length, checksum) = decode_prefix(*prefix)?;
        assert_eq!(length, body.len());
        decode(body, checksum, key)
    }

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        let reply = Reply::Arrived { suspects: vec![PageIndex { chunk: ChunkIndex(5), page: 6 }] };
        assert_eq!(read(&encode(&reply, 3).unwrap(), 3), Ok(reply));
    }

    /// A daemon of 1.0 reads what a daemon of 1.1 says to it: the kinds that it knows have kept their numbers.
    #[test]
    fn what_came_with_1_1_stands_behind_all_that_was_there_before() {
        let kind = |bytes: Vec<u8>| bytes[PREFIX_BYTES];
        assert_eq!(kind(encode(&Request::Verdict { id: 0 }, 0).unwrap()), 18);
        assert_eq!(kind(encode(&Request::Identify, 0).unwrap()), 19);
        let failed = Reply::Failed(Problem::new("x".into(), sterna_api::Blame::Host, "y"));
        assert_eq!(kind(encode(&failed, 0).unwrap()), 16);
        assert_eq!(kind(encode(&Reply::Identity { identity: 0 }, 0).unwrap()), 17);
    }

    /// Found by the fuzz target `message`; failed with NaN that the JSON of the report could not hold.
    #[test]
    fn a_measure_that_is_no_number_is_none_in_the_report() {
        use sterna_api::report::{Blocktime, Faults, Latency};
        let latency_us = Latency { p50: 1.5, p99: f64::INFINITY, max: f64::NAN };
        let blocktime_by_thread = vec![Blocktime { ms: f64::NEG_INFINITY, ..Blocktime::default() }];
        let faults = Faults { latency_us, blocktime_ms: f64::NAN, blocktime_by_thread, ..Faults::default() };
        let account = PostcopyAccount { faults, ..PostcopyAccount::default() };
        let Reply::Completed(account) = read(&encode(&Reply::Completed(Box::new(account)), 3).unwrap(), 3).unwrap()
        else {
            panic!("another reply")
        };
        assert_eq!(account.faults.latency_us, Latency { p50: 1.5, p99: 0.0, max: 0.0 });
        assert_eq!((account.faults.blocktime_ms, account.faults.blocktime_by_thread[0].ms), (0.0, 0.0));
    }

    #[test]
    fn a_problem_survives_the_way() {
        let problem = Problem::new("out-of-memory".into(), sterna_api::Blame::Host, "no room").hint("make room");
        assert_eq!(read(&encode(&Reply::Failed(problem.clone()), 3).unwrap(), 3), Ok(Reply::Failed(problem)));
    }

    #[test]
    fn a_length_beyond_bounds_is_refused_before_anything_is_allocated() {
        let mut prefix = [0xff; PREFIX_BYTES];
        assert_eq!(decode_prefix(prefix), Err(MessageError::Length(u32::MAX as usize)));
        prefix[..4].copy_from_slice(&(MAX_MESSAGE_BYTES as u32 + 1).to_le_bytes());
        assert!(decode_prefix(prefix).is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_refused_and_nothing_panics(body: Vec<u8>, key: u64) {
            let checksum = XxHash3_64::oneshot_with_seed(key, &body);
            prop_assert_eq!(decode::<Request>(&body, checksum ^ 1, key), Err(MessageError::Checksum));
            if let Ok(request) = decode::<Request>(&body, checksum, key) {
                // Whatever is understood is understood in the same way again.
                prop_assert_eq!(read::<Request>(&encode(&request, key).unwrap(), key), Ok(request));
            }
            let _ = decode::<Reply>(&body, checksum, key);
        }
    }
}
