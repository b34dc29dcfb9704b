//! What the programs that run inside test guests share. Each program is one sentence long; here is the vocabulary.
//!
//! What a program has to say is one line of `key=value` words, on the console and, where the guest was given a
//! meter, as a UDP datagram: `guest/README.md` lists the lines.

/// `--name value` arguments.
pub mod arguments;
/// The heartbeat's datagram.
pub mod beat;
/// What is due by now, at a given rate.
pub mod pace;
/// Pages of memory, plain and self-checking.
pub mod page;
/// Small random numbers, the same in every run.
pub mod random;
/// Lines to the console and to the meter.
pub mod report;
/// Stores to pages, silent ones among them, the same in every run.
pub mod writer;
