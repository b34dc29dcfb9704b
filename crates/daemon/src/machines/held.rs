//! A clone that is held ready for whoever takes it.
//!
//! It has all that a clone has, and its guest has not run. Until it is taken it has a name that nobody gave it. To take
//! it is one `rename`: that of its directory to the name that it gets. What is on record says so before. So a daemon
//! that finds the directory at its old name finds a clone that is held, and at its new name one that is taken and is to
//! run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna_api::VmState;
use sterna_sys::host::random_u128;
use sterna_sys::path::Root;

use super::hold::{Activity, Shown};
use crate::qemu::arguments::{NAME, parse};

/// What a held clone waits for, as it is on record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The template that it is a clone of.
    pub template: String,
    /// It is being taken.
    #[serde(default)]
    pub taking: Option<Taking>,
}

/// The names of a held clone that is being taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taking {
    /// The one that nobody gave it.
    pub from: String,
    /// The one that it gets.
    pub to: String,
}

/// The activity of a machine that is held ready.
#[derive(Debug)]
pub struct Ready {
    /// The template that it is a clone of.
    pub template: String,
}

impl Activity for Ready {
    fn describe(&self) -> &'static str {
        "it is held ready for 'sterna run --from-template'"
    }

    fn show(&self) -> Shown {
        let note = format!("held ready: 'sterna run NAME --from-template {}' takes it", self.template);
        Shown::As { state: VmState::Paused, note: Some(note), progress: None }
    }
}

/// A name for a clone that nobody has named yet.
#[must_use]
pub fn new_name() -> String {
    format!("held-{:08x}", random_u128() as u32)
}

/// Gives the files that QEMU made under its machine's former name the new one: those whose last part has `{name}` in it
/// in these arguments. One that is not there has it already, or never was.
pub fn rename_files(arguments: &[String], from: &str, to: &str) {
    for path in named_paths(arguments) {
        if let Err(error) = rename_file(&path, from, to)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), vm = to, %error, "a machine's file keeps its name");
        }
    }
}

/// The paths in these arguments whose last part has `{name}` in it.
fn named_paths(arguments: &[String]) -> Vec<PathBuf> {
    let items = parse(arguments);
    let values = items.iter().filter_map(|item| item.value.as_deref());
    let words = values.flat_map(|value| value.split([',', '=', ':', '"'])).map(Path::new);
    let has = |part: Option<&std::ffi::OsStr>| part.is_some_and(|part| part.to_string_lossy().contains(NAME));
    words.filter(|path| path.is_absolute() && has(path.file_name())).map(Path::to_path_buf).collect()
}

/// Both names are in one directory, which is looked up once, and no link of another user is followed on the way.
fn rename_file(path: &Path, from: &str, to: &str) -> io::Result<()> {
    let (Some(parent), Some(last)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let place = Root::own()?.find(parent)?;
    let (directory, last) = (place.itself(), last.to_string_lossy());
    fs::rename(directory.join(last.replace(NAME, from)), directory.join(last.replace(NAME, to)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_have_the_machine_s_name_get_its_new_one_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let arguments = [
            "-chardev".to_owned(),
            format!("file,id=c,path={},append=on", at("{name}.console").display()),
            "-serial".to_owned(),
            format!("unix:{},server=on", at("s-{name}").display()),
            "-drive".to_owned(),
            format!("file={},format=raw", at("disk").display()),
            "-name".to_owned(),
            "{name}".to_owned(),
        ];
        for name in ["old.console", "s-old", "disk", "old"] {
            fs::write(at(name), name).unwrap();
        }
        // The second time as a daemon that finds a taking half done.
        for _ in 0..2 {
            rename_files(&arguments, "old", "new");
            let mut names: Vec<String> = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort_unstable();
            assert_eq!(names, ["disk", "new.console", "old", "s-new"]);
        }
    }
}
