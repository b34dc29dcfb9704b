//! The movers of the guests of most experiments, and their lab of two hosts with a link of 1 Gbit.

use crate::baseline::{Method, Ram, qemu};
use crate::error::Result;
use crate::lab::LabConfig;
use crate::sterna;
use crate::trial::{Mover, Qemu};

/// The link of both hosts, bytes per second.
pub(super) const LINK_BYTES_PER_S: u64 = 125_000_000;

/// Sterna with options as on its command line.
pub(super) fn sterna(options: &str) -> Result<Mover> {
    Ok(Mover::Sterna(sterna::options(options)?))
}

/// QEMU by itself, RAM as most users have it.
pub(super) fn vanilla() -> Mover {
    Mover::Qemu(Method::Vanilla, Ram::Plain)
}

/// The lab's two hosts.
pub(super) fn lab_config() -> LabConfig {
    LabConfig { rate_bytes_per_s: Some(LINK_BYTES_PER_S), ..LabConfig::pair(&super::lab_name()) }
}

/// The methods of `wanted` that this QEMU has. The missing ones are printed.
pub(super) fn known(qemu: &Qemu, wanted: &[Method]) -> Result<Vec<Mover>> {
    let known = qemu::capabilities(&qemu.path)?;
    let has = |method: &&Method| {
        let absent = method.capabilities().iter().find(|name| !known.iter().any(|known| known == *name));
        absent
            .into_iter()
            .for_each(|name| eprintln!("no row {} with QEMU {}: it has no {name}", method.label(), qemu.label));
        absent.is_none()
    };
    Ok(wanted.iter().filter(has).map(|method| Mover::Qemu(*method, Ram::Plain)).collect())
}
