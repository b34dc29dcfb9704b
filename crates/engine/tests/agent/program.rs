//! The program that some tests run in QEMU's place: this same program, told by an environment variable to map RAM and
//! do as it is told, a line at a time. It calls libc as QEMU does, through the dynamic linker.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use sterna_engine::agent::Agent;
use tempfile::TempDir;

use crate::{fixture, reader};

/// Set to the RAM file's path in the program.
const ROLE: &str = "STERNA_TEST_RAM_FILE";

/// How long its agent has for an answer, as the daemon's: it is made to stand still, too.
const ANSWER: Duration = Duration::from_secs(5);

/// Bytes of the RAM file.
pub const RAM_BYTES: u64 = 64 << 20;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// What every word of a page holds where it is as it should be; no page's is zero.
pub fn word_of(page: u64) -> u64 {
    (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The program, ended when dropped.
pub struct Program {
    pub dir: TempDir,
    pub ram: PathBuf,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it with the library inside and its RAM mapped shared, once.
    pub fn start() -> Self {
        let mut started = Self::launch(None, None);
        started.tell("map shared 0 0");
        started
    }

    /// Starts it with the library inside in this memory mode; nothing is mapped yet.
    pub fn start_in_mode(memory: &str) -> Self {
        Self::launch(Some(memory), None)
    }

    /// The same with RAM that begins as what this file holds.
    pub fn start_with_template(memory: &str, template: &OwnedFd) -> Self {
        Self::launch(Some(memory), Some(template))
    }

    fn launch(memory: Option<&str>, template: Option<&OwnedFd>) -> Self {
        let dir = fixture::scratch();
        let ram = dir.path().join("ram");
        std::fs::File::create(&ram).and_then(|file| file.set_len(RAM_BYTES)).expect("a RAM file");
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(&program);
        if let Some(memory) = memory {
            command.env("STERNA_AGENT_MEMORY", memory);
        }
        if let Some(template) = template {
            fixture::pass_template(&mut command, template);
        }
        let mut child = command
            .args(["--ignored", "--exact", "program::do_as_told", "--nocapture", "--test-threads=1"])
            .env(ROLE, &ram)
            .env("LD_PRELOAD", fixture::library())
            .env("STERNA_AGENT_SOCKET", dir.path().join("agent"))
            .env("STERNA_AGENT_PROGRAM", program.file_name().expect("it has a name"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { dir, ram, child, input, output }
    }

    /// Connects to the library in it.
    pub fn agent(&self) -> Agent {
        fixture::connect_within(&self.dir.path().join("agent"), ANSWER)
    }

    /// The process.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to do something; what it says when it is done.
    pub fn tell(&mut self, order: &str) -> String {
        writeln!(self.input, "{order}").expect("the program listens");
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).expect("the program speaks"), 0, "it ended at '{order}'");
            if let Some((_, answer)) = line.split_once("done:") {
                return answer.trim().to_owned();
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the program that other tests start"]
fn do_as_told() {
    let Some(ram) = std::env::var_os(ROLE) else { return };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(Path::new(&ram)).expect("the RAM file");
    let (mut address, mut reading) = (0, None::<std::thread::JoinHandle<i64>>);
    for line in std::io::stdin().lines() {
        let line = line.expect("standard input");
        let words: Vec<_> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().expect("a number");
        let answer = match words[0] {
            // `try-map` may fail.
            "map" | "try-map" => {
                let flags = if words[1] == "shared" { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
                let fixed = if number(2) == 0 { 0 } else { libc::MAP_FIXED };
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                // SAFETY: a new mapping, or one over a mapping of this test's own.
                let mapped = unsafe {
                    libc::mmap(number(2) as *mut _, RAM_BYTES as usize, protection, flags | fixed, file.as_raw_fd(), 0)
                };
                if mapped == libc::MAP_FAILED {
                    assert_eq!(words[0], "try-map");
                    last_errno()
                } else {
                    address = mapped as u64;
                    address.to_string()
                }
            }
            "merge-all-memory" => {
                const PR_SET_MEMORY_MERGE: i32 = 67;
                // SAFETY: changes no content.
                let result = unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1_u64, 0_u64, 0_u64, 0_u64) };
                if result == 0 { "0".to_owned() } else { last_errno() }
            }
            "refuse-anonymous" => refuse_anonymous().to_string(),
            "try-map-huge" => map_huge_pages(),
            "fill" => {
                for page in 0..number(1) {
                    let at = (address + page * PAGE) as *mut u64;
                    // SAFETY: within the mapping, which nobody else uses now; aligned.
                    (0..PAGE / 8).for_each(|index| unsafe { at.add(index as usize).write_volatile(word_of(page)) });
                }
                String::new()
            }
            "read" => {
                // SAFETY: within the mapping, which stays; aligned.
                unsafe { ((address + number(1) * PAGE) as *const u64).read_volatile() }.to_string()
            }
            "begin-read" => {
                let (way, at, length) = (words[1].to_owned(), address + number(2), number(3));
                let data = tempfile::tempfile().expect("a file");
                data.write_all_at(&vec![7; length as usize], 0).expect("a file's data");
                // SAFETY: nobody else uses these pages until it has ended.
                reading = Some(std::thread::spawn(move || unsafe { reader::read(&way, &data, at, length) }));
                String::new()
            }
            "end-read" => reading.take().expect("it was begun").join().expect("it only reads").to_string(),
            "uring" => reader::uring(number(1) as u8).to_string(),
            "unmap" => {
                // SAFETY: nothing refers to the mapping.
                unsafe { libc::munmap((address + number(1)) as *mut _, number(2) as usize) }.to_string()
            }
            "truncate" => file.set_len(number(1)).map_or_else(|error| error.to_string(), |()| "0".to_owned()),
            // What it does to every userfaultfd that it has: how many there are.
            "block" | "close" => {
                let descriptors = std::fs::read_dir("/proc/self/fd").expect("proc is mounted");
                let own = descriptors.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
                let userfaultfds = own.filter(|fd| {
                    std::fs::read_link(format!("/proc/self/fd/{fd}"))
                        .is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]")
                });
                let found: Vec<i32> = userfaultfds.collect();
                for fd in &found {
                    // SAFETY: flags of a descriptor that the library keeps, or its end: the library must live with
                    // both.
                    let done = unsafe {
                        if words[0] == "block" { libc::fcntl(*fd, libc::F_SETFL, 0) } else { libc::close(*fd) }
                    };
                    assert_eq!(done, 0);
                }
                found.len().to_string()
            }
            // So many threads share so many pages, and each reads its own in turn: how many are not as [`word_of`] has
            // them.
            "check" => {
                let (threads, pages) = (number(1), number(2));
                let part = |thread: u64| (thread * pages / threads)..((thread + 1) * pages / threads);
                let is_bad = |page: &u64| {
                    // SAFETY: within the mapping, which stays; aligned; whoever fills the page does so before it can be
                    // read.
                    let word = |index: u64| unsafe {
                        ((address + page * PAGE) as *const u64).add(index as usize).read_volatile()
                    };
                    (0..PAGE / 8).any(|index| word(index) != word_of(*page))
                };
                let bad: usize = std::thread::scope(|scope| {
                    let readers: Vec<_> =
                        (0..threads).map(|thread| scope.spawn(move || part(thread).filter(is_bad).count())).collect();
                    readers.into_iter().map(|reader| reader.join().expect("it only reads")).sum()
                });
                bad.to_string()
            }
            "punch" => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                let (offset, length) = (number(1) as i64, number(2) as i64);
                // SAFETY: touches no memory of this program's.
                unsafe { libc::fallocate64(file.as_raw_fd(), mode, offset, length) }.to_string()
            }
            "punch-each-page" => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                for index in 0..number(1) {
                    let offset = (index * 4096 % RAM_BYTES) as i64;
                    // SAFETY: touches no memory of this program's.
                    assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, 4096) }, 0);
                }
                String::new()
            }
            "advise" => {
                let advice = words[1].parse().expect("a number");
                // SAFETY: nothing refers to the mapping.
                let result = unsafe { libc::madvise((address + number(2)) as *mut _, number(3) as usize, advice) };
                if result == 0 { "0".to_owned() } else { last_errno() }
            }
            // One page after another: how many do not read as zeros then. A page is found as it was, or read, or
            // written before, in turns.
            "discard-each" => {
                let (first, step, count) = (number(1), number(2), number(3));
                let is_bad = |index: &u64| {
                    let words = (address + (first + index * step) * PAGE) as *mut u64;
                    // SAFETY: within the mapping, which stays; aligned; nobody else uses the page now.
                    unsafe {
                        match index % 3 {
                            0 => {}
                            1 => drop(words.read_volatile()),
                            _ => words.add(7).write_volatile(!0),
                        }
                        assert_eq!(libc::madvise(words.cast(), PAGE as usize, libc::MADV_DONTNEED), 0);
                        (0..(PAGE / 8) as usize).any(|word| words.add(word).read_volatile() != 0)
                    }
                };
                (0..count).filter(is_bad).count().to_string()
            }
            "environment" => {
                let output = Command::new("env").output().expect("env runs");
                let of_library = ["SOCKET", "PROGRAM", "MEMORY", "TEMPLATE"].map(|name| format!("STERNA_AGENT_{name}"));
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let names = || of_library.iter().map(String::as_str).chain(["LD_PRELOAD"]);
                text.lines().filter(|line| names().any(|name| line.starts_with(name))).collect()
            }
            other => panic!("'{other}' is no order"),
        };
        println!("done:{answer}");
    }
}

