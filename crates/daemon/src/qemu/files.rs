//! The files that QEMU's arguments name. Their paths must be absolute, because QEMU starts in other directories and on
//! other hosts, and they must exist at the destination.

use std::path::{Path, PathBuf};

use sterna_api::{Code, Problem};

use super::arguments::Item;
use crate::problems::invalid;

/// A file that an argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The option.
    pub option: String,
    /// The file.
    pub path: PathBuf,
}

/// The files that the arguments name and that must be there when QEMU starts. Names that QEMU looks up in its own
/// directories (`-bios bios.bin`) and images behind a protocol (`nbd:…`) are no files here.
#[must_use]
pub fn named(items: &[Item]) -> Vec<Named> {
    let mut files = Vec::new();
    for item in items {
        let found = match item.option.as_str() {
            "kernel" | "dtb" | "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "fda" | "fdb" | "mtdblock" | "pflash"
            | "sd" | "" => item.value.clone(),
            "initrd" => {
                // Several modules, each with arguments after a space.
                let list = item.value.clone().unwrap_or_default();
                for path in list.split(',').filter_map(|part| part.split(' ').next()) {
                    push(&mut files, item, path);
                }
                None
            }
            "bios" => item.value.clone().filter(|value| value.contains('/')),
            "drive" => item.get("file"),
            "blockdev" => blockdev_file(item),
            _ => None,
        };
        if let Some(path) = found {
            push(&mut files, item, &path);
        }
    }
    files
}

fn push(files: &mut Vec<Named>, item: &Item, path: &str) {
    let plain = path.strip_prefix("file:").unwrap_or(path);
    let protocol = plain.split('/').next().is_some_and(|first| first.contains(':'));
    if !protocol && !plain.is_empty() {
        files.push(Named { option: item.option.clone(), path: PathBuf::from(plain) });
    }
}

fn blockdev_file(item: &Item) -> Option<String> {
    let value = item.value.as_deref()?;
    if let Ok(json) = serde_json::from_str::<serde_json::Value>(value) {
        let name = json["filename"].as_str().or_else(|| json["file"]["filename"].as_str());
        return name.map(String::from);
    }
    item.get("filename").or_else(|| item.get("file.filename"))
}

/// Refuses relative paths.
///
/// # Errors
/// A [`Problem`] that names the argument.
pub fn check_absolute(items: &[Item]) -> Result<(), Problem> {
    match named(items).into_iter().find(|file| file.path.is_relative()) {
        None => Ok(()),
        Some(file) => {
            let path = file.path.display();
            let mut problem = invalid(format!("'{path}' (-{}) is a relative path", file.option))
                .hint("give the whole path: QEMU starts in another directory, and later on other hosts");
            problem.code = Code::RelativePath;
            Err(problem)
        }
    }
}

/// The first file that is not on this host.
#[must_use]
pub fn missing(items: &[Item]) -> Option<Named> {
    named(items).into_iter().find(|file| !Path::new(&file.path).exists())
}

#[cfg(test)]
mod tests {
    use super::super::arguments::parse;
    use super::*;

    fn paths(line: &str) -> Vec<String> {
        let items = parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>());
        named(&items).into_iter().map(|file| file.path.display().to_string()).collect()
    }

    #[test]
    fn files_are_found_in_every_way_to_name_them() {
        assert_eq!(
            paths(
                "-kernel /k -initrd /i,/j -drive file=/d,if=virtio -drive if=pflash,file=/f -blockdev \
                 driver=file,filename=/b,node-name=x -blockdev {\"driver\":\"file\",\"filename\":\"/c\"} -bios /rom/x.bin \
                 -cdrom file:/e /img"
            ),
            ["/k", "/i", "/j", "/d", "/f", "/b", "/c", "/rom/x.bin", "/e", "/img"]
        );
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        assert!(
            paths("-bios bios-microvm.bin -drive file=nbd:localhost:1 -drive file=rbd:pool/img -append /x").is_empty()
        );
    }

    #[test]
    fn relative_paths_and_missing_files_are_named() {
        let items = parse(&["-kernel".into(), "vmlinuz".into()]);
        assert!(check_absolute(&items).unwrap_err().message.contains("vmlinuz"));
        let items = parse(&["-kernel".into(), "/proc/version".into(), "-initrd".into(), "/nowhere/initrd".into()]);
        assert_eq!(missing(&items).unwrap().path, Path::new("/nowhere/initrd"));
    }
}
