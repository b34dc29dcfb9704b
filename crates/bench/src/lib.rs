//! Sterna's lab and experiments: hosts on one machine, load, a meter that measures from outside, QEMU's own migration
//! as the baseline, and the experiments that compare the two.

/// The accelerator, which runs guests' processors.
pub mod accelerator;

/// Single pages of memory hosts, asked for without a guest.
pub mod bare;

/// QEMU's own migration.
pub mod baseline;

/// All experiments, measured for hours.
pub mod campaign;

/// Running programs and waiting for things to happen.
pub mod command;

/// Guests' consoles, at which one can type.
pub mod console;

/// The demos.
pub mod demo;

/// What can go wrong.
pub mod error;

/// The experiments.
pub mod experiments;

/// The host memory that guests' RAM takes.
pub mod footprint;

/// Gangs of guests that move together.
pub mod gang;

/// Guests and their QEMU arguments.
pub mod guest;

/// The runs that campaigns have kept.
pub mod kept;

/// The kernel's merging of equal pages.
pub mod ksm;

/// Hosts on one machine.
pub mod lab;

/// Load on guests and links.
pub mod load;

/// Guests' heartbeats, measured from outside.
pub mod meter;

/// The pages of experiments.
pub mod pages;

/// Plots as SVG and PNG.
pub mod plot;

/// Processes by id and start time.
pub mod process;

/// The content of a guest's RAM.
pub mod ram;

/// The results that experiments write.
pub mod result;

/// Medians, ratios, lines.
pub mod stats;

/// The steps of a pause.
pub mod steps;

/// Machines that Sterna runs.
pub mod sterna;

/// The paths of programs and files.
pub mod tools;

/// One migration, measured from every side.
pub mod trial;

/// Memory that costs little when it is touched.
pub mod warm;

pub use error::{Error, Result};
pub use guest::Guest;
pub use lab::{Lab, LabConfig};
