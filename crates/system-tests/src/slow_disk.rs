//! A disk that a guest reads slowly, past its page tables: reads are under way for long, and the pages that they fill
//! are pinned.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sterna_bench::command::{run, wait_for};

use crate::plan::JOBS;
use crate::{PATIENCE, Plan, Site};

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
pub struct SlowDisk {
    _directory: tempfile::TempDir,
    /// What is on it.
    sum: String,
    slow: Slow,
    /// QEMU's arguments.
    more: Vec<String>,
}

impl SlowDisk {
    /// Read in this way (`aio=`).
    ///
    /// # Errors
    /// Why it cannot be slow here.
    ///
    /// # Panics
    /// Where the disk cannot be made.
    pub fn read_by(aio: &str) -> Result<Self, String> {
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
    ///
    /// # Panics
    /// As [`Plan::small`].
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.plan_with(JOBS)
    }

    /// The same with these other jobs.
    ///
    /// # Panics
    /// As [`Plan::small`].
    #[must_use]
    pub fn plan_with(&self, jobs: &str) -> Plan {
        Plan { jobs: format!("{jobs};sh:/dev/vdb"), more: self.more.clone(), ..Plan::small() }
    }

    /// From now on it is slow for the guest; waits until it has been read so.
    ///
    /// # Panics
    /// Where the guest does not read it.
    pub fn is_read_slowly(&self, site: &Site) {
        self.is_read_slowly_at(site, site.names().0);
    }

    /// The same where the guest runs on this host.
    ///
    /// # Panics
    /// Where the guest does not read it.
    pub fn is_read_slowly_at(&self, site: &Site, host: &str) {
        self.slow.take(site.qemu_at(host).expect("its QEMU runs"));
        let before = said(site, "READ").len();
        let read = || Ok((said(site, "READ").len() > before + 2).then_some(()));
        wait_for("the disk to be read", PATIENCE, read).unwrap();
    }

    /// All that the guest has of it, from before and from now on, is what is on it.
    ///
    /// # Panics
    /// Where it has something else.
    pub fn is_right(&self, site: &Site) {
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
#[must_use]
pub fn said(site: &Site, word: &str) -> Vec<String> {
    let text = site.guest.console_text();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(|line| line.trim().strip_prefix(word)).map(str::to_owned).collect()
}
