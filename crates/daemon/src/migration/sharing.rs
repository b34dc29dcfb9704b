//! Which of the machines that leave together share pages on their way.
//!
//! Only machines of one trust group share, and only private memory can. Unless it is asked for, a migration of several
//! machines is as many gangs as there are trust groups among them, and whoever shares with nobody goes alone: an
//! operator who empties a host names all its machines. Where it is asked for, all must be one gang.

use std::collections::HashMap;
use std::sync::Arc;

use sterna_api::options::PreserveSharing;
use sterna_api::{Blame, Code, MemoryMode, MigrateOptions, Problem};
use sterna_engine::memory::common::{self, Together};
use sterna_engine::source::Gang;

use crate::machines::record::VmRecord;

/// A machine's gang, and which of its members it is.
pub type Membership = Option<(Arc<Gang>, u16)>;

/// The gang of each machine.
///
/// # Errors
/// It is asked for, and they cannot be one gang: each reason is named.
pub fn gangs(members: &[VmRecord], asked: Option<PreserveSharing>) -> Result<Vec<Membership>, Problem> {
    if asked == Some(PreserveSharing::Off) {
        return Ok(vec![None; members.len()]);
    }
    if asked == Some(PreserveSharing::On) {
        all_one(members)?;
    }
    let mut sizes: HashMap<&str, u16> = HashMap::new();
    for group in members.iter().filter_map(group_of) {
        *sizes.entry(group).or_default() += 1;
    }
    let gangs: HashMap<&str, Arc<Gang>> =
        sizes.into_iter().map(|(group, size)| (group, Gang::new(group, size, together(group, members)))).collect();
    let mut next: HashMap<&str, u16> = HashMap::new();
    let memberships = members.iter().map(|record| {
        let group = group_of(record)?;
        let index = next.entry(group).or_default();
        *index += 1;
        Some((Arc::clone(gangs.get(group)?), *index - 1))
    });
    Ok(memberships.collect())
}

/// The options of a machine with this membership: they say whether it shares pages.
#[must_use]
pub fn resolved(options: &MigrateOptions, membership: &Membership) -> MigrateOptions {
    let sharing = if membership.is_some() { PreserveSharing::On } else { PreserveSharing::Off };
    MigrateOptions { preserve_sharing: Some(sharing), ..options.clone() }
}

/// What the members of a gang have together.
fn together(group: &str, members: &[VmRecord]) -> Together {
    let guests: Vec<_> =
        members.iter().filter(|record| group_of(record) == Some(group)).map(VmRecord::private_memory).collect();
    common::together(&guests)
}

/// The trust group in which the machine can share pages.
fn group_of(record: &VmRecord) -> Option<&str> {
    record.trust_group.as_deref().filter(|_| record.memory_mode == MemoryMode::Private)
}

fn all_one(members: &[VmRecord]) -> Result<(), Problem> {
    let mut wrong = Vec::new();
    for VmRecord { name, memory_mode, trust_group, .. } in members {
        if *memory_mode != MemoryMode::Private {
            wrong.push(format!("'{name}' has its memory in a file (--memory-mode shared)"));
        } else if trust_group.is_none() {
            wrong.push(format!("'{name}' is in no trust group"));
        }
    }
    let mut groups: Vec<_> = members.iter().filter_map(|record| record.trust_group.as_deref()).collect();
    groups.sort_unstable();
    groups.dedup();
    if groups.len() > 1 {
        wrong.push(format!("they are of {} trust groups: {}", groups.len(), groups.join(", ")));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let message = format!("these machines cannot share pages: {}", wrong.join("; "));
    Err(Problem::new(Code::NoSharing, Blame::Request, message)
        .hint("without --preserve-sharing on, each trust group shares by itself, and the other machines do not"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, memory_mode: MemoryMode, group: Option<&str>) -> VmRecord {
        VmRecord { name: name.into(), memory_mode, trust_group: group.map(String::from), ..VmRecord::sample() }
    }

    fn members() -> [VmRecord; 5] {
        [
            record("a", MemoryMode::Private, Some("red")),
            record("b", MemoryMode::Private, Some("blue")),
            record("c", MemoryMode::Shared, None),
            record("d", MemoryMode::Private, Some("red")),
            record("e", MemoryMode::Private, None),
        ]
    }

    #[test]
    fn each_trust_group_is_a_gang_and_who_is_in_none_goes_alone() {
        let gangs = gangs(&members(), None).expect("gangs");
        let numbers: Vec<_> = gangs.iter().map(|member| member.as_ref().map(|(_, number)| *number)).collect();
        assert_eq!(numbers, [Some(0), Some(0), None, Some(1), None]);
        let gang = |at: usize| &gangs[at].as_ref().expect("a member").0;
        assert!(Arc::ptr_eq(gang(0), gang(3)) && !Arc::ptr_eq(gang(0), gang(1)));
        let shares = |member| resolved(&MigrateOptions::default(), member).preserve_sharing;
        assert_eq!(gangs.iter().map(shares).collect::<Vec<_>>(), {
            let (on, off) = (Some(PreserveSharing::On), Some(PreserveSharing::Off));
            [on, on, off, on, off]
        });
        let alone = super::gangs(&members(), Some(PreserveSharing::Off)).expect("nobody shares");
        assert!(alone.iter().all(Option::is_none));
    }

    #[test]
    fn where_all_are_to_share_each_reason_why_they_cannot_is_named() {
        let problem = gangs(&members(), Some(PreserveSharing::On)).expect_err("they cannot");
        assert_eq!((problem.code, problem.blame), (Code::NoSharing, Blame::Request));
        for reason in ["'c' has its memory in a file", "'e' is in no trust group", "of 2 trust groups: blue, red"] {
            assert!(problem.message.contains(reason), "{}", problem.message);
        }
        let red = [record("a", MemoryMode::Private, Some("red")), record("d", MemoryMode::Private, Some("red"))];
        assert!(gangs(&red, Some(PreserveSharing::On)).expect("one gang").iter().all(Option::is_some));
    }
}
