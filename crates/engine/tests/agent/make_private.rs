//! Shared RAM that becomes private: it reads as before, and what its file holds stays what it is.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_agent_protocol::message::Status;
use sterna_engine::agent::{AddressRange, Agent, AgentError, Sharing};
use sterna_sys::file::{nobody_writes, punch};
use sterna_sys::process::maps;

use crate::fixture::{cannot_run, device, eventually, identity};
use crate::private::kernel_flags;
use crate::program::{PAGE, Program, RAM_BYTES, word_of};

/// A program with shared RAM of which some pages hold words.
struct Shared {
    program: Program,
    agent: Agent,
    at: AddressRange,
    /// The file that stands for its RAM afterwards.
    stand_in: PathBuf,
}

/// The pages that hold words, between holes.
const DATA: [u64; 4] = [8, 9, 40, 16_383];

fn shared() -> Shared {
    let program = Program::start();
    let ram = OpenOptions::new().write(true).open(&program.ram).expect("the RAM file");
    for page in DATA {
        let words: Vec<u8> = (0..PAGE / 8).flat_map(|_| word_of(page).to_ne_bytes()).collect();
        ram.write_all_at(&words, page * PAGE).expect("data");
    }
    let mut agent = program.agent();
    let block = agent.blocks().expect("blocks").remove(0);
    let stand_in = program.dir.path().join("stand-in");
    File::create(&stand_in).and_then(|file| file.set_len(RAM_BYTES)).expect("a file");
    let at = AddressRange { address: block.address, length: block.length };
    Shared { program, agent, at, stand_in }
}

impl Shared {
    fn make_private(&mut self, file: &File, bridged: u64) -> Result<(), AgentError> {
        self.agent.make_private(file.as_fd(), self.at, bridged, identity(&self.stand_in))
    }

    fn ram(&self) -> File {
        File::open(&self.program.ram).expect("it is there")
    }

    /// What its RAM holds there, by the file.
    fn word(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        self.ram().read_exact_at(&mut word, page * PAGE).expect("a word");
        u64::from_ne_bytes(word)
    }

    fn read(&mut self, page: u64) -> u64 {
        self.program.tell(&format!("read {page}")).parse().expect("a number")
    }

    fn reads(&mut self, pages: &[u64]) -> Vec<u64> {
        pages.iter().map(|page| self.read(*page)).collect()
    }
}

#[test]
fn ram_that_is_left_out_of_dumps_stays_so() {
    let mut shared = shared();
    assert_eq!(shared.program.tell(&format!("advise {} 0 {RAM_BYTES}", libc::MADV_DONTDUMP)), "0");
    shared.make_private(&shared.ram(), 0).expect("private");
    let block = shared.agent.blocks().expect("blocks").remove(0);
    let flags = kernel_flags(shared.program.id(), &block);
    assert!(flags.iter().any(|flag| flag == "dd"), "{flags:?}");
}

#[test]
fn what_was_shared_reads_as_before_and_what_is_written_goes_to_nobody_else() {
    for bridged in [0, 1 << 30] {
        let mut shared = shared();
        let before = shared.reads(&DATA);
        let held = shared.ram().metadata().expect("it is there").blocks();
        assert!(!nobody_writes(shared.ram()).expect("the kernel tells"), "it is mapped shared");
        shared.make_private(&shared.ram(), bridged).expect("private");
        assert_eq!(shared.reads(&DATA), before);
        assert_eq!(shared.read(39), 0);
        shared.program.tell("fill 9");
        assert_eq!(shared.reads(&[7, 8, 9]), [7, 8, 9].map(word_of));
        let file = shared.ram();
        let mut words = [1; 8];
        file.read_exact_at(&mut words, 7 * PAGE).expect("a hole, or zeros");
        assert_eq!(words, [0; 8], "what was written is in the file");
        if bridged == 0 {
            assert_eq!(file.metadata().expect("it is there").blocks(), held, "holes were filled");
        }
        let block = shared.agent.blocks().expect("blocks").remove(0);
        assert_eq!((block.address, block.length, block.sharing), (shared.at.address, RAM_BYTES, Sharing::Private));
        assert_eq!((block.device, block.inode), identity(&shared.stand_in));
        // The program itself has the file open for writing; nothing is mapped so any more.
        let id = sterna_sys::file::id(&file).expect("an identity");
        eventually("the former mapping goes", || {
            let maps = maps(shared.program.id()).expect("it runs");
            maps.iter().all(|mapping| mapping.file != Some(id) || !mapping.permissions.shared).then_some(())
        });
    }
}

const PAGES: u64 = RAM_BYTES / PAGE;

