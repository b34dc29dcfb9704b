//! A daemon that is killed at any step of a page's way out or in: the next one finds every page valid where the record
//! has it.
//!
//! The daemon is another process, of this very program, so that SIGKILL ends it as it ends one in earnest; the VMM is
//! the test's.

use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use sterna_engine::agent::{Advice, Discards};
use sterna_engine::error::MigrateError;
use sterna_engine::inside::Inside;
use sterna_engine::memory::{Mappings, Memory};
use sterna_engine::split::Parity;
use sterna_protocol::layout::Layout;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_sys::iovec::Outgoing;
use sterna_sys::process::Pidfd;
use sterna_sys::userfaultfd::{Features, Userfaultfd};

use super::*;

/// The variable that makes a daemon of this program: the numbers of the RAM's and the record's descriptors, where the
/// RAM is, how much life it has, whether another one was there before, the memory host and its mirror, a directory, and
/// whether it is to bring the guest together, or else to send it away.
const DAEMON: &str = "STERNA_SPLIT_DAEMON";

/// How many steps this process may take: with the next one it is killed.
#[derive(Debug)]
struct Life(AtomicU64);

impl Life {
    fn step(&self) {
        if self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_err() {
            Pidfd::open(std::process::id()).unwrap().kill().unwrap();
            std::thread::park();
        }
    }
}

/// RAM of a guest whose daemon lives no longer than that: what it does to a page is a step, and what it has done.
#[derive(Debug)]
struct Mortal {
    ram: Arc<dyn Memory>,
    life: Arc<Life>,
}

impl Memory for Mortal {
    fn load(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.ram.load(chunk, pages, bodies)
    }

    fn discard(&self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        self.life.step();
        let half: PageSet = pages.iter().filter(|page| page % 2 == 0).collect();
        self.ram.discard(chunk, &half)?;
        self.life.step();
        self.ram.discard(chunk, pages)?;
        self.life.step();
        Ok(())
    }

    fn install(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.life.step();
        if let Some(first) = pages.iter().next() {
            self.ram.install(chunk, &[first].into_iter().collect(), &bodies[..PAGE_BYTES])?;
        }
        self.life.step();
        self.ram.install(chunk, pages, bodies)?;
        self.life.step();
        Ok(())
    }

    fn layout(&self) -> &Layout {
        self.ram.layout()
    }

    fn spans(&self) -> Vec<Range<u64>> {
        self.ram.spans()
    }

    fn files(&self) -> io::Result<Vec<(u64, u64)>> {
        self.ram.files()
    }

    fn intact(&self) -> io::Result<()> {
        self.ram.intact()
    }

    fn lost(&self, chunk: ChunkIndex) -> io::Error {
        self.ram.lost(chunk)
    }

    fn tracked_coarsely(&self, chunk: ChunkIndex) -> bool {
        self.ram.tracked_coarsely(chunk)
    }

    fn allocated(&self) -> io::Result<PageMap> {
        self.ram.allocated()
    }

    fn allocated_in(&self, chunk: ChunkIndex) -> io::Result<PageSet> {
        self.ram.allocated_in(chunk)
    }

    fn allocated_bytes(&self) -> io::Result<u64> {
        self.ram.allocated_bytes()
    }

    fn read(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &mut [u8]) -> io::Result<()> {
        self.ram.read(chunk, pages, bodies)
    }

    fn load_bytes(&self, block: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.ram.load_bytes(block, offset, bytes)
    }

    fn in_place(&self, chunk: ChunkIndex, pages: &PageSet) -> Option<Vec<Outgoing<'_>>> {
        self.ram.in_place(chunk, pages)
    }

    fn write(&self, chunk: ChunkIndex, pages: &PageSet, bodies: &[u8]) -> io::Result<()> {
        self.ram.write(chunk, pages, bodies)
    }

    fn mappings(&self) -> &'static dyn Mappings {
        self.ram.mappings()
    }
}

/// The VMM's process, which is another one: this one asks it by a socket.
struct InsideParent {
    socket: UnixStream,
    vmm: Pidfd,
    life: Arc<Life>,
}

impl InsideParent {
    /// One question: what it is about, and numbers. The answer is a number.
    fn ask(&mut self, what: u8, numbers: &[u64]) -> u64 {
        let words = [u64::from(what), numbers.len() as u64].into_iter().chain(numbers.iter().copied());
        let question: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.socket.write_all(&question).unwrap();
        next_word(&mut self.socket).expect("an answer")
    }

