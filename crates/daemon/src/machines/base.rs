//! An image under a machine's overlay, and who else may use it.
//!
//! A fork freezes an image: from then on only overlays lie over it, and all of them were made at that moment. So who
//! may still use it is told by their files, on any host that has them: while one is there, running or not, its owner
//! may want it. Of those nobody knows that people have made over it by other means.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// An image that a fork has left to be read only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// The image.
    pub image: PathBuf,
    /// The overlay of this machine's disk that lies over it.
    pub overlay: PathBuf,
    /// The others that were made over it.
    pub others: Vec<PathBuf>,
    /// It is somebody's disk, and never was this machine's: it is never written.
    pub kept: bool,
    /// What the overlay has is being written into it.
    #[serde(default)]
    pub committing: bool,
}

impl Base {
    /// Whether this machine alone is left of those who may use the image, and may write it.
    #[must_use]
    pub fn is_its_alone(&self) -> bool {
        !self.kept && self.others.iter().all(|other| is_gone(other))
    }
}

/// Whether there certainly is no such file.
fn is_gone(path: &Path) -> bool {
    // Where its directory is not there either, it may lie on a file system that is not mounted now.
    matches!(path.try_exists(), Ok(false)) && path.parent().is_some_and(Path::is_dir)
}

/// The bases of a clone whose source has these: the same, of which it may write only what Sterna has made.
#[must_use]
pub fn of_a_clone(bases: &[Base]) -> Vec<Base> {
    let made = |image: &Path| bases.iter().any(|base| base.overlay == image);
    bases.iter().map(|base| Base { kept: base.kept || !made(&base.image), committing: false, ..base.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(image: &Path, overlay: &Path, others: &[&Path]) -> Base {
        let others = others.iter().map(|path| path.to_path_buf()).collect();
        Base { image: image.into(), overlay: overlay.into(), others, kept: false, committing: false }
    }

    #[test]
    fn an_image_is_its_alone_once_no_other_overlay_of_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (image, own, other) = (path("image"), path("own"), path("other"));
        let mut base = base(&image, &own, &[&other]);
        assert!(base.is_its_alone());
        std::fs::write(&other, "").unwrap();
        assert!(!base.is_its_alone(), "whether a machine runs with it or not");
        std::fs::remove_file(&other).unwrap();
        base.others.push("/no/such/directory/overlay".into());
        assert!(!base.is_its_alone(), "nobody knows what is there");
        base.others.pop();
        base.kept = true;
        assert!(!base.is_its_alone());
    }

    #[test]
    fn a_clone_writes_the_overlays_that_were_made_and_never_the_disk_that_its_source_began_with() {
        let [disk, first, second] = ["/disk", "/first", "/second"].map(Path::new);
        let bases = [base(disk, first, &[]), base(first, second, &[])];
        assert_eq!(of_a_clone(&bases).iter().map(|base| base.kept).collect::<Vec<_>>(), [true, false]);
        assert!(!bases[0].kept, "its source may");
    }
}
