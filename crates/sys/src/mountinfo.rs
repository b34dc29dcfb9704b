//! `/proc/thread-self/mountinfo` (kernel's `Documentation/filesystems/proc.rst`, 3.5).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A mount: one line of `mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its number, as `statx` reports it.
    pub id: u64,
    /// Major and minor number of the device, as `st_dev` shows it.
    pub device: (u32, u32),
    /// The directory of the file system that is the mount's root.
    pub root: PathBuf,
    /// The directory at which it is mounted.
    pub point: PathBuf,
    /// The file system's type: `tmpfs`, `cgroup2`, …
    pub kind: String,
    /// The file system's own options: `size=…`, `huge=…`, a cgroup's controllers.
    pub options: OsString,
}

impl Mount {
    /// The value of option `name`; `Some("")` where it stands without one.
    pub fn option(&self, name: &str) -> Option<&OsStr> {
        self.options.as_bytes().split(|&byte| byte == b',').find_map(|option| {
            match option.strip_prefix(name.as_bytes())? {
                [b'=', value @ ..] => Some(OsStr::from_bytes(value)),
                [] => Some(OsStr::new("")),
                _ => None,
            }
        })
    }
}

/// All mounts of this thread's mount namespace, in the order of mounting. Of two mounts at one place the later hides
/// the earlier.
///
/// # Errors
/// `/proc` is not mounted.
pub fn mounts() -> Result<Vec<Mount>> {
    let path = "/proc/thread-self/mountinfo";
    let text = std::fs::read(path).map_err(|error| Error::new(format!("read {path}"), error))?;
    Ok(parse(&text))
}

/// The mounts that `text` lists; lines that are not understood are passed over.
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = number(fields.next()?)?;
    let _parent = fields.next()?;
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let root = unescape(fields.next()?);
    let point = unescape(fields.next()?);
    // Then the mount's options and any number of optional fields, up to a lone dash.
    fields.find(|&field| field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let _source = fields.next()?;
    Some(Mount {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: PathBuf::from(root),
        point: PathBuf::from(point),
        kind,
        options: unescape(fields.next()?),
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Undoes `\040` and similar escapes, by which the kernel keeps a line's fields apart.
pub(crate) fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        rest = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                after
            }
            _ => {
                plain.push(*first);
                tail
            }
        };
    }
    OsString::from_vec(plain)
}

/// The mount on which `path` would be found among `mounts`: the last of those with the longest matching point.
pub fn containing<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().filter(|mount| path.starts_with(&mount.point)).max_by_key(|mount| mount.point.components().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        36 21 0:32 / /run/my\\040ram rw,nosuid shared:7 master:2 - tmpfs tmpfs rw,size=1024k,huge=never,mode=700\n\
        40 21 0:28 /sub /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        not a mount\n\
        41 21 0:33 / /run/my\\040ram rw - tmpfs tmpfs rw,huge=always\n";

    #[test]
    fn fields_options_and_escapes_are_understood_and_nonsense_is_passed_over() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 4);
        assert_eq!(mounts[1].point, Path::new("/run/my ram"));
        assert_eq!((mounts[1].id, mounts[1].device, mounts[1].kind.as_str()), (36, (0, 32), "tmpfs"));
        assert_eq!(mounts[1].option("huge"), Some(OsStr::new("never")));
        assert_eq!(mounts[1].option("hug"), None);
        assert_eq!(mounts[2].option("memory"), Some(OsStr::new("")));
        assert_eq!(mounts[2].root, Path::new("/sub"));
    }

    #[test]
    fn of_two_mounts_at_one_place_the_later_counts() {
        let mounts = parse(TEXT);
        assert_eq!(containing(&mounts, Path::new("/run/my ram/file")).unwrap().id, 41);
        assert_eq!(containing(&mounts, Path::new("/run/my rams")).unwrap().id, 21);
    }

    #[test]
    fn this_process_has_a_root_and_a_proc() {
        let mounts = mounts().unwrap();
        assert!(mounts.iter().any(|mount| mount.point == Path::new("/")));
        assert!(mounts.iter().any(|mount| mount.kind == "proc"));
    }
}
