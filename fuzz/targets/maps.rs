//! `/proc/PID/maps` of a QEMU that chose its files' names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sterna_sys::process::parse_maps;

fuzz_target!(|text: &[u8]| {
    let lines = text.split(|&byte| byte == b'\n').count();
    let maps = parse_maps(text);
    assert!(maps.len() <= lines);
    for mapping in &maps {
        assert!(mapping.path.as_ref().is_none_or(|path| !path.as_os_str().is_empty()));
    }
});
