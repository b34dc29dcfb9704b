//! Overlays that a fork makes of a machine's disks.
//!
//! A template has one of each disk, too, which nobody writes: clones that are made later get copies of it.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_sys::host::random_u128;
use sterna_sys::path::open_regular;

use super::base;

/// Whose overlay a template's is: no machine has this name.
pub const TEMPLATE: &str = "";

/// What a qcow2 file begins with.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The most that an empty overlay may take, bytes: with the first table of a disk of 8 PiB.
const MOST_BYTES: u64 = 256 << 20;

/// The most entries of a qcow2's first table that are looked at: those of 8 PiB.
const MOST_ENTRIES: u32 = 1 << 24;

/// An overlay of a disk. It is on record in the machine that is forked until it is known who uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The machine that is to have it, or [`TEMPLATE`].
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
    /// An overlay of the machine `of` of the image `base`, in this directory; `named` is what its name begins with.
    #[must_use]
    pub fn plan(of: &str, base: &Path, directory: &Path, named: &str) -> Self {
        let number = number();
        Self {
            of: of.into(),
            path: directory.join(format!("{named}-{number}.qcow2")),
            base: base.into(),
            node: format!("sterna-{number}"),
            elsewhere: false,
        }
    }

    /// Another one of the same image, for a clone of the template that this one is of.
    #[must_use]
    pub fn another(&self, of: &str) -> Self {
        let number = number();
        Self { of: of.into(), path: base::named_after(&self.path, &number), ..self.clone() }
    }

    /// Whether it is a template's.
    #[must_use]
    pub fn is_of_a_template(&self) -> bool {
        self.of == TEMPLATE
    }

    /// Makes its file, which is empty, and belongs to whom the image under it belongs.
    ///
    /// # Errors
    /// The kernel's error, such as that there is a file of that name.
    pub fn make(&self) -> io::Result<File> {
        let base = fs::metadata(&self.base)?;
        let file = File::options().write(true).create_new(true).mode(base.mode() & 0o666).open(&self.path)?;
        fchown(&file, Some(base.uid()), Some(base.gid()))?;
        Ok(file)
    }

    /// Makes its file, a copy of a template's. Whoever looks who may want the image finds one of both at any moment: it
    /// is there before the other is looked for.
    ///
    /// # Errors
    /// The kernel's error; or the template's is not what it was made as. Nothing is left of it.
    pub fn make_like(&self, template: &Path) -> io::Result<()> {
        let mut file = self.make()?;
        let copied = open_regular(template).map_err(io::Error::from).and_then(|from| {
            let (about, own) = (from.metadata()?, file.metadata()?);
            // It lies where others may write.
            if (about.uid(), about.gid()) != (own.uid(), own.gid()) || about.len() > MOST_BYTES {
                return Err(io::Error::other(format!("{} is no overlay that Sterna made", template.display())));
            }
            io::copy(&mut from.take(MOST_BYTES), &mut file)
        });
        if let Err(error) = copied {
            let _ = fs::remove_file(&self.path);
            return Err(error);
        }
        Ok(())
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
        // It lies where others may write.
        let file = open_regular(&self.path).map_err(io::Error::from)?;
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

fn number() -> String {
    format!("{:08x}", random_u128() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(dir: &Path) -> Overlay {
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

    #[test]
    fn what_others_put_in_an_overlays_place_holds_nobody_up_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let overlay = overlay(dir.path());
        assert!(std::process::Command::new("mkfifo").arg(&overlay.path).status().unwrap().success());
        // To open one whose other end nobody has open takes for ever.
        overlay.remove();
        assert!(overlay.path.exists());
    }

    #[test]
    fn a_clones_overlay_is_a_copy_of_its_templates_and_of_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let template = Overlay { of: TEMPLATE.into(), path: dir.path().join("t-1.qcow2"), ..overlay(dir.path()) };
        let clones = template.another("c");
        assert!(template.is_of_a_template() && !clones.is_of_a_template() && clones.path != template.path);
        assert!(clones.make_like(&template.path).is_err() && !clones.path.exists(), "there is none");
        fs::write(&template.path, qcow2(0)).unwrap();
        clones.make_like(&template.path).unwrap();
        assert_eq!(fs::read(&clones.path).unwrap(), qcow2(0));
        assert!(clones.make_like(&template.path).is_err(), "there is one of its name");
        assert_eq!(fs::read(&clones.path).unwrap(), qcow2(0));
        // Another's file in its place.
        let another = template.another("d");
        fchown(File::open(&template.path).unwrap(), Some(1234), None).unwrap();
        assert!(another.make_like(&template.path).is_err() && !another.path.exists());
    }
}
