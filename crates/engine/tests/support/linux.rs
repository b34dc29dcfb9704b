//! Linux guests for tests: a QEMU under TCG with its RAM in a file, the guest image, and nothing left behind.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::physical::GuestPhysical;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::vmm::Source;
use sterna_engine::vmm::qemu::{QemuProcess, QemuSource, SharedQmp};
use sterna_engine::vmm::qmp::Qmp;
use sterna_introspect::PageTables;
use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::Access;
use tempfile::TempDir;

/// How long a guest that starts may say nothing on its console.
const BOOT: Duration = Duration::from_secs(120);
/// How often one that does not come up is started anew.
const BOOTS: u32 = 4;

/// How long anything else may take: ends a hopeless wait, and nothing else.
const LONG: Duration = Duration::from_secs(300);

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// That of the guest image.
    Image,
    /// The newest there is.
    New,
    /// None: the machine stands before its first instruction.
    None,
}

impl Kernel {
    fn path(self) -> Option<PathBuf> {
        match self {
            Self::Image => file("STERNA_KERNEL", "build/guest/vmlinuz"),
            Self::New => file("STERNA_NEW_KERNEL", "build/new-kernel/vmlinuz"),
            Self::None => None,
        }
    }
}

/// A guest to boot.
pub struct Plan {
    pub kernel: Kernel,
    /// QEMU 10.0 instead of the one on PATH.
    pub qemu_10: bool,
    pub machine: &'static str,
    pub memory_mib: u64,
    pub cpu: &'static str,
    /// More words for the kernel's command line.
    pub words: &'static str,
}

/// A file named by the environment, or where `./x` puts it; says where it is not.
fn file(variable: &str, built: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path = named.unwrap_or_else(|| Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(built));
    let found = path.exists().then_some(path);
    if found.is_none() {
        println!("skipped: {variable} names no file, and {built} is not there");
    }
    found
}

/// The QEMU that a plan wants.
pub fn binary(plan: &Plan) -> Option<PathBuf> {
    if plan.qemu_10 {
        return file("STERNA_QEMU_10", "build/qemu-10.0/qemu-system-x86_64");
    }
    file("STERNA_QEMU_7", "/usr/bin/qemu-system-x86_64")
}

/// A running guest, killed when dropped.
pub struct Guest {
    // First: the process ends before its directories go.
    child: ChildGuard,
    pub qmp: SharedQmp,
    source: QemuSource,
    directory: TempDir,
    memory: TempDir,
    memory_bytes: u64,
}

impl Guest {
    /// A guest that has started its jobs and told how many pages it has free; `None`, said why, where something is
    /// missing.
    pub fn boot(plan: &Plan) -> Option<Self> {
        Self::boot_with(plan, |_, _| {})
    }

    /// The same, with a last word about how QEMU is started, in whose directory what it leaves behind may lie.
    pub fn boot_with(plan: &Plan, prepare: impl Fn(&mut Command, &Path)) -> Option<Self> {
        for _ in 0..BOOTS {
            let guest = Self::prepared(plan, &binary(plan)?, BOOT, &prepare)?;
            if guest.comes_up(1) {
                return Some(guest);
            }
            // Under TCG a kernel panics now and then while it boots; the next one comes up.
            let console = guest.console();
            let tail = console.char_indices().rev().nth(400).map_or(0, |(at, _)| at);
            eprintln!("the guest does not come up, its console ends: {}", &console[tail..]);
        }
        panic!("the guest does not come up");
    }

    /// A machine as planned, started by this binary.
    pub fn start(plan: &Plan, binary: &Path, within: Duration) -> Option<Self> {
        Self::prepared(plan, binary, within, &|_: &mut Command, _: &Path| {})
    }

