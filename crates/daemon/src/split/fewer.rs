//! A memory host is gone for good, and no spare takes its place: the other ones go on without it, with as much
//! redundancy as they can give. Those that are left have parity of fewer; or each page is at two of them; or at one.

use std::sync::Arc;

use sterna_api::split::{MemoryHost, Redundancy};
use sterna_api::{Code, Problem, SplitReport, SplitRequest};
use sterna_engine::monitor::Monitor;

use super::Splits;
use crate::machines::borrowed::{Borrowed, Place};
use crate::machines::split::SplitRecord;

/// What the memory hosts that are left may be asked for, the best first, where these do not answer.
fn ways(borrowed: &Borrowed, silent: &[String]) -> Vec<(Redundancy, Vec<MemoryHost>)> {
    let (gone, left): (Vec<_>, Vec<_>) = borrowed.lending().into_iter().partition(|host| silent.contains(&host.peer));
    let lent = borrowed.lent().filter(|(number, _)| !borrowed.leaving.contains(number));
    let pages: u64 = lent.map(|(_, place)| place.bytes).sum();
    if gone.len() != 1 || borrowed.redundancy() != Redundancy::Parity {
        return Vec::new();
    }
    let all = [Redundancy::Parity, Redundancy::Mirrored, Redundancy::None];
    all.into_iter().filter_map(|redundancy| Some((redundancy, lending(&left, redundancy, pages)?))).collect()
}

/// What each of these memory hosts is to lend for all to have room for so many bytes of pages: as much as there was
/// before. `None` where they cannot have this redundancy.
fn lending(left: &[MemoryHost], redundancy: Redundancy, pages: u64) -> Option<Vec<MemoryHost>> {
    let bytes = Place::bytes_of_each(left.len(), redundancy, pages);
    let asked: Vec<_> = left.iter().map(|host| MemoryHost { bytes, peer: host.peer.clone() }).collect();
    Place::of(&asked, redundancy).ok().map(|_| asked)
}

/// Has a machine go on without a memory host that does not answer. How much redundancy it has then; `None` where the
/// others cannot lend what that takes. Blocks until they have all of it.
///
/// # Errors
/// A [`Problem`]: somebody else does something with the machine.
pub(super) fn go_on_without(
    splits: &Splits,
    name: &str,
    split: &SplitRecord,
    silent: &[String],
) -> Result<Option<Redundancy>, Problem> {
    for (redundancy, memory) in ways(&split.borrowed, silent) {
        let request = SplitRequest {
            here_bytes: split.here_bytes,
            memory,
            redundancy: Some(redundancy),
            unused: Some(split.unused),
            ..SplitRequest::default()
        };
        match splits.split(name, &request, &Arc::new(Monitor::new(name))) {
            Ok(SplitReport { error: None, .. }) => return Ok(Some(redundancy)),
            Ok(SplitReport { error: Some(problem), .. }) => return Err(problem),
            Err(problem) if problem.code == Code::LoanRefused => {
                tracing::info!(vm = name, ?redundancy, "without it: {}", problem.with_causes());
            }
            Err(problem) => return Err(problem),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use sterna_protocol::store::most_bytes;

    use super::*;

    fn borrowed(hosts: &[&str], chunks: u64) -> Borrowed {
        let memory: Vec<_> =
            hosts.iter().map(|peer| MemoryHost { peer: (*peer).into(), bytes: chunks * most_bytes(1) }).collect();
        let mut borrowed = Borrowed::default();
        borrowed.welcome_all(&Place::of(&memory, Redundancy::Parity).unwrap()).unwrap();
        borrowed.leaving.clear();
        borrowed
    }

    #[test]
    fn those_that_are_left_have_parity_of_fewer_or_copies_or_none_with_room_for_as_much() {
        let (four, three) = (borrowed(&["b:1", "c:1", "d:1", "e:1"], 12), borrowed(&["b:1", "c:1", "d:1"], 12));
        let of = |borrowed: &Borrowed, silent: &[&str]| -> Vec<(Redundancy, u64)> {
            let silent: Vec<_> = silent.iter().map(|peer| (*peer).to_owned()).collect();
            let ways = ways(borrowed, &silent);
            assert!(ways.iter().all(|(_, memory)| memory.iter().all(|host| !silent.contains(&host.peer))));
            ways.into_iter().map(|(redundancy, memory)| (redundancy, memory[0].bytes / most_bytes(1))).collect()
        };
        // Four have 9 chunks of pages each, 36; three of 18 have 12 each. Three are no pairs.
        assert_eq!(of(&four, &["c:1"]), [(Redundancy::Parity, 18), (Redundancy::None, 12)]);
        // Three have 8 each, 24: two have all of them each, or half.
        assert_eq!(of(&three, &["d:1"]), [(Redundancy::Mirrored, 24), (Redundancy::None, 12)]);
        assert!(of(&three, &[]).is_empty() && of(&three, &["b:1", "c:1"]).is_empty());
        let plain = Place::of(&[MemoryHost { peer: "b:1".into(), bytes: 4 }], Redundancy::None).unwrap();
        assert!(of(&Borrowed { hosts: plain, ..Borrowed::default() }, &["b:1"]).is_empty());
    }
}
