//! A machine that changes its QEMU: what is on record of it, so that whatever ends in between, the guest is in one of
//! the two.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_sys::host;

use super::backing::OwnFile;
use super::files::{kept_log, remove_each};
use crate::process::Identity;
use crate::qemu::launch::{Place, log_file};

/// Another QEMU beside a machine's own, while its guest goes from the one to the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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

    fn tag(&self) -> String {
        let (Self::Begun { tag, .. } | Self::Done { tag, .. }) = self;
        tag.clone()
    }

    /// The same, once the new QEMU runs as this process.
    #[must_use]
    pub fn with(&self, successor: Identity) -> Self {
        Self::Begun { tag: self.tag(), successor: Some(successor) }
    }

    /// The same, once the new QEMU has the guest; `former` had it, and these files end with that one.
    #[must_use]
    pub fn done(&self, former: Identity, files: Vec<PathBuf>) -> Self {
        Self::Done { tag: self.tag(), former, files }
    }

    /// Where the new QEMU's files are, in its machine's directory.
    #[must_use]
    pub fn place(&self, dir: &Path) -> Place {
        Place::beside(dir, &self.tag())
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
                let _ = std::fs::rename(&place.log, kept_log(logs, name));
                remove_each(&[own(&place.qmp), own(&place.agent)]);
            }
            Self::Done { files, .. } => {
                // Where an earlier daemon came as far as this, there is nothing to rename any more.
                if place.log.exists() {
                    let _ = std::fs::rename(log_file(dir), kept_log(logs, name));
                    let _ = std::fs::rename(&place.log, log_file(dir));
                }
                remove_each(&files.iter().map(|path| own(path)).collect::<Vec<_>>());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Failed with a tag inside the value: such a record could be written and not read.
    #[test]
    fn what_is_on_record_is_read_as_it_was_written() {
        let process = Identity { pid: 7, start_ticks: u64::MAX, boot: u128::MAX };
        let begun = Succession::begin();
        let done = begun.done(process, vec!["/run/qmp.sock".into()]);
        for succession in [begun.clone(), begun.with(process), done] {
            let text = serde_json::to_string(&succession).unwrap();
            assert_eq!(serde_json::from_str::<Succession>(&text).unwrap(), succession, "{text}");
        }
    }

    #[test]
    fn the_output_of_the_qemu_that_has_the_guest_is_the_machine_s() {
        let dir = tempfile::tempdir().unwrap();
        let (machine, logs) = (dir.path().join("vm"), dir.path().join("logs"));
        std::fs::create_dir_all(machine.join("run")).unwrap();
        std::fs::create_dir(&logs).unwrap();
        let succession = Succession::begin();
        let place = succession.place(&machine);
        let files = [&place.qmp, &place.agent, &place.log];
        let write = || {
            std::fs::write(log_file(&machine), "former").unwrap();
            files.iter().for_each(|file| std::fs::write(file, "new").unwrap());
        };
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        write();
        succession.tidy("g", &machine, &logs);
        assert_eq!(read(&log_file(&machine)).as_deref(), Some("former"));
        assert_eq!(read(&logs.join("g.log")).as_deref(), Some("new"), "what it said last");
        assert!(files.iter().all(|file| !file.exists()));
        write();
        let former = Identity { pid: 7, start_ticks: 7, boot: 7 };
        let old = machine.join("run/qmp.sock");
        std::fs::write(&old, "").unwrap();
        let done = succession.done(former, vec![old.clone()]);
        for _ in 0..2 {
            done.tidy("g", &machine, &logs);
            assert_eq!(read(&log_file(&machine)).as_deref(), Some("new"));
            assert_eq!(read(&logs.join("g.log")).as_deref(), Some("former"));
            assert!(place.qmp.exists() && place.agent.exists() && !place.log.exists() && !old.exists());
        }
    }
}
