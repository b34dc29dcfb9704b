//! `evacuate`: machines leave this host as fast as its uplink allows, a part of them to memory hosts.

use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use sterna_api::split::MemoryHost;
use sterna_api::{MigrateOptions, MigrateRequest, Problem, Report, SplitReport, SplitRequest, Status, Vm};

use crate::arguments::Evacuate;
use crate::client::{Client, escape};
use crate::failure::{CANCELLED, FAILED, Failure, LOST, code_of, describe, worst};
use crate::machines::write_json;
use crate::{migrate, split, table};

/// What leaves lies in chunks of this size, bytes; a memory host has a note beside each.
const CHUNK: u64 = 1 << 20;
const NOTE: u64 = 4096;
/// The least that the daemon leaves of a machine, bytes.
const LEAST_BYTES: u64 = 16 * CHUNK;
/// The least of a machine that goes with its guest, which travels at the new host's speed: a sixteenth.
const LEAST: u64 = 16;

/// Has machines leave: what goes to memory hosts goes first, machine by machine, as each can have all of the uplink;
/// then all guests move, and come together there. Where a machine cannot be split nothing moves; those that do not move
/// are as they were before.
///
/// # Errors
/// The daemon's problem.
pub async fn evacuate(client: &Client, wanted: Evacuate) -> Result<ExitCode, Failure> {
    let mut machines: Vec<Vm> = Vec::new();
    for name in &wanted.names {
        machines.push(client.get(&format!("/v1/vms/{}", escape(name))).await?);
    }
    let json = wanted.json.as_deref();
    let say = |text: &str| if json == Some(Path::new("-")) { eprint!("{text}") } else { print!("{text}") };
    let whole = || machines.iter().filter(|vm| vm.split.is_none());
    let sum = whole().map(|vm| vm.memory_bytes).sum();
    let mut splits: Vec<SplitReport> = Vec::new();
    for vm in whole() {
        let report = split::leave(client, &vm.name, &request(vm.memory_bytes, sum, &wanted.memory)).await;
        let report = report.unwrap_or_else(|failure| failed(vm, *failure.problem));
        say(&split::describe(&report));
        if let Some(problem) = &report.error {
            eprint!("{}", describe(&vm.name, problem));
        }
        splits.push(report);
        if !splits.iter().all(is_split) {
            break;
        }
    }
    let moved = if splits.iter().all(is_split) {
        let options = MigrateOptions::default();
        let request = MigrateRequest { vms: wanted.names, family: None, to: wanted.to, options, merge: true };
        migrate::to_its_end(client, &request).await.map(|moved| moved.migrations)
    } else {
        Ok(Vec::new())
    };
    let reports: &[Report] = moved.as_deref().unwrap_or_default();
    for report in reports {
        say(&table::show(report));
        if let Some(failure) = table::failure(report) {
            eprint!("{failure}");
        }
    }
    let has_left = |split: &SplitReport| reports.iter().any(|report| report.vm == split.vm && left(report));
    put_back(client, splits.iter().filter(|split| is_split(split) && !has_left(split))).await;
    if let Some(path) = json {
        write_json(path, &json!({ "split": splits, "migrations": reports }))?;
    }
    let of_split = |split: &SplitReport| match split.status {
        Status::Completed => 0,
        Status::Cancelled => CANCELLED,
        _ => FAILED,
    };
    let codes: Vec<u8> = splits.iter().map(of_split).chain(reports.iter().map(code_of)).collect();
    moved.map(|_| ExitCode::from(worst(codes)))
}

/// Whether a machine's part is at its memory hosts.
fn is_split(split: &SplitReport) -> bool {
    split.status == Status::Completed
}

/// Whether a machine is not this host's any more, or nobody knows.
fn left(report: &Report) -> bool {
    report.status == Status::Completed || code_of(report) == LOST
}

fn failed(vm: &Vm, problem: Problem) -> SplitReport {
    SplitReport { vm: vm.name.clone(), status: Status::Failed, error: Some(problem), ..SplitReport::default() }
}

/// Brings machines together here that stay.
async fn put_back(client: &Client, splits: impl Iterator<Item = &SplitReport>) {
    for split in splits {
        eprintln!("{}: it stays, and comes together here", split.vm);
        let merged = client.post::<SplitReport>(&format!("/v1/vms/{}/merge", escape(&split.vm)), &()).await;
        if let Err(failure) = merged {
            eprint!("{}", describe(&split.vm, &failure.problem));
        }
    }
}

/// What is asked for a machine of so much memory: machines share the memory hosts by their size; `whole` is the memory
/// of all of these. All in bytes.
fn request(memory_bytes: u64, whole: u64, memory: &[MemoryHost]) -> SplitRequest {
    let part = |host: &MemoryHost| {
        let bytes = u128::from(host.bytes) * u128::from(memory_bytes) / u128::from(whole.max(1));
        MemoryHost { peer: host.peer.clone(), bytes: bytes as u64 / (CHUNK + NOTE) * (CHUNK + NOTE) }
    };
    let memory: Vec<MemoryHost> = memory.iter().map(part).collect();
    let there: u64 = memory.iter().map(|host| host.bytes / (CHUNK + NOTE) * CHUNK).sum();
    let here_bytes = memory_bytes.saturating_sub(there).max(memory_bytes / LEAST).max(LEAST_BYTES);
    SplitRequest { here_bytes: here_bytes.next_multiple_of(CHUNK), memory, ..SplitRequest::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_share_memory_hosts_by_their_size_and_as_much_leaves_as_those_take() {
        let lends = |peer: &str, mib: u64| MemoryHost { peer: peer.into(), bytes: mib * (CHUNK + NOTE) };
        let memory = [lends("b:1", 900), lends("c:1", 300)];
        let small = request(512 * CHUNK, 1536 * CHUNK, &memory);
        assert_eq!((small.memory, small.here_bytes), (vec![lends("b:1", 300), lends("c:1", 100)], 112 * CHUNK));
        // As much as is lent, but for a sixteenth, and what QEMU itself needs.
        assert_eq!(request(512 * CHUNK, 512 * CHUNK, &memory).here_bytes, 32 * CHUNK);
        assert_eq!(request(64 * CHUNK, 64 * CHUNK, &memory).here_bytes, 16 * CHUNK);
    }
}
