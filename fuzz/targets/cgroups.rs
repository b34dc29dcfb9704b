//! `/proc/self/cgroup`, `/proc/meminfo` and the files of a memory cgroup.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_sys::memory::{Version, parse_available, parse_cgroups, parse_room};

fuzz_target!(|texts: (&str, &str, &str, &str, &str)| {
    let (cgroups, meminfo, limit, usage, stat) = texts;
    assert!(parse_cgroups(cgroups).len() <= cgroups.lines().count());
    let _ = parse_available(meminfo);
    for version in [Version::V1, Version::V2] {
        if let Some(room) = parse_room(limit, usage, stat, version) {
            assert!(room <= limit.trim().parse().expect("a limit that was understood"), "more than the limit");
        }
    }
});
