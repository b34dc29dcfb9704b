//! Checks before a machine comes here, so that it is refused early and with a reason.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sterna_api::problem::Whereabouts;
use sterna_api::units::show_size;
use sterna_api::{Blame, Code, Problem};
use sterna_protocol::layout::PAGE_BYTES;
use sterna_protocol::spec::VmSpec;

use crate::problems::check_name;
use crate::qemu::arguments::{self, Item, RAM_ID};
use crate::qemu::binary::{Binary, DEFAULT_NAME, show};
use crate::qemu::{cpu, files};

/// Memory that a machine needs beside its RAM: QEMU itself, page tables, buffers.
pub(super) const MARGIN_BYTES: u64 = 64 << 20;

/// Checks all that can be checked before QEMU is started, but for the room; yields the QEMU to start.
///
/// # Errors
/// A [`Problem`] that says what is missing on this host.
pub fn check(spec: &VmSpec, items: &[Item], preferred: Option<&Path>) -> Result<Binary, Problem> {
    check_name(&spec.name)?;
    check_ram(spec, items)?;
    check_balloon(spec)?;
    let binary = find_qemu(spec, preferred)?;
    check_qemu(spec, &binary)?;
    check_cpu(spec)?;
    check_files(spec, items)?;
    Ok(binary)
}

fn refuse(code: Code, blame: Blame, message: String) -> Problem {
    Problem::new(code, blame, message).guest(Whereabouts::Source)
}

fn check_balloon(spec: &VmSpec) -> Result<(), Problem> {
    let wrong =
        |why| refuse(Code::Balloon, Blame::Peer, format!("the balloon of '{}' cannot be handled: {why}", spec.name));
    spec.balloon.check(spec.memory_bytes).map_err(wrong)
}

fn check_ram(spec: &VmSpec, items: &[Item]) -> Result<(), Problem> {
    let name = &spec.name;
    if spec.private && !spec.managed_ram {
        return Err(refuse(
            Code::PrivateMemory,
            Blame::Request,
            format!("'{name}' has private memory that Sterna did not make: it cannot be moved"),
        ));
    }
    if spec.blocks.is_empty() {
        return Err(refuse(Code::RamLayout, Blame::Peer, format!("'{name}' has no RAM")));
    }
    for block in &spec.blocks {
        if block.page_bytes != PAGE_BYTES as u64 {
            return Err(refuse(
                Code::HugePages,
                Blame::Host,
                format!(
                    "RAM block '{}' is in pages of {}: this host offers pages of 4 KiB only",
                    block.id,
                    show_size(block.page_bytes)
                ),
            ));
        }
        let known = if spec.managed_ram { block.id == RAM_ID } else { arguments::names_ram_file(items, &block.id) };
        if !known {
            return Err(refuse(
                Code::HotpluggedMemory,
                Blame::Request,
                format!("RAM block '{}' was plugged in while '{name}' ran: its arguments do not make it", block.id),
            )
            .hint("unplug it, or start the machine with it in its arguments"));
        }
    }
    if spec.managed_ram && (spec.blocks.len() != 1 || spec.blocks[0].bytes != spec.memory_bytes) {
        return Err(refuse(
            Code::RamLayout,
            Blame::Peer,
            format!("the RAM blocks of '{name}' are not the RAM it was started with"),
        ));
    }
    if spec.managed_ram {
        arguments::check_for_run(items, false)?;
    }
    Ok(())
}

/// Finds the configured QEMU, or the one of the same path if it is root's alone, or the one of the same name on PATH.
/// The path comes from the peer, and root starts the program there to ask for its version: so no other user may have
/// been able to put it there.
fn find_qemu(spec: &VmSpec, preferred: Option<&Path>) -> Result<Binary, Problem> {
    if let Some(path) = preferred {
        return Binary::find(path);
    }
    let same = PathBuf::from(&spec.qemu_path);
    if same.is_absolute() && roots_alone(&same) {
        return Binary::find(&same);
    }
    Binary::find(Path::new(same.file_name().unwrap_or(DEFAULT_NAME.as_ref())))
}

/// Whether a program, and every directory on the way to it, can be changed by root only. (In a sticky directory, such
/// as `/tmp`, others cannot replace what is root's.)
fn roots_alone(path: &Path) -> bool {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    let alone = |part: &Path| {
        part.symlink_metadata().is_ok_and(|meta| {
            let sticky = meta.is_dir() && meta.mode() & STICKY != 0;
            meta.uid() == 0 && (meta.mode() & WRITABLE_BY_OTHERS == 0 || sticky)
        })
    };
    path.canonicalize().is_ok_and(|path| path.is_file() && path.ancestors().all(alone))
}

/// Checks the QEMU for the machine type. A versioned type is the same machine in every QEMU that offers it; another
/// type depends on its QEMU's version.
fn check_qemu(spec: &VmSpec, binary: &Binary) -> Result<(), Problem> {
    let path = binary.path.display();
    if !binary.offers(&spec.machine) {
        return Err(refuse(
            Code::MachineType,
            Blame::Host,
            format!("{path} (QEMU {}) does not offer the machine type '{}'", show(binary.version), spec.machine),
        )
        .hint("start the machine with a type both QEMUs offer, as '-machine pc-q35-7.2'"));
    }
    let (wanted, here) = (spec.qemu_version, binary.version);
    let versioned = spec.machine.contains('-');
    if !versioned && (here.0, here.1) < (wanted.0, wanted.1) {
        return Err(refuse(
            Code::QemuVersion,
            Blame::Host,
            format!(
                "{path} is QEMU {}, older than the source's {}, and machine type '{}' has no version",
                show(here),
                show(wanted),
                spec.machine
            ),
        )
        .hint("bring this host's QEMU to the source's version"));
    }
    Ok(())
}

fn check_cpu(spec: &VmSpec) -> Result<(), Problem> {
    let Some(wanted) = &spec.cpu else { return Ok(()) };
    let why = match cpu::describe() {
        Some(here) => cpu::lacks(wanted, &here),
        None => Some("the daemon cannot read what it offers".into()),
    };
    match why {
        None => Ok(()),
        Some(why) => Err(refuse(
            Code::CpuModel,
            Blame::Host,
            format!("this host's processor cannot stand in for the one '{}' was given: {why}", spec.name),
        )
        .hint("start the machine with a named -cpu model that both hosts offer")),
    }
}

fn check_files(spec: &VmSpec, items: &[Item]) -> Result<(), Problem> {
    match files::missing(&arguments::named(items, &spec.name)) {
        None => Ok(()),
        Some(file) => Err(refuse(
            Code::FileMissing,
            Blame::Host,
            format!("'{}' needs {} (-{}), which is not on this host", spec.name, file.path.display(), file.option),
        )
        .hint("disks must be on shared storage, kernels and firmware at the same path on both hosts")),
    }
}

/// Checks that there is room for what `who` needs, and a margin.
///
/// # Errors
/// A [`Problem`] where there is not.
pub fn check_room(who: &str, bytes: u64, room_bytes: u64) -> Result<(), Problem> {
    let needed = bytes.saturating_add(MARGIN_BYTES);
    if needed > room_bytes {
        return Err(refuse(
            Code::OutOfMemory,
            Blame::Host,
            format!("{who} needs {} now, this host has room for {}", show_size(needed), show_size(room_bytes)),
        )
        .hint("make room on this host, or choose another"));
    }
    Ok(())
}

#[cfg(test)]
#[path = "prechecks_tests.rs"]
pub(super) mod tests;
