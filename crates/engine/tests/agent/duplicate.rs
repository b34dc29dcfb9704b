//! What becomes of threads that wait for pages when whoever fills them is killed: with the library's duplicate of the
//! userfaultfd they wait for the next one; without it they read zeros. The threads are a program's that knows what it
//! must read, and a guest's processor.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::json;
use sterna_engine::agent::Backing;
use sterna_sys::userfaultfd::{Event, Features, Modes, Userfaultfd};

use crate::fixture::{self, Start, cannot_run, device, eventually};
use crate::program::{PAGE, Program, word_of};

/// Pages that the program reads, and threads that share them.
const PAGES: u64 = 256;
const THREADS: u64 = 4;
/// Pages that the first handler fills before it fills no more.
const FILLED: u64 = 40;

/// Set to the library's socket in the process that fills pages.
const SOCKET: &str = "STERNA_TEST_AGENT";
/// Set to the file of what the pages hold.
const CONTENT: &str = "STERNA_TEST_CONTENT";
/// How it gets the userfaultfd there.
const WAY: &str = "STERNA_TEST_WAY";
/// How many pages it fills.
const LIMIT: &str = "STERNA_TEST_LIMIT";

/// A process that fills the program's missing pages, as a daemon does; dropping it kills it.
struct Handler {
    child: Child,
    output: BufReader<ChildStdout>,
    /// It has the userfaultfd.
    ready: bool,
    /// Pages that were asked for and that it left.
    left: BTreeSet<u64>,
    /// All that were asked for.
    asked: BTreeSet<u64>,
}

impl Handler {
    /// Starts for the process whose library listens in that directory; there is also what is to be filled in.
    fn start(directory: &Path, way: &str, limit: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program has a path"))
            .args(["--ignored", "--exact", "duplicate::fill_what_is_asked_for", "--nocapture", "--test-threads=1"])
            .env(SOCKET, directory.join("agent"))
            .env(CONTENT, directory.join("content"))
            .env(WAY, way)
            .env(LIMIT, limit.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut started = Self { child, output, ready: false, left: BTreeSet::new(), asked: BTreeSet::new() };
        started.listen_until(|handler| handler.ready);
        started
    }

    /// Listens to it until that is enough.
    fn listen_until(&mut self, enough: impl Fn(&Self) -> bool) {
        while !enough(self) {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).expect("it speaks"), 0, "it ended early");
            // The first line begins with the name of the test.
            let Some((_, said)) = line.trim_end().split_once("done:") else { continue };
            let page = || said.rsplit(' ').next().and_then(|page| page.parse().ok()).expect("a page");
            match said.split(' ').next() {
                Some("ready") => self.ready = true,
                Some("fills") => drop(self.asked.insert(page())),
                _ => drop((self.left.insert(page()), self.asked.insert(page()))),
            }
        }
    }

    /// `kill -9`, and its end.
    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills the program where a test fails while its threads wait: the test would wait with them.
struct KillUnlessDone(Option<Pid>);

