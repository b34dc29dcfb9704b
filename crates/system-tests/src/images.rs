//! Disks that a guest writes all the time and reads again, and that it would see anybody else write.

use std::collections::HashSet;
use std::path::PathBuf;

use sterna_bench::Guest;
use sterna_bench::command::wait_for;
use tempfile::TempDir;

use crate::PATIENCE;

/// Writes blocks of a disk, each time with something else, and reads all of them: each must hold what this guest's
/// memory says that it wrote there last.
const SCRIPT: &str = r#"n=0
while :; do
    i=$((n % 4))
    for disk in $disks; do
        head -c 16 /dev/urandom | md5sum >/tmp/line
        dd if=/tmp/line of=/dev/$disk bs=4096 seek=$i conv=sync,notrunc,fsync 2>/dev/null
        cp /tmp/line /tmp/want.$disk.$i
        blockdev --flushbufs /dev/$disk
        for j in 0 1 2 3; do
            [ -e /tmp/want.$disk.$j ] || continue
            dd if=/dev/$disk of=/tmp/block bs=4096 skip=$j count=1 2>/dev/null
            [ "$(head -n 1 /tmp/block)" = "$(cat /tmp/want.$disk.$j)" ] || echo "BLOCK BAD $disk $j at $n"
        done
    done
    n=$((n + 1))
    echo "BLOCKS read $n"
done
"#;

/// An empty qcow2 image of 8 MiB: its header, and in clusters of 64 KiB the table of reference counts, one block of
/// them, and the first table of the disk.
fn empty_qcow2() -> Vec<u8> {
    const CLUSTER: u64 = 1 << 16;
    let mut image = vec![0; 4 * CLUSTER as usize];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb\0\0\0\x02");
    put(20, &16_u32.to_be_bytes());
    put(24, &(8_u64 << 20).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(3 * CLUSTER).to_be_bytes());
    put(48, &CLUSTER.to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(CLUSTER as usize, &(2 * CLUSTER).to_be_bytes());
    (0..4).for_each(|cluster| put((2 * CLUSTER) as usize + 2 * cluster, &1_u16.to_be_bytes()));
    image
}

/// Where the images are, and those of the guest's script.
#[derive(Debug)]
pub struct Images {
    /// The directory of all.
    pub directory: PathBuf,
    /// They are read by direct I/O, and go with this.
    on_disk: Option<TempDir>,
}

impl Images {
    /// Makes the guest's disks, a raw one and with `both` one in qcow2, and one with the script. That is the guest's
    /// disk `first` (`/dev/vda` is `a`), where it looks for it; the others come after it.
    ///
    /// # Panics
    /// Where there is no room for them.
    #[must_use]
    pub fn make(directory: PathBuf, first: char, both: bool) -> Self {
        std::fs::create_dir_all(&directory).expect("a directory");
        std::fs::write(directory.join("disk.img"), vec![0; 8 << 20]).expect("a disk");
        if both {
            std::fs::write(directory.join("disk2.img"), empty_qcow2()).expect("a disk");
        }
        let disks = (1..=1 + u8::from(both)).map(|place| format!("vd{}", char::from(first as u8 + place)));
        let mut script = format!("disks='{}'\n{SCRIPT}", disks.collect::<Vec<_>>().join(" "));
        script.push_str(&"\n".repeat(512 - script.len() % 512));
        std::fs::write(directory.join("script"), script).expect("a script");
        Self { directory, on_disk: None }
    }

    /// The same on a disk of the host's, and they are read by direct I/O.
    ///
    /// # Panics
    /// As [`make`](Self::make).
    #[must_use]
    pub fn on_a_disk(first: char, both: bool) -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let made = Self::make(directory.path().to_owned(), first, both);
        Self { on_disk: Some(directory), ..made }
    }

    /// What the guest is to run whose disk `first` has the script.
    #[must_use]
    pub fn job(first: char) -> String {
        format!("sh:/dev/vd{first}")
    }

    /// The raw disk's image.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.directory.join("disk.img")
    }

    /// QEMU's words for all.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let drive = |name: &str, format: &str, more: &str| {
            format!("file={},format={format},if=virtio{more}", self.directory.join(name).display())
        };
        let cache = if self.on_disk.is_some() { ",cache=none" } else { "" };
        let mut drives = vec![drive("script", "raw", ",readonly=on"), drive("disk.img", "raw", cache)];
        if self.directory.join("disk2.img").exists() {
            drives.push(drive("disk2.img", "qcow2", cache));
        }
        drives.into_iter().flat_map(|drive| ["-drive".into(), drive]).collect()
    }

    /// The overlays that there are.
    ///
    /// # Panics
    /// Where the directory is gone.
    #[must_use]
    pub fn overlays(&self) -> HashSet<PathBuf> {
        let files = std::fs::read_dir(&self.directory).expect("the directory").flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|extension| extension == "qcow2")).collect()
    }
}

/// A guest, after this moment, has read what it wrote, and never anything else.
///
/// # Panics
/// Where it has, or writes no more.
pub fn read_what_it_wrote(guest: &Guest) {
    let (name, from) = (&guest.name, guest.console_text().len());
    let said = || {
        let text = guest.console_text();
        assert!(!text.contains("BLOCK BAD"), "{name}: {text}");
        let read = text.get(from..).unwrap_or_default().matches("BLOCKS read").count();
        // All four were written anew and read since.
        Ok((read > 5).then_some(()))
    };
    wait_for("the guest's word on its disk", PATIENCE, said).unwrap_or_else(|error| panic!("{name}: {error}"));
}
