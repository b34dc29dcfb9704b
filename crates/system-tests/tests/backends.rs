//! RAM back ends that can and cannot be moved, and what writes guest RAM in ways of its own: disks with direct I/O,
//! balloons.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use sterna_api::Phase;
use sterna_api::options::MIN_BANDWIDTH_BYTES_PER_S;
use sterna_bench::accelerator;
use sterna_bench::command::{run, wait_for};
use sterna_system_tests::needs::left_to_another_day;
use sterna_system_tests::stranger::Stranger;
use sterna_system_tests::{PATIENCE, Plan, Site, cli, needs, skip_without, turn};

/// A file system in memory for the RAM of machines that Sterna did not start.
fn tmpfs() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("sterna-st-").tempdir_in("/dev/shm").unwrap()
}

/// A machine with firmware only, and this back end.
fn bare(backend: Option<&str>) -> Vec<String> {
    let words =
        ["-accel", accelerator::chosen().name(), "-display", "none", "-vga", "none", "-nodefaults", "-m", "64M"];
    let mut words = words.map(str::to_owned).to_vec();
    words.push("-machine".into());
    words.push(backend.map_or("q35", |_| "q35,memory-backend=ram").into());
    words.extend(backend.iter().flat_map(|backend| ["-object".to_owned(), (*backend).to_owned()]));
    words
}

fn file_backend(path: &Path) -> String {
    format!("memory-backend-file,id=ram,size=64M,mem-path={},share=on", path.display())
}

#[test]
fn ram_that_cannot_be_moved_is_refused_with_the_reason_and_runs_on() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let site = Site::without_guest(&Plan::small());
    let ram = tmpfs();
    let file = ram.path().join("ram").display().to_string();
    let cases = [
        ("memfd", Some("memory-backend-memfd,id=ram,size=64M,share=on".into()), true, "memfd"),
        ("private", Some(format!("memory-backend-file,id=ram,size=64M,mem-path={file},share=off")), true, "share=on"),
        ("anon", Some("memory-backend-ram,id=ram,size=64M".into()), true, "anonymous"),
        ("plain", None, true, "memory-backend-file"),
        ("noagent", Some(file_backend(&ram.path().join("ram"))), false, "agent"),
    ];
    for (name, backend, with_agent, word) in cases {
        let backend: Option<String> = backend;
        let mut stranger = Stranger::start(site.host("a"), name, &bare(backend.as_deref()), with_agent);
        stranger.adopt("x").expect(1, &["cannot be adopted", word, "hint"]);
        assert!(stranger.runs(), "{name}: it is left alone");
    }
    // The same machine with RAM that can be moved, and the agent.
    let stranger = Stranger::start(site.host("a"), "good", &bare(Some(&file_backend(&ram.path().join("ram")))), true);
    stranger.adopt("g").expect(0, &[]);
    site.attempt(None, &["--verify"]).expect(0, &[]);
}

/// Huge pages of the machine, given back when dropped.
struct HugePages {
    mount: tempfile::TempDir,
    before: String,
}

const HUGE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

impl HugePages {
    fn take(count: usize) -> Option<Self> {
        let before = std::fs::read_to_string(HUGE).ok()?;
        let wanted = before.trim().parse::<usize>().ok()? + count;
        let mount = tempfile::tempdir().ok()?;
        std::fs::write(HUGE, wanted.to_string()).ok()?;
        let taken = Self { mount, before };
        run("mount", &format!("-t hugetlbfs none {}", taken.mount.path().display())).ok()?;
        (std::fs::read_to_string(HUGE).ok()?.trim() == wanted.to_string()).then_some(taken)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = run("umount", &self.mount.path().display().to_string());
        let _ = std::fs::write(HUGE, self.before.trim());
    }
}

#[test]
fn ram_in_huge_pages_is_refused_with_the_reason() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let Some(huge) = HugePages::take(32) else {
        return println!("skipped: this machine gives no huge pages of 2 MiB");
    };
    let site = Site::without_guest(&Plan::small());
    let backend = file_backend(&huge.mount.path().join("ram"));
    let mut stranger = Stranger::start(site.host("a"), "huge", &bare(Some(&backend)), true);
    stranger.adopt("x").expect(1, &["cannot be adopted", "huge pages of 2.00 MiB", "in whatever mode", "huge=advise"]);
    assert!(stranger.runs());
}

