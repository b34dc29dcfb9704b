//! What hosts and a guest are to be like.

use std::path::PathBuf;

use sterna_bench::tools;

/// The guest of most tests: small, and it never stops writing.
pub const JOBS: &str = "checker:--mib,24,--rate,8";

/// The words of `run` for private memory.
const PRIVATE: [&str; 2] = ["--memory-mode", "private"];

/// How memory is mapped where a test does not say: `STERNA_MEMORY_MODE=private` runs every test's guest in private
/// memory.
fn memory_mode() -> Vec<String> {
    let private = std::env::var("STERNA_MEMORY_MODE").is_ok_and(|word| word == "private");
    PRIVATE.iter().filter(|_| private).map(|word| (*word).to_owned()).collect()
}

/// What a site is to be like.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The hosts.
    pub hosts: Vec<String>,
    /// QEMU of host `a`, and of host `b`.
    pub qemu: [PathBuf; 2],
    /// The guest's RAM, bytes.
    pub memory_bytes: u64,
    /// Its virtual processors.
    pub cpus: u32,
    /// Its machine type.
    pub machine: String,
    /// Its processor model, where it is not the richest that there is.
    pub cpu: Option<String>,
    /// What it runs.
    pub jobs: String,
    /// More of QEMU's arguments.
    pub more: Vec<String>,
    /// More words of `run`: how its memory is mapped, and with whom it is shared.
    pub run: Vec<String>,
    /// Memory limit of each host, bytes.
    pub memory_limit_bytes: Option<u64>,
}

impl Plan {
    /// 256 MiB, one processor, `pc-q35-7.2` in QEMU 7.2 on both hosts.
    ///
    /// # Panics
    /// Where QEMU is absent.
    #[must_use]
    pub fn small() -> Self {
        let qemu = tools::qemu_7_2().expect("looked for before");
        Self {
            hosts: ["a", "b"].map(str::to_owned).into(),
            qemu: [qemu.clone(), qemu],
            memory_bytes: 256 << 20,
            cpus: 1,
            machine: "pc-q35-7.2".into(),
            cpu: None,
            jobs: JOBS.into(),
            more: Vec::new(),
            run: memory_mode(),
            memory_limit_bytes: None,
        }
    }

    /// The same in private memory.
    ///
    /// # Panics
    /// As [`Plan::small`].
    #[must_use]
    pub fn private() -> Self {
        Self { run: PRIVATE.map(str::to_owned).into(), ..Self::small() }
    }

    /// A checker of memory that stays, and churn beside it: half a guest's memory is taken and given back within
    /// seconds.
    ///
    /// # Panics
    /// As [`Plan::small`].
    #[must_use]
    pub fn churning() -> Self {
        let jobs = "checker:--mib,16,--rate,4;churn:--mib,128,--rate,32;builder".into();
        Self { jobs, memory_bytes: 512 << 20, cpus: 2, ..Self::small() }
    }
}
