//! Which machines can be split, and how.

use std::collections::HashSet;

use sterna_api::split::MemoryHost;
use sterna_api::units::show_size;
use sterna_api::{Blame, Code, MemoryMode, Problem, SplitRequest};
use sterna_protocol::layout::CHUNK_BYTES;
use sterna_protocol::store::most_bytes;

use crate::machines::agent;
use crate::machines::borrowed::Place;
use crate::machines::control::Control;
use crate::machines::reach::check_writers;
use crate::machines::record::VmRecord;
use crate::migration::address::check_address;
use crate::migration::paging::in_small_pages;
use crate::problems::invalid;

/// The least that a machine keeps here: QEMU itself touches some of it all the time.
const LEAST_HERE: u64 = 16 * CHUNK_BYTES as u64;

/// Checks what needs no machine to be checked; `listen`: where other daemons reach this one.
///
/// # Errors
/// A [`Problem`] with the rule that the request breaks.
pub(super) fn check_request(request: &SplitRequest, listen: Option<&String>) -> Result<(), Problem> {
    let mut peers = HashSet::new();
    for MemoryHost { peer, bytes } in &request.memory {
        check_address(peer)?;
        if !peers.insert(peer) {
            return Err(invalid(format!("memory host {peer} is named twice")));
        }
        if listen == Some(peer) {
            return Err(invalid(format!("{peer} is this host, which cannot lend memory to a guest of its own")));
        }
        if *bytes < most_bytes(1) {
            let least = show_size(most_bytes(1));
            return Err(invalid(format!("memory host {peer} is asked for {bytes} bytes: {least} is the least")));
        }
    }
    if request.here_bytes < LEAST_HERE {
        let (asked, least) = (show_size(request.here_bytes), show_size(LEAST_HERE));
        return Err(invalid(format!("{asked} are to stay here: {least} is the least, QEMU itself needs some")));
    }
    Ok(())
}

/// Whether a machine is one that can be split.
///
/// # Errors
/// A [`Problem`]: its memory is private or in pages that cannot be held back, or others than its processors write it
/// past the page tables.
pub(super) fn check_machine(record: &VmRecord) -> Result<(), Problem> {
    let name = &record.name;
    if record.memory_mode == MemoryMode::Private {
        let message = format!("'{name}' cannot be split: its memory is private, and pages leave shared memory only");
        return Err(Problem::new(Code::PrivateMemory, Blame::Request, message));
    }
    in_small_pages(&record.blocks)?;
    record.check_settled()?;
    let about = Control::connect(&record.qmp)?.inspect()?;
    check_writers(name, "be split", &about)?;
    if about.may_nest {
        let message = format!(
            "'{name}' cannot be split: it may run guests of its own, and for these KVM keeps some of its memory mapped \
             past the page tables"
        );
        return Err(Problem::new(Code::ForeignWriters, Blame::Request, message)
            .hint("give it processors without virtualization: '-cpu MODEL,-vmx' or ',-svm'"));
    }
    // What QEMU reads by calls that its agent notes is known for as long as it is under way.
    let tells = agent::tells_of_reads(&record.agent, record.process.pid)?;
    let untold = if tells { &about.untold_io } else { &about.direct_io };
    if !untold.is_empty() {
        let who = untold.join(", ");
        let message = format!(
            "'{name}' cannot be split: devices may write its memory past the page tables, and a page that leaves \
             would lose that ({who})"
        );
        return Err(Problem::new(Code::DirectIo, Blame::Request, message).hint(
            "a disk may stay as it is with 'aio=threads' or 'aio=native', unless the machine was started with an \
                 agent of an earlier version; 'cache=writeback' or 'cache=writethrough' let any disk be read through \
                 the page cache",
        ));
    }
    Ok(())
}

/// Whether a machine's memory has room here and at its memory hosts together, and a part of it leaves.
///
/// # Errors
/// A [`Problem`] that says how much is missing, or that nothing would leave.
pub(super) fn check_budget(record: &VmRecord, here: u64, hosts: &[Place]) -> Result<(), Problem> {
    let all = record.memory_bytes;
    if here >= all {
        let (here, all) = (show_size(here), show_size(all));
        let message = format!("{here} may stay here of {all}: nothing would leave");
        return Err(invalid(message));
    }
    // Each chunk takes a note, too, and lies at one of them as a whole.
    let chunks: u64 = hosts.iter().map(|host| host.bytes / most_bytes(1)).sum();
    let there = chunks.saturating_mul(CHUNK_BYTES as u64);
    if here.saturating_add(there) < all {
        let message = format!(
            "{} here and {} at memory hosts are less than the {} that the machine has",
            show_size(here),
            show_size(there),
            show_size(all)
        );
        return Err(invalid(message).hint("a memory host needs 4 KiB for each MiB beside the memory itself"));
    }
    Ok(())
}
