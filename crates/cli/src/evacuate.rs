//! `evacuate`: machines leave this host as fast as its uplink allows, a part of them to memory hosts.

use std::path::Path;
use std::process::ExitCode;

use sterna_api::split::MemoryHost;
use sterna_api::{SplitReport, SplitRequest, Status, Vm};

use crate::arguments::Evacuate;
use crate::client::{Client, escape};
use crate::failure::{CANCELLED, FAILED, Failure, code_of, describe};
use crate::machines::write_json;
use crate::split;

/// What leaves lies in chunks of this size, bytes; a memory host has a note beside each.
const CHUNK: u64 = 1 << 20;
const NOTE: u64 = 4096;
/// The least of a machine that goes with its guest: an eighth, so that it does not stand still.
const LEAST: u64 = 8;

/// Has machines leave one after the other: each of them can have all of the uplink. It ends at the first that stays.
///
/// # Errors
/// The daemon's problem.
pub async fn evacuate(client: &Client, wanted: Evacuate) -> Result<ExitCode, Failure> {
    let mut machines: Vec<Vm> = Vec::new();
    for name in &wanted.names {
        machines.push(client.get(&format!("/v1/vms/{}", escape(name))).await?);
    }
    let whole = machines.iter().filter(|vm| vm.split.is_none()).map(|vm| vm.memory_bytes).sum();
    let (to_stdout, mut reports, mut code) = (wanted.json.as_deref() == Some(Path::new("-")), Vec::new(), 0);
    for vm in &machines {
        let split = vm.split.as_ref().map(|split| split.here_bytes);
        let request = request((vm.memory_bytes, split), whole, &wanted);
        let report: SplitReport = split::leave(client, &vm.name, &request).await?;
        let text = split::describe(&report, &request);
        if to_stdout {
            eprint!("{text}")
        } else {
            print!("{text}")
        }
        code = match (report.status, &report.migration) {
            (Status::Completed, _) => 0,
            (_, Some(moved)) => code_of(moved),
            (Status::Cancelled, None) => CANCELLED,
            (Status::Failed, None) => FAILED,
        };
        if let Some(problem) = &report.error {
            eprint!("{}", describe(&vm.name, problem));
        }
        reports.push(report);
        if code != 0 {
            break;
        }
    }
    if let Some(path) = &wanted.json {
        write_json(path, &reports)?;
    }
    Ok(ExitCode::from(code))
}

/// What is asked for a machine of so much memory: one that is `split` already, with so much of it here, goes as it is,
/// others share the memory hosts by their size; `whole` is the memory of all of these. All in bytes.
fn request((memory_bytes, split): (u64, Option<u64>), whole: u64, wanted: &Evacuate) -> SplitRequest {
    let (main, merge) = (Some(wanted.to.clone()), true);
    if let Some(here_bytes) = split {
        return SplitRequest { here_bytes, main, merge, ..SplitRequest::default() };
    }
    let part = |host: &MemoryHost| {
        let bytes = u128::from(host.bytes) * u128::from(memory_bytes) / u128::from(whole.max(1));
        MemoryHost { peer: host.peer.clone(), bytes: bytes as u64 / (CHUNK + NOTE) * (CHUNK + NOTE) }
    };
    let memory: Vec<MemoryHost> = wanted.memory.iter().map(part).collect();
    let there: u64 = memory.iter().map(|host| host.bytes / (CHUNK + NOTE) * CHUNK).sum();
    let here_bytes = memory_bytes.saturating_sub(there).max(memory_bytes / LEAST);
    SplitRequest { here_bytes: here_bytes.next_multiple_of(CHUNK), memory, main, merge, ..SplitRequest::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_share_memory_hosts_by_their_size_and_as_much_leaves_as_those_take() {
        let lends = |peer: &str, mib: u64| MemoryHost { peer: peer.into(), bytes: mib * (CHUNK + NOTE) };
        let memory = vec![lends("b:1", 900), lends("c:1", 300)];
        let wanted = Evacuate { names: vec![], to: "d:1".into(), memory, json: None };
        let small = request((512 * CHUNK, None), 1536 * CHUNK, &wanted);
        assert_eq!(small.memory, [lends("b:1", 300), lends("c:1", 100)]);
        assert_eq!((small.here_bytes, small.main.as_deref(), small.merge), (112 * CHUNK, Some("d:1"), true));
        // As much as is lent, and no more than seven eighths.
        let alone = request((512 * CHUNK, None), 512 * CHUNK, &wanted);
        assert_eq!(alone.here_bytes, 64 * CHUNK);
        let split = request((512 * CHUNK, Some(7)), 0, &wanted);
        assert!(split.here_bytes == 7 && split.memory.is_empty() && split.main.is_some());
    }
}
