//! QEMU's arguments, which a peer proposes: reading, checking and completing them.
#![no_main]

use std::path::{Path, PathBuf};

use libfuzzer_sys::fuzz_target;
use sterna_daemon::qemu::arguments::{Additions, check_for_run, for_incoming, for_run, names_ram_file, parse, unparse};
use sterna_daemon::qemu::{cpu, files};

fuzz_target!(|given: (Vec<String>, String, String)| {
    let (arguments, machine, cpu_here) = given;
    let items = parse(&arguments);
    assert_eq!(parse(&unparse(&items)), items, "what was read can be written and read again");
    let allowed = check_for_run(&items, false).is_ok();
    let _ = (files::named(&items), files::check_absolute(&items), names_ram_file(&items, "ram"));
    for ram in [None, Some((1 << 30, Path::new("/ram,file")))] {
        let additions = Additions { name: "vm", qmp: Path::new("/qmp,sock"), ram, huge: false };
        let incoming = for_incoming(&items, &additions, &machine, &[("ram".into(), PathBuf::from("/new,ram"))]);
        // A destination's QEMU must wait: whatever came from the peer, these stand last.
        assert_eq!(incoming[incoming.len() - 3..], ["-incoming", "defer", "-S"]);
        if allowed {
            drop(for_run(&items, &additions));
        }
    }
    let _ = cpu::lacks(&machine, &cpu_here);
});
