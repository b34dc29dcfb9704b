//! Sterna's lab and experiments: hosts on one machine, load, a meter that measures from outside, QEMU's own migration
//! as the baseline, and the experiments that compare the two.

/// What runs guests' processors.
pub mod accelerator;

/// QEMU's own migration.
pub mod baseline;

/// Running programs and waiting for things to happen.
pub mod command;

/// The demo.
pub mod demo;

/// What can go wrong.
pub mod error;

/// The experiments.
pub mod experiments;

/// Guests and their QEMU arguments.
pub mod guest;

/// Hosts on one machine.
pub mod lab;

/// Load on guests and links.
pub mod load;

/// What guests look like from outside.
pub mod meter;

/// Plots as SVG and PNG.
pub mod plot;

/// Processes that cannot be confused.
pub mod process;

/// What a guest's RAM holds.
pub mod ram;

/// What experiments write.
pub mod result;

/// Medians, ratios, lines.
pub mod stats;

/// Machines that Sterna runs.
pub mod sterna;

/// Where programs and files are.
pub mod tools;

/// One migration, looked at from every side.
pub mod trial;

pub use error::{Error, Result};
pub use guest::Guest;
pub use lab::{Lab, LabConfig};
