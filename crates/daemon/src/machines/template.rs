//! Memory templates: files that machines' private memory begins as, and that they share until they write.
//!
//! A template is its owner's: nothing here writes or removes one. What a guest has not written yet is read from the
//! file whenever the guest reads it, so the file must stay as it is for as long as a machine uses it. QEMU gets a
//! descriptor for reading only. Whoever may write the file is root or this daemon's user, by its permissions.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_api::units::show_size;
use sterna_api::{Blame, Code, Problem};
use sterna_sys::file::{self, FileId, Kind, allocated_runs};
use sterna_sys::path::{Place, open_regular};
use sterna_sys::process::each_mapping;

use crate::problems::invalid;

/// The most pieces that a template's data may be in. Each may be a mapping of QEMU's between two others. The kernel
/// allows a process 65,530 unless it is told otherwise, and the agent leaves half of them to QEMU.
const MOST_PIECES: usize = 16_000;

/// The mappings of a template that are looked at: another thread may be replacing one just then.
const LOOKS: usize = 4;

/// The template of a RAM block, as it was when its machine was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Where it was.
    pub path: PathBuf,
    /// Its device, major and minor number.
    pub device: (u32, u32),
    /// Its inode there.
    pub inode: u64,
    /// Its length.
    pub bytes: u64,
    /// When it was last changed: seconds and nanoseconds.
    pub modified: (i64, i64),
}

impl Template {
    /// Opens the template at a path for a machine with so much RAM; `not_on` is a file system where none may lie.
    ///
    /// # Errors
    /// A [`Problem`] that says what is wrong with it.
    pub fn open(path: &Path, bytes: u64, not_on: &Path) -> Result<(Self, File), Problem> {
        let shown = path.display();
        if !path.is_absolute() {
            return Err(invalid(format!("the memory template {shown} is no absolute path")));
        }
        let unusable = |error: io::Error| {
            let mut problem = unfit(format!("the memory template {shown} cannot be used"));
            problem.cause.push(error.to_string());
            problem.hint("a regular file, and no link to one")
        };
        let file = open_regular(path).map_err(|error| unusable(error.into()))?;
        let template = Self::of(path, &file).map_err(unusable)?;
        let meta = file.metadata().map_err(unusable)?;
        let kind = file::backing(&file).map_err(|error| unusable(error.into()))?.kind;
        if !matches!(kind, Kind::Tmpfs(_)) {
            return Err(unfit(format!("the memory template {shown} is not on tmpfs"))
                .hint(format!("pages of a disk's file can fail to read: 'cp --sparse=always {shown} /dev/shm/'")));
        }
        if not_on.metadata().is_ok_and(|meta_of| meta_of.dev() == meta.dev()) {
            return Err(unfit(format!("the memory template {shown} lies among the RAM of this host's machines")).hint(
                "a machine would write it, and the daemon remove it: copy it to another place, such as /dev/shm",
            ));
        }
        let daemon = rustix::process::geteuid().as_raw();
        if meta.uid() != 0 && meta.uid() != daemon || meta.mode() & 0o022 != 0 {
            return Err(unfit(format!("others than root may write the memory template {shown}"))
                .hint(format!("'chown root {shown}' and 'chmod 0444 {shown}'")));
        }
        if template.bytes != bytes {
            let (has, needs) = (show_size(template.bytes), show_size(bytes));
            return Err(unfit(format!("the memory template {shown} has {has} and not the machine's {needs}"))
                .hint(format!("--memory must be {} bytes exactly", template.bytes)));
        }
        let pieces = allocated_runs(&file, 0..bytes).take(MOST_PIECES + 1);
        if pieces.collect::<sterna_sys::Result<Vec<_>>>().map_err(|error| unusable(error.into()))?.len() > MOST_PIECES {
            return Err(unfit(format!("the memory template {shown} has its data in more than {MOST_PIECES} pieces"))
                .hint("'cp --sparse=never' makes a copy in one piece"));
        }
        Ok((template, file))
    }

    fn of(path: &Path, file: &File) -> io::Result<Self> {
        let (FileId { device, inode }, meta) = (file::id(file)?, file.metadata()?);
        let modified = (meta.mtime(), meta.mtime_nsec());
        Ok(Self { path: path.into(), device, inode, bytes: meta.len(), modified })
    }

    /// The file itself.
    #[must_use]
    pub fn file(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }

