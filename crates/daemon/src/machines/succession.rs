//! A machine that changes its QEMU: what is on record of it, so that whatever ends in between, the guest is in one of
//! the two.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_sys::host;

use super::backing::OwnFile;
use super::files::remove_each;
use crate::process::Identity;
use crate::qemu::launch::{Place, log_file};

/// Another QEMU beside a machine's own, while its guest goes from the one to the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "stage")]
pub enum Succession {
    /// The guest is in the QEMU of the record; this one waits for it, or is to end.
    Begun {
        /// What tells its files apart.
        tag: String,
        /// Its process, once it is there.
        successor: Option<Identity>,
    },
    /// The guest is in the QEMU of the record; its former one has it no more, and is to end.
    Done {
        /// What tells the files of the new one apart.
        tag: String,
        /// The former one's process.
        former: Identity,
        /// Its files that end with it.
        files: Vec<PathBuf>,
    },
}

impl Succession {
    /// One that begins now.
    #[must_use]
    pub fn begin() -> Self {
        Self::Begun { tag: format!("{:08x}", host::random_u128() as u32), successor: None }
    }

    /// Where the new QEMU's files are, in its machine's directory.
    #[must_use]
    pub fn place(&self, dir: &Path) -> Place {
        let (Self::Begun { tag, .. } | Self::Done { tag, .. }) = self;
        Place::beside(dir, tag)
    }

    /// The process of the QEMU that has not got the guest, where it is known.
    #[must_use]
    pub fn other(&self) -> Option<Identity> {
        match self {
            Self::Begun { successor, .. } => *successor,
            Self::Done { former, .. } => Some(*former),
        }
    }

    /// Removes the files of the QEMU that has not got the guest, which has ended. What it said last is kept in `logs`,
    /// as that of every QEMU that has ended.
    pub fn tidy(&self, name: &str, dir: &Path, logs: &Path) {
        let place = self.place(dir);
        let own = |path: &Path| OwnFile { path: path.into(), file: None };
        match self {
            Self::Begun { .. } => {
                let _ = std::fs::rename(&place.log, logs.join(format!("{name}.log")));
                remove_each(&[own(&place.qmp), own(&place.agent)]);
            }
            Self::Done { files, .. } => {
                // Where an earlier daemon came as far as this, there is nothing to rename any more.
                if place.log.exists() {
                    let _ = std::fs::rename(log_file(dir), logs.join(format!("{name}.log")));
                    let _ = std::fs::rename(&place.log, log_file(dir));
                }
                remove_each(&files.iter().map(|path| own(path)).collect::<Vec<_>>());
            }
        }
    }
}