#[test]
fn what_is_written_or_given_back_after_its_file_was_looked_at_reads_as_it_is() {
    for bridged in [0, 8 * PAGE] {
        let mut shared = shared();
        let ram = OpenOptions::new().write(true).open(&shared.program.ram).expect("the RAM file");
        let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
        let further = || {
            let before = writes.load(Ordering::Acquire);
            while writes.load(Ordering::Acquire) < before + 300 {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let number = writes.fetch_add(1, Ordering::AcqRel);
                    let page = number.wrapping_mul(7919) % PAGES;
                    match number / PAGES % 2 {
                        0 => ram.write_all_at(&(number + 1).to_ne_bytes(), page * PAGE).expect("written"),
                        _ => punch(&ram, page * PAGE..(page + 1) * PAGE).expect("given back"),
                    }
                }
            });
            for _ in 0..5 {
                further();
                shared.agent.look_ahead(shared.ram().as_fd(), bridged).expect("looked at");
                further();
            }
            stop.store(true, Ordering::Release);
        });
        let all: Vec<u64> = (0..PAGES).collect();
        let held: Vec<u64> = all.iter().map(|page| shared.word(*page)).collect();
        shared.make_private(&shared.ram(), bridged).expect("private");
        assert_eq!(shared.reads(&all), held);
    }
}

#[test]
fn data_that_came_into_a_hole_ends_where_it_ends_and_another_file_says_nothing() {
    // Beside what was known, and more than is looked at page by page.
    for filled in [8, 41, 6000] {
        let mut shared = shared();
        let stand_in = File::open(&shared.stand_in).expect("it is there");
        for file in [shared.ram(), stand_in, shared.ram()] {
            shared.agent.look_ahead(file.as_fd(), 0).expect("looked at");
        }
        shared.program.tell(&format!("fill {filled}"));
        let held = shared.ram().metadata().expect("it is there").blocks();
        shared.make_private(&shared.ram(), 0).expect("private");
        assert_eq!(shared.program.tell(&format!("check 2 {filled}")), "0");
        assert_eq!(shared.reads(&DATA), DATA.map(word_of));
        let beyond = [filled, 6001, 16_382];
        let expected = beyond.map(|page| if DATA.contains(&page) { word_of(page) } else { 0 });
        assert_eq!(shared.reads(&beyond), expected);
        assert_eq!(shared.ram().metadata().expect("it is there").blocks(), held, "holes were filled");
    }
    let mut shared = shared();
    let stand_in = File::open(&shared.stand_in).expect("it is there");
    shared.agent.look_ahead(stand_in.as_fd(), 0).expect("looked at");
    shared.make_private(&shared.ram(), 0).expect("private");
    assert_eq!(shared.reads(&DATA), DATA.map(word_of));
}

#[test]
fn what_is_discarded_afterwards_reads_as_zeros_and_the_file_keeps_it() {
    let mut shared = shared();
    let before = shared.reads(&DATA);
    shared.make_private(&shared.ram(), 0).expect("private");
    shared.program.tell(&format!("advise {} {} {PAGE}", libc::MADV_DONTNEED, 40 * PAGE));
    assert_eq!(shared.reads(&DATA), [before[0], before[1], 0, before[3]]);
    let mut words = [0; 8];
    shared.ram().read_exact_at(&mut words, 40 * PAGE).expect("its words");
    assert_eq!(u64::from_ne_bytes(words), before[2]);
}

#[test]
fn what_cannot_become_private_stays_as_it_is() {
    let mut shared = shared();
    let before = shared.reads(&DATA);
    assert_eq!(before, DATA.map(word_of));
    let writable = OpenOptions::new().read(true).write(true).open(&shared.program.ram).expect("it is there");
    let short = shared.program.dir.path().join("short");
    File::create(&short).and_then(|file| file.set_len(RAM_BYTES - PAGE)).expect("a file");
    for wrong in [writable, File::open(&short).expect("it is there")] {
        let refused = shared.make_private(&wrong, 0);
        assert!(matches!(refused, Err(AgentError::Refused { status: Status::System, .. })), "{refused:?}");
    }
    let whole = shared.at;
    shared.at.length -= PAGE;
    let refused = shared.make_private(&shared.ram(), 0);
    assert!(matches!(refused, Err(AgentError::Refused { status: Status::System, .. })), "{refused:?}");
    shared.at.address -= PAGE;
    let refused = shared.make_private(&shared.ram(), 0);
    assert!(matches!(refused, Err(AgentError::Refused { status: Status::OutsideRam, .. })), "{refused:?}");
    shared.at = whole;
    if !cannot_run() {
        let opened = shared.agent.open_userfaultfd(Some(device().as_fd()), 0).expect("a userfaultfd");
        let refused = shared.make_private(&shared.ram(), 0);
        assert!(matches!(refused, Err(AgentError::Refused { status: Status::AlreadyOpen, .. })), "{refused:?}");
        drop(opened);
        shared.agent.close_userfaultfd().expect("closed");
    }
    // It is shared still: what is written is in the file.
    assert_eq!(shared.reads(&DATA), before);
    shared.program.tell("fill 4");
    let mut words = [0; 8];
    shared.ram().read_exact_at(&mut words, 3 * PAGE).expect("its words");
    assert_eq!(u64::from_ne_bytes(words), word_of(3));
    shared.make_private(&shared.ram(), 0).expect("private");
    let again = shared.make_private(&shared.ram(), 0);
    assert!(matches!(again, Err(AgentError::Refused { status: Status::System, .. })), "{again:?}");
}