    /// Looks whether the file that a process has mapped at these addresses is as it was; `true` where it has none of it
    /// any more.
    fn is_unchanged(&self, pid: u32, addresses: &Range<u64>) -> io::Result<bool> {
        let mut mapped = Vec::new();
        each_mapping(pid, |mapping| {
            let here = addresses.start <= mapping.range.start && mapping.range.end <= addresses.end;
            if here && mapping.file == Some(self.file()) && mapped.len() < LOOKS {
                mapped.push(mapping.range);
            }
        })?;
        if mapped.is_empty() {
            return Ok(true);
        }
        // The file may have lost its name since, and another file may have got it.
        let itself =
            |range: &Range<u64>| File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", range.start, range.end));
        let opened = mapped.iter().find_map(|range| itself(range).ok());
        let file = opened.map_or_else(|| Place::at(&self.path)?.open(false).map_err(io::Error::from), Ok)?;
        Ok(Self::of(&self.path, &file)? == *self)
    }

    /// Checks that the file is as it was when this machine was started, whose QEMU has it at these addresses.
    ///
    /// # Errors
    /// A [`Problem`]: the guest's RAM may be damaged.
    pub fn check(&self, name: &str, pid: u32, addresses: &Range<u64>) -> Result<(), Problem> {
        let path = self.path.display();
        let mut problem = match self.is_unchanged(pid, addresses) {
            Ok(true) => return Ok(()),
            Ok(false) => unfit(format!(
                "the memory template of '{name}' ({path}) was changed while the machine used it: THE GUEST'S MEMORY MAY BE DAMAGED"
            ))
            .hint("stop the machine; nobody may write a template while a machine uses it"),
            Err(error) => {
                let mut problem = unfit(format!("the memory template of '{name}' ({path}) cannot be looked at"));
                problem.cause.push(error.to_string());
                problem
            }
        };
        problem.blame = Blame::Host;
        Err(problem)
    }
}

fn unfit(message: String) -> Problem {
    Problem::new(Code::MemoryTemplate, Blame::Request, message)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions, Permissions};
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const BYTES: u64 = 64 << 10;

    fn refused(path: &Path, not_on: &Path) -> String {
        let problem = Template::open(path, BYTES, not_on).expect_err("it must be refused");
        format!("{}: {}", problem.code.as_str(), problem.message)
    }

    #[test]
    fn a_template_is_a_file_of_roots_on_tmpfs_of_the_machines_size() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let elsewhere = tempfile::tempdir_in("/").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("template");
        fs::write(&path, vec![1; BYTES as usize]).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let not_on = Path::new("/proc");
        let (template, file) = Template::open(&path, BYTES, not_on).expect("it is right");
        assert_eq!((template.bytes, template.file()), (BYTES, file::id(&file).unwrap()));
        (&file).write_all(b"x").expect_err("it is open for reading only");

        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(refused(&link, not_on).contains("cannot be used"));
        assert!(refused(dir.path(), not_on).contains("cannot be used"));
        assert!(refused(&dir.path().join("none"), not_on).contains("cannot be used"));
        assert!(refused(Path::new("template"), not_on).contains("absolute"));
        assert!(refused(&path, dir.path()).contains("among the RAM"));
        let disk = elsewhere.path().join("template");
        fs::write(&disk, vec![1; BYTES as usize]).unwrap();
        if !matches!(file::backing(File::open(&disk).unwrap()).unwrap().kind, Kind::Tmpfs(_)) {
            assert!(refused(&disk, not_on).contains("not on tmpfs"));
        }
        for mode in [0o664, 0o646] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(refused(&path, not_on).contains("may write"), "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(BYTES + 4096).unwrap();
        assert_eq!(refused(&path, not_on).split(':').next(), Some("memory-template"));
    }

    /// This process is the machine's.
    #[test]
    fn a_template_that_was_changed_while_it_is_mapped_is_noticed_whatever_its_name_is_by_then() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("template");
        fs::write(&path, vec![1; BYTES as usize]).unwrap();
        let (template, file) = Template::open(&path, BYTES, Path::new("/proc")).expect("it is right");
        let mapping = sterna_sys::map::PrivateMapping::new(BYTES).unwrap();
        let (pid, addresses) = (std::process::id(), mapping.addresses());
        assert!(template.is_unchanged(pid, &addresses).unwrap(), "it is not mapped");
        mapping.lay(0, &file, 0..BYTES / 2).unwrap();
        mapping.write(0, b"the machine's own");
        assert!(template.is_unchanged(pid, &addresses).unwrap());
        fs::rename(&path, dir.path().join("kept")).unwrap();
        fs::write(&path, vec![2; BYTES as usize]).unwrap();
        if rustix::process::geteuid().is_root() {
            assert!(template.is_unchanged(pid, &addresses).unwrap(), "another file has its name");
        }
        let mut kept = OpenOptions::new().write(true).open(dir.path().join("kept")).unwrap();
        kept.write_all(b"changed").unwrap();
        assert!(!template.is_unchanged(pid, &addresses).unwrap());
        mapping.renew(0..BYTES).unwrap();
        assert!(template.is_unchanged(pid, &addresses).unwrap(), "nothing of it is mapped any more");
    }
}
