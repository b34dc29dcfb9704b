//! Bare machines for tests: a QEMU with its RAM in a file, a boot sector instead of a system, and nothing left behind.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna_engine::vmm::qemu::{ErrorLog, QemuDestination, QemuProcess, QemuSource, SharedQmp};
use sterna_engine::vmm::qmp::Qmp;
use tempfile::TempDir;

/// Long enough for anything that is not broken, on a busy machine.
pub const LONG: Duration = Duration::from_secs(300);

/// RAM of a machine, bytes.
pub const RAM_BYTES: u64 = 64 << 20;

/// What libvirt denies QEMU.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The user and group QEMU runs as where tests run as root.
const NOBODY: u32 = 65534;

/// Where the boot sector counts its timer ticks, physical address.
const COUNTER: u64 = 0x8000;

/// Where it looks for a word to write to a port: a flag, the port, the word.
const FLAG: u64 = 0x8004;
const PORT: u64 = 0x8006;
const WORD: u64 = 0x8008;

/// ```text
///        xor ax, ax; mov ds, ax; sti
/// count: inc dword [COUNTER]
///        cmp byte [FLAG], 0; jne write; hlt; jmp count
/// write: mov byte [FLAG], 0; mov dx, [PORT]; mov ax, [WORD]; out dx, ax; jmp count
/// ```
const BOOT_CODE: [u8; 35] = [
    0x31, 0xc0, 0x8e, 0xd8, 0xfb, //
    0x66, 0xff, 0x06, 0x00, 0x80, //
    0x80, 0x3e, 0x04, 0x80, 0x00, 0x75, 0x03, 0xf4, 0xeb, 0xf1, //
    0xc6, 0x06, 0x04, 0x80, 0x00, 0x8b, 0x16, 0x06, 0x80, 0xa1, 0x08, 0x80, 0xef, 0xeb, 0xe2,
];

/// The QEMU binaries to test with: the one on PATH, and that of `STERNA_QEMU_10`. Says which are absent.
pub fn binaries() -> Vec<PathBuf> {
    let on_path = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path).map(|directory| directory.join("qemu-system-x86_64")).find(|file| file.exists())
    });
    if on_path.is_none() {
        println!("skipped: no qemu-system-x86_64 on PATH");
    }
    let ten = std::env::var_os("STERNA_QEMU_10").map(PathBuf::from).filter(|file| file.exists());
    if ten.is_none() {
        println!("skipped: STERNA_QEMU_10 names no QEMU 10");
    }
    on_path.into_iter().chain(ten).collect()
}

/// What a machine is started with.
#[derive(Clone)]
pub struct Config {
    pub machine: &'static str,
    pub extra: Vec<&'static str>,
}

impl Config {
    pub fn new(machine: &'static str) -> Self {
        Self { machine, extra: Vec::new() }
    }

    pub fn with(mut self, arguments: &[&'static str]) -> Self {
        self.extra.extend(arguments);
        self
    }
}

/// Where the boot sector's code lies in the firmware that takes its place on `microvm`, and its reset vector: a jump
/// there.
const FIRMWARE_CODE: usize = 0xff00;
const RESET_VECTOR: (usize, [u8; 3]) = (0xfff0, [0xe9, 0x0d, 0xff]);

/// A disk with the boot sector, shared by a source and its destination as a network disk would be.
pub struct Disk {
    directory: TempDir,
}

impl Disk {
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("sterna-disk-").tempdir().unwrap();
        open_to_all(directory.path());
        let path = directory.path().join("disk");
        let mut bytes = vec![0; 1 << 20];
        bytes[..BOOT_CODE.len()].copy_from_slice(&BOOT_CODE);
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(&path, bytes).unwrap();
        open_to_all(&path);
        std::fs::write(directory.path().join("firmware"), firmware()).unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }
}

/// `microvm` has no timer that firmware has set up: there the same code runs instead of firmware and does not rest.
fn firmware() -> Vec<u8> {
    let mut bytes = vec![0; 64 << 10];
    let nop_for = |byte| if matches!(byte, 0xf4 | 0xfb) { 0x90 } else { byte };
    for (to, &byte) in bytes[FIRMWARE_CODE..].iter_mut().zip(&BOOT_CODE) {
        *to = nop_for(byte);
    }
    bytes[RESET_VECTOR.0..][..RESET_VECTOR.1.len()].copy_from_slice(&RESET_VECTOR.1);
    bytes
}

/// A running QEMU, killed when dropped.
pub struct Machine {
    // First: the process ends before its directories go.
    child: ChildGuard,
    pub qmp: SharedQmp,
    runtime: TempDir,
    memory: TempDir,
}

impl Machine {
    /// A machine whose guest runs; returns when it counts.
    pub fn source(binary: &Path, config: &Config, disk: &Disk) -> Self {
        let machine = Self::start(binary, config, disk, &[]);
        machine.assert_counts();
        machine
    }

    /// A machine that waits for device state.
    pub fn destination(binary: &Path, config: &Config, disk: &Disk) -> Self {
        Self::start(binary, config, disk, &["-incoming", "defer", "-S"])
    }

