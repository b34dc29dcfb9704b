//! Disks that write guest RAM past the page tables, and take their time over it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sterna_bench::command::{run, wait_for};
use sterna_system_tests::needs::{left_to_another_day, times};
use sterna_system_tests::{PATIENCE, Plan, Site, cli, needs, skip_without, turn};

/// How fast the disk is, bytes per second: a read waits for a second, its pages pinned.
const BYTES_PER_S: u64 = 1_000_000;
/// What of the disk each of the guest's readers reads.
const PART_MIB: usize = 48;
/// Readers beside each other.
const READERS: usize = 4;

/// A control group whose processes read a file's disk slowly. It must outlive them.
struct Slow {
    directory: PathBuf,
    /// The file that says how slowly, and the words before and after the number.
    limit: (PathBuf, String, &'static str),
}

impl Slow {
    /// For the disk that has this file; why not, where that cannot be.
    fn of(file: &Path) -> Result<Self, String> {
        let device = std::fs::metadata(file).map_err(|error| error.to_string())?.dev();
        let number = format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device));
        let disk = Path::new("/sys/dev/block").join(&number);
        if !disk.exists() {
            return Err(format!("{} lies on no disk", file.display()));
        }
        // A partition's requests are its disk's.
        let disk = if disk.join("partition").exists() { disk.join("../dev") } else { disk.join("dev") };
        let number = std::fs::read_to_string(disk).map_err(|error| error.to_string())?;
        let name = format!("sterna-slow-{}", std::process::id());
        let (one, two) = (Path::new("/sys/fs/cgroup/blkio"), Path::new("/sys/fs/cgroup"));
        let (directory, limit) = if one.join("blkio.throttle.read_bps_device").exists() {
            (one.join(name), ("blkio.throttle.read_bps_device", format!("{} ", number.trim()), ""))
        } else {
            let _ = std::fs::write(two.join("cgroup.subtree_control"), "+io");
            (two.join(name), ("io.max", format!("{} rbps=", number.trim()), "max"))
        };
        std::fs::create_dir(&directory).map_err(|error| format!("no control group for disks: {error}"))?;
        let slow = Self { limit: (directory.join(limit.0), limit.1, limit.2), directory };
        slow.set(&BYTES_PER_S.to_string()).map_err(|error| format!("no limit for disks: {error}"))?;
        Ok(slow)
    }

    fn set(&self, bytes_per_s: &str) -> std::io::Result<()> {
        let (file, before, _) = &self.limit;
        std::fs::write(file, format!("{before}{bytes_per_s}"))
    }

    /// From now on its reads are slow.
    fn take(&self, pid: u32) {
        std::fs::write(self.directory.join("cgroup.procs"), pid.to_string()).expect("a process that runs");
    }

    /// The disk is as fast as it is.
    fn let_go(&self) {
        let (_, _, none) = self.limit;
        self.set(if none.is_empty() { "0" } else { none }).expect("a limit");
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        // The kernel lets go of the last process a moment after it has ended.
        let removed = || Ok(std::fs::remove_dir(&self.directory).is_ok().then_some(()));
        if let Err(error) = wait_for("the removal of a control group", PATIENCE, removed) {
            println!("{error}");
        }
    }
}

/// What the guest does: reads all of the disk into memory that it has never used, several parts beside each other, says
/// what it has, forgets it, and so on.
fn script() -> String {
    let mut text = format!(
        "exec 3</dev/vda\npart() {{\ni=0\nwhile [ $i -lt {PART_MIB} ]; do\n\
         dd if=/dev/vda of=/dev/null bs=1M skip=$(($1 + i)) count=1 2>/dev/null\necho READ\ni=$((i + 1))\ndone\n}}\nwhile :; do\n"
    );
    (0..READERS).for_each(|reader| text.push_str(&format!("part {} &\n", reader * PART_MIB)));
    text.push_str("wait\nmd5sum </dev/vda | sed 's/^/DISK /'\necho 3 >/proc/sys/vm/drop_caches\ndone\n");
    text.push_str(&"\n".repeat(512 - text.len() % 512));
    text
}

/// A disk that a guest reads all the time, slowly and past its page tables.
struct Disk {
    _directory: tempfile::TempDir,
    /// What is on it.
    sum: String,
    slow: Slow,
    /// QEMU's arguments.
    more: Vec<String>,
}

