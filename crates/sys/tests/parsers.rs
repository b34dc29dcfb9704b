//! What the kernel writes about others is read without a panic, whatever names they chose. Fuzz targets go on where
//! these end.

use std::path::Path;

use proptest::prelude::*;
use sterna_sys::memory::{Version, parse_available, parse_cgroups, parse_room};
use sterna_sys::mountinfo;
use sterna_sys::process::parse_maps;

proptest! {
    #[test]
    fn any_bytes_are_read_as_mappings_and_mounts(text: Vec<u8>) {
        let lines = text.split(|&byte| byte == b'\n').count();
        prop_assert!(parse_maps(&text).len() <= lines);
        prop_assert!(mountinfo::parse(&text).len() <= lines);
    }

    #[test]
    fn a_mapped_files_name_survives_whatever_it_is(
        name in "/[^\n\\\\]{1,40}",
        start in 1u64..1 << 40,
        pages in 1u64..1 << 20,
    ) {
        prop_assume!(!name.ends_with(" (deleted)"));
        let end = start + pages * 4096;
        let maps = parse_maps(format!("{start:x}-{end:x} rw-s 00000000 00:1f 77 {name}\n").as_bytes());
        prop_assert_eq!(maps.len(), 1);
        prop_assert_eq!(&maps[0].range, &(start..end));
        prop_assert_eq!(maps[0].path.as_deref(), Some(Path::new(&name)));
    }

    #[test]
    fn a_mounts_own_place_lies_on_a_mount(point in "(/[a-z]{1,4}){1,4}", other in "(/[a-z]{1,4}){1,4}") {
        let text = format!("1 0 0:1 / {point} rw - tmpfs none rw\n2 0 0:2 / {other} rw - tmpfs none rw,huge=never\n");
        let mounts = mountinfo::parse(text.as_bytes());
        let found = mountinfo::containing(&mounts, Path::new(&point)).expect("it is a mount itself");
        prop_assert!(Path::new(&point).starts_with(&found.point));
        prop_assert!(mountinfo::containing(&mounts, Path::new("relative")).is_none());
    }

    #[test]
    fn a_cgroup_never_leaves_more_than_its_limit(limit: u64, usage: u64, inactive: u64) {
        for version in [Version::V1, Version::V2] {
            let stat = format!("inactive_file {inactive}\ntotal_inactive_file {inactive}\n");
            if let Some(room) = parse_room(&limit.to_string(), &usage.to_string(), &stat, version) {
                prop_assert!(room <= limit);
            }
        }
    }

    #[test]
    fn any_text_is_read_as_cgroups_and_memory(text: String) {
        prop_assert!(parse_cgroups(&text).len() <= text.lines().count());
        let _ = parse_available(&text);
        let _ = parse_room(&text, &text, &text, Version::V2);
    }
}
