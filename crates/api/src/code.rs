//! Codes: the words for problems that programs use.

use std::fmt::{self, Display};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The kind of a failure, as a client of HTTP has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The object of the request does not exist.
    Absent,
    /// The object of the request has no such method.
    Method,
    /// The request is valid, but its object is in another state than it needs.
    Conflict,
    /// Somebody did not answer in time.
    Late,
    /// The blame decides.
    ByBlame,
}

/// Declares the codes: the name in this program, the kind, and the word that programs see.
macro_rules! codes {
    ($($(#[$doc:meta])+ $name:ident: $kind:ident = $word:literal,)+) => {
        /// A stable word for programs. JSON and the protocol carry it as text; a word of another version of Sterna
        /// survives as [`Code::Other`].
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub enum Code {
            $($(#[$doc])+ $name,)+
            /// A word that this version does not know.
            Other(String),
        }

        impl Code {
            /// Every code that this version gives.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The word.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $word,)+
                    Self::Other(word) => word,
                }
            }

            /// The kind of the failure.
            #[must_use]
            pub fn kind(&self) -> Kind {
                match self {
                    $(Self::$name => Kind::$kind,)+
                    Self::Other(_) => Kind::ByBlame,
                }
            }

            fn known(word: &str) -> Option<Self> {
                match word {
                    $($word => Some(Self::$name),)+
                    _ => None,
                }
            }
        }
    };
}

codes! {
    // Requests.
    /// The request contradicts itself or the rules.
    InvalidRequest: ByBlame = "invalid-request",
    /// The name is none that a machine can have.
    InvalidName: ByBlame = "invalid-name",
    /// The command line is wrong.
    Usage: ByBlame = "usage",
    /// The options contradict each other.
    BadOptions: ByBlame = "bad-options",
    /// An argument for QEMU is one that Sterna gives itself.
    ArgumentConflict: ByBlame = "argument-conflict",
    /// An argument for QEMU names a file by a relative path.
    RelativePath: ByBlame = "relative-path",
    /// A path of the machine is too long for a socket.
    PathTooLong: ByBlame = "path-too-long",
    /// The API has no such path.
    NoSuchRoute: Absent = "no-such-route",
    /// The API's path has no such method.
    NoSuchMethod: Method = "no-such-method",
    /// There is no machine of this name.
    UnknownVm: Absent = "unknown-vm",
    /// There is no template of this name.
    UnknownTemplate: Absent = "unknown-template",
    /// There is no migration of this number.
    UnknownMigration: Absent = "unknown-migration",
    /// Nothing is lent to a guest of this number.
    UnknownLoan: Absent = "unknown-loan",
    /// There is no process of this number.
    NoSuchProcess: ByBlame = "no-such-process",
    /// The name is taken.
    NameTaken: Conflict = "name-taken",
    /// The process is a machine of this host already.
    AlreadyKnown: Conflict = "already-known",
    /// The machine is busy with something else.
    VmBusy: Conflict = "vm-busy",
    /// The migration is past the point of no return.
    TooLate: Conflict = "too-late",
    /// The machine is being moved here.
    Arriving: Conflict = "arriving",
    /// The machine is not being moved.
    NotMigrating: Conflict = "not-migrating",
    /// The guest does not run, so it cannot switch itself off.
    NotRunning: Conflict = "not-running",
    /// Pages of the machine are still to come.
    StillArriving: Conflict = "still-arriving",
    /// A part of the machine's memory is at memory hosts.
    Split: Conflict = "split",
    /// All of the machine's memory is here.
    NotSplit: Conflict = "not-split",
    /// The machine's guest runs elsewhere and needs pages from here.
    ServingPages: Conflict = "serving-pages",
    /// The requested work has begun and not ended yet.
    StillEnding: ByBlame = "still-ending",
    /// The guest is known to run at its destination.
    RunsThere: Conflict = "runs-there",
    /// The host that is said to be off is not the machine's destination.
    NotItsDestination: Conflict = "not-its-destination",
    /// The work was cancelled.
    Cancelled: ByBlame = "cancelled",
    /// The pages of a guest that runs elsewhere were given up.
    GivenUp: ByBlame = "given-up",
    /// The guest did not react to the power button.
    GuestIgnoresPowerdown: Late = "guest-ignores-powerdown",
    /// The guest did not let go of a network card.
    GuestKeepsCard: Late = "guest-keeps-card",
    /// A network card cannot be changed, or there is none.
    NetworkCard: ByBlame = "network-card",

    // Machines that cannot be run, adopted or moved.
    /// Private memory cannot be moved.
    PrivateMemory: ByBlame = "private-memory",
    /// The machines of a gang cannot share pages, or not on that host.
    NoSharing: ByBlame = "no-sharing",
    /// A memory template is not what one must be, or was changed while a machine used it.
    MemoryTemplate: ByBlame = "memory-template",
    /// The machine cannot be forked.
    CannotFork: ByBlame = "cannot-fork",
    /// The machine asks for more memory than the host has.
    TooMuchMemory: ByBlame = "too-much-memory",
    /// QEMU is older than Sterna supports.
    QemuTooOld: ByBlame = "qemu-too-old",
    /// The program is not QEMU.
    NotQemu: ByBlame = "not-qemu",
    /// QEMU is not on this host.
    QemuNotFound: ByBlame = "qemu-not-found",
    /// Part of the RAM is in no file.
    AnonymousRam: ByBlame = "anonymous-ram",
    /// The RAM is a memfd.
    MemfdRam: ByBlame = "memfd-ram",
    /// The RAM is mapped privately.
    PrivateRam: ByBlame = "private-ram",
    /// The RAM's file has no name that can be opened.
    UnnamedRam: ByBlame = "unnamed-ram",
    /// The RAM's file is on no tmpfs.
    DiskRam: ByBlame = "disk-ram",
    /// The RAM is in huge pages.
    HugePages: ByBlame = "huge-pages",
    /// QEMU has mapped another file than the one it names.
    RamNotMapped: ByBlame = "ram-not-mapped",
    /// The RAM is another machine's.
    RamOfAnother: ByBlame = "ram-of-another",
    /// Some RAM is no shared named file.
    ImmovableRam: ByBlame = "immovable-ram",
    /// A RAM block was plugged in while the machine ran.
    HotpluggedMemory: ByBlame = "hotplugged-memory",
    /// The RAM blocks contradict each other, or the machine.
    RamLayout: ByBlame = "ram-layout",
    /// Others than QEMU write the guest's RAM.
    ForeignWriters: ByBlame = "foreign-writers",
    /// Devices may write the guest's RAM past the page tables.
    DirectIo: ByBlame = "direct-io",
    /// QEMU itself refuses to migrate.
    QemuBlocks: ByBlame = "qemu-blocks",
    /// The machine's disks are on other images than its arguments name.
    DiskImages: ByBlame = "disk-images",
    /// The destination does not offer the machine type.
    MachineType: ByBlame = "machine-type",
    /// The destination's QEMU is too old for the machine.
    QemuVersion: ByBlame = "qemu-version",
    /// The destination's processor cannot stand in for the source's.
    CpuModel: ByBlame = "cpu-model",
    /// The destination lacks a file of the machine.
    FileMissing: ByBlame = "file-missing",
    /// Memory is short.
    OutOfMemory: ByBlame = "out-of-memory",

    // Balloons, and memory that guests hold free.
    /// The balloon's setting contradicts the machine.
    Balloon: ByBlame = "balloon",
    /// The machine has no balloon device.
    NoBalloon: ByBlame = "no-balloon",
    /// The balloon is looked after already.
    BalloonInUse: Conflict = "balloon-in-use",
    /// The guest's balloon driver says nothing.
    BalloonSilent: Conflict = "balloon-silent",
    /// The guest's kernel cannot be looked into.
    GuestUnfit: Conflict = "guest-unfit",

    // QEMU, the agent inside it, and the guest.
    /// QEMU has ended.
    QemuGone: ByBlame = "qemu-gone",
    /// QEMU did not do what it was asked.
    QemuError: ByBlame = "qemu-error",
    /// QEMU failed while the machine was being moved.
    QemuFailed: ByBlame = "qemu-failed",
    /// QEMU does not answer.
    QmpUnreachable: ByBlame = "qmp-unreachable",
    /// The guest has switched itself off.
    GuestOff: ByBlame = "guest-off",
    /// The guest has ended at the destination.
    GuestGone: ByBlame = "guest-gone",
    /// The agent does not answer.
    AgentMissing: ByBlame = "agent-missing",
    /// The agent's library is not on this host.
    AgentNotFound: ByBlame = "agent-not-found",
    /// Another process answers in the agent's place.
    AgentForeign: ByBlame = "agent-foreign",
    /// The agent does not see the machine's RAM.
    AgentRam: ByBlame = "agent-ram",
    /// The agent did not do what it was asked.
    AgentFailed: ByBlame = "agent-failed",

    // This host.
    /// A file, memory or the kernel of this host failed.
    HostError: ByBlame = "host-error",
    /// The kernel failed while a machine was being moved.
    HostFailed: ByBlame = "host-failed",
    /// A RAM file was cut short.
    RamCutShort: ByBlame = "ram-cut-short",
    /// The RAM's file system is full.
    RamFull: ByBlame = "ram-full",
    /// The guest's processors cannot be slowed down here.
    CannotThrottle: ByBlame = "cannot-throttle",
    /// The kernel cannot hold missing pages back.
    NoPostcopy: ByBlame = "no-postcopy",
    /// Sterna itself failed.
    Internal: ByBlame = "internal",

    // The peer, and the link to it.
    /// The peer cannot be reached.
    PeerUnreachable: ByBlame = "peer-unreachable",
    /// The link to the peer broke off.
    LinkFailed: ByBlame = "link-failed",
    /// The program that answers is not Sterna.
    NotSterna: ByBlame = "not-sterna",
    /// The peer's version does not fit.
    PeerVersion: ByBlame = "peer-version",
    /// The peer broke the protocol.
    PeerProtocol: ByBlame = "peer-protocol",
    /// Data from the peer was damaged.
    Damaged: ByBlame = "damaged",
    /// The daemon that answers is not the one that accepted the guest.
    AnotherDaemon: ByBlame = "another-daemon",
    /// The destination receives as many machines as it may already: the same proposal can succeed later.
    TooManyIncoming: ByBlame = "too-many-incoming",
    /// The migration has ended there before.
    StaleMigration: ByBlame = "stale-migration",
    /// The daemon that answers is the migration's source.
    NotYours: ByBlame = "not-yours",
    /// The daemon that answers has never heard of the migration.
    NotKnownHere: ByBlame = "not-known-here",
    /// The rounds of pages do not converge.
    NotConverging: ByBlame = "not-converging",
    /// The guest wrote while its devices were being saved.
    WrittenWhileSaving: ByBlame = "written-while-saving",
    /// The QEMU that was to take the guest over used its RAM too early.
    TouchedEarly: ByBlame = "touched-early",
    /// A page differs between source and destination.
    VerifyMismatch: ByBlame = "verify-mismatch",

    // Pages that follow their guest.
    /// All pages are at the destination.
    Paged: ByBlame = "paged",
    /// The guest does not run at the destination yet.
    NotYet: ByBlame = "not-yet",
    /// Nothing can bring the guest's pages.
    PagingLost: ByBlame = "paging-lost",
    /// Pages that the source has sent are missing at the destination.
    PagesMissing: ByBlame = "pages-missing",

    // Memory hosts.
    /// A memory host does not lend what it was asked for.
    LoanRefused: ByBlame = "loan-refused",
    /// A memory host has lost pages that it alone had.
    PagesLost: ByBlame = "pages-lost",

    // Encryption.
    /// The certificate, the key or the authority is unusable.
    TlsFiles: ByBlame = "tls-files",
    /// Others can read the key.
    TlsKeyExposed: ByBlame = "tls-key-exposed",
    /// The peer's certificate is not signed by the known authority.
    TlsUntrusted: ByBlame = "tls-untrusted",
    /// The peer's certificate is not valid now.
    TlsDate: ByBlame = "tls-date",
    /// The peer's certificate has another name.
    TlsName: ByBlame = "tls-name",
    /// The peer's certificate is missing or unusable.
    TlsCertificate: ByBlame = "tls-certificate",
    /// The peer is not allowed.
    TlsNotAllowed: ByBlame = "tls-not-allowed",
    /// The peer refuses this host's certificate.
    TlsRefused: ByBlame = "tls-refused",
    /// One side encrypts and the other does not.
    TlsMixed: ByBlame = "tls-mixed",
    /// The migration was begun by another daemon.
    TlsNotYours: ByBlame = "tls-not-yours",
    /// Encryption failed.
    TlsFailed: ByBlame = "tls-failed",

    // The command line's own.
    /// The daemon cannot be reached.
    DaemonUnreachable: ByBlame = "daemon-unreachable",
    /// The daemon's answer cannot be read.
    DaemonAnswer: ByBlame = "daemon-answer",
}

impl From<&str> for Code {
    fn from(word: &str) -> Self {
        Self::known(word).unwrap_or_else(|| Self::Other(word.into()))
    }
}

impl From<String> for Code {
    fn from(word: String) -> Self {
        Self::known(&word).unwrap_or(Self::Other(word))
    }
}

impl PartialEq<str> for Code {
    fn eq(&self, word: &str) -> bool {
        self.as_str() == word
    }
}

impl PartialEq<&str> for Code {
    fn eq(&self, word: &&str) -> bool {
        self.as_str() == *word
    }
}

impl Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_code_is_a_word_of_its_own_and_comes_back_from_it() {
        let words: HashSet<&str> = Code::ALL.iter().map(Code::as_str).collect();
        assert_eq!(words.len(), Code::ALL.len());
        for code in Code::ALL {
            assert_eq!(Code::from(code.as_str()), *code);
            let json = serde_json::to_string(code).unwrap();
            assert_eq!(json, format!("\"{code}\""));
            assert_eq!(serde_json::from_str::<Code>(&json).unwrap(), *code);
            assert!(code.as_str().chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{code}");
        }
    }

    #[test]
    fn a_code_of_a_later_version_survives_as_it_is() {
        let code: Code = serde_json::from_str("\"of-tomorrow\"").unwrap();
        assert_eq!((code.clone(), code.as_str()), (Code::Other("of-tomorrow".into()), "of-tomorrow"));
        assert_eq!(serde_json::to_string(&code).unwrap(), "\"of-tomorrow\"");
    }
}
