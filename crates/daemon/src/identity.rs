//! The identity of this daemon: a number of its state directory, drawn once. A source whose guest this daemon accepted
//! believes only this identity about the guest.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use sterna_engine::host::DaemonId;

use sterna_sys::host::random_u128;

/// The identity of this state directory, from its file `identity`. The file is made where there is none.
///
/// # Errors
/// The file cannot be read or made, or holds something else: no new identity is drawn, because every daemon that waits
/// for this one's word would then wait for ever.
pub fn load_or_make(state: &Path) -> io::Result<DaemonId> {
    let path = state.join("identity");
    match fs::read_to_string(&path) {
        Ok(text) => u128::from_str_radix(text.trim_end(), 16).map(DaemonId).map_err(|_| {
            let why = format!("{} does not hold an identity: put the former file back, or remove it", path.display());
            io::Error::new(io::ErrorKind::InvalidData, why)
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(state, &path),
        Err(error) => Err(error),
    }
}

/// Draws an identity. It is on disk before it is sent to anybody.
fn make(state: &Path, path: &Path) -> io::Result<DaemonId> {
    let identity = DaemonId(random_u128());
    let new = path.with_extension("new");
    // The file of an attempt that was cut short may be left.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    writeln!(file, "{:032x}", identity.0)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(state)?.sync_all()?;
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_state_directory_keeps_its_identity_and_shares_it_with_no_other() {
        let [dir, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let identity = load_or_make(dir.path()).unwrap();
        assert_eq!(load_or_make(dir.path()).unwrap(), identity);
        assert_ne!(load_or_make(other.path()).unwrap(), identity);
        let mode = fs::metadata(dir.path().join("identity")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn an_identity_that_cannot_be_read_is_not_replaced_by_another() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("identity"), "").unwrap();
        assert!(load_or_make(dir.path()).is_err());
        assert_eq!(fs::read(dir.path().join("identity")).unwrap(), b"");
    }

    #[test]
    fn what_is_left_of_an_attempt_that_was_cut_short_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("identity.new"), "12").unwrap();
        assert!(load_or_make(dir.path()).is_ok());
    }
}
