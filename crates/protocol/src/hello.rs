//! The first bytes of every connection: who is there, which version, which features.
//!
//! The caller sends a `Hello` and the listener answers with one. The first 12 bytes, magic and version, never change,
//! so that two daemons of any age can tell each other why they do not understand each other. Majors must be equal. The
//! lower minor and the features that both have are used. A feature that one side *needs* and the other lacks ends the
//! connection.
//!
//! ```text
//!   0           8       10      12     13  14      16             24             32        48        56       64
//!   +-----------+-------+-------+------+---+-------+--------------+--------------+---------+---------+--------+
//!   | STERNA\r\n| major | minor | role | 0 | index | features     | needed       | session | key     | 0      |
//!   +-----------+-------+-------+------+---+-------+--------------+--------------+---------+---------+--------+
//! ```

use zerocopy::little_endian::{U16, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;
/// The version this code speaks.
pub const VERSION: Version = Version { major: 1, minor: 1 };
/// The first version whose daemons say who they are ([`Request::Identify`](crate::message::Request::Identify)).
pub const KNOWS_IDENTITIES: Version = Version { major: 1, minor: 1 };
const MAGIC: [u8; 8] = *b"STERNA\r\n";

/// What a daemon can do beyond the version's base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u64);

impl Features {
    /// Nothing beyond the base.
    pub const NONE: Self = Self(0);
    /// It reads packed frames: bodies in blocks of their own encodings.
    pub const PACKED: Self = Self(1 << 0);
    /// It reads packed frames with differences to what was sent before.
    pub const XBZRLE: Self = Self(1 << 1);
    /// It reads packed frames with LZ4.
    pub const LZ4: Self = Self(1 << 2);
    /// It reads packed frames with Zstandard.
    pub const ZSTD: Self = Self(1 << 3);
    /// It lets a guest run before all its pages are there, or serves the pages of one that does.
    pub const POSTCOPY: Self = Self(1 << 4);
    /// It keeps what the machines of a gang share: it has a pool for their pages, and reads shared frames.
    pub const SHARING: Self = Self(1 << 5);
    /// It knows offers: pages that machines at the destination have already.
    pub const OFFERS: Self = Self(1 << 6);
    /// It compares both sides' pages once the guest runs, also where no page follows the guest: it notes each page
    /// before the guest first sees it.
    pub const VERIFY_AFTER: Self = Self(1 << 7);
    /// It knows tickets: a machine that comes back can refer to what was kept of it.
    pub const RETURNS: Self = Self(1 << 8);
    /// It knows what machines are related to by forks.
    pub const FAMILIES: Self = Self(1 << 9);
    /// It knows clones: machines that come while their source runs on.
    pub const CLONES: Self = Self(1 << 10);
    /// It can keep pages of guests that run elsewhere.
    pub const STORES: Self = Self(1 << 11);
    /// It takes machines of whose pages some are, and stay, at memory hosts.
    pub const SPLIT: Self = Self(1 << 12);
    /// It says in which pool it keeps what a gang shares.
    pub const POOLS: Self = Self(1 << 13);
    /// Of the memory that it lends it can be asked for what was granted before, and for nothing else.
    pub const REOPENS: Self = Self(1 << 14);
    /// It can keep the parity of pages that other memory hosts have.
    pub const PARITY: Self = Self(1 << 15);
    /// It keeps a guest in small pages whose user wants that.
    pub const SMALL_PAGES: Self = Self(1 << 16);
    /// It takes split machines whose memory hosts have parity.
    pub const SPLIT_PARITY: Self = Self(1 << 17);
    /// Pages that follow a split guest may go past its next host, from its source to memory hosts.
    pub const STRAIGHT: Self = Self(1 << 18);
    /// TLS. No daemon announces it: a listener that accepts only encrypted calls *needs* it of a plain caller, to say
    /// why it refuses.
    pub const TLS: Self = Self(1 << 32);
    /// All features that this code knows.
    pub const KNOWN: Self = Self(0b111_1111_1111_1111_1111);
    const NAMES: [(Self, &'static str); 20] = [
        (Self::PACKED, "packed frames"),
        (Self::XBZRLE, "differences (delta xbzrle)"),
        (Self::LZ4, "compress lz4"),
        (Self::ZSTD, "compress zstd"),
        (Self::POSTCOPY, "post-copy"),
        (Self::SHARING, "shared pages (preserve-sharing)"),
        (Self::OFFERS, "offers of pages that are there already"),
        (Self::VERIFY_AFTER, "comparison outside the pause (verify)"),
        (Self::RETURNS, "machines that come back (keep_departed)"),
        (Self::FAMILIES, "families of forked machines"),
        (Self::CLONES, "clones from other hosts (fork --to)"),
        (Self::STORES, "memory for guests of other hosts (lend_memory)"),
        (Self::SPLIT, "machines whose memory is at memory hosts (split)"),
        (Self::POOLS, "the number of a gang's pool"),
        (Self::REOPENS, "memory that is lent when it is asked for, and not with every call (split)"),
        (Self::PARITY, "parity of memory at other hosts (redundancy parity)"),
        (Self::SMALL_PAGES, "guests that stay in small pages (huge-pages off)"),
        (Self::SPLIT_PARITY, "machines whose memory hosts have parity (split)"),
        (Self::STRAIGHT, "pages that follow a guest straight to memory hosts (split)"),
        (Self::TLS, "TLS ([tls] in sternad.toml)"),
    ];

    /// The features of either set.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The features of this set that are not in the other.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The features of both sets.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether this set has all features of the other.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

impl std::fmt::Display for Features {
    /// Names features by the options that ask for them, and by their numbers where there is no option.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known =
            Self::NAMES.iter().filter(|(feature, _)| self.0 & feature.0 != 0).map(|(_, name)| (*name).to_string());
        let strange = Self::NAMES.iter().fold(self.0, |left, (feature, _)| left & !feature.0);
        let strange = (strange != 0).then(|| format!("{strange:#x}"));
        f.write_str(&known.chain(strange).collect::<Vec<_>>().join(", "))
    }
}

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Different majors do not understand each other.
    pub major: u16,
    /// A higher minor understands all lower ones.
    pub minor: u16,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Requests and replies; it founds the session.
    Control,
    /// Page frames; the number counts the session's connections from 0.
    Pages(u16),
    /// The devices' state.
    Devices,
    /// [`PageRequest`](crate::message::PageRequest)s: the one connection on which the destination speaks and the source
    /// listens.
    Faults,
    /// Page frames that were asked for: they overtake all others.
    Urgent,
    /// Requests to a memory host, and its replies: a session of its own.
    Store,
}

/// The first bytes of a connection, and of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The sender's version.
    pub version: Version,
    /// What the connection is for.
    pub role: Role,
    /// What the sender can do.
    pub features: Features,
    /// What the sender cannot do without.
    pub needed: Features,
    /// The session: drawn by the source.
    pub session: u128,
    /// The seed of the session's checksums: drawn by the source.
    pub key: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    major: U16,
    minor: U16,
    role: u8,
    reserved: u8,
    index: U16,
    features: U64,
    needed: U64,
    session: U128,
    key: U64,
    reserved2: U64,
}