#[test]
fn a_machine_with_several_blocks_of_ram_moves_to_and_fro() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let ram = tmpfs();
    let plan = Plan::small();
    let mut site = Site::without_guest(&plan);
    let block =
        |id: &str| format!("memory-backend-file,id={id},size=128M,mem-path={},share=on", ram.path().join(id).display());
    let mut words = site.qemu_words(&plan);
    for word in ["-m", "256M", "-object", &block("low"), "-object", &block("high")] {
        words.push(word.into());
    }
    for word in ["-numa", "node,memdev=low", "-numa", "node,memdev=high"] {
        words.push(word.into());
    }
    let stranger = Stranger::start(site.host("a"), "blocks", &words, true);
    site.wait_until_up();
    stranger.adopt("g").expect(0, &[]);
    for _ in 0..2 {
        // The first host keeps the RAM files, which are not the daemon's: it has them no more on record.
        let report = site.migrate(&[]);
        assert_eq!(report.ram.total_pages, (256 << 20) / 4096);
        site.checker_is_well();
    }
}

/// What the guest's kernel holds of its disks, by its own count; nothing else of it is a clean copy of a file, as its
/// other files lie in memory alone.
fn clean_copies_of_the_disk_are_counted_from_outside(site: &Site) {
    let console = site.guest.console_text();
    let said = console.lines().find_map(|line| line.split_once("Buffers:")?.1.split_whitespace().next()?.parse().ok());
    let said: u64 = said.map(|kib: u64| kib / 4).expect("the guest has told what it holds");
    let words = ["estimate", &site.guest.name, "--bandwidth", "1Gbit", "--duration", "200ms", "--page-cache", "--json"];
    let answer = cli::ask(site.here(), &words);
    let told: serde_json::Value = serde_json::from_str(&answer.expect(0, &[]).stdout).expect("an estimate");
    let counted = told["observed"]["page_cache_pages"].as_u64().unwrap_or_else(|| panic!("{answer:#?}"));
    println!("{counted} clean pages of the page cache, the guest says {said}");
    // What a script and a look at /proc read in between.
    assert!(said >= DISK_BYTES as u64 / 4096 && counted.abs_diff(said) <= 64, "{counted}, the guest says {said}");
}

/// Bytes of the disk that the guest reads over and over.
const DISK_BYTES: usize = 48 << 20;

#[test]
fn a_disk_read_by_direct_io_through_the_migration_arrives_in_ram() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    // On a disk: where the kernel copies, as on a tmpfs, no device writes past the page tables.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let (disk, script) = (directory.path().join("disk"), directory.path().join("script"));
    let mut seed = 1_u64;
    let noise = |_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 56) as u8
    };
    std::fs::write(&disk, (0..DISK_BYTES).map(noise).collect::<Vec<u8>>()).unwrap();
    // The whole of it through the guest's cache, which lasts as long as somebody has it open; then again and again past
    // it, and what of it has arrived.
    let mut text = "exec 3</dev/vda\ndd if=/dev/vda of=/dev/null bs=1M 2>/dev/null\ngrep Buffers: /proc/meminfo\nwhile :; do\ndd if=/dev/vda of=/tmp/copy bs=1M iflag=direct 2>/dev/null\nmd5sum </tmp/copy | sed 's/^/DISK /'\ndone\n"
        .to_owned();
    text.push_str(&"\n".repeat(512 - text.len() % 512));
    std::fs::write(&script, text).unwrap();
    let drive = |path: &Path, more: &str| format!("file={},format=raw,if=virtio,{more}", path.display());
    let more = ["-drive".into(), drive(&disk, "cache=none,aio=native"), "-drive".into(), drive(&script, "readonly=on")];
    let jobs = format!("{};sh:/dev/vdb", sterna_system_tests::plan::JOBS);
    let mut site = Site::start(&Plan { jobs, more: more.to_vec(), ..Plan::small() });
    let sum = run("md5sum", &disk.display().to_string()).unwrap();
    let sum = sum.split(' ').next().unwrap().to_owned();
    let read = |site: &Site| -> Vec<String> {
        let text = site.guest.console_text();
        let reads = text.lines().filter_map(|line| line.trim().strip_prefix("DISK "));
        // The last line may still be on its way: md5sum's ends with the name of what it read.
        reads.filter(|line| line.ends_with('-')).map(str::to_owned).collect()
    };
    wait_for("the disk to be read once", PATIENCE, || Ok((!read(&site).is_empty()).then_some(()))).unwrap();
    clean_copies_of_the_disk_are_counted_from_outside(&site);
    for _ in 0..4 {
        let before = read(&site).len();
        let report = site.migrate(&["--bandwidth", "60MB"]);
        println!("{:?}", report.tracking);
        site.checker_is_well();
        // The read that was under way when it moved, and one that began afterwards.
        wait_for("the disk to be read", PATIENCE, || Ok((read(&site).len() >= before + 2).then_some(()))).unwrap();
    }
    for (number, line) in read(&site).iter().enumerate() {
        assert!(line.starts_with(&sum), "read {number} differs: {line}, not {sum}");
    }
}

