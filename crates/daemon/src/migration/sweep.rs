//! Gives back what lies in the pools of gangs that have come here, and in what forks have made common, and what no
//! guest needs any more, again and again (`sterna_engine::memory::unneeded`).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use sterna_api::MemoryMode;
use sterna_engine::memory::unneeded;
use sterna_sys::file::{FileId, device_of};

use super::pools::Pools;
use crate::machines::images::Images;
use crate::machines::table::Machines;
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
        if record.memory_mode != MemoryMode::Private {
            continue;
        }
        if record.paging.is_some() {
            // Its agent may still map pages of a pool, asked by a daemon before this one.
            return Ok(0);
        }
        processes.push(record.process.pid);
    }
    if !pools.are_held() {
        images.forget_unused(&processes)?;
    }
    if processes.is_empty() {
        return Ok(0);
    }
    let device = device_of(pools.dir())?;
    let _nothing_is_offered = pools.giving_back();
    // Of what a record keeps clones are made later, or pages are still to go to clones on other hosts. A fork that is
    // under way holds everything, and what it leaves is on record before it ends: so it is asked first.
    let needed = |pool| pools.holds(pool) || images.is_kept(pool) || goes_to_clones(machines, pool);
    unneeded::give_back(&processes, device, needed)
}

/// Whether pages of this file may still have to go to a clone on another host.
fn goes_to_clones(machines: &Machines, file: FileId) -> bool {
    let table = machines.table();
    let mut images = table.values().filter_map(|entry| entry.record.as_ref()).filter(|record| record.image);
    images.any(|record| record.blocks.iter().any(|block| block.file().is_ok_and(|known| known == file)))
}
