//! The disks in QEMU's arguments, and the same disks on overlays.
//!
//! Understood are `-drive file=PATH` and `-blockdev` of a format over a file, in one option or in two, in words or in
//! JSON, raw or qcow2. What else makes a disk is not: nobody may write an image that others begin as, so every disk
//! that the guest can write must be found here.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sterna_api::Problem;

use super::arguments::{Item, NAME, join_pairs};
use super::clone::refused;

/// An image, and the one that is used in its place.
#[derive(Debug, Clone, Copy)]
pub struct Replacement<'a> {
    /// The image.
    pub image: &'a Path,
    /// The other, such as an overlay of it.
    pub by: &'a Path,
    /// The other's format.
    pub format: &'a str,
}

/// What says of an image how it is read, which its overlay does not have, as a key begins.
const OF_THE_IMAGE: [&str; 10] =
    ["offset", "size", "driver", "backing", "encrypt", "key-secret", "copy-on-read", "data-file", "fat-type", "file."];

/// These arguments, of the machine of this name, with its disks on overlays.
///
/// # Errors
/// A [`Problem`]: an image is not named in a way that is known, or another disk can be written.
pub fn onto(items: &[Item], name: &str, overlays: &[Replacement<'_>]) -> Result<Vec<Item>, Problem> {
    replaced(items, name, overlays, may_write)
}

/// These arguments with some of the machine's disks on other images.
///
/// # Errors
/// A [`Problem`]: an image is not named in a way that is known.
pub fn with_others(items: &[Item], name: &str, others: &[Replacement<'_>]) -> Result<Vec<Item>, Problem> {
    replaced(items, name, others, |_| false)
}

/// The same, of which none may be left that is `wrong`.
fn replaced(
    items: &[Item],
    name: &str,
    replacements: &[Replacement<'_>],
    wrong: impl Fn(&Item) -> bool,
) -> Result<Vec<Item>, Problem> {
    let mut onto = items.to_vec();
    let mut left = replacements.to_vec();
    for (index, item) in items.iter().enumerate() {
        let found = image(item).and_then(|path| {
            let path = PathBuf::from(path.replace(NAME, name));
            left.iter().position(|replacement| replacement.image == path)
        });
        match found {
            Some(at) => {
                let Replacement { by, format, .. } = left.swap_remove(at);
                replace(&mut onto, index, by, format)?;
            }
            None if wrong(item) => {
                let why = "it can be written, and is no disk of the guest's in raw or qcow2 that it has alone";
                return Err(refused(item, why).hint("name disks with -drive file=PATH,format=raw or qcow2"));
            }
            None => {}
        }
    }
    match left.first() {
        None => Ok(onto),
        Some(Replacement { image, .. }) => {
            let message = format!("the disk {} is not in the arguments: was it plugged in later?", image.display());
            Err(crate::problems::invalid(message).hint("give the clones' arguments behind '--' with the same disks"))
        }
    }
}

/// Whether QEMU with these arguments, in which the machine has its name, has a disk on this image: not under another
/// one.
#[must_use]
pub fn is_named(items: &[Item], file: &Path) -> bool {
    let below = below(items);
    let text = file.display().to_string();
    items.iter().any(|item| match image(item).filter(|path| path.starts_with('/')) {
        Some(path) => {
            let is_below =
                item.option == "blockdev" && item.word("node-name").is_some_and(|name| below.contains(&name));
            !is_below && is_same(Path::new(&path), file)
        }
        // In words that are not understood it may be a disk.
        None => item.value.as_deref().is_some_and(|value| value.replace(",,", ",").contains(&text)),
    })
}

/// The block nodes that lie under others, by what the arguments say: images under overlays, and what reads them.
fn below(items: &[Item]) -> HashSet<String> {
    let nodes = || items.iter().filter(|item| item.option == "blockdev");
    let mut below: HashSet<String> = nodes().filter_map(|item| item.word("backing")).collect();
    loop {
        let is_below = |item: &&Item| item.word("node-name").is_some_and(|name| below.contains(&name));
        let files = nodes().filter(is_below).filter_map(|item| item.word("file"));
        let more: Vec<String> = files.filter(|file| !below.contains(file)).collect();
        if more.is_empty() {
            return below;
        }
        below.extend(more);
    }
}

/// Whether both paths lead to one file.
fn is_same(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| path.metadata().map(|about| (about.dev(), about.ino())).ok();
    one == other || file(one).is_some_and(|one| file(other) == Some(one))
}

/// The file that an option names for a disk.
fn image(item: &Item) -> Option<String> {
    let path = match (item.option.as_str(), item.json()) {
        ("drive", _) => item.get("file"),
        ("blockdev", Some(json)) => {
            let file = if json["file"].is_object() { &json["file"] } else { &json };
            (file["driver"] == "file").then(|| file["filename"].as_str().map(String::from)).flatten()
        }
        ("blockdev", None) if item.get("driver").as_deref() == Some("file") => item.get("filename"),
        ("blockdev", None) => item.get("file.filename"),
        _ => None,
    }?;
    Some(path.strip_prefix("file:").map(String::from).unwrap_or(path))
}

/// Whether an option makes a disk that may be written.
fn may_write(item: &Item) -> bool {
    let on = |key: &str| item.get(key).is_some_and(|word| word == "on");
    match item.option.as_str() {
        "hda" | "hdb" | "hdc" | "hdd" | "fda" | "fdb" | "mtdblock" | "pflash" | "sd" | "snapshot" | "" => true,
        "drive" => {
            let empty = item.get("file").is_none();
            !(empty || on("readonly") || on("read-only") || item.get("media").as_deref() == Some("cdrom"))
        }
        // A format's file has its own option; what is over it is told by that.
        "blockdev" => {
            image(item).is_some() && !item.json().map_or_else(|| on("read-only"), |json| json["read-only"] == true)
        }
        _ => false,
    }
}

/// Has the disk of this option be another image, of this format.
fn replace(items: &mut [Item], index: usize, by: &Path, format: &str) -> Result<(), Problem> {
    let item = items[index].clone();
    let path = by.display().to_string();
    if item.option == "drive" {
        check_words(&item, &item)?;
        items[index].set("file", &path);
        items[index].set("format", format);
        return Ok(());
    }
    match item.json() {
        Some(mut json) if json["file"].is_object() => {
            check_json(&item, &json)?;
            json["driver"] = format.into();
            json["file"]["filename"] = path.into();
            items[index].value = Some(json.to_string());
            return Ok(());
        }
        None if item.get("file.filename").is_some() => {
            let mut of_file = item.clone();
            of_file.value = Some(join_pairs(&without_file(&item)));
            check_words(&of_file, &item)?;
            items[index].set("driver", format);
            items[index].set("file.filename", &path);
            return Ok(());
        }
        _ => {}
    }
    let node = item.json().map_or_else(|| item.get("node-name"), |json| json["node-name"].as_str().map(String::from));
    let over = |other: &Item| {
        let file = other.json().map_or_else(|| other.get("file"), |json| json["file"].as_str().map(String::from));
        other.option == "blockdev" && file.is_some() && file == node
    };
    let Some(over) = items.iter().position(over) else {
        return Err(refused(&item, "its file is used without a format").hint("put 'raw' over it: -blockdev driver=raw"));
    };
    match items[over].json() {
        Some(mut json) => {
            check_json(&items[over], &json)?;
            json["driver"] = format.into();
            items[over].value = Some(json.to_string());
        }
        None => {
            check_words(&items[over], &items[over])?;
            items[over].set("driver", format);
        }
    }
    match item.json() {
        Some(mut json) => {
            json["filename"] = path.into();
            items[index].value = Some(json.to_string());
        }
        None => items[index].set("filename", &path),
    }
    Ok(())
}

/// The keys of a format whose file's own are among them.
fn without_file(item: &Item) -> Vec<(String, String)> {
    item.pairs().into_iter().filter(|(key, _)| !matches!(key.as_str(), "file.filename" | "file.driver")).collect()
}

/// Checks that nothing among the words says how the image is read. `shown`: the option that people see.
fn check_words(item: &Item, shown: &Item) -> Result<(), Problem> {
    let keys = item.pairs().into_iter().map(|(key, value)| (key, json!(value)));
    check(keys, item.option == "drive", shown)
}

fn check_json(item: &Item, json: &Value) -> Result<(), Problem> {
    let pairs = json.as_object().into_iter().flatten();
    check(pairs.map(|(key, value)| (key.clone(), value.clone())), false, item)
}

fn check(keys: impl Iterator<Item = (String, Value)>, drive: bool, shown: &Item) -> Result<(), Problem> {
    for (key, value) in keys {
        let plain = |value: &Value| matches!(value.as_str(), Some("raw" | "qcow2"));
        let odd = match key.as_str() {
            "driver" if !drive => !plain(&value),
            "format" => !plain(&value),
            "snapshot" => value != "off",
            key => OF_THE_IMAGE.iter().any(|word| key.starts_with(word)),
        };
        if odd {
            let why = format!("'{key}' says how its image is read, and an overlay is read otherwise");
            return Err(refused(shown, &why).hint("overlays are made of plain raw and qcow2 images in files"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::arguments::{parse, unparse};
    use super::*;

    fn words(line: &str) -> Vec<Item> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    fn over(line: &str, overlays: &[(&'static str, &'static str)]) -> Result<String, String> {
        let replacement = |(image, by): &(&'static str, &'static str)| Replacement {
            image: Path::new(*image),
            by: Path::new(*by),
            format: "qcow2",
        };
        let overlays: Vec<_> = overlays.iter().map(replacement).collect();
        onto(&words(line), "web1", &overlays).map(|items| unparse(&items).join(" ")).map_err(|problem| problem.message)
    }

    #[test]
    fn a_disk_goes_back_to_the_image_under_its_overlay_and_the_others_stay() {
        let items = words("-drive file=/o,if=virtio,format=qcow2 -drive file=/other,format=raw");
        let back = [Replacement { image: Path::new("/o"), by: Path::new("/d"), format: "raw" }];
        let back = with_others(&items, "web1", &back).unwrap();
        assert_eq!(unparse(&back).join(" "), "-drive if=virtio,file=/d,format=raw -drive file=/other,format=raw");
    }

    #[test]
    fn each_way_to_name_a_disk_names_its_overlay_and_all_else_stays() {
        let pairs = [
            (
                "-drive file=/d,if=virtio,format=raw,cache=writeback -smp 2 -drive file=/r,readonly=on -cdrom /c",
                "-drive if=virtio,cache=writeback,file=/o,format=qcow2 -smp 2 -drive file=/r,readonly=on -cdrom /c",
            ),
            ("-drive file=file:/d,if=none,id=x", "-drive if=none,id=x,file=/o,format=qcow2"),
            (
                "-blockdev driver=file,filename=/d,node-name=f -blockdev driver=raw,file=f,node-name=n -device x,drive=n",
                "-blockdev driver=file,node-name=f,filename=/o -blockdev file=f,node-name=n,driver=qcow2 -device x,drive=n",
            ),
            (
                "-blockdev driver=qcow2,node-name=n,file.driver=file,file.filename=/d",
                "-blockdev node-name=n,file.driver=file,driver=qcow2,file.filename=/o",
            ),
            (
                "-blockdev {\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"/d\"},\"node-name\":\"n\"}",
                "-blockdev {\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"/o\"},\"node-name\":\"n\"}",
            ),
            (
                "-blockdev {\"driver\":\"file\",\"filename\":\"/d\",\"node-name\":\"f\"} -blockdev driver=raw,file=f",
                "-blockdev {\"driver\":\"file\",\"filename\":\"/o\",\"node-name\":\"f\"} -blockdev file=f,driver=qcow2",
            ),
        ];
        for (line, expected) in pairs {
            assert_eq!(over(line, &[("/d", "/o")]).as_deref(), Ok(expected));
        }
        assert_eq!(over("-drive file=/{name}.img", &[("/web1.img", "/o")]).unwrap(), "-drive file=/o,format=qcow2");
    }

    #[test]
    fn a_disk_is_on_an_image_that_its_arguments_name_for_a_disk_and_not_under_one() {
        let over = "-blockdev driver=file,filename=/f,node-name=f -blockdev driver=raw,file=f,node-name=b -blockdev \
                    driver=qcow2,node-name=o,backing=b,file.driver=file,file.filename=/o";
        let json = "-blockdev {\"driver\":\"file\",\"filename\":\"/f\",\"node-name\":\"f\"} -blockdev \
                    {\"driver\":\"qcow2\",\"file\":\"f\",\"node-name\":\"b\"} -blockdev \
                    {\"driver\":\"file\",\"filename\":\"/o\",\"node-name\":\"p\"} -blockdev \
                    {\"driver\":\"qcow2\",\"file\":\"p\",\"node-name\":\"o\",\"backing\":\"b\"}";
        for (line, image, named) in [
            ("-drive file=/d,format=raw -smp 2", "/d", true),
            ("-drive file=file:/d", "/d", true),
            ("-drive file=/d,,e", "/d,e", true),
            ("-drive file=/d2", "/d", false),
            ("-drive file=/d,offset=512", "/d", true),
            ("-drive file=/d -smp 2", "/snapshot", false),
            (over, "/o", true),
            (over, "/f", false),
            (json, "/o", true),
            (json, "/f", false),
            // Not understood, but there.
            ("-hda /h", "/h", true),
            ("/bare", "/bare", true),
            ("-cdrom /c", "/c2", false),
            ("-blockdev driver=host_device,filename=/dev/x,node-name=x", "/dev/x", true),
        ] {
            assert_eq!(is_named(&words(line), Path::new(image)), named, "{image} in {line}");
        }
        let dir = tempfile::tempdir().unwrap();
        let [disk, link] = ["disk", "link"].map(|name| dir.path().join(name));
        std::fs::write(&disk, "").unwrap();
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        assert!(is_named(&words(&format!("-drive file={}", link.display())), &disk), "it is the same file");
    }

    #[test]
    fn what_is_not_understood_is_refused_and_so_is_a_disk_without_overlay() {
        for (line, why) in [
            ("-drive file=/d,format=raw,offset=512", "'offset'"),
            ("-drive file=/d,snapshot=on", "'snapshot'"),
            ("-drive file=/d,format=vmdk", "'format'"),
            ("-drive file=/d,file.locking=off", "'file.locking'"),
            ("-blockdev driver=luks,node-name=n,file.driver=file,file.filename=/d", "'driver'"),
            ("-blockdev driver=qcow2,node-name=n,file.driver=file,file.filename=/d,backing=b", "'backing'"),
            ("-blockdev driver=file,filename=/d,node-name=f", "without a format"),
            ("-drive file=/d -drive file=/other", "file=/other': it can be written"),
            ("-drive file=/d -drive file=/d", "it can be written"),
            ("-drive file=/d -hda /h", "-hda /h"),
            ("-drive file=/d /bare", "/bare"),
            ("-drive file=/d -snapshot", "-snapshot"),
            ("-drive file=/d -blockdev driver=file,filename=/e,node-name=e", "filename=/e"),
            ("-smp 2", "/d is not in the arguments"),
        ] {
            let refusal = over(line, &[("/d", "/o")]).expect_err(line);
            assert!(refusal.contains(why), "{line}: {refusal}");
        }
    }
}
