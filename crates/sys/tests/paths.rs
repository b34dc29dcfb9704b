//! Paths that others can change.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use sterna_sys::file;
use sterna_sys::path::{Place, Root, connect, open_regular};

const NOBODY: u32 = 65534;

fn link(target: impl AsRef<Path>, link: &Path, owner: u32) {
    symlink(target, link).unwrap();
    std::os::unix::fs::lchown(link, Some(owner), Some(owner)).unwrap();
}

/// Fails where a path is opened as it is.
#[test]
fn links_of_root_are_followed_and_those_of_others_are_not() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let dir = tempfile::tempdir().unwrap();
    let (here, file) = (dir.path(), dir.path().join("real/file"));
    fs::create_dir_all(here.join("real/deep")).unwrap();
    fs::create_dir(here.join("theirs")).unwrap();
    fs::write(&file, "x").unwrap();
    link(here.join("real"), &here.join("absolute"), 0);
    link("real/deep/../", &here.join("relative"), 0);
    link(here.join("real"), &here.join("nobodys"), NOBODY);
    link("../real", &here.join("theirs/roots"), 0);
    chown(here.join("theirs"), Some(NOBODY), None).unwrap();
    link("loop", &here.join("loop"), 0);
    let root = Root::own().unwrap();
    let id = file::id(fs::File::open(&file).unwrap()).unwrap();
    for path in ["real/file", "absolute/file", "relative/file", "real/deep/../file", "./theirs/../real/file"] {
        assert_eq!(root.find(&here.join(path)).unwrap().id().unwrap(), id, "{path}");
    }
    for path in ["nobodys/file", "nobodys", "theirs/roots/file", "loop"] {
        let error = root.find(&here.join(path)).unwrap_err();
        assert_eq!(error.kind(), std::io::Error::from(rustix::io::Errno::LOOP).kind(), "{path}");
    }
    assert_eq!(root.find(&here.join("real/file/x")).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert_eq!(root.find(&here.join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(root.find(&here.join("real/../../../../../../../..")).is_ok(), "there is nothing above the root");
}

#[test]
fn what_is_no_file_is_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    let (file, pipe, to) = (dir.path().join("file"), dir.path().join("pipe"), dir.path().join("link"));
    fs::write(&file, "x").unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    symlink(&file, &to).unwrap();
    assert!(open_regular(&file).is_ok());
    for path in [&pipe, &to, &dir.path().to_path_buf(), &"/dev/null".into()] {
        assert!(open_regular(path).is_err(), "{}", path.display());
    }
    assert!(Place::at(&file).unwrap().open(true).is_ok());
}

/// Waited for ever while the connection was made as any other, and was given to whom the link named.
#[test]
fn a_socket_is_connected_to_without_waiting_and_without_anothers_link() {
    let dir = tempfile::tempdir().unwrap();
    let (path, to) = (dir.path().join("socket"), dir.path().join("link"));
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let mut inside = Vec::new();
    let full = loop {
        match connect(&path) {
            Ok(stream) => inside.push(stream),
            Err(error) => break error,
        }
        assert!(inside.len() < 10);
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    drop(listener);
    assert_eq!(connect(&path).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(connect(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    if rustix::process::geteuid().is_root() {
        link(&path, &to, NOBODY);
        assert!(connect(&to).is_err_and(|error| error.kind() != ErrorKind::ConnectionRefused));
    }
}
