//! Machines a part of whose memory is at memory hosts: they move, and that part stays where it is.
//!
//! The machine's record here says that it is split until it is forgotten, and the one at its destination from its
//! beginning: with the map of missing pages, which is valid only once the source has named them in the pause. Who owes
//! the memory hosts what they have lent is whoever the guest belongs to: a machine that is forgotten on its way owes
//! nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_api::options::SkipFree;
use sterna_api::{Blame, Code, MigrateOptions, Mode, Problem, Unused};
use sterna_engine::paging::whereabouts::Holder;
use sterna_engine::split::loans::borrow;
use sterna_engine::split::onward::Handed;
use sterna_engine::split::{Lender, Split, SplitError};
use sterna_engine::store::client::StoreError;
use sterna_engine::transport::credentials::Credentials;
use sterna_protocol::layout::{CHUNK_BYTES, PAGE_BYTES};
use sterna_protocol::spec::{SplitParity, SplitSpec, VmSpec};
use sterna_protocol::store::{Claim, Refusal, most_bytes};

use super::address::check_address;
use crate::machines::borrowed::{Borrowed, parity_of};
use crate::machines::record::VmRecord;
use crate::machines::split::{EpochFile, SplitRecord};
use crate::machines::table::Machines;
use crate::problems::{host, invalid};

/// Whether a split machine can be moved to this address.
///
/// # Errors
/// A [`Problem`]: the destination lends the machine memory, or some of it is coming back.
pub fn check(record: &VmRecord, to: &str) -> Result<(), Problem> {
    let Some(split) = &record.split else { return Ok(()) };
    let refuse = |why: &str| {
        let message = format!("'{}' cannot be moved so: a part of its memory is at memory hosts, {why}", record.name);
        Err(Problem::new(Code::Split, Blame::Request, message))
    };
    if split.borrowed.lending().iter().any(|host| host.peer == to) {
        return refuse(&format!("and {to} is one of these")).map_err(|problem| {
            problem.hint(format!("'sterna split {}' with the others alone has it emptied first", record.name))
        });
    }
    if split.merging || !split.borrowed.leaving.is_empty() {
        return refuse("and some of that is coming back").map_err(|problem| {
            problem.hint(format!("wait until it is here: 'sterna show {}' says how much is left", record.name))
        });
    }
    Ok(())
}

/// The options for a machine: of one that is split, what tells which memory is free may be away itself.
#[must_use]
pub fn options(record: &VmRecord, options: &MigrateOptions) -> MigrateOptions {
    match &record.split {
        None => options.clone(),
        Some(_) => MigrateOptions { skip_free: SkipFree::Off, ..options.clone() },
    }
}

/// The part of a machine that is at memory hosts, and what its destination is told of it: with `merge`, that it is to
/// bring it together. `None` where the machine is not split.
///
/// # Errors
/// A [`Problem`]: its memory hosts have not answered yet, or its epoch cannot be read.
pub fn leaving(
    machines: &Machines,
    record: &VmRecord,
    merge: bool,
) -> Result<Option<(Arc<Split>, SplitSpec)>, Problem> {
    let Some((split, engine)) = record.split.as_ref().zip(machines.split_of(record)?) else { return Ok(None) };
    let epochs = EpochFile::of(&machines.dir(&record.name)).with_next_owners();
    let epochs = epochs.map_err(|error| host("cannot read the epoch of the guest's owner", &error))?;
    Ok(Some((engine, split.borrowed.spec(split.room(), epochs, merge))))
}

/// How much memory a split machine will have where it goes, bytes. What is here of it comes before it may leave again,
/// except in post-copy, where it comes as there is room.
#[must_use]
pub fn needed_bytes(record: &VmRecord, split: &Split, merge: bool, mode: Mode) -> u64 {
    match (&record.split, merge) {
        (Some(split), false) if mode == Mode::Postcopy => split.here_bytes,
        (Some(split), false) => split.here_bytes.max(record.content_bytes()),
        _ => record.content_bytes().saturating_add(split.pager().missing().saturating_mul(PAGE_BYTES as u64)),
    }
}

