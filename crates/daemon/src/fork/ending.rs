//! The end of a fork: what a machine's RAM has become, and which files go. A restarted daemon comes to it, too.

use std::io;
use std::ops::Range;

use sterna_api::{Blame, Code, MemoryMode, Problem};
use sterna_sys::file::FileId;
use sterna_sys::process::{descriptors_of, maps};

use super::source::{put_in_place, take_from_its_user};
use crate::machines::agent;
use crate::machines::backing::{Backing, OwnFile, is_private, is_shared};
use crate::machines::files::remove_each;
use crate::machines::images::Images;
use crate::machines::record::VmRecord;
use crate::problems::host;

/// The record of a machine that was being forked, as its RAM is now: private, or as before.
///
/// # Errors
/// A [`Problem`] where it cannot be told. Nothing may be done with the machine's RAM then.
pub fn as_it_is(forking: &VmRecord) -> Result<VmRecord, Problem> {
    let Some(private) = &forking.forking else { return Ok(forking.clone()) };
    let pid = forking.process.pid;
    let before = VmRecord { forking: None, ..forking.clone() };
    if before.memory_mode == MemoryMode::Private {
        return Ok(before);
    }
    // The kernel's word. What RAM was mapped as before may still be there, somewhere else.
    let maps = maps(pid).map_err(|error| host("cannot look at QEMU's memory", &error))?;
    let each = |is: &dyn Fn(FileId, Range<u64>) -> bool| {
        forking.blocks.iter().zip(private).all(|(former, block)| {
            let (Ok(file), Some(address)) = (former.file(), block.private) else { return false };
            is(file, address..address.saturating_add(block.bytes))
        })
    };
    if each(&|file, at| is_shared(&maps, &at, file)) {
        return Ok(before);
    }
    // Its file may have its name still.
    if each(&|file, at| is_private(&maps, &at, |behind| behind == file)) {
        return Ok(VmRecord { memory_mode: MemoryMode::Private, blocks: private.clone(), ..before });
    }
    let message = format!("QEMU's mappings of the RAM of '{}' are neither what they were nor private", forking.name);
    Err(Problem::new(Code::AgentRam, Blame::Qemu, message))
}

/// Brings a machine to an end of its fork that an earlier daemon began: its guest can be let run then.
///
/// # Errors
/// As [`as_it_is`]; or QEMU keeps the RAM file that its clones were to have.
pub fn recover(forking: &VmRecord) -> Result<VmRecord, Problem> {
    let now = as_it_is(forking)?;
    if now.memory_mode == forking.memory_mode {
        return Ok(now);
    }
    let reached = agent::connect(&now.agent, now.process.pid);
    let mut agent = reached.map_err(|error| error.problem())?;
    for (former, block) in forking.blocks.iter().zip(&now.blocks) {
        let numbers = former.file().and_then(|file| Ok(descriptors_of(now.process.pid, file)?));
        // While it is there; with QEMU's descriptors it goes.
        if let Ok(file) = former.open(now.process.pid) {
            take_from_its_user(&file).map_err(|error| host("cannot take the former RAM file from its user", &error))?;
        }
        let open = numbers.and_then(|numbers| Ok((numbers, block.open_here()?)));
        let (numbers, stand_in) = open.map_err(|error| host("cannot look at the machine's RAM", &error))?;
        let put = put_in_place(&mut agent, &numbers, &stand_in);
        put.map_err(|error| host("cannot take the former RAM file from QEMU", &error))?;
    }
    Ok(now)
}

/// Removes the names of the files that were to hold the RAM of a machine after its fork and do not `now`. Those that
/// held it before, and do not now, are its image's from now on.
pub fn forget_others(images: &Images, forking: &VmRecord, now: &VmRecord) {
    let is_other = |backing: &&Backing| now.backings().all(|kept| kept.file() != backing.file());
    let own = |backing: &Backing| OwnFile { path: backing.path.clone(), file: Some(backing.file()) };
    for former in forking.backings().filter(|backing| backing.owned).filter(is_other).map(own) {
        match former.is_itself().and_then(|()| images.rename(&former.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %former.path.display(), %error, "what was a machine's RAM keeps its name");
            }
            _ => {}
        }
    }
    let private = forking.forking.iter().flatten().flat_map(|block| &block.backings);
    remove_each(&private.filter(is_other).map(own).collect::<Vec<_>>());
}