const _: () = assert!(size_of::<Raw>() == HELLO_BYTES);

/// Why a connection was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The peer is not Sterna.
    #[error("the peer does not speak Sterna's protocol")]
    Stranger,
    /// The peer speaks another major version.
    #[error("the peer speaks version {theirs} of the protocol, this daemon {ours}")]
    Version {
        /// What this code speaks.
        ours: Version,
        /// What the peer speaks.
        theirs: Version,
    },
    /// One side needs features that the other lacks.
    #[error(
        "the peer {} what {}: {features}",
        if *.theirs { "needs" } else { "lacks" },
        if *.theirs { "this daemon lacks" } else { "this migration needs" }
    )]
    Features {
        /// The features.
        features: Features,
        /// Whether the peer needs them. If not, the peer lacks them.
        theirs: bool,
    },
    /// A role that this code does not know.
    #[error("connection of unknown role {0}")]
    Role(u8),
}

impl Hello {
    /// Encodes the hello.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let (role, index) = match self.role {
            Role::Control => (1, 0),
            Role::Pages(index) => (2, index),
            Role::Devices => (3, 0),
            Role::Faults => (4, 0),
            Role::Urgent => (5, 0),
            Role::Store => (6, 0),
        };
        let raw = Raw {
            magic: MAGIC,
            major: self.version.major.into(),
            minor: self.version.minor.into(),
            role,
            reserved: 0,
            index: index.into(),
            features: self.features.0.into(),
            needed: self.needed.0.into(),
            session: self.session.into(),
            key: self.key.into(),
            reserved2: U64::ZERO,
        };
        zerocopy::transmute!(raw)
    }

    /// Decodes the peer's hello.
    ///
    /// # Errors
    /// [`HelloError::Stranger`], [`HelloError::Version`], [`HelloError::Role`].
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(HelloError::Stranger);
        }
        let version = Version { major: raw.major.get(), minor: raw.minor.get() };
        if version.major != VERSION.major {
            return Err(HelloError::Version { ours: VERSION, theirs: version });
        }
        let role = match raw.role {
            1 => Role::Control,
            2 => Role::Pages(raw.index.get()),
            3 => Role::Devices,
            4 => Role::Faults,
            5 => Role::Urgent,
            6 => Role::Store,
            role => return Err(HelloError::Role(role)),
        };
        Ok(Self {
            version,
            role,
            features: Features(raw.features.get()),
            needed: Features(raw.needed.get()),
            session: raw.session.get(),
            key: raw.key.get(),
        })
    }

    /// What both sides use: the lower minor and the common features.
    ///
    /// # Errors
    /// [`HelloError::Features`] where one side needs what the other lacks.
    pub fn agree(&self, peer: &Self) -> Result<(Version, Features), HelloError> {
        let lacking = self.needed.0 & !peer.features.0;
        if lacking != 0 {
            return Err(HelloError::Features { features: Features(lacking), theirs: false });
        }
        let wanted = peer.needed.0 & !self.features.0;
        if wanted != 0 {
            return Err(HelloError::Features { features: Features(wanted), theirs: true });
        }
        Ok((self.version.min(peer.version), self.features.common(peer.features)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(minor: u16, features: u64, needed: u64) -> Hello {
        Hello {
            version: Version { major: VERSION.major, minor },
            role: Role::Pages(3),
            features: Features(features),
            needed: Features(needed),
            session: 7,
            key: 8,
        }
    }

    #[test]
    fn a_hello_arrives_as_it_was_sent() {
        assert_eq!(Hello::decode(&hello(4, 3, 1).encode()), Ok(hello(4, 3, 1)));
    }

    #[test]
    fn an_older_and_a_newer_daemon_use_what_both_know() {
        let (old, new) = (hello(0, 0b001, 0), hello(5, 0b111, 0));
        let expected = Ok((Version { major: VERSION.major, minor: 0 }, Features(0b001)));
        assert_eq!(old.agree(&new), expected);
        assert_eq!(new.agree(&old), expected);
    }

    #[test]
    fn only_daemons_that_both_know_identities_speak_of_them() {
        let (old, new) = (hello(0, 0, 0), hello(VERSION.minor, 0, 0));
        assert!(old.agree(&new).unwrap().0 < KNOWS_IDENTITIES && new.agree(&old).unwrap().0 < KNOWS_IDENTITIES);
        assert!(new.agree(&new).unwrap().0 >= KNOWS_IDENTITIES);
    }

    #[test]
    fn a_needed_feature_that_one_side_lacks_ends_it_on_both() {
        let (plain, needy) = (hello(0, 0b001, 0), hello(0, 0b011, 0b010));
        assert_eq!(needy.agree(&plain), Err(HelloError::Features { features: Features(0b010), theirs: false }));
        assert_eq!(plain.agree(&needy), Err(HelloError::Features { features: Features(0b010), theirs: true }));
    }

    #[test]
    fn features_are_named_by_the_options_that_ask_for_them() {
        let lacking = HelloError::Features { features: Features::LZ4.and(Features(1 << 40)), theirs: false };
        assert_eq!(lacking.to_string(), "the peer lacks what this migration needs: compress lz4, 0x10000000000");
    }

    #[test]
    fn a_plain_caller_learns_that_tls_is_needed() {
        let ours = hello(0, Features::KNOWN.0, 0);
        let why = ours.agree(&hello(0, Features::KNOWN.0, Features::TLS.0)).unwrap_err();
        assert_eq!(why.to_string(), "the peer needs what this daemon lacks: TLS ([tls] in sternad.toml)");
    }

    #[test]
    fn another_major_is_named() {
        let mut bytes = hello(0, 0, 0).encode();
        bytes[8..10].copy_from_slice(&9u16.to_le_bytes());
        assert!(matches!(Hello::decode(&bytes), Err(HelloError::Version { theirs: Version { major: 9, .. }, .. })));
    }

    proptest! {
        #[test]
        fn strangers_are_recognised(bytes: [u8; HELLO_BYTES]) {
            prop_assert_eq!(Hello::decode(&bytes), Err(HelloError::Stranger));
        }
    }
}
