//! Records: JSON files that are replaced as a whole, and believed only where only root can have written them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::process::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_sys::path::open_regular;

use sterna_sys::host::random_u128;

/// The longest record that is read, bytes.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// What a record must outlive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outlives {
    /// The daemon alone: when the host goes down, the record's subject ends too.
    Daemon,
    /// The host.
    Host,
}

/// Writes `value` as JSON so that after a crash at any moment the file holds either the old or the new value, and
/// outlives the host.
///
/// # Errors
/// As [`replace_record`].
pub fn write_record<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    replace_record(path, value, Outlives::Host)
}

/// Writes `value` as JSON so that after a crash of what it outlives the file holds either the old or the new value.
/// Where several threads write one record at the same time, it holds the whole value of one of them.
///
/// # Errors
/// The file system's error; then the old value stands, and nothing is left of the new one.
pub fn replace_record<T: Serialize>(path: &Path, value: &T, outlives: Outlives) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a record needs a directory"))?;
    let bytes = serde_json::to_vec_pretty(value)?;
    // Nobody else writes to a file of this name, and nobody could have put a link there.
    let new = path.with_extension(format!("json.{:032x}.new", random_u128()));
    let written = write_new(&new, &bytes, outlives).and_then(|()| fs::rename(&new, path));
    if let Err(error) = written {
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    match outlives {
        Outlives::Daemon => Ok(()),
        Outlives::Host => File::open(dir)?.sync_all(),
    }
}

fn write_new(path: &Path, bytes: &[u8], outlives: Outlives) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    match outlives {
        Outlives::Daemon => Ok(()),
        Outlives::Host => file.sync_all(),
    }
}

/// Removes the half-written records of a daemon that died.
pub fn remove_half_written(dir: &Path) {
    for path in fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "new") {
            let _ = fs::remove_file(path);
        }
    }
}

/// Reads a record; `None` where there is no such file.
///
/// # Errors
/// The file system's error, an error in the JSON, or that a user other than root and the daemon's own may have written
/// it.
pub fn read_record<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let file = match open_regular(path).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let about = file.metadata()?;
    let refused =
        |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it is not believed: {why}")));
    if ![0, geteuid().as_raw()].contains(&about.uid()) {
        return refused(format!("it belongs to user {}", about.uid()));
    }
    if about.mode() & 0o022 != 0 {
        return refused(format!("others may write it (mode {:o})", about.mode() & 0o7777));
    }
    if about.len() > MAX_RECORD_BYTES {
        return refused(format!("it has {} bytes", about.len()));
    }
    let mut bytes = Vec::new();
    file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// Makes a directory root's own, so that nobody else can change what lies in it. One that belongs to somebody else is
/// taken over: earlier daemons gave a machine's directory to QEMU's user.
///
/// # Errors
/// The path does not exist, is no directory, or cannot be taken over.
pub fn take_directory(path: &Path) -> io::Result<()> {
    use rustix::fs::{Gid, Mode, OFlags, Uid, fchmod, fchown, open};
    // The path is never followed through a link. A descriptor makes sure that the directory that was checked is the one
    // that is changed.
    let dir = open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let about = rustix::fs::fstat(&dir)?;
    let own = geteuid();
    let narrower = Mode::from_raw_mode(about.st_mode & 0o755);
    if ![0, own.as_raw()].contains(&about.st_uid) {
        tracing::info!(path = %path.display(), from = about.st_uid, "taking a directory over from another user");
        fchown(&dir, Some(Uid::from_raw(own.as_raw())), Some(Gid::from_raw(rustix::process::getegid().as_raw())))?;
        fchmod(&dir, narrower)?;
    } else if about.st_mode & 0o022 != 0 {
        tracing::warn!(path = %path.display(), "others could write in this directory of the daemon's: they cannot any more");
        fchmod(&dir, narrower)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn names(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn a_record_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        assert_eq!(read_record::<u32>(&path).unwrap(), None);
        write_record(&path, &7u32).unwrap();
        write_record(&path, &8u32).unwrap();
        assert_eq!(read_record::<u32>(&path).unwrap(), Some(8));
        assert_eq!(names(dir.path()), 1);
        fs::write(&path, "{").unwrap();
        assert!(read_record::<u32>(&path).is_err());
    }

    /// Failed while all writers used one name for the new value: the second truncated the file that the first then put
    /// in place.
    #[test]
    fn two_who_write_one_record_never_mix_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        let text = |writer: usize| char::from(b'a' + writer as u8).to_string().repeat(writer * 20_000 + 1);
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..200 {
                        replace_record(path, &text(writer), Outlives::Daemon).expect("nobody takes the new value away");
                    }
                });
            }
            for _ in 0..400 {
                if let Some(found) = read_record::<String>(&path).expect("it is whole at any moment") {
                    assert!((0..4).any(|writer| found == text(writer)), "{} bytes", found.len());
                }
            }
        });
        assert_eq!(names(dir.path()), 1, "nothing is left of the new values");
    }

    /// Failed with `File::create`: the link's target was overwritten.
    #[test]
    fn a_link_in_the_new_values_place_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("vm.json"), dir.path().join("target"));
        fs::write(&target, "root's").unwrap();
        symlink(&target, dir.path().join("vm.json.new")).unwrap();
        symlink(&target, &path).unwrap();
        write_record(&path, &7u32).unwrap();
        assert_eq!(
            (fs::read_to_string(&target).unwrap().as_str(), read_record(&path).unwrap()),
            ("root's", Some(7u32))
        );
    }

    /// Failed while any kind of file was read.
    #[test]
    fn a_record_that_another_may_have_written_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        write_record(&path, &7u32).unwrap();
        for mode in [0o620, 0o602] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = read_record::<u32>(&path).unwrap_err();
            assert!(error.to_string().contains("others may write it"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read_record::<u32>(&path).unwrap(), Some(7));
        let link = dir.path().join("link.json");
        symlink(&path, &link).unwrap();
        assert!(read_record::<u32>(&link).is_err(), "a link is no record");
        let pipe = dir.path().join("pipe.json");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(read_record::<u32>(&pipe).is_err(), "nor is a pipe, and nobody waits for one");
        if geteuid().is_root() {
            chown(&path, Some(65534), None).unwrap();
            let error = read_record::<u32>(&path).unwrap_err();
            assert!(error.to_string().contains("belongs to user 65534"), "{error}");
        }
    }

    #[test]
    fn what_is_left_of_a_value_that_was_never_put_in_place_goes() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["vm.json", "vm.json.new", "vm.json.0123.new"] {
            fs::write(dir.path().join(name), "1").unwrap();
        }
        remove_half_written(dir.path());
        assert_eq!((names(dir.path()), dir.path().join("vm.json").exists()), (1, true));
    }
}
