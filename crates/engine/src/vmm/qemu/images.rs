//! The images that the guest's disks and drives are on.

use std::path::PathBuf;

use serde_json::Value;

/// The file of each image in the answer to `query-block`: of several that lie over one another, that of the uppermost.
pub(super) fn files(list: &Value) -> Vec<PathBuf> {
    let devices = list.as_array().into_iter().flatten();
    devices.filter_map(|device| file(device["inserted"]["file"].as_str()?)).collect()
}

/// The file that QEMU means; none where an image is in no file.
fn file(named: &str) -> Option<PathBuf> {
    let path = |text: &str| text.starts_with('/').then(|| PathBuf::from(text));
    // So it names what a path alone does not say all of.
    let Some(json) = named.strip_prefix("json:") else { return path(named) };
    let json: Value = serde_json::from_str(json).ok()?;
    let mut node = &json;
    while node["file"].is_object() {
        node = &node["file"];
    }
    path(node["filename"].as_str()?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// As QEMU 7.2 and 10.0 answer, of which only these fields matter.
    #[test]
    fn each_disk_and_drive_with_something_in_it_is_on_an_image() {
        let list = json!([
            { "device": "virtio0", "inserted": { "ro": false, "file": "/o", "backing_file": "/base" } },
            { "device": "cd", "inserted": { "ro": true, "file": "/c" } },
            { "device": "floppy0" },
        ]);
        assert_eq!(files(&list), ["/o", "/c"].map(Path::new));
        assert!(files(&Value::Null).is_empty());
    }

    #[test]
    fn an_image_is_told_from_whatever_qemu_calls_it() {
        let nested = r#"json:{"driver":"qcow2","backing":{"driver":"raw","file":{"driver":"file","filename":"/b"}},"file":
            {"driver":"file","filename":"/o"}}"#;
        for (named, path) in [
            ("/d", Some("/d")),
            (r#"json:{"driver":"raw","offset":512,"file":{"driver":"file","filename":"/d"}}"#, Some("/d")),
            (nested, Some("/o")),
            (r#"json:{"driver":"nbd","server":{"type":"unix"}}"#, None),
            ("json:{", None),
            ("nbd://host/x", None),
            ("fat:rw:/directory", None),
            ("", None),
        ] {
            assert_eq!(file(named).as_deref(), path.map(Path::new), "{named}");
        }
    }
}