/// Checks what a source says of a machine's memory hosts, and that this host, which is called `listen`, reaches them.
///
/// # Errors
/// A [`Problem`] that names the memory host, and what is wrong.
pub fn check_coming(
    spec: &VmSpec,
    split: &SplitSpec,
    listen: Option<&String>,
    credentials: Option<&Arc<Credentials>>,
) -> Result<(), Problem> {
    let chunks: u64 = spec.blocks.iter().map(|block| block.bytes.div_ceil(CHUNK_BYTES as u64)).sum();
    let sane = u64::from(split.chunks) == chunks
        && split.hosts.len() <= Holder::MAX_HOSTS
        && split.hosts.iter().all(|host| host.bytes >= most_bytes(1))
        && split.here_bytes < spec.memory_bytes
        && split.parity.is_none_or(|parity| lies(parity, split));
    if spec.private || !sane {
        return Err(invalid(format!("what is said of the memory hosts of '{}' cannot be", spec.name)));
    }
    let borrowed = Borrowed::from_spec(split);
    for place in borrowed.lent().flat_map(|(_, place)| place.members()) {
        check_address(&place.peer)?;
        if listen == Some(&place.peer) {
            let message =
                format!("this host lends memory to '{}', and cannot do that for a guest of its own", spec.name);
            return Err(Problem::new(Code::Split, Blame::Request, message)
                .hint(format!("at its source: 'sterna split {}' with its other memory hosts alone", spec.name)));
        }
    }
    let claim = borrowed.claim(split.epoch);
    // By parity one of all may be away.
    let mut may_be_away = usize::from(split.parity.is_some());
    for lender in borrowed.lenders(credentials).into_iter().filter(|lender| !lender.leaving) {
        // Of two that have the same pages one will do.
        let reached: Vec<_> = lender.members().iter().map(|member| reach(member, claim, split.chunks)).collect();
        if reached.iter().all(Result::is_err) {
            match may_be_away.checked_sub(1) {
                Some(left) => may_be_away = left,
                None => reached.into_iter().collect::<Result<(), _>>()?,
            }
        }
    }
    Ok(())
}

/// Whether parity can lie so over these memory hosts: each chunk of a stripe is at another one, and so is its parity.
fn lies(parity: SplitParity, split: &SplitSpec) -> bool {
    let parity = parity_of(parity);
    let over: Vec<_> = parity.numbers().collect();
    parity.fits(split.hosts.len())
        && parity.bytes >= most_bytes(1)
        && split.hosts.iter().enumerate().all(|(number, host)| host.gone != over.contains(&number))
        && over.iter().all(|number| split.hosts[*number].mirror.is_none())
}

/// Whether a memory host answers this host as it does the machine's owner.
fn reach(lender: &Lender, claim: Claim, chunks: u32) -> Result<(), Problem> {
    match borrow(lender, claim, chunks) {
        Ok(()) => Ok(()),
        // Its owner has raised its epoch meanwhile.
        Err(SplitError::Host { source, .. }) if matches!(*source, StoreError::Refused(Refusal::Fenced { .. })) => {
            Ok(())
        }
        Err(error) => {
            let problem = error.problem();
            let message = format!("this host cannot use the memory of {}: {}", lender.peer, problem.message);
            Err(Problem { message, ..problem })
        }
    }
}

