//! Reading machines' records at the daemon's start: those of older daemons too, and none that another may have written.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use sterna_sys::file::FileId;

use super::record::VmRecord;
use crate::state::{read_record, remove_half_written, take_directory, write_record};

/// What lies in the directory of the machines.
#[derive(Debug, Default)]
pub struct Found {
    /// The machines.
    pub records: Vec<VmRecord>,
    /// Directories without a record.
    pub unfinished: Vec<PathBuf>,
    /// The names of machines whose record cannot be used: whatever is theirs is left alone, for nobody can tell what
    /// it is any more.
    pub unread: Vec<String>,
}

/// Reads all machines' records, below `vms`.
///
/// # Errors
/// Where the directory cannot be read. One record that cannot be used is logged, and costs nothing but the
/// daemon's care for its machine.
pub fn read_machines(vms: &Path) -> io::Result<Found> {
    let mut found = Found::default();
    let mut owners: HashMap<FileId, String> = HashMap::new();
    for entry in std::fs::read_dir(vms)? {
        let dir = entry?.path();
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let loaded = load(&dir, &name).and_then(|record| match record {
            Some(record) => check_ram_is_nobodys(&owners, record).map(Some),
            None => Ok(None),
        });
        match loaded {
            Ok(Some(record)) => {
                if !record.image {
                    owners.extend(record.backings().map(|backing| (backing.file(), name.clone())));
                }
                found.records.push(record);
            }
            Ok(None) => found.unfinished.push(dir),
            Err(error) => {
                tracing::error!(
                    dir = %dir.display(), %error,
                    "cannot use a machine's record: it is not looked after, and nothing of it is removed"
                );
                found.unread.push(name);
            }
        }
    }
    Ok(found)
}

/// Of two machines with one file for their RAM, by their records, at most one can be right; but clones that go to other
/// hosts have what nobody writes.
fn check_ram_is_nobodys(owners: &HashMap<FileId, String>, record: VmRecord) -> io::Result<VmRecord> {
    let owner = record.backings().find_map(|backing| owners.get(&backing.file()));
    match owner.filter(|_| !record.image) {
        None => Ok(record),
        Some(owner) => Err(io::Error::new(io::ErrorKind::InvalidData, format!("its RAM is the RAM of '{owner}'"))),
    }
}

fn load(dir: &Path, name: &str) -> io::Result<Option<VmRecord>> {
    // Earlier daemons gave it to QEMU's user. From here on only root changes what lies in it, so that what is read
    // now stays what was read. A file of root's that its user had moved here from another machine's directory is told
    // by the name in it; an old one of the same machine's cannot be told, and says what was true of it once.
    take_directory(dir)?;
    remove_half_written(dir);
    let path = dir.join("vm.json");
    let Some(mut record) = read_record::<VmRecord>(&path)? else { return Ok(None) };
    if record.is_taken_as(name) && record.name != name {
        record = record.renamed(name, dir);
        write_record(&path, &record)?;
    }
    if record.name != name {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is the record of '{}'", record.name)));
    }
    if recall_ram(&mut record)
        && let Err(error) = write_record(&path, &record)
    {
        tracing::warn!(vm = %record.name, %error, "cannot write down which files hold its RAM");
    }
    Ok(Some(record))
}

/// Completes the record of an older daemon, which does not say which files hold the machine's RAM; whether it says so
/// now. Where its QEMU runs, they are those that it has mapped. Where that has ended, Sterna's own still have their
/// names in a directory of root's.
fn recall_ram(record: &mut VmRecord) -> bool {
    let (running, owned) = (record.process.open().is_some(), record.owns_ram_files);
    let mut changed = false;
    for block in record.blocks.iter_mut().filter(|block| block.backings.is_empty()) {
        let recalled = match running {
            true => block.recall_mapped(record.process.pid, owned),
            false if owned => block.recall_here(),
            false => continue,
        };
        match recalled {
            Ok(()) => changed = true,
            Err(error) => tracing::warn!(
                vm = %record.name, block = block.id, %error,
                "cannot tell which file holds its RAM: it can be stopped, and not moved"
            ),
        }
    }
    changed
}