    fn userfaultfd(&mut self, what: u8, features: u64) -> Option<Userfaultfd> {
        let number = self.ask(what, &[features]);
        (number > 0).then(|| self.vmm.duplicate(number as i32).unwrap().into())
    }
}

impl Inside for InsideParent {
    fn open(&mut self, features: Features) -> Result<Userfaultfd, MigrateError> {
        Ok(self.userfaultfd(b'o', features.bits()).unwrap())
    }

    fn open_alone(&mut self, _: Features) -> Result<Userfaultfd, MigrateError> {
        unreachable!("a guest that is split has its pager's")
    }

    fn lend(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn log_discards(&mut self) -> Result<(), MigrateError> {
        Ok(())
    }

    fn reopen(&mut self) -> Result<Option<Userfaultfd>, MigrateError> {
        Ok(self.userfaultfd(b'r', 0))
    }

    fn advise(&mut self, _: Advice, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.life.step();
        let numbers: Vec<u64> = ranges.iter().flat_map(|range| [range.start, range.end]).collect();
        self.ask(b'd', &numbers);
        self.life.step();
        Ok(())
    }

    fn pid(&self) -> u32 {
        std::os::unix::process::parent_id()
    }

    fn discards(&mut self) -> Discards {
        Discards::Ranges(Vec::new())
    }

    fn close(&mut self) {}
}

fn next_word(socket: &mut UnixStream) -> Option<u64> {
    let mut word = [0; 8];
    socket.read_exact(&mut word).ok().map(|()| u64::from_le_bytes(word))
}

/// The VMM's side: answers a daemon until that has ended.
fn answer_daemon(guest: &Guest, mut socket: UnixStream) -> Option<()> {
    let mut inside = guest.means().inside;
    // The daemon takes a duplicate: this one has its number for as long as the daemon lives.
    let mut given = Vec::new();
    let mut number = |made: Userfaultfd| {
        let number = made.as_fd().as_raw_fd() as u64;
        given.push(made);
        number
    };
    loop {
        let (what, count) = (next_word(&mut socket)?, next_word(&mut socket)?);
        let numbers: Vec<u64> = (0..count).map(|_| next_word(&mut socket)).collect::<Option<_>>()?;
        let answer = match u8::try_from(what).unwrap() {
            b'o' => number(inside.open(Features::from_bits_retain(numbers[0])).unwrap()),
            b'r' => inside.reopen().unwrap().map_or(0, &mut number),
            _ => {
                let ranges: Vec<_> = numbers.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
                inside.advise(Advice::DontNeed, &ranges).unwrap();
                0
            }
        };
        socket.write_all(&answer.to_le_bytes()).ok()?;
    }
}

/// Epochs in a file.
struct InFile(std::path::PathBuf);

impl Epochs for InFile {
    fn raise(&self) -> io::Result<u64> {
        // Of several threads of a daemon each gets another one.
        static RAISING: Mutex<()> = Mutex::new(());
        let _raising = RAISING.lock().unwrap();
        let epoch = std::fs::read_to_string(&self.0).map_or(0, |text| text.parse().unwrap()) + 1;
        std::fs::write(&self.0, u64::to_string(&epoch))?;
        Ok(epoch)
    }
}

/// No test: the daemon's part of the one below, in a process of its own.
#[test]
fn daemon() {
    let Ok(told) = std::env::var(DAEMON) else { return };
    let [ram, record, address, steps, begun, peer, directory, merges] = *told.split(' ').collect::<Vec<_>>() else {
        panic!("{told}")
    };
    let (number, directory) = (|word: &str| word.parse::<u64>().unwrap(), Path::new(directory));
    let vmm = Pidfd::open(std::os::unix::process::parent_id()).unwrap();
    let file = |word: &str| File::from(vmm.duplicate(number(word) as i32).unwrap());
    let (steps, merges) = (number(steps), merges == "1");
    // A merge begins with a daemon that is at work.
    let life = Arc::new(Life(AtomicU64::new(if merges { u64::MAX } else { steps })));
    let block = BlockFile {
        spec: block(u64::from(CHUNKS) * CHUNK_BYTES as u64),
        file: file(ram),
        address: number(address),
        process: None,
    };
    let ram = Mortal { ram: kind::open(&[block], Access::ReadWrite).unwrap(), life: Arc::clone(&life) };
    let missing = file(record);
    let socket = UnixStream::connect(directory.join("vmm")).unwrap();
    let inside = Box::new(InsideParent { socket, vmm, life: Arc::clone(&life) });
    let means = PagingMeans { inside, missing };
    let lenders = lenders(&peer.split(',').collect::<Vec<_>>());
    let epochs = Box::new(InFile(directory.join("epoch")));
    let split = if begun == "1" {
        Split::recover(Pager::recover(Arc::new(ram), means).unwrap(), lenders, GUEST, epochs).unwrap()
    } else {
        Split::begin(Pager::open(Arc::new(ram), means, None).unwrap(), lenders, GUEST, epochs).unwrap()
    };
    if merges {
        life.0.store(steps, Ordering::Release);
        let next_chunk = || {
            life.step();
            Ok(())
        };
        split.merge(&next_chunk).unwrap();
        // Its record says that all is here, and the VMM keeps the userfaultfd for the next one.
        loop {
            life.step();
        }
    }
    let mut way = split.way_out().unwrap();
    for turn in 0.. {
        match way.send(ChunkIndex(turn % CHUNKS), 0) {
            // A machine may be too busy for it to answer in time.
            Ok(_) | Err(SplitError::Host { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

/// One host, two that have the same pages, or three with parity.
fn lenders(peers: &[&str]) -> Vec<Lender> {
    let bytes = most_bytes(CHUNKS);
    let lender = |peer: &str, mirror: Option<&&str>, parity| Lender {
        peer: peer.into(),
        mirror: mirror.map(|mirror| (*mirror).into()),
        parity,
        once: Default::default(),
        credentials: None,
        bytes,
        leaving: false,
    };
    match peers {
        [peer] => vec![lender(peer, None, None)],
        [peer, mirror] => vec![lender(peer, Some(mirror), None)],
        more => more.iter().map(|peer| lender(peer, None, Some(Parity::new((2, 3), bytes)))).collect(),
    }
}

/// Once every day, and 20 times in the long proof.
fn often(lives: impl Iterator<Item = u64> + Clone) -> impl Iterator<Item = u64> {
    let times = if std::env::var("STERNA_LONG").is_ok_and(|word| word == "1") { 20 } else { 1 };
    (0..times).flat_map(move |_| lives.clone())
}

#[test]
fn a_daemon_that_is_killed_at_any_step_leaves_each_page_valid_where_the_record_has_it() {
    if !tracking_works() {
        return;
    }
    // Each of the first steps, and then some of the many that come when pages go and come at once.
    let hosts = [LendingHost::new()];
    let killed = Killed::new(&hosts);
    for (turn, steps) in often((0..60).chain((60..400).step_by(37))).enumerate() {
        killed.after(steps, turn > 0, false);
    }
    killed.end();
}

/// Each page is at two memory hosts, and one of them loses all it has again and again.
#[test]
fn a_daemon_that_is_killed_at_any_step_leaves_each_page_valid_at_one_of_two_at_least() {
    if !tracking_works() {
        return;
    }
    let hosts = [LendingHost::new(), LendingHost::new()];
    let killed = Killed::new(&hosts);
    for (turn, steps) in often((0..24).chain((24..400).step_by(41))).enumerate() {
        if turn % 5 == 4 {
            mirror::loses_all(&hosts[0]);
        }
        killed.after(steps, turn > 0, false);
    }
    killed.end();
}

/// There is parity, and one of three, always the same, loses all it has again and again.
#[test]
fn a_daemon_that_is_killed_at_any_step_leaves_each_page_valid_there_or_by_parity() {
    if !tracking_works() {
        return;
    }
    let hosts = [(); 3].map(|()| LendingHost::to_guests_of(2 * CHUNKS));
    let killed = Killed::new(&hosts);
    for (turn, steps) in often((0..24).chain((24..400).step_by(41))).enumerate() {
        if turn % 5 == 4 {
            mirror::loses_all(&hosts[0]);
        }
        killed.after(steps, turn > 0, false);
    }
    killed.end();
}

/// For each chunk of what is away: before it is asked for, and before, amidst and after it is written. The guest has
/// more of it come at the same time.
#[test]
fn a_daemon_that_is_killed_at_any_step_of_a_merge_leaves_each_page_valid_where_the_record_has_it() {
    if !tracking_works() {
        return;
    }
    let hosts = [LendingHost::new()];
    let killed = Killed::new(&hosts);
    let mut begun = false;
    for steps in often(0..u64::from(CHUNKS) * 4 + 2) {
        killed.all_leaves(begun);
        killed.after(steps, true, true);
        begun = true;
    }
    killed.end();
}

/// A guest that writes, whose daemons are killed.
struct Killed<'a> {
    hosts: &'a [LendingHost],
    guest: Guest,
    checking: Checking,
    directory: tempfile::TempDir,
    listener: UnixListener,
}

impl<'a> Killed<'a> {
    fn new(hosts: &'a [LendingHost]) -> Self {
        let (guest, directory) = (Guest::new(), tempfile::tempdir().unwrap());
        let listener = UnixListener::bind(directory.path().join("vmm")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let checking = Checking::start(&guest, 2);
        Self { hosts, guest, checking, directory, listener }
    }

    fn lenders(&self) -> Vec<Lender> {
        lenders(&self.hosts.iter().map(|host| host.relay.address.as_str()).collect::<Vec<_>>())
    }

    fn epochs(&self) -> InFile {
        InFile(self.directory.path().join("epoch"))
    }

    /// A daemon that lives as long as this process wants.
    fn daemon_here(&self, begun: bool) -> Arc<Split> {
        let epoch = self.epochs().raise().unwrap();
        self.guest.epochs.0.store(epoch, Ordering::Release);
        if begun { self.guest.recover_over(self.lenders()).unwrap() } else { self.guest.split_over(self.lenders()) }
    }

    /// Most of the guest is away, and its daemon has gone.
    fn all_leaves(&self, begun: bool) {
        let split = self.daemon_here(begun);
        send_all(&split, 0);
        dies(split);
        // Nobody asks in an epoch of before.
        let epoch = self.guest.epochs.0.load(Ordering::Acquire);
        std::fs::write(&self.epochs().0, epoch.to_string()).unwrap();
    }

    /// A daemon that is killed after so many steps; another one was there before where it has `begun`.
    fn after(&self, steps: u64, begun: bool, merges: bool) {
        let peers = self.hosts.iter().map(|host| host.relay.address.as_str()).collect::<Vec<_>>().join(",");
        let told = [
            self.guest.ram.file.as_raw_fd().to_string(),
            self.guest.record.as_raw_fd().to_string(),
            self.guest.ram.mapping.addresses().start.to_string(),
            steps.to_string(),
            u8::from(begun).to_string(),
            peers,
            self.directory.path().display().to_string(),
            u8::from(merges).to_string(),
        ];
        let mut daemon = Command::new(std::env::current_exe().unwrap());
        daemon.args(["--exact", "killed::daemon", "--nocapture"]).env(DAEMON, told.join(" "));
        let mut daemon = daemon.stdout(std::process::Stdio::null()).spawn().unwrap();
        std::thread::scope(|scope| {
            // Until it is there, or has ended.
            let socket = loop {
                match self.listener.accept() {
                    Ok((socket, _)) => break Some(socket),
                    Err(_) if daemon.try_wait().unwrap().is_some() => break None,
                    Err(_) => std::thread::yield_now(),
                }
            };
            let answering = socket.map(|socket| {
                socket.set_nonblocking(false).unwrap();
                scope.spawn(move || answer_daemon(&self.guest, socket))
            });
            while answering.as_ref().is_some_and(|answering| !answering.is_finished()) {
                if !self.checking.is_well() {
                    daemon.kill().unwrap();
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        assert!(self.checking.is_well(), "after {steps} steps the guest found something else than it had written");
        let ended = daemon.wait().unwrap();
        assert_eq!(ended.signal(), Some(9), "after {steps} steps it did not end as it should: {ended}");
        // What is left of its connections would be too much for this process after many daemons.
        self.hosts.iter().for_each(|host| host.relay.cut());
        self.hosts.iter().for_each(|host| host.relay.restore());
    }

    /// One that lives.
    fn end(self) {
        let split = self.daemon_here(true);
        self.checking.goes_on(1000);
        split.bring_back().unwrap();
        let lenders = self.lenders();
        self.checking.end();
        assert_eq!(split.pager().missing(), 0);
        dies(split);
        let split = self.guest.recover_over(lenders).unwrap();
        if self.hosts.len() > 2 {
            return split.end();
        }
        assert_eq!(self.hosts.iter().map(|host| host.pages()).sum::<u64>(), 0, "the next daemon gives copies up");
        split.end();
    }
}