impl Drop for KillUnlessDone {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// Lets the program read its pages through a handler that leaves each thread's next page unfilled and is then killed;
/// `then` is told the pages that were left, and whether the program is through. How many pages the program found bad.
fn bad_pages_after_a_kill(
    way: &str,
    then: impl FnOnce(&Path, &BTreeSet<u64>, &dyn Fn() -> bool) -> Option<Handler>,
) -> u64 {
    let mut program = Program::start();
    let directory = program.dir.path().to_owned();
    let content = (0..PAGES).flat_map(|page| word_of(page).to_ne_bytes().repeat(PAGE as usize / 8));
    std::fs::write(directory.join("content"), content.collect::<Vec<_>>()).expect("content");
    let mut first = Handler::start(&directory, way, FILLED);
    let mut guard = KillUnlessDone(Some(program.pid()));
    let bad = std::thread::scope(|scope| {
        let reader = scope.spawn(move || program.tell(&format!("check {THREADS} {PAGES}")));
        // All of its threads wait then.
        first.listen_until(|handler| handler.left.len() as u64 == THREADS);
        first.kill();
        let second = then(&directory, &first.left, &|| reader.is_finished());
        let bad = reader.join().expect("the program ends its work");
        guard.0 = None;
        drop(second);
        bad
    });
    bad.parse().expect("a number")
}

#[test]
fn without_the_duplicate_pages_that_a_killed_handler_owed_read_as_zeros() {
    if cannot_run() {
        return;
    }
    let bad = bad_pages_after_a_kill("alone", |_, _, _| None);
    assert_eq!(bad, PAGES - FILLED, "each page that it had not filled is lost, and no thread waited for it");
}

#[test]
fn with_the_duplicate_threads_wait_for_the_next_handler_and_every_page_is_right() {
    if cannot_run() {
        return;
    }
    let bad = bad_pages_after_a_kill("open", |directory, left, is_through| {
        assert_eq!(left.len() as u64, THREADS);
        std::thread::sleep(Duration::from_millis(300));
        assert!(!is_through(), "threads went on though nobody filled their pages");
        let mut second = Handler::start(directory, "take", PAGES);
        // The faults that the first one had read are raised again; those of pages that it filled are not.
        second.listen_until(|handler| left.is_subset(&handler.asked) && handler.asked.len() as u64 == PAGES - FILLED);
        Some(second)
    });
    assert_eq!(bad, 0);
}

/// A guest that counts in every page of a range (`guest/README.md`): passes, and pages that it found wrong.
fn counters(ram: &Path) -> [u32; 2] {
    let mut words = [0; 8];
    std::fs::File::open(ram).and_then(|file| file.read_exact_at(&mut words, 64 << 10)).expect("RAM");
    [0, 4].map(|at| u32::from_le_bytes(words[at..at + 4].try_into().expect("four bytes")))
}

/// Takes a guest's pages away in mid-work, lets it run on through a handler that is killed with the guest waiting, and
/// says how the guest stands when it has waited or run on for a while; then the handler `next` goes on, where there is
/// one, and how it stands then.
fn guest_after_a_kill(way: &str, next: Option<&str>) -> Option<[[u32; 2]; 3]> {
    if cannot_run() {
        return None;
    }
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../../build/guest/kvm-tiny.bin");
    let image = std::env::var_os("STERNA_KVM_TINY").map_or_else(|| PathBuf::from(built), PathBuf::from);
    if !image.exists() {
        eprintln!("skipped: the guest that counts is not built (STERNA_KVM_TINY)");
        return None;
    }
    let mut qemu = Start::new().ram(8).with(&format!("-bios {}", image.display())).go();
    let directory = qemu.dir.path().to_owned();
    let ram = directory.join("ram");
    qemu.qmp("cont", json!({}));
    eventually("the guest's first passes", || (counters(&ram)[0] > 2).then_some(()));
    qemu.qmp("stop", json!({}));
    let before = counters(&ram);
    let content = std::fs::read(&ram).expect("RAM");
    std::fs::write(directory.join("content"), &content).expect("content");
    // Cut to nothing and made long again the file is all holes, and nothing of it is mapped any more.
    let file = std::fs::OpenOptions::new().write(true).open(&ram).expect("RAM");
    file.set_len(0).and_then(|()| file.set_len(content.len() as u64)).expect("RAM");
    let mut first = Handler::start(&directory, way, FILLED);
    qemu.qmp("cont", json!({}));
    first.listen_until(|handler| handler.left.len() == 1);
    first.kill();
    let Some(next) = next else {
        let after = eventually("a page that is wrong", || (counters(&ram)[1] > 0).then(|| counters(&ram)));
        return Some([before, after, after]);
    };
    std::thread::sleep(Duration::from_millis(300));
    let meanwhile = counters(&ram);
    let second = Handler::start(&directory, next, u64::MAX);
    let passes = eventually("the guest's next passes", || (counters(&ram)[0] > before[0] + 2).then(|| counters(&ram)));
    drop(qemu);
    drop(second);
    Some([before, meanwhile, passes])
}

#[test]
fn without_the_duplicate_a_guest_finds_pages_that_it_never_wrote() {
    let Some([before, after, _]) = guest_after_a_kill("alone", None) else { return };
    assert_eq!(before[1], 0);
    assert!(after[1] > 0, "it ran on with zeros: {before:?} {after:?}");
}

#[test]
fn with_the_duplicate_a_guest_waits_for_the_next_handler_and_finds_every_page() {
    let Some([before, meanwhile, after]) = guest_after_a_kill("open", Some("take")) else { return };
    // The pass that it was in when it stopped may have ended with the pages that were filled.
    assert!(meanwhile[0] <= before[0] + 1 && meanwhile[1] == 0, "it did not wait: {before:?} {meanwhile:?}");
    assert!(after[0] > before[0] + 1 && after[1] == 0, "{before:?} {after:?}");
}

#[test]
#[ignore = "the process that other tests kill"]
fn fill_what_is_asked_for() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let (way, limit) = (std::env::var(WAY).expect("a way"), std::env::var(LIMIT).expect("a limit"));
    let mut left_to_fill: u64 = limit.parse().expect("a number");
    let mut agent = fixture::connect(Path::new(&socket));
    let block = agent.blocks().expect("blocks").remove(0);
    let extent = block.address..block.address + block.length;
    let Backing::Named(path) = &block.backing else { panic!("not a file: {block:?}") };
    let ram = std::fs::OpenOptions::new().write(true).open(path).expect("RAM");
    let content = std::fs::File::open(std::env::var_os(CONTENT).expect("content")).expect("content");
    let faults = if way == "take" {
        let taken = agent.take_userfaultfd().expect("take").expect("it keeps one");
        let faults = Userfaultfd::from(taken);
        faults.wake(extent).expect("wake");
        faults
    } else {
        let features = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
        let opened = agent.open_userfaultfd(Some(device().as_fd()), features.bits()).expect("a userfaultfd");
        let faults = Userfaultfd::from(opened.descriptor);
        faults.register(extent, Modes::MISSING | Modes::MINOR).expect("register");
        faults
    };
    if way == "alone" {
        agent.close_userfaultfd().expect("close");
    }
    drop(agent);
    println!("done:ready");
    let mut events: [Event; 16] = Default::default();
    loop {
        let count = faults.read_events(&mut events).expect("events");
        for event in &events[..count] {
            let Event::Fault(fault) = event else { panic!("{event:?}") };
            let page = (fault.address - block.address) / PAGE;
            if left_to_fill == 0 {
                println!("done:leaves {page}");
                continue;
            }
            left_to_fill -= 1;
            let mut bytes = [0; PAGE as usize];
            content.read_exact_at(&mut bytes, page * PAGE).expect("content");
            ram.write_all_at(&bytes, page * PAGE).expect("RAM");
            faults.continue_(fault.address..fault.address + PAGE).expect("continue");
            println!("done:fills {page}");
        }
        if count == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
