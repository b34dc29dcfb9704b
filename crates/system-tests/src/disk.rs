//! A disk that a guest reads all the time, by direct I/O and otherwise.

use std::path::{Path, PathBuf};

use crate::random::Random;
use crate::{PATIENCE, Site};
use sterna_bench::command::{run, wait_for};

/// Bytes of the disk. No byte of it is zero: how much of a wrong read is zeros tells what was lost.
const BYTES: usize = 24 << 20;

/// Reads the disk over and over: what is left of it in the page cache, then from the disk into the page cache, and past
/// it. Each read is one line with its sum; a wrong one also says how many bytes are not zeros.
const SCRIPT: &str = r#"exec 3</dev/vda
look() {
    set -- "$1" "$2" $(md5sum <"$2")
    echo "DISK $1 $3"
    [ "$3" = "$want" ] || echo "DISK BAD $1: $(tr -d '\000' <"$2" | wc -c) bytes are not zeros"
}
while :; do
    look cache /dev/vda
    blockdev --flushbufs /dev/vda
    look disk /dev/vda
    dd if=/dev/vda of=/tmp/copy bs=256k iflag=direct 2>/dev/null
    look direct /tmp/copy
done
"#;

/// The disk, and the one with the guest's script.
pub struct Disk {
    directory: tempfile::TempDir,
    sum: String,
}

impl Disk {
    /// Makes both.
    ///
    /// # Panics
    /// Where there is no room for them.
    #[must_use]
    pub fn make() -> Self {
        // Not on a tmpfs: where the kernel copies, no device writes past the page tables.
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory on a disk");
        let mut random = Random(1);
        let bytes: Vec<u8> = (0..BYTES).map(|_| random.below(255) as u8 + 1).collect();
        let disk = directory.path().join("disk");
        std::fs::write(&disk, bytes).expect("a disk");
        let sum = run("md5sum", &disk.display().to_string()).expect("its sum");
        let sum = sum.split(' ').next().unwrap_or_default().to_owned();
        let mut script = format!("want={sum}\n{SCRIPT}");
        script.push_str(&"\n".repeat(512 - script.len() % 512));
        std::fs::write(directory.path().join("script"), script).expect("a script");
        Self { directory, sum }
    }

    /// QEMU's arguments for it: QEMU reads it by direct I/O.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        self.arguments_with("cache=none,aio=native")
    }

    /// The same with these words about how QEMU reads it.
    #[must_use]
    pub fn arguments_with(&self, how: &str) -> Vec<String> {
        let path = |name: &str| -> PathBuf { self.directory.path().join(name) };
        let drive = |path: &Path, more: &str| format!("file={},format=raw,if=virtio,{more}", path.display());
        let disk = drive(&path("disk"), how);
        ["-drive".into(), disk, "-drive".into(), drive(&path("script"), "readonly=on")].to_vec()
    }

    /// What the guest is to run.
    #[must_use]
    pub fn job(&self) -> &'static str {
        "sh:/dev/vdb"
    }

    /// The guest reads on, after this moment, and never has it read anything but what the disk holds.
    ///
    /// # Panics
    /// Where it has, or reads no more.
    pub fn is_read_as_it_is(&self, site: &Site) {
        let before = sums(&site.guest.console_text()).len();
        // Of what was in the guest's page cache by now, all has been read again.
        let read = || {
            let text = site.guest.console_text();
            let wrong: Vec<&str> = text.lines().filter(|line| line.contains("DISK BAD")).collect();
            assert!(wrong.is_empty(), "the guest read what its disk does not hold: {wrong:#?}");
            Ok((sums(&text).len() >= before + 3).then_some(()))
        };
        wait_for("the guest to read its disk", PATIENCE, read).unwrap_or_else(|error| panic!("{error}"));
        for (way, sum) in sums(&site.guest.console_text()) {
            assert_eq!(sum, self.sum, "the guest read something else ({way})");
        }
    }
}

/// What the guest said of its reads: how, and the sum. Other lines may have come in between.
fn sums(console: &str) -> Vec<(String, String)> {
    let words = console.lines().filter_map(|line| line.trim().split_once("DISK ")?.1.split_once(' '));
    let whole = words.filter(|(_, sum)| sum.len() == 32 && sum.bytes().all(|byte| byte.is_ascii_hexdigit()));
    whole.map(|(way, sum)| (way.to_owned(), sum.to_owned())).collect()
}
