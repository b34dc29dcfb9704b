//! Whole-system tests: real daemons, real QEMUs and a Linux guest that checks its own memory, in a lab of two hosts.
//! Everything is done through the command line, as its users do, and judged from outside.
//!
//! What these tests share is here; the tests themselves are in `tests/`, a program a subject.

/// What hosts hold, to be compared: what was there before must be all that is there after.
pub mod census;

/// `sterna`, with its exit status.
pub mod cli;

/// What tests need of this machine, and whose turn it is.
pub mod needs;

/// Options in all pairs.
pub mod pairs;

/// A wire with somebody on it: holds a message back, cuts, stalls, damages.
pub mod proxy;

/// A QEMU that somebody else started.
pub mod stranger;

/// What hosts and a guest are to be like.
pub mod plan;

/// Two hosts and a guest under watch.
pub mod site;

/// A site that several tests use, one after the other.
pub mod shared;

pub use census::Census;
pub use cli::{Answer, Attempt};
pub use needs::{skip_without, turn};
pub use plan::Plan;
pub use proxy::{Kind, Point, Proxy};
pub use shared::on_shared_site;
pub use site::Site;
pub use sterna_bench::command::PATIENCE;
