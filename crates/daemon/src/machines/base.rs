//! An image under a machine's overlay, and who else may use it.
//!
//! A fork freezes an image: from then on only overlays lie over it, and all of them were made at that moment. So who
//! may still use it is told by their files, on any host that has them: while one is there, running or not, its owner
//! may want it. Clones of a template are made later, and so are their overlays: their names say so. Of those nobody
//! knows that people have made over it by other means.

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
    /// That of a template among them: overlays of clones that are made later are [named after](named_after) it.
    #[serde(default)]
    pub template: Option<PathBuf>,
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
        !self.kept
            && self.others.iter().all(|other| is_gone(other))
            && self.template.as_ref().is_none_or(|template| is_the_last(template, &self.overlay))
    }
}

/// The path of an overlay that is made like a template's: who may want the image is told by its name.
#[must_use]
pub fn named_after(template: &Path, number: &str) -> PathBuf {
    template.with_file_name(format!("{}{number}.qcow2", beginning(template)))
}

/// What the names of overlays begin with that were made like a template's.
fn beginning(template: &Path) -> String {
    format!("{}-", template.file_stem().unwrap_or_default().to_string_lossy())
}

/// Whether there certainly is no overlay but this one that was made like a template's.
fn is_the_last(template: &Path, own: &Path) -> bool {
    let (Some(Ok(directory)), beginning) = (template.parent().map(std::fs::read_dir), beginning(template)) else {
        return false;
    };
    let is_another = |name: std::ffi::OsString| {
        name.to_string_lossy().starts_with(&beginning) && own.file_name() != Some(name.as_os_str())
    };
    // One that cannot be read may be another.
    !directory.into_iter().any(|entry| entry.map_or(true, |entry| is_another(entry.file_name())))
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
        Base { image: image.into(), overlay: overlay.into(), others, template: None, kept: false, committing: false }
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
    fn an_image_is_nobodys_alone_while_there_is_a_template_of_it_or_an_overlay_of_a_clone_of_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (image, template) = (path("image"), path("t-1.qcow2"));
        let clones = named_after(&template, "2");
        let of_the_source = Base { template: Some(template.clone()), ..base(&image, &path("m"), &[&template]) };
        let of_the_clone = Base { overlay: clones.clone(), ..of_the_source.clone() };
        for there in [&template, &clones] {
            std::fs::write(there, "").unwrap();
            assert!(!of_the_source.is_its_alone());
            assert_eq!(of_the_clone.is_its_alone(), *there == clones);
            std::fs::remove_file(there).unwrap();
        }
        std::fs::write(path("t-12.qcow2"), "").unwrap();
        assert!(of_the_source.is_its_alone() && of_the_clone.is_its_alone());
        drop(dir);
        assert!(!of_the_source.is_its_alone(), "nobody knows what is there");
    }

    #[test]
    fn a_clone_writes_the_overlays_that_were_made_and_never_the_disk_that_its_source_began_with() {
        let [disk, first, second] = ["/disk", "/first", "/second"].map(Path::new);
        let bases = [base(disk, first, &[]), base(first, second, &[])];
        assert_eq!(of_a_clone(&bases).iter().map(|base| base.kept).collect::<Vec<_>>(), [true, false]);
        assert!(!bases[0].kept, "its source may");
    }
}
