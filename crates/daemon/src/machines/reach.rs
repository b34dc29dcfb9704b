//! What it takes to move a machine, or to take memory from it: its QEMU and its agent answer, its RAM is open, and all
//! that writes the RAM can be watched.

use std::sync::Arc;

use sterna_api::{Blame, Code, Problem};
use sterna_engine::faults::GuestFaults;
use sterna_engine::inside::InsideQemu;
use sterna_engine::memory::BlockFile;
use sterna_engine::paging::Pager;
use sterna_engine::source::track::WriteProtect;
use sterna_engine::vmm::qemu::Inspection;

use super::control::{self, Control};
use super::record::VmRecord;
use crate::problems::host;
use crate::qemu::arguments::{Item, named, parse};
use crate::qemu::disks::is_named;

/// Whether all that writes the guest's RAM does so through QEMU's mapping, without which it cannot do `what`.
///
/// # Errors
/// A [`Problem`] that names who does not.
pub fn check_writers(name: &str, what: &str, about: &Inspection) -> Result<(), Problem> {
    if about.foreign_writers.is_empty() {
        return Ok(());
    }
    let who = about.foreign_writers.join(", ");
    let why = format!("'{name}' cannot {what}: others than QEMU write its RAM, unseen ({who})");
    Err(Problem::new(Code::ForeignWriters, Blame::Request, why)
        .hint("use virtio devices that QEMU or the kernel's vhost serve"))
}

/// Whether another QEMU can have a machine's guest at all, whatever the destination, without which it cannot do `what`.
///
/// # Errors
/// A [`Problem`] that says what is in the way.
pub fn check_movable(name: &str, what: &str, about: &Inspection) -> Result<(), Problem> {
    let refuse = |code, why: String| Err(Problem::new(code, Blame::Request, format!("'{name}' cannot {what}: {why}")));
    check_writers(name, what, about)?;
    if !about.blockers.is_empty() {
        return refuse(Code::QemuBlocks, about.blockers.join("; "))
            .map_err(|problem| problem.hint("QEMU itself refuses: take the device away that it names"));
    }
    let immovable = about.immovable_ram();
    if !immovable.is_empty() {
        return refuse(Code::ImmovableRam, format!("RAM that is no shared named file: {}", immovable.join(", ")));
    }
    Ok(())
}

/// Whether another QEMU with these arguments has the machine's disks. Its user may have told its QEMU by other ways
/// than Sterna's to go on with other images: with an overlay (`blockdev-snapshot`), or without (`block-commit`).
///
/// # Errors
/// A [`Problem`] that names the image that they do not have.
pub fn check_images(name: &str, items: &[Item], about: &Inspection) -> Result<(), Problem> {
    let items = named(items, name);
    // What a file of options says is not known.
    if items.iter().any(|item| item.option == "readconfig") {
        return Ok(());
    }
    let Some(image) = about.images.iter().find(|image| !is_named(&items, image)) else { return Ok(()) };
    let message = format!(
        "'{name}' has a disk on {}, which its arguments do not name: another QEMU would open something else",
        image.display()
    );
    Err(Problem::new(Code::DiskImages, Blame::Request, message).hint(format!(
        "give it its former image back at its monitor, or name this one: 'sterna replace {name} -- ARGUMENTS'"
    )))
}

/// The same of the arguments on record.
///
/// # Errors
/// As [`check_images`].
pub fn check_disks(record: &VmRecord, about: &Inspection) -> Result<(), Problem> {
    check_images(&record.name, &parse(&record.arguments), about)
}

/// A machine that can be moved: its QEMU and its RAM, and what watches its writes.
pub struct Movable {
    /// The connection to its QEMU.
    pub control: Control,
    /// What it is made of.
    pub about: Inspection,
    /// Its RAM.
    pub blocks: Vec<BlockFile>,
    /// What watches its writes.
    pub tracker: WriteProtect,
}

/// Checks that a machine can be moved at all, as [`movable`] does, and nothing else.
///
/// # Errors
/// As [`movable`].
pub fn check(record: &VmRecord) -> Result<(), Problem> {
    record.check_settled()?;
    let about = Control::connect(&record.qmp)?.inspect()?;
    check_movable(&record.name, "be moved", &about)?;
    check_disks(record, &about)?;
    record.check_template()
}

/// Reaches a machine's QEMU and agent, and checks that it can be moved at all. Of one that is split a `pager` has the
/// agent, and the RAM.
///
/// # Errors
/// A [`Problem`]: what does not answer, or why it cannot be moved.
pub fn movable(record: &VmRecord, pager: Option<&Arc<Pager>>) -> Result<Movable, Problem> {
    record.check_settled()?;
    let mut control = Control::connect(&record.qmp)?;
    let about = control.inspect()?;
    check_movable(&record.name, "be moved", &about)?;
    check_disks(record, &about)?;
    // What damages a guest must not travel as if it were the guest's.
    record.check_template().inspect_err(|problem| tracing::error!(vm = %record.name, "{}", problem.message))?;
    let (faults, blocks) = accesses(record, pager)?;
    let tracker = WriteProtect::of(record.process.pid, faults).map_err(|error| error.problem())?;
    Ok(Movable { control, about, blocks, tracker })
}

/// What knows of accesses to a machine's RAM, and the RAM, with addresses in QEMU. Of one that is split a `pager` has
/// the agent already.
///
/// # Errors
/// A [`Problem`]: its agent does not answer, or its RAM cannot be opened.
pub fn accesses(record: &VmRecord, pager: Option<&Arc<Pager>>) -> Result<(Arc<GuestFaults>, Vec<BlockFile>), Problem> {
    let (faults, addresses) = match pager {
        Some(pager) => (Arc::clone(pager.guest_faults()), pager.ram().spans().iter().map(|span| span.start).collect()),
        None => {
            let (agent, addresses) = control::agent_and_addresses(&record.agent, record.process.pid, &record.blocks)?;
            (GuestFaults::of(InsideQemu::new(agent)), addresses)
        }
    };
    let blocks = record.block_files(&addresses).map_err(|error| host("cannot open the machine's RAM", &error))?;
    Ok((faults, blocks))
}
