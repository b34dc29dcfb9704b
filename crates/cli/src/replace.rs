//! `replace`.

use std::path::Path;
use std::process::ExitCode;

use sterna_api::problem::Whereabouts;
use sterna_api::units::show_size;
use sterna_api::{Code, ReplaceRequest, Replaced, Vm, VmState};

use crate::arguments::Replace;
use crate::client::{Client, escape};
use crate::failure::{Failure, LOST};
use crate::machines::{binary_path, write_json};

/// Has another QEMU take machines over, one after the other.
///
/// # Errors
/// The daemon's problem with the first machine that failed; those before it are in their new QEMU.
pub async fn replace(client: &Client, wanted: Replace) -> Result<ExitCode, Failure> {
    let names: Vec<String> = match wanted.name {
        Some(name) => vec![name],
        None => {
            let all = client.get::<Vec<Vm>>("/v1/vms").await?.into_iter();
            // What is held ready for a template is made anew there.
            let (leave, stay): (Vec<Vm>, Vec<Vm>) = all.filter(|vm| vm.held_for.is_none()).partition(leaves);
            leave.iter().for_each(|vm| eprintln!("sterna: '{}' is left out: it leaves this host", vm.name));
            stay.into_iter().map(|vm| vm.name).collect()
        }
    };
    let request = ReplaceRequest {
        qemu: wanted.qemu.map(binary_path),
        arguments: (!wanted.arguments.is_empty()).then_some(wanted.arguments),
        verify: wanted.verify,
    };
    // The report alone stands on standard output where it is asked for there.
    let quiet = wanted.json.as_deref() == Some(Path::new("-"));
    let mut reports = Vec::new();
    let mut failed = None;
    for (index, name) in names.iter().enumerate() {
        let answer = client.post(&format!("/v1/vms/{}/replace", escape(name)), &request).await;
        let replaced: Replaced = match answer {
            Ok(replaced) => replaced,
            Err(failure) if wanted.all && failure.problem.code == Code::UnknownVm => {
                eprintln!("sterna: '{name}' is left out: it has ended, or has left this host");
                continue;
            }
            Err(failure) => {
                let failure = failure.with_whereabouts();
                if wanted.all || failure.code == LOST {
                    eprintln!("sterna: the QEMU of '{name}' is not replaced: the guest {}", whereabouts(&failure));
                }
                let left = names[index + 1..].join(", ");
                if !left.is_empty() {
                    eprintln!("sterna: not begun: {left}");
                }
                failed = Some(failure);
                break;
            }
        };
        if !quiet {
            tell(&replaced);
        }
        reports.push(replaced);
    }
    if let Some(path) = &wanted.json {
        match reports.as_slice() {
            [only] if !wanted.all => write_json(path, only)?,
            reports if wanted.all => write_json(path, &reports)?,
            _ => {}
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Whether a machine's QEMU here is of no use for long: it is being moved away, or is only what a clone elsewhere
/// needs.
fn leaves(vm: &Vm) -> bool {
    matches!(vm.state, VmState::MigratingOut | VmState::WaitingForPeer)
}

/// Where the guest of a machine is whose QEMU was not replaced, for people.
fn whereabouts(failure: &Failure) -> &'static str {
    match failure.problem.guest {
        Whereabouts::Gone => "is GONE",
        Whereabouts::Paused => "is PAUSED",
        Whereabouts::Source | Whereabouts::Destination => "is as it was",
    }
}

fn tell(replaced: &Replaced) {
    let Replaced { vm, from_qemu, to_qemu, pid, .. } = replaced;
    println!(
        "{vm}: QEMU {to_qemu} (process {pid}) in place of {from_qemu}, paused {:.1} ms, {:.0} ms in all{}{}",
        replaced.pause_ms,
        replaced.ms,
        match replaced.copied_bytes {
            0 => String::new(),
            bytes => format!(", {} copied", show_size(bytes)),
        },
        if replaced.verify.checked { ", its memory compared: the same" } else { "" }
    );
    for change in &replaced.changed_arguments {
        println!("{vm}: {change}");
    }
}