/// The answer of an order that failed.
fn last_errno() -> String {
    format!("errno {}", std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Maps a file of huge pages, none of which need be there; "0" where that succeeded.
fn map_huge_pages() -> String {
    const BYTES: usize = 2 << 20;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    // SAFETY: a new file and a new mapping, which nothing refers to; they last as long as this program.
    unsafe {
        let file = libc::memfd_create(c"huge".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB);
        if file < 0 || libc::ftruncate(file, BYTES as i64) != 0 {
            return last_errno();
        }
        let mapped = libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, file, 0);
        if mapped == libc::MAP_FAILED { last_errno() } else { "0".to_owned() }
    }
}

/// Makes the kernel refuse with `ENOMEM` that this thread maps anonymous memory over something; 0 where that succeeded.
fn refuse_anonymous() -> i32 {
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let load = |offset| (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, offset);
    let unless_skip = |value, skipped| (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, skipped, value);
    let answer = |value| (libc::BPF_RET | libc::BPF_K, 0, value);
    let arguments = std::mem::offset_of!(libc::seccomp_data, args) as u32;
    let mut filter = [
        load(std::mem::offset_of!(libc::seccomp_data, nr) as u32),
        unless_skip(libc::SYS_mmap as u32, 3),
        load(arguments + 3 * size_of::<u64>() as u32),
        unless_skip(FLAGS as u32, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::ENOMEM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ]
    .map(|(code, jf, k)| libc::sock_filter { code: code as u16, jt: 0, jf, k });
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter outlives the calls, which only read it.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as u64, &raw const program)
    }
}