    /// A machine as the arguments make it.
    pub fn start(binary: &Path, config: &Config, disk: &Disk, arguments: &[&str]) -> Self {
        let runtime = tempfile::Builder::new().prefix("sterna-qemu-").tempdir().unwrap();
        let memory = tempfile::Builder::new().prefix("sterna-ram-").tempdir_in("/dev/shm").unwrap();
        open_to_all(runtime.path());
        open_to_all(memory.path());
        let ram = memory.path().join("ram").display().to_string();
        let socket = runtime.path().join("qmp");
        let microvm = config.machine == "microvm";
        let disk_device = if microvm { "virtio-blk-device,drive=disk" } else { "ide-hd,drive=disk" };
        let mut command = Command::new(binary);
        command
            .args(["-machine", &format!("{},memory-backend=ram", config.machine), "-accel", "tcg", "-m", "64"])
            .args(["-object", &format!("memory-backend-file,id=ram,size={RAM_BYTES},mem-path={ram},share=on")])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-sandbox", SANDBOX])
            .args(["-drive", &format!("if=none,id=disk,format=raw,file={}", disk.path("disk")), "-device", disk_device])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(&config.extra)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(runtime.path().join("log")).unwrap());
        if microvm {
            command.args(["-bios", &disk.path("firmware")]);
        }
        if rustix::process::geteuid().is_root() && reachable_by_all(binary) {
            command.uid(NOBODY).gid(NOBODY);
        }
        let child = ChildGuard { child: command.spawn().unwrap(), log: runtime.path().join("log") };
        let qmp = match Qmp::connect(&socket, LONG) {
            Ok(qmp) => Arc::new(Mutex::new(qmp)),
            Err(error) => {
                let log = std::fs::read_to_string(runtime.path().join("log")).unwrap_or_default();
                panic!("QEMU did not start: {error}: {log}");
            }
        };
        Self { child, qmp, runtime, memory }
    }

    pub fn pid(&self) -> u32 {
        self.child.child.id()
    }

    pub fn process(&self) -> QemuProcess {
        QemuProcess::open(self.pid()).unwrap()
    }

    pub fn as_source(&self) -> QemuSource {
        QemuSource::new(self.qmp.clone(), self.process())
    }

    pub fn as_destination(&self) -> QemuDestination {
        let log = ErrorLog::new(self.runtime.path().join("log"));
        QemuDestination::new(self.qmp.clone(), self.process(), Some(log))
    }

    /// Runs a QMP command.
    pub fn execute(&self, command: &str, arguments: serde_json::Value) -> serde_json::Value {
        self.qmp.lock().unwrap().execute(command, arguments, LONG).unwrap()
    }

    /// The guest's state by QEMU's name.
    pub fn status(&self) -> String {
        self.execute("query-status", serde_json::json!({}))["status"].as_str().unwrap().to_owned()
    }

    /// Speaks to this QEMU by a new connection, as a daemon does that was started anew.
    pub fn reconnect(self) -> Self {
        let Self { child, qmp, runtime, memory } = self;
        drop(qmp);
        let qmp = Arc::new(Mutex::new(Qmp::connect(&runtime.path().join("qmp"), LONG).unwrap()));
        Self { child, qmp, runtime, memory }
    }

    pub fn kill(&self) {
        self.process().kill();
    }

    pub fn ram(&self) -> File {
        File::options().read(true).write(true).open(self.memory.path().join("ram")).unwrap()
    }

    /// Copies all RAM from another machine.
    pub fn copy_ram_from(&self, other: &Self) {
        let mut bytes = vec![0; RAM_BYTES as usize];
        other.ram().read_exact_at(&mut bytes, 0).unwrap();
        self.ram().write_all_at(&bytes, 0).unwrap();
    }

    pub fn counter(&self) -> u32 {
        let mut bytes = [0; 4];
        self.ram().read_exact_at(&mut bytes, COUNTER).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Fails unless the guest counts on within a while.
    #[track_caller]
    pub fn assert_counts(&self) {
        let (deadline, before) = (Instant::now() + LONG, self.counter());
        // From 0 may also be the firmware at work: the second tick is the guest's.
        while self.counter().wrapping_sub(before) < 2 {
            assert!(Instant::now() < deadline, "the guest does not run");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Fails if the guest counts within a few of its ticks.
    #[track_caller]
    pub fn assert_stands(&self) {
        let before = self.counter();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(self.counter(), before, "the guest runs");
    }

    /// Has the guest write a word to a port.
    pub fn write_port(&self, port: u16, word: u16) {
        let ram = self.ram();
        ram.write_all_at(&port.to_le_bytes(), PORT).unwrap();
        ram.write_all_at(&word.to_le_bytes(), WORD).unwrap();
        ram.write_all_at(&[1], FLAG).unwrap();
    }

    /// Has the guest switch itself off (ACPI, where SeaBIOS puts it).
    pub fn switch_off(&self) {
        self.write_port(0x604, 0x2000);
    }

    pub fn wait_ended(&self) {
        assert!(self.process().wait(LONG), "QEMU does not end");
    }
}

/// A child that ends with the test, and says why it ended where the test failed.
struct ChildGuard {
    child: Child,
    log: PathBuf,
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            println!("QEMU ended: {:?}; it said: {log}", self.child.try_wait());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
}

/// Whether an unprivileged user can reach a program; says so where not: a checkout may lie where only root may look.
fn reachable_by_all(path: &Path) -> bool {
    let open = path.canonicalize().is_ok_and(|path| {
        path.ancestors()
            .all(|part| part.metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::mode(&meta) & 1 == 1))
    });
    if !open {
        println!("skipped: running {} as an unprivileged user: it lies where only root may look", path.display());
    }
    open
}