/// Says a QMP command on a connection of its own; the answer.
fn qmp(stream: &mut BufReader<UnixStream>, command: &str) -> serde_json::Value {
    stream.get_mut().write_all(command.as_bytes()).unwrap();
    let mut line = String::new();
    while !line.contains("\"return\"") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "QEMU hung up");
        assert!(!line.contains("\"error\""), "{line}");
    }
    serde_json::from_str(&line).unwrap()
}

#[test]
fn a_balloon_that_takes_and_gives_back_memory_through_the_migration_leaves_both_sides_equal() {
    let _turn = turn();
    if left_to_another_day(9) || skip_without(&needs::GUEST) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("second-qmp");
    let more = ["-device", "virtio-balloon-pci,id=balloon", "-qmp"].map(str::to_owned);
    let more = more.into_iter().chain([format!("unix:{},server=on,wait=off", path.display())]).collect();
    let mut site = Site::start(&Plan { more, ..Plan::small() });
    let mut second = BufReader::new(UnixStream::connect(&path).unwrap());
    qmp(&mut second, "{\"execute\":\"qmp_capabilities\"}");
    let mut size = |mib: u64, done: fn(u64) -> bool| {
        let bytes = mib << 20;
        qmp(&mut second, &format!("{{\"execute\":\"balloon\",\"arguments\":{{\"value\":{bytes}}}}}"));
        wait_for("the balloon", PATIENCE, || {
            let answer = qmp(&mut second, "{\"execute\":\"query-balloon\"}");
            let actual = answer["return"]["actual"].as_u64().expect("its size");
            Ok(done(actual >> 20).then_some(()))
        })
        .unwrap();
    };
    // Held back until the balloon has done both.
    cli::limit_bandwidth(site.here(), Some(2 << 20));
    let attempt = site.begin(None, &["--verify"]);
    // Taken after tracking began, given back in part before it ends: what was taken must read as zeros there, what was
    // given back and written again must travel.
    site.wait_for_phase(Phase::Precopy, |progress| progress.bytes_on_wire > 1 << 20);
    // However long a balloon takes here, it does not end before.
    cli::limit_bandwidth(site.here(), Some(MIN_BANDWIDTH_BYTES_PER_S));
    size(160, |actual| actual < 180);
    size(200, |actual| actual > 190);
    cli::limit_bandwidth(site.here(), None);
    let answer = attempt.end();
    answer.expect(0, &[]);
    let report = answer.report().unwrap();
    println!("{:?}", report.tracking);
    assert!(report.tracking.discarded_pages > 0, "the balloon took nothing: {:?}", report.tracking);
    assert!(report.verify.checked && report.verify.mismatches == 0, "{:?}", report.verify);
    site.moved();
    site.nothing_is_left_there();
    site.checker_is_well();
}