/// The record of a machine's memory hosts where it comes to, with its map of missing pages in this file; and what the
/// engine needs to ask them.
///
/// # Errors
/// A [`Problem`]: the epoch cannot be written down.
pub fn coming(
    split: &SplitSpec,
    map: PathBuf,
    dir: &Path,
    credentials: Option<&Arc<Credentials>>,
) -> Result<(SplitRecord, Handed), Problem> {
    let (borrowed, epochs) = (Borrowed::from_spec(split), EpochFile::of(dir));
    let follows = epochs.follow(split.own_epoch);
    follows.map_err(|error| host("cannot write the epoch of the guest's owner", &error))?;
    let lenders = borrowed.lenders(credentials);
    let handed = Handed { lenders, guest: (split.guest, split.key), epochs: Box::new(epochs) };
    let unused = if split.unused_counts { Unused::Ignore } else { Unused::Track };
    Ok((SplitRecord { borrowed, here_bytes: split.here_bytes, unused, map, merging: split.merge }, handed))
}

/// A guest stays on this host, or may do so by a person's word (`passing_over` its next owner): what is at memory hosts
/// is this host's to ask for.
pub fn stays(machines: &Machines, record: &VmRecord, passing_over: bool) {
    if record.split.is_none() {
        return;
    }
    if passing_over && let Err(error) = EpochFile::of(&machines.dir(&record.name)).pass_over() {
        tracing::error!(vm = %record.name, %error, "its memory hosts may listen to the host that it was handed over to");
    }
    if let Some(remote) = machines.remote(&record.name) {
        remote.goes_on();
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::spec::SplitHost;

    use super::*;
    use crate::migration::prechecks::tests::spec;

    #[test]
    fn what_is_said_of_memory_hosts_is_checked_before_any_is_asked() {
        let Some(machine) = spec() else { return };
        let host = |peer: &str| SplitHost {
            peer: peer.into(),
            bytes: most_bytes(1),
            mirror: None,
            once: Default::default(),
            gone: false,
        };
        let chunks = machine.blocks.iter().map(|block| block.bytes.div_ceil(CHUNK_BYTES as u64)).sum::<u64>() as u32;
        let split = SplitSpec {
            guest: 1,
            key: 2,
            chunks,
            hosts: vec![host("b:1")],
            here_bytes: machine.memory_bytes / 2,
            unused_counts: false,
            epoch: 1,
            own_epoch: 2,
            merge: false,
            parity: None,
        };
        let refused = |split: &SplitSpec, listen: &str| {
            let problem = check_coming(&machine, split, Some(&listen.to_owned()), None).unwrap_err();
            (problem.code.to_string(), problem.message)
        };
        let (code, message) = refused(&split, "b:1");
        assert!(code == "split" && message.contains("this host lends memory to"), "{message}");
        let mirrored = SplitHost { mirror: Some("c:1".into()), ..host("b:1") };
        assert_eq!(refused(&SplitSpec { hosts: vec![mirrored.clone()], ..split.clone() }, "c:1").0, "split");
        let over = |stripe, hosts| Some(SplitParity { stripe, hosts, over: 0, turn: 0, bytes: most_bytes(1) });
        let bits = |bits| over(2, 3).map(|parity| SplitParity { over: bits, ..parity });
        let three: Vec<_> = ["b:1", "c:1", "e:1"].map(host).to_vec();
        for wrong in [
            SplitSpec { chunks: chunks + 1, ..split.clone() },
            SplitSpec { hosts: vec![host("b:1"); Holder::MAX_HOSTS + 1], ..split.clone() },
            SplitSpec { hosts: vec![SplitHost { bytes: 0, ..host("b:1") }], ..split.clone() },
            SplitSpec { here_bytes: machine.memory_bytes, ..split.clone() },
            SplitSpec { hosts: vec![host("nowhere")], ..split.clone() },
            SplitSpec { parity: over(1, 2), ..split.clone() },
            SplitSpec { parity: over(3, 3), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: over(0, 3), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: over(2, u32::MAX), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: over(1, 2), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: bits(0b1011), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: bits(0b0011), hosts: three.clone(), ..split.clone() },
            SplitSpec { parity: over(2, 3), hosts: vec![mirrored; 3], ..split.clone() },
        ] {
            assert_eq!(refused(&wrong, "d:1").0, "invalid-request", "{wrong:?}");
        }
    }
}