    fn prepared(plan: &Plan, binary: &Path, within: Duration, prepare: &impl Fn(&mut Command, &Path)) -> Option<Self> {
        let directory = tempfile::Builder::new().prefix("sterna-linux-").tempdir().unwrap();
        let memory = tempfile::Builder::new().prefix("sterna-ram-").tempdir_in("/dev/shm").unwrap();
        let socket = directory.path().join("qmp");
        let (ram, bytes) = (memory.path().join("ram"), plan.memory_mib << 20);
        let mut command = Command::new(binary);
        command
            .args(["-machine", &format!("{},memory-backend=ram", plan.machine), "-accel", "tcg", "-cpu", plan.cpu])
            .args(["-smp", "2", "-m", &plan.memory_mib.to_string()])
            .args(["-object", &format!("memory-backend-file,id=ram,size={bytes},mem-path={},share=on", ram.display())])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-serial", &format!("file:{}", directory.path().join("console").display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(directory.path().join("log")).unwrap());
        if plan.kernel == Kernel::None {
            command.arg("-S");
        } else {
            let (kernel, initrd) = (plan.kernel.path()?, file("STERNA_INITRD", "build/guest/initrd.gz")?);
            // What it counts itself, each second.
            let jobs = "watch:-t,-n,1,grep,nr_free_pages,/proc/vmstat";
            let words = match plan.words.split_once("sterna.run=") {
                Some((before, more)) => format!("{before}sterna.run={jobs};{more}"),
                None => format!("{} sterna.run={jobs}", plan.words),
            };
            command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
            command.args(["-append", &format!("console=ttyS0 {words}")]);
        }
        prepare(&mut command, directory.path());
        let child = ChildGuard { child: command.spawn().unwrap(), directory: directory.path().to_owned() };
        let qmp = Arc::new(Mutex::new(Qmp::connect(&socket, within).expect("QEMU starts")));
        let source = QemuSource::new(qmp.clone(), QemuProcess::open(child.child.id()).unwrap());
        Some(Self { child, qmp, source, directory, memory, memory_bytes: bytes })
    }

    /// Waits until the guest has come up so often, and told of its pages since.
    #[track_caller]
    pub fn wait_up(&self, times: usize) {
        assert!(self.comes_up(times), "the guest does not come up");
    }

    fn comes_up(&self, times: usize) -> bool {
        let (mut heard, mut told_bytes) = (Instant::now(), 0);
        loop {
            let console = self.console();
            if console.len() != told_bytes {
                (heard, told_bytes) = (Instant::now(), console.len());
            }
            let last = console.rmatch_indices("GUEST UP").next();
            let told = last.is_some_and(|(at, _)| console[at..].contains("nr_free_pages "));
            if console.matches("GUEST UP").count() >= times && told {
                return true;
            }
            if heard.elapsed() > BOOT || console.contains("Kernel panic") {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Its RAM, as it sees it now.
    pub fn memory(&mut self) -> GuestPhysical {
        let spec = BlockSpec { id: "ram".into(), bytes: self.memory_bytes, page_bytes: 4096, path: String::new() };
        let map = self.source.memory_map().expect("a map of its RAM");
        let block = BlockFile { spec, file: self.ram(), address: 0, process: None };
        let ram = SharedMemory::open(&[block], Access::Read).expect("a mapping");
        GuestPhysical::new(&map, Arc::new(ram)).expect("a map of its RAM")
    }

    /// The page tables of its processors, now.
    pub fn processors(&mut self) -> Vec<PageTables> {
        self.source.page_tables().expect("its registers")
    }

    /// The last number of free pages that it told.
    pub fn free_pages_it_says(&self) -> u64 {
        let console = self.console();
        // The last line may be cut short.
        let whole = console.rsplit_once(['\n', '\r']).map_or("", |(whole, _)| whole);
        let told = whole.rsplit_once("nr_free_pages ").and_then(|(_, rest)| rest.split_whitespace().next());
        told.and_then(|word| word.parse().ok()).expect("it told so")
    }

    /// Fills guest-physical memory, past the guest's back.
    pub fn fill(&mut self, addresses: Range<u64>, byte: u8) {
        let (memory, ram) = (self.memory(), self.ram());
        for (_, range) in memory.locate(addresses) {
            let bytes = vec![byte; (range.end - range.start) as usize];
            ram.write_all_at(&bytes, range.start).unwrap();
        }
    }

    pub fn stop(&mut self) {
        self.execute("stop");
    }

    pub fn go_on(&mut self) {
        self.execute("cont");
    }

    /// Presses the reset button; the guest stands before its first instruction.
    pub fn reset(&mut self) {
        self.execute("stop");
        self.execute("system_reset");
    }

    fn execute(&self, command: &str) {
        self.qmp.lock().unwrap().execute(command, json!({}), LONG).unwrap();
    }

    /// Where what it leaves behind lies.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The file of its RAM.
    pub fn ram(&self) -> File {
        File::options().read(true).write(true).open(self.memory.path().join("ram")).unwrap()
    }

    /// All that it said.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(self.directory.path().join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A child that ends with the test, and shows what it said where the test failed.
struct ChildGuard {
    child: Child,
    directory: PathBuf,
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["log", "console"] {
                let said = std::fs::read(self.directory.join(name)).unwrap_or_default();
                let said = String::from_utf8_lossy(&said).into_owned();
                let end = said.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
                println!("{name}: {}", &said[end..]);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
