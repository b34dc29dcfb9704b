//! Split machines: a guest runs here, and a part of its memory is at memory hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::options::Mode;
use crate::problem::Problem;
use crate::report::{Report, Status};

/// A host that lends memory to guests of others (`lend_memory`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryHost {
    /// Where its daemon listens, `HOST:PORT`.
    pub peer: String,
    /// What it lends, bytes: for each MiB of the guest's memory 4 KiB more, which say what is there.
    pub bytes: u64,
}

/// At how many memory hosts each page is that is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub enum Redundancy {
    /// At one. A memory host that goes down for good takes its pages with it.
    #[default]
    #[serde(rename = "none")]
    None,
    /// At two: the first that is named and the second have the same pages, the third and the fourth, and so on. Any one
    /// of them may go down for good.
    #[serde(rename = "copies=2")]
    Mirrored,
    /// At one, and the others have parity of it: any one of three or more, which lend the same, may go down for good.
    #[serde(rename = "parity")]
    Parity,
}

/// Where pages belong that the guest has never used, or has given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unused {
    /// Nowhere: they take no memory and never travel. The guest gets zeros when it uses one, at once.
    #[default]
    Track,
    /// Where any other page would be: each counts as memory that is here, and leaves and comes back as any other. This
    /// is what split guests cost where nobody knows which pages are used; it is there to compare with.
    Ignore,
}

/// Has a part of a machine's memory leave for memory hosts; or, of a machine that is split already, changes how much of
/// it is here, and which memory hosts it has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SplitRequest {
    /// The most memory that the guest has here from then on, bytes.
    pub here_bytes: u64,
    /// The memory hosts. Of a machine that is split already: none, where it keeps those that it has; or all that it is
    /// to have. Others are emptied, and have their memory back then.
    #[serde(default)]
    pub memory: Vec<MemoryHost>,
    /// At how many of them each page is. Without it: at one, or as the machine has it that is split already.
    #[serde(default)]
    pub redundancy: Option<Redundancy>,
    /// Where pages belong that the guest does not use. Without it: nowhere, or as the machine has it that is split
    /// already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused: Option<Unused>,
    /// The daemon of the host that the guest then moves to, `HOST:PORT`; without it the guest stays. What has left for
    /// memory hosts stays there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub main: Option<String>,
    /// How it moves there. With `postcopy` it goes at once and what is here follows it; what is too much there goes
    /// straight to memory hosts. Otherwise that leaves first. Without it: by rounds alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// All of it is brought together there, once it runs there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub merge: bool,
}

impl SplitRequest {
    /// Whether the guest moves before anything of it leaves.
    #[must_use]
    pub fn goes_first(&self) -> bool {
        self.main.is_some() && self.mode == Some(Mode::Postcopy)
    }
}

/// The report on a machine that was split, whose room was changed, or that was merged.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SplitReport {
    /// The virtual machine.
    pub vm: String,
    /// How it ended. Where it is not `completed`, the machine is as it was before, unless the error says otherwise; but
    /// where memory hosts were being exchanged, it has those that came and those that were not empty yet.
    pub status: Status,
    /// Why it failed.
    pub error: Option<Problem>,
    /// How long it took, milliseconds. The guest ran meanwhile.
    pub ms: f64,
    /// RAM, bytes.
    pub memory_bytes: u64,
    /// The most of it that may be here from now on, bytes.
    pub here_bytes: u64,
    /// What this host had given memory for before, bytes.
    pub allocated_before_bytes: u64,
    /// What it has given memory for now, bytes.
    pub allocated_after_bytes: u64,
    /// Pages that are at memory hosts now.
    pub away_pages: u64,
    /// Pages that were sent to memory hosts meanwhile, and left.
    pub out_pages: u64,
    /// Pages that left without being sent: what a memory host had of them was right still.
    pub unsent_pages: u64,
    /// Pages of zeros that left without being sent.
    pub zero_pages: u64,
    /// Pages that were sent and stayed, because the guest wrote them or waited for them.
    pub kept_pages: u64,
    /// Pages that came back meanwhile.
    pub in_pages: u64,
    /// The move of its guest to another host, where one was asked for and has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<Box<Report>>,
}

/// What is elsewhere of a machine that runs here.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Split {
    /// The most of its memory that may be here, bytes.
    pub here_bytes: u64,
    /// Pages that are at memory hosts.
    pub away_pages: u64,
    /// Its memory hosts.
    pub memory: Vec<MemoryHost>,
    /// At how many of them each page is.
    #[serde(default)]
    pub redundancy: Redundancy,
    /// Where pages belong that the guest does not use.
    #[serde(default)]
    pub unused: Unused,
    /// Those that did not answer when they were last asked, where another one has the same pages.
    #[serde(default)]
    pub silent: Vec<String>,
    /// Pages that are at one memory host alone although each is to be at two: the other one did not answer when they
    /// left, or has lost them. It is given them once it answers.
    #[serde(default)]
    pub alone_pages: u64,
    /// Memory hosts that are being emptied, and are given nothing more.
    #[serde(default)]
    pub leaving: Vec<MemoryHost>,
    /// Memory hosts that the guest, or its daemon, waits for.
    pub waiting: Vec<Waiting>,
    /// Why more of it is here than may be, where that is so because pages cannot leave.
    pub stuck: Option<String>,
    /// Pages that left for memory hosts since this daemon began, those included that did not have to be sent.
    #[serde(default)]
    pub out_pages: u64,
    /// Pages that came back since then.
    #[serde(default)]
    pub in_pages: u64,
    /// Pages that waited for room here since this daemon began, because the guest takes memory faster than it leaves.
    #[serde(default)]
    pub paced_pages: u64,
    /// Those of them that were let in although there was none: they had waited long enough.
    #[serde(default)]
    pub forced_pages: u64,
    /// The longest wait of these, milliseconds.
    #[serde(default)]
    pub paced_longest_ms: f64,
}

/// A memory host that is waited for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// The memory host.
    pub peer: String,
    /// For how long, milliseconds.
    pub ms: f64,
    /// Why it brings no pages, where that is known.
    pub why: Option<String>,
}