impl Disk {
    /// Read in this way (`aio=`); why not, where that cannot be.
    fn read_by(aio: &str) -> Result<Self, String> {
        // On a disk: where the kernel copies, as on a tmpfs, no device writes past the page tables.
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (disk, orders) = (directory.path().join("disk"), directory.path().join("script"));
        let mut seed = 1_u64;
        let noise = |_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        };
        std::fs::write(&disk, (0..(READERS * PART_MIB) << 20).map(noise).collect::<Vec<u8>>()).unwrap();
        std::fs::write(&orders, script()).unwrap();
        let sum = run("md5sum", &disk.display().to_string()).unwrap();
        let sum = sum.split(' ').next().unwrap().to_owned();
        let slow = Slow::of(&disk)?;
        let drive = |path: &Path, more: &str| format!("file={},format=raw,if=virtio,{more}", path.display());
        let how = format!("cache=none,aio={aio}");
        let more = ["-drive".into(), drive(&disk, &how), "-drive".into(), drive(&orders, "readonly=on")].into();
        Ok(Self { _directory: directory, sum, slow, more })
    }

    /// A guest that reads it.
    fn plan(&self) -> Plan {
        let jobs = format!("{};sh:/dev/vdb", sterna_system_tests::plan::JOBS);
        Plan { jobs, more: self.more.clone(), ..Plan::small() }
    }

    /// From now on it is slow for the guest; waits until it has been read so.
    fn is_read_slowly(&self, site: &Site) {
        self.slow.take(site.qemu_at(site.names().0).expect("its QEMU runs"));
        let before = said(site, "READ").len();
        let read = || Ok((said(site, "READ").len() > before + 2).then_some(()));
        wait_for("the disk to be read", PATIENCE, read).unwrap();
    }

    /// All that the guest has of it, from before and from now on, is what is on it.
    fn is_right(&self, site: &Site) {
        self.slow.let_go();
        // It says nothing while it goes through all of it, and a busy machine may take its time.
        let whole = || Ok((!said(site, "DISK ").is_empty()).then_some(()));
        wait_for("the disk to be read as a whole", PATIENCE * 10, whole).unwrap();
        for line in said(site, "DISK ") {
            assert!(line.starts_with(&self.sum), "{line}, not {}", self.sum);
        }
        self.slow.set(&BYTES_PER_S.to_string()).unwrap();
    }
}

/// Lines of the guest's console that begin so, without that; not one that it is still writing.
fn said(site: &Site, word: &str) -> Vec<String> {
    let text = site.guest.console_text();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(|line| line.trim().strip_prefix(word)).map(str::to_owned).collect()
}

/// Reads wait for long, their pages pinned and zeros, in a guest that has never used its memory: what lands after a
/// page went is found all the same, in every mode. While only pages that had been sent were compared, each of `auto`,
/// `precopy` and `hybrid` lost some 200 pages, every time.
#[test]
fn reads_that_stay_under_way_for_long_into_memory_never_used_arrive_in_every_mode() {
    let _turn = turn();
    if left_to_another_day(3) || skip_without(&needs::GUEST) {
        return;
    }
    // Before the site: what is in it ends with that.
    let disk = match Disk::read_by("native") {
        Ok(disk) => disk,
        Err(why) => return println!("skipped: {why}"),
    };
    for number in 0..times(1, 4) {
        let plan = Plan { memory_bytes: 512 << 20, ..disk.plan() };
        let mut site = Site::without_guest(&plan);
        site.run(&plan);
        for mode in ["auto", "postcopy", "precopy", "hybrid", "stop-and-copy"].into_iter().take(times(2, 5)) {
            disk.is_read_slowly(&site);
            let report = site.migrate(&["--mode", mode]);
            let (total_ms, setup_ms, paused_ms) = (report.total_ms, report.setup_ms, report.downtime_ms);
            let found = report.tracking.untracked_writes;
            println!(
                "{number}, {mode}: {total_ms:.0} ms, set-up {setup_ms:.0}, paused {paused_ms:.0}, {found} found, {:?}",
                report.postcopy
            );
            site.checker_is_well();
        }
        if !said(&site, "DISK ").is_empty() {
            println!(
                "{number}: this machine is so slow that the guest's memory had all been used before the last of them"
            );
        }
        disk.is_right(&site);
    }
}

/// A part of the guest's memory is elsewhere, more and less of it in turn, and reads into what is here take a second: a
/// page that is being read into does not leave.
#[test]
fn what_a_slow_disk_reads_into_a_split_guest_past_its_page_tables_is_there_when_the_guest_looks() {
    let _turn = turn();
    if left_to_another_day(3) || skip_without(&needs::GUEST) {
        return;
    }
    for aio in ["native", "threads"].into_iter().take(times(1, 2)) {
        let disk = match Disk::read_by(aio) {
            Ok(disk) => disk,
            Err(why) => return println!("skipped: {why}"),
        };
        let plan = Plan { hosts: ["a", "b", "c"].map(str::to_owned).into(), ..disk.plan() };
        let mut site = Site::without_guest(&plan);
        for host in ["b", "c"] {
            site.configure(host, "lend_memory = \"400M\"");
        }
        site.run(&plan);
        let split = |site: &Site, here: &str| {
            let memory = ["b", "c"].map(|host| format!("{}=120M", site.host(host).listen()));
            let main = format!("here={here}");
            let words = ["split", &site.guest.name, "--main", &main, "--memory", &memory[0], "--memory", &memory[1]];
            cli::ask(site.here(), &words).expect(0, &[]);
        };
        for here in ["96M", "64M", "128M", "64M"].into_iter().take(times(2, 4)) {
            disk.is_read_slowly(&site);
            split(&site, here);
            site.checker_is_well();
        }
        disk.is_right(&site);
        cli::ask(site.here(), &["merge", &site.guest.name]).expect(0, &[]);
        site.checker_is_well();
    }
}
