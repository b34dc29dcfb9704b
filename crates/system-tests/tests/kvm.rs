//! Pages written by virtual processors under KVM: a tiny guest counts in every page of a range, for ever.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use sterna_bench::tools;
use sterna_system_tests::site::files;
use sterna_system_tests::{Plan, Site, cli, skip_without, turn};

/// Where the guest tells how it is (`guest/README.md`).
const COUNTERS: u64 = 64 << 10;

/// What the guest tells.
#[derive(Debug, Clone, Copy)]
struct Counters {
    passes: u32,
    bad: u32,
    first: u32,
    pages: u32,
}

fn image() -> Option<PathBuf> {
    let named = std::env::var_os("STERNA_KVM_TINY").map(PathBuf::from);
    let built = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../build/guest/kvm-tiny.bin"));
    named.or(Some(built)).filter(|path| path.exists())
}

/// The arguments of a machine that runs the tiny guest.
fn machine(image: &str) -> Vec<String> {
    let words = ["-accel", "kvm", "-machine", "pc-q35-7.2", "-nodefaults", "-display", "none", "-bios", image];
    words.map(str::to_owned).to_vec()
}

/// Why KVM cannot be used here: QEMU says it best.
fn no_kvm(image: &str) -> Option<String> {
    let mut child = Command::new(tools::qemu_7_2().ok()?)
        .args(machine(image))
        .args(["-m", "8M", "-S", "-monitor", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    // The end of its standard input does not end QEMU; this word does.
    use std::io::Write;
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(b"quit\n"));
    let output = child.wait_with_output().ok()?;
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

fn counters(site: &Site, host: &str) -> Counters {
    let file = files(site.host(host)).into_iter().find(|path| path.is_file()).expect("a RAM file");
    let mut words = [0; 16];
    File::open(file).and_then(|file| file.read_exact_at(&mut words, COUNTERS)).expect("the guest's RAM");
    let word = |index: usize| u32::from_le_bytes(words[index * 4..][..4].try_into().expect("four bytes"));
    Counters { passes: word(0), bad: word(1), first: word(2), pages: word(3) }
}

#[test]
fn what_a_virtual_processor_writes_under_kvm_arrives() {
    let _turn = turn();
    if skip_without(&[tools::qemu_7_2]) {
        return;
    }
    let Some(image) = image().map(|path| path.display().to_string()) else {
        return println!("skipped: the tiny KVM guest is not built (STERNA_KVM_TINY)");
    };
    if let Some(reason) = no_kvm(&image) {
        return println!("skipped: no KVM here: {reason}");
    }
    let mut site = Site::without_guest(&Plan::small());
    let words = ["run", "g", "--memory", "8M", "--detach", "--"].map(str::to_owned);
    let words: Vec<String> = words.into_iter().chain(machine(&image)).collect();
    cli::ask(site.here(), &words.iter().map(String::as_str).collect::<Vec<_>>()).expect(0, &[]);
    let (here, _) = site.names();
    site.eventually("the guest counts", || counters(&site, here).passes > 2);

    // The last two leave pages for after the switchover, which the processor asks for by touching them.
    for mode in ["precopy", "precopy", "hybrid", "postcopy"] {
        let (here, there) = site.names();
        let before = counters(&site, here);
        // Slow: the guest writes all of its range again and again while pages go.
        let report = site.migrate(&["--mode", mode, "--bandwidth", "16MB", "--downtime-limit", "500ms"]);
        if mode == "postcopy" {
            assert!(report.postcopy.residue_pages >= u64::from(before.pages), "all goes after: {report:#?}");
        } else {
            assert!(report.tracking.write_faults > 0, "nothing was tracked: {:?}", report.tracking);
        }
        // Where QEMU takes long to stop, hybrid's rounds go on meanwhile, and may leave nothing.
        if report.postcopy.residue_pages > 0 {
            assert!(report.faults.count > 0 && report.pages.faulted > 0, "it asked for nothing: {report:#?}");
        }
        assert_eq!(report.pages.duplicate, 0);
        let arrived = counters(&site, there);
        assert_eq!((arrived.first, arrived.pages), (before.first, before.pages));
        assert!(arrived.passes > before.passes, "{before:?} {arrived:?}");
        // A pass that began at the destination has looked at each page.
        site.eventually("it counts on", || counters(&site, there).passes > arrived.passes + 1);
        let later = counters(&site, there);
        println!("{mode}: {before:?}, {arrived:?} at the destination, {later:?}");
        assert_eq!(later.bad, 0, "every page held what was last written to it: {later:?}");
    }
}
