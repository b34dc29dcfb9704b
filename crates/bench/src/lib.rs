//! Sterna's lab and experiments: hosts on one machine, load, a meter that measures from outside, QEMU's own migration
//! as the baseline, and the experiments that compare the two.

/// Running programs and waiting for things to happen.
pub mod command;

/// What can go wrong.
pub mod error;

/// Hosts on one machine.
pub mod lab;

/// Load on guests and links.
pub mod load;

/// Processes that cannot be confused.
pub mod process;

/// Medians, ratios, lines.
pub mod stats;

/// Where programs and files are.
pub mod tools;

pub use error::{Error, Result};
pub use lab::{Lab, LabConfig};
