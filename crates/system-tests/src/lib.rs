//! Whole-system tests: real daemons, real QEMUs and a Linux guest that checks its own memory, in a lab of two hosts.
//! Everything is done through the command line, as its users do, and judged from outside.
//!
//! What these tests share is here; the tests themselves are in `tests/`, a program a subject.

/// The census: what hosts hold before and after a test must be the same.
pub mod census;

/// `sterna`, with its exit status.
pub mod cli;

/// A disk that a guest reads all the time.
pub mod disk;

/// Disks that it writes and reads again.
pub mod images;

/// One that it reads slowly, past its page tables.
pub mod slow_disk;

/// Guests of one family.
pub mod member;

/// Guests that share pages and move together.
pub mod gang;

/// What tests need of this machine, and the turns that they take.
pub mod needs;

/// Options in all pairs.
pub mod pairs;

/// A proxy on the wire: it holds a message back, cuts, stalls, damages.
pub mod proxy;

/// Random choices that can be made again.
pub mod random;

/// The records that daemons write, each of which one can be killed at.
pub mod steps;

/// A QEMU that was not started by Sterna.
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
