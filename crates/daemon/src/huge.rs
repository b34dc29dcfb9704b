//! Huge pages for machines at rest.
//!
//! While a guest's writes are watched its RAM is mapped page by page, and small pages are what comes to it from another
//! host. Once nothing is done with it any more, this thread asks for huge pages again and has the kernel make them
//! (`MADV_COLLAPSE`): a new mapping where the file still has the huge page, a copy where it has 512 small ones. Holes
//! stay: only what is allocated as a whole becomes a huge page. It is done piece by piece, each within
//! `Machines::while_free`, so that none is under way when somebody begins to move or fork the machine; and slowly.
//!
//! A piece that was refused is left as it is, until somebody has done something with the machine, or some minutes have
//! passed: a page is held for direct I/O, or the host has no huge page left.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_engine::agent::{AddressRange, Advice};
use sterna_engine::memory::huge;
use sterna_sys::process::{Pidfd, thread_cpu_time};

use crate::machines::agent;
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::process::Identity;

/// How often machines are looked at.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a machine is left alone that has what it can have.
const AGAIN: Duration = Duration::from_secs(300);
/// What is made takes one processor this part of the time at most.
const PART: u32 = 10;
/// How many pieces may be refused one after another before the machine is left alone.
const REFUSED: u32 = 16;

/// What was done for a machine.
#[derive(Debug, Clone, Copy)]
struct Done {
    process: Identity,
    /// As [`Entry::begun`](crate::machines::table::Entry::begun) was.
    begun: u64,
    at: Instant,
}

/// Begins to look after machines, on a thread of its own, for as long as this daemon runs.
pub fn begin(machines: Arc<Machines>) {
    if sterna_sys::huge::transparent_bytes().is_none() {
        return;
    }
    let care = move || {
        let mut done = HashMap::new();
        loop {
            look(&machines, &mut done);
            std::thread::sleep(PAUSE);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("huge-pages".into()).spawn(care) {
        tracing::error!(%error, "cannot start the thread that makes huge pages of machines' memory");
    }
}

/// Looks at all machines once.
fn look(machines: &Machines, done: &mut HashMap<String, Done>) {
    let due: Vec<(String, Done)> = {
        let table = machines.table();
        done.retain(|name, _| table.contains_key(name));
        let as_now = |(name, record, begun): (&String, &VmRecord, u64)| {
            (name.clone(), Done { process: record.process, begun, at: Instant::now() })
        };
        let known = table.iter().filter_map(|(name, entry)| Some((name, entry.record.as_ref()?, entry.begun)));
        let is_due = |(name, now): &(String, Done)| {
            done.get(name)
                .is_none_or(|last| (last.process, last.begun) != (now.process, now.begun) || last.at.elapsed() > AGAIN)
        };
        known.filter(|(_, record, _)| record.wants_huge_pages()).map(as_now).filter(is_due).collect()
    };
    for (name, now) in due {
        match rest(machines, &name, now) {
            // It is busy. It is looked at again.
            None => {}
            Some(Ok(made)) => {
                if made > 0 {
                    tracing::debug!(vm = name, made, "memory is in huge pages");
                }
                done.insert(name, now);
            }
            Some(Err(error)) => {
                tracing::debug!(vm = name, %error, "memory stays in small pages");
                done.insert(name, now);
            }
        }
    }
}

/// Has a machine's RAM be in huge pages; how many were made. `None` where somebody has begun something with it.
fn rest(machines: &Machines, name: &str, now: Done) -> Option<io::Result<u64>> {
    let asked = while_same(machines, name, now, |record| ask(record).map(|()| record.clone()))?;
    let found = asked.and_then(|record| Ok((pieces(&record)?, Pidfd::open(now.process.pid)?)));
    let (pieces, process) = match found {
        Ok(found) => found,
        Err(error) => return Some(Err(error)),
    };
    let (mut made, mut refused) = (0, 0);
    for piece in pieces {
        // Not the time that passes: on a busy host most of that is waiting.
        let before = thread_cpu_time();
        match while_same(machines, name, now, |_| process.collapse(piece))? {
            Ok(()) => (made, refused) = (made + 1, 0),
            Err(error) if refused >= REFUSED => return Some(Err(error.into())),
            Err(_) => refused += 1,
        }
        std::thread::sleep(thread_cpu_time().saturating_sub(before) * PART);
    }
    Some(Ok(made))
}

/// Does something short with a machine that is free, and still the same.
fn while_same<T>(machines: &Machines, name: &str, now: Done, act: impl FnOnce(&VmRecord) -> T) -> Option<T> {
    let same = |record: &VmRecord| record.process == now.process && now.process.open().is_some();
    machines.while_free(name, |record| same(record).then(|| act(record))).flatten()
}

/// Asks for huge pages in the machine's name, as QEMU does when it starts.
fn ask(record: &VmRecord) -> io::Result<()> {
    let spans = record.huge_spans()?;
    if spans.is_empty() {
        return Ok(());
    }
    let ranges: Vec<_> = spans
        .into_iter()
        .map(|(_, span)| AddressRange { address: span.start, length: span.end - span.start })
        .collect();
    let mut agent = agent::connect(&record.agent, record.process.pid).map_err(io::Error::other)?;
    agent.advise(Advice::HugePage, &ranges).map_err(io::Error::other)
}

/// What of its RAM can become huge pages: where it is in QEMU's memory.
fn pieces(record: &VmRecord) -> io::Result<Vec<Range<u64>>> {
    let mut pieces = Vec::new();
    for (block, span) in record.huge_spans()? {
        let file: File = block.open(record.process.pid)?;
        pieces.extend(huge::small_pieces(record.process.pid, &file, span)?);
    }
    Ok(pieces)
}
