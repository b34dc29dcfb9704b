//! Overlays that a fork makes of a machine's disks.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a qcow2 file begins with.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The most entries of a qcow2's first table that are looked at: those of 8 PiB.
const MOST_ENTRIES: u32 = 1 << 24;

/// An overlay of a disk. It is on record in the machine that is forked until it is known who uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The machine that is to have it.
    pub of: String,
    /// Its file.
    pub path: PathBuf,
    /// The image under it.
    pub base: PathBuf,
    /// The name of its block node, where the machine that is forked opens it.
    pub node: String,
    /// That machine is on another host. From the pause on it may run there, whatever is known of it here.
    #[serde(default)]
    pub elsewhere: bool,
}

impl Overlay {
    /// Makes its file, which is empty, and belongs to whom the image under it belongs.
    ///
    /// # Errors
    /// The kernel's error, such as that there is a file of that name.
    pub fn make(&self) -> io::Result<()> {
        let base = fs::metadata(&self.base)?;
        let file = File::options().write(true).create_new(true).mode(base.mode() & 0o666).open(&self.path)?;
        fchown(&file, Some(base.uid()), Some(base.gid()))
    }

    /// Removes its file, unless a guest has written something to it. It is not an error where there is none.
    pub fn remove(&self) {
        let path = self.path.display();
        match self.is_blank() {
            Ok(true) => match fs::remove_file(&self.path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::warn!(%path, %error, "cannot remove an overlay that nobody uses");
                }
                _ => {}
            },
            Ok(false) => tracing::error!(%path, of = self.of, "nobody uses this overlay, and it has data: it stays"),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%path, %error, "cannot look at an overlay that nobody uses: it stays"),
        }
    }

    /// Whether nothing was written to it yet: it is empty, or none of its clusters holds data.
    fn is_blank(&self) -> io::Result<bool> {
        let file = File::open(&self.path)?;
        if file.metadata()?.len() == 0 {
            return Ok(true);
        }
        let mut header = [0; 48];
        file.read_exact_at(&mut header, 0)?;
        let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (entries, table) = (word(36), u64::from(word(40)) << 32 | u64::from(word(44)));
        if header[..4] != MAGIC || entries > MOST_ENTRIES {
            return Ok(false);
        }
        let mut entries = vec![0; entries as usize * 8];
        file.read_exact_at(&mut entries, table)?;
        Ok(entries.iter().all(|byte| *byte == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(dir: &std::path::Path) -> Overlay {
        let base = dir.join("base");
        fs::write(&base, "base").unwrap();
        Overlay { of: "a".into(), path: dir.join("a.qcow2"), base, node: "n".into(), elsewhere: false }
    }

    /// A qcow2 whose first table, of two entries, has this as its second.
    fn qcow2(entry: u8) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[39] = 2;
        bytes[46] = 1;
        bytes[256 + 8] = entry;
        bytes
    }

    #[test]
    fn an_overlay_that_nobody_has_written_to_goes_and_any_other_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let overlay = overlay(dir.path());
        overlay.remove();
        overlay.make().unwrap();
        assert_eq!(overlay.make().unwrap_err().kind(), ErrorKind::AlreadyExists);
        overlay.remove();
        assert!(!overlay.path.exists());
        fs::write(&overlay.path, qcow2(0)).unwrap();
        overlay.remove();
        assert!(!overlay.path.exists());
        for written in [qcow2(0x80), b"something else".to_vec(), vec![7; 4096]] {
            fs::write(&overlay.path, written).unwrap();
            overlay.remove();
            assert!(overlay.path.exists());
        }
    }
}
