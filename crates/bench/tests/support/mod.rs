//! What tests with real guests share.

use sterna_bench::{Lab, LabConfig, tools};

/// A lab without daemons; `None`, with the reason said, where there can be none.
pub fn lab(name: &str, rate_bytes_per_s: Option<u64>) -> Option<Lab> {
    if tools::kernel().is_err() || tools::initrd().is_err() || tools::qemu_7_2().is_err() {
        eprintln!("skipped: QEMU or the guest's image is absent");
        return None;
    }
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    let pair = LabConfig::pair(&format!("{name}{}", std::process::id()));
    Some(Lab::up(LabConfig { daemons: false, rate_bytes_per_s, ..pair }).unwrap())
}
