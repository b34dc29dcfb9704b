//! `/proc/thread-self/mountinfo`.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sterna_sys::mountinfo::{containing, parse};

fuzz_target!(|text: &[u8]| {
    let mounts = parse(text);
    assert!(mounts.len() <= text.split(|&byte| byte == b'\n').count());
    for mount in &mounts {
        for name in ["huge", "size", "memory", ""] {
            let _ = mount.option(name);
        }
        let found = containing(&mounts, &mount.point).expect("a mount's own point lies on a mount");
        assert!(mount.point.starts_with(&found.point));
    }
    let _ = containing(&mounts, Path::new("/a/b"));
});
