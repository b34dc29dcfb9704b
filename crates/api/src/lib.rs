//! Request and report types of the daemon's API, shared by the daemon, the command line and the experiments.
//!
//! Everything here is plain data with a JSON form, which `/openapi.json` of a daemon describes. Scripts rely on it:
//! fields are added, never renamed or dropped.

/// Sizes, rates and durations as people write them: `4G`, `1Gbit`, `300ms`.
pub mod units;

/// The options of a migration.
pub mod options;

/// The report of a migration.
pub mod report;

/// The estimate of a migration.
pub mod estimate;

/// Machines that move together.
pub mod gang;

/// Balloons: how much of its memory a guest keeps.
pub mod balloon;

/// Reclaim: a guest's free memory is given back to its host.
pub mod reclaim;

/// Replacement: another QEMU takes a guest over on the same host.
pub mod replace;

/// Forks: a running guest goes on as several.
pub mod fork;

/// Split machines: a part of a guest's memory is at memory hosts.
pub mod split;

/// Network cards, and their links.
pub mod link;

/// The progress of a running migration.
pub mod progress;

/// Virtual machines as the daemon shows them, and the requests that make and end them.
pub mod vm;

/// Problems: what failed, whose fault it is, and what to do.
pub mod problem;

/// Codes: the words for problems that programs use.
pub mod code;

pub use balloon::{Balloon, BalloonMode, BalloonSetting};
pub use code::Code;
pub use estimate::Estimate;
pub use fork::{Cloned, ForkRequest, Forked, NotCloned, TakeRequest, Taken, TemplateChange, TemplateState};
pub use gang::{GangPauses, Totals};
pub use link::{LinkRequest, NetworkCard};
pub use options::{MigrateOptions, Mode};
pub use problem::{Blame, Problem};
pub use progress::{Phase, Progress};
pub use reclaim::{ReclaimMethod, ReclaimRequest, Reclaimed};
pub use replace::{ReplaceRequest, Replaced};
pub use report::{Report, Status};
pub use split::{SplitReport, SplitRequest, Unused};
pub use vm::{AdoptRequest, MemoryMode, MigrateRequest, Migration, ResumeRequest, RunRequest, Vm, VmState};
