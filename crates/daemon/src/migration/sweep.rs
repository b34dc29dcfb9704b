//! Gives back what lies in the pools of gangs that have come here, and in what forks have made common, and what no
//! guest needs any more, again and again (`sterna_engine::memory::unneeded`).
//!
//! # Guests that wait for pages
//! A page that a VMM may still map is needed, and no process shows that. So a pool is left alone where one may:
//! * a machine is on its way here: its session holds the pool of its gang, and all that it was offered
//! * its session is over, while its guest waits for pages: nobody asks its VMM to map more, because from then on pages
//!   come with their bodies. A request that got no answer is known to its memory (`Memory::may_map_later`) before the
//!   session lets go of the pool, so that is asked after the other. Once it has all its pages there is none: the page
//!   of such a request is missing
//! * a daemon before this one has left a request unanswered: the agent has carried it out by its second answer to this
//!   daemon, and this daemon has had more before it has a pager for the guest
//!
//! All of these are asked before processes are looked at: what was mapped by then is found there.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use sterna_api::MemoryMode;
use sterna_engine::memory::unneeded;
use sterna_sys::file::{FileId, device_of};

use super::arriving::Arriving;
use super::pools::Pools;
use crate::machines::images::Images;
use crate::machines::missing::Bringer;
use crate::machines::record::VmRecord;
use crate::machines::table::{Entry, Machines};
use crate::pace::pause_after;

/// The pause between two looks at least.
const PAUSE: Duration = Duration::from_secs(2);
/// A look's processor time is less than this part of the pause after it: looking costs one processor at most 2 %. By
/// the clock a look takes any time where the processors are busy, and just then memory must not stay for minutes.
const PART: u32 = 50;

/// Begins to look, on a thread of its own, for as long as this daemon runs.
pub fn begin(machines: Arc<Machines>, pools: Arc<Pools>, images: Arc<Images>) {
    let look = move || {
        let mut warned = false;
        loop {
            let look = || {
                pools.look();
                match sweep(&machines, &pools, &images) {
                    Ok(0) => {}
                    Ok(bytes) => tracing::debug!(bytes, "no guest needs these pages of its pool any more"),
                    Err(error) if !warned => {
                        warned = true;
                        tracing::warn!(%error, "pages of pools that no guest needs any more cannot be given back");
                    }
                    Err(_) => {}
                }
            };
            std::thread::sleep(pause_after(PAUSE, PART, look));
        }
    };
    if let Err(error) = std::thread::Builder::new().name("pools".into()).spawn(look) {
        tracing::error!(%error, "cannot start the thread that gives back what no guest needs of pools");
    }
}

/// Looks once. Returns how much was given back, bytes.
fn sweep(machines: &Machines, pools: &Pools, images: &Images) -> io::Result<u64> {
    let mut processes = Vec::new();
    for record in machines.table().values().filter_map(|entry| entry.record.as_ref()) {
        if record.memory_mode == MemoryMode::Private {
            processes.push(record.process.pid);
        }
    }
    let may_be_mapped = |pool| pools.holds(pool) || machines.table().values().any(may_map_later);
    if !pools.are_held() {
        images.forget_unused(&processes, may_be_mapped)?;
    }
    if processes.is_empty() {
        return Ok(0);
    }
    let device = device_of(pools.dir())?;
    let _nothing_is_offered = pools.giving_back();
    // Of what a record keeps clones are made later, or pages are still to go to clones on other hosts. A fork that is
    // under way holds everything, and what it leaves is on record before it ends: so it is asked first.
    let needed = |pool| may_be_mapped(pool) || images.is_kept(pool) || goes_to_clones(machines, pool);
    unneeded::give_back(&processes, device, needed)
}

/// Whether the VMM of a machine whose guest waits for pages may still map some that nobody holds for it.
fn may_map_later(entry: &Entry) -> bool {
    let waits = |record: &VmRecord| record.memory_mode == MemoryMode::Private && record.paging.is_some();
    let waits = entry.record.as_ref().is_some_and(waits) && !entry.hold.is::<Arriving>();
    waits && entry.pager.as_ref().is_none_or(|Bringer(pager)| pager.ram().may_map_later())
}

/// Whether pages of this file may still have to go to a clone on another host.
fn goes_to_clones(machines: &Machines, file: FileId) -> bool {
    let table = machines.table();
    let mut images = table.values().filter_map(|entry| entry.record.as_ref()).filter(|record| record.image);
    images.any(|record| record.blocks.iter().any(|block| block.file().is_ok_and(|known| known == file)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sterna_engine::host::MigrationId;

    use super::*;
    use crate::machines::hold::Hold;
    use crate::machines::record::Paging;

    #[test]
    fn a_vmm_that_nobody_has_asked_since_its_daemon_died_may_still_map_pages() {
        let id = MigrationId(1);
        let paging = Paging { id, from: "a".into(), map: Path::new("/map").into(), held_back: false };
        let waits = VmRecord { memory_mode: MemoryMode::Private, paging: Some(paging), ..VmRecord::sample() };
        let may = |record: &VmRecord, hold| may_map_later(&Entry::new(Some(record.clone()), hold));
        assert!(may(&waits, Hold::Free) && may(&waits, Hold::Stopping));
        // Its session holds what it may be given.
        assert!(!may(&waits, Hold::busy(Arriving(id))));
        assert!(!may(&VmRecord { paging: None, ..waits.clone() }, Hold::Free));
    }
}
