//! What the programs that run inside test guests share. Each program is one sentence long; here is the vocabulary.
//!
//! What a program has to say is one line of `key=value` words, on the console and, where the guest was given a
//! meter, as a UDP datagram: `guest/README.md` lists the lines.

/// `--name value` arguments.
pub mod arguments;
/// The heartbeat's datagram.
pub mod beat;
/// How often which value was seen, small enough for a line.
pub mod histogram;
/// What is due by now, at a given rate.
pub mod pace;
/// Pages of memory, plain and self-checking.
pub mod page;
/// A file in pieces that many peers offer.
pub mod piece;
/// Small random numbers, the same in every run.
pub mod random;
/// Lines to the console and to the meter.
pub mod report;
/// Quicksort that tells how far it is.
pub mod sorting;
/// Stores to pages, silent ones among them, the same in every run.
pub mod writer;
/// Keys of which few are popular.
pub mod zipf;
