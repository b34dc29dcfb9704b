//! RAM that begins as a template, and what is discarded of it.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use sterna_agent_protocol::message::Status;
use sterna_engine::agent::{AddressRange, Agent, AgentBlock, AgentError, Discards, MapRun, Sharing};
use sterna_sys::pagemap::Pagemap;
use sterna_sys::process::maps;
use sterna_sys::userfaultfd::{Features, Modes, Userfaultfd};
use tempfile::TempDir;

use crate::fixture::{Start, cannot_run, device, identity, scratch, with_each_qemu};
use crate::private::kernel_flags;
use crate::program::{PAGE, Program, RAM_BYTES, word_of};

/// The pages of the template that hold data: two runs, between holes.
const DATA: [std::ops::Range<u64>; 2] = [16..4096, 8192..8200];

/// A template of this many bytes; its file.
fn template(directory: &Path, bytes: u64) -> OwnedFd {
    let path = directory.join("template");
    let file = File::create(&path).expect("a file");
    file.set_len(bytes).expect("room");
    for page in DATA.into_iter().flatten().filter(|page| page * PAGE < bytes) {
        let words: Vec<u8> = (0..PAGE / 8).flat_map(|_| word_of(page).to_ne_bytes()).collect();
        file.write_all_at(&words, page * PAGE).expect("data");
    }
    File::open(path).expect("it is there").into()
}

/// A program whose RAM begins as a template.
struct Cloned {
    program: Program,
    agent: Agent,
    block: AgentBlock,
    _dir: TempDir,
    template: OwnedFd,
}

fn cloned(memory: &str) -> Cloned {
    let dir = scratch();
    let template = template(dir.path(), RAM_BYTES);
    let mut program = Program::start_with_template(memory, &template);
    program.tell("map shared 0 0");
    let mut agent = program.agent();
    let block = agent.blocks().expect("blocks").remove(0);
    Cloned { program, agent, block, _dir: dir, template }
}

impl Cloned {
    fn read(&mut self, page: u64) -> u64 {
        self.program.tell(&format!("read {page}")).parse().expect("a number")
    }

    fn span(&self) -> std::ops::Range<u64> {
        self.block.address..self.block.address + self.block.length
    }

    /// The pages behind which the template stands, by the kernel's word.
    fn areas(&self) -> Vec<std::ops::Range<u64>> {
        let file = sterna_sys::file::id(&self.template).expect("an identity");
        let mut found: Vec<std::ops::Range<u64>> = Vec::new();
        for mapping in maps(self.program.id()).expect("it runs").iter().filter(|mapping| mapping.file == Some(file)) {
            assert!(!mapping.permissions.shared && mapping.permissions.write);
            let place = |address: u64| (address - self.block.address) / PAGE;
            let (from, to) = (place(mapping.range.start), place(mapping.range.end));
            assert_eq!(mapping.offset, from * PAGE);
            match found.last_mut() {
                Some(last) if last.end == from => last.end = to,
                _ => found.push(from..to),
            }
        }
        found
    }

    fn watched(&mut self, features: Features, modes: Modes) -> Userfaultfd {
        let opened = self.agent.open_userfaultfd(Some(device().as_fd()), features.bits()).expect("a userfaultfd");
        let userfaultfd = Userfaultfd::from(opened.descriptor);
        userfaultfd.register(self.span(), modes).expect("registered");
        userfaultfd
    }
}

#[test]
fn ram_begins_as_its_template_and_what_is_written_stays_its_own() {
    for memory in ["private", "private,mergeable"] {
        let mut cloned = cloned(memory);
        let before = std::fs::metadata(cloned._dir.path().join("template")).expect("it is there").blocks();
        assert_eq!(cloned.areas(), DATA);
        assert_eq!(
            [15, 16, 4095, 4096, 8199].map(|page| cloned.read(page)),
            [0, word_of(16), word_of(4095), 0, word_of(8199)]
        );
        assert_eq!(cloned.program.tell("fill 20"), "");
        assert_eq!([15, 19, 20].map(|page| cloned.read(page)), [15, 19, 20].map(word_of));
        let mut words = [0; 8];
        let file = File::open(cloned._dir.path().join("template")).expect("it is there");
        file.read_exact_at(&mut words, 15 * PAGE).expect("a hole");
        assert_eq!(words, [0; 8], "what was written is in the template");
        let after = file.metadata().expect("it is there");
        assert_eq!(after.blocks(), before, "holes were filled");
        let ram = std::fs::metadata(&cloned.program.ram).expect("the file is there");
        assert_eq!((ram.len(), ram.blocks()), (RAM_BYTES, 0));
        assert_eq!((cloned.block.sharing, cloned.block.length), (Sharing::Private, RAM_BYTES));
        assert_eq!((cloned.block.device, cloned.block.inode), identity(&cloned.program.ram));
        let flags = kernel_flags(cloned.program.id(), &cloned.block);
        assert!(flags.iter().any(|flag| flag == "nh"), "{flags:?}");
        assert_eq!(cloned.program.tell("environment"), "");
        let open = std::fs::read_dir(format!("/proc/{}/fd", cloned.program.id())).expect("it runs");
        let names: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).collect();
        assert!(names.iter().all(|name| !name.ends_with("template")), "{names:?}");
    }
}

#[test]
fn ram_is_not_mapped_where_its_template_is_not_what_it_must_be() {
    let dir = scratch();
    let right = template(dir.path(), RAM_BYTES);
    let writable = OpenOptions::new().read(true).write(true).open(dir.path().join("template")).expect("it is there");
    let short = scratch();
    let long = scratch();
    let directory = File::open(dir.path()).expect("a directory");
    let cases: [(&str, &str, OwnedFd); 6] = [
        ("it is shared", "shared", right.try_clone().expect("a descriptor")),
        ("it can be written", "private", writable.into()),
        ("it is too short", "private", template(short.path(), RAM_BYTES - PAGE)),
        ("it is too long", "private", template(long.path(), RAM_BYTES + PAGE)),
        ("it is a directory", "private", directory.into()),
        ("its mode is unknown", "Private", right),
    ];
    for (why, memory, file) in cases {
        let mut program = Program::start_with_template(memory, &file);
        // And once more: RAM without what the template holds would be no better the second time.
        for _ in 0..2 {
            assert_eq!(program.tell("try-map shared 0 0"), format!("errno {}", libc::EINVAL), "{why}");
        }
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.id())).expect("it runs");
        let ram = program.ram.to_str().expect("a name");
        assert!(!maps.lines().any(|line| line.ends_with(ram) || line.ends_with("/template")), "{why}: {maps}");
    }
}

#[test]
fn what_is_discarded_reads_zero_and_is_anonymous_while_nobody_watches() {
    let mut cloned = cloned("private");
    let mut log = cloned.agent.discard_log().expect("the log");
    assert_eq!(cloned.program.tell("discard-each 20 2 90"), "0");
    assert_eq!(cloned.program.tell(&format!("advise {} {} {}", libc::MADV_DONTNEED, 4000 * PAGE, 5000 * PAGE)), "0");
    assert_eq!(
        [16, 19, 20, 21, 198, 199, 3999, 4000, 8192].map(|page| cloned.read(page) != 0),
        [true, true, false, true, false, true, true, false, false]
    );
    let areas = cloned.areas();
    assert!(areas.iter().all(|area| !area.contains(&20) && !area.contains(&198) && area.end <= 4000), "{areas:?}");
    let Discards::Ranges(ranges) = log.drain() else { panic!("the log is complete") };
    assert_eq!(ranges.len(), 91);
    let flags = kernel_flags(
        cloned.program.id(),
        &AgentBlock { address: cloned.block.address + 20 * PAGE, ..cloned.block.clone() },
    );
    assert!(["nh", "dc"].iter().all(|wanted| flags.iter().any(|flag| flag == wanted)), "{flags:?}");
}

#[test]
fn what_is_discarded_reads_zero_where_no_more_mappings_may_be_made() {
    let mut cloned = cloned("private");
    assert_eq!(cloned.program.tell("refuse-anonymous"), "0");
    assert_eq!(cloned.program.tell("discard-each 20 1 3000"), "0");
    assert_eq!(cloned.areas(), DATA);
    assert_eq!(cloned.read(19), word_of(19));
}

#[test]
fn what_is_discarded_while_ram_is_watched_reads_zero_and_stays_watched() {
    if cannot_run() {
        return;
    }
    let missing = Features::MISSING_SHMEM;
    for (features, modes, armed, lent) in [
        (missing, Modes::MISSING, false, false),
        (Features::TRACKING, Modes::WP, false, false),
        (Features::TRACKING, Modes::WP, true, false),
        (Features::TRACKING, Modes::WP, true, true),
    ] {
        let mut cloned = cloned("private");
        let userfaultfd = cloned.watched(features, modes);
        if lent {
            cloned.agent.lend_userfaultfd().expect("lent");
            assert!(!cloned.agent.hello().expect("hello").userfaultfd);
        }
        let pagemap = Pagemap::open(cloned.program.id()).expect("pagemap");
        if armed {
            pagemap.written_and_arm(cloned.span(), &mut Vec::new()).expect("armed");
        }
        let how = format!("{modes:?}, armed {armed}, lent {lent}");
        assert_eq!(cloned.program.tell("discard-each 20 1 3000"), "0", "{how}");
        assert_eq!(cloned.program.tell(&format!("advise {} {} {}", libc::MADV_DONTNEED, 3500 * PAGE, 600 * PAGE)), "0");
        assert_eq!([19, 3499, 3500, 4000, 4095].map(|page| cloned.read(page) != 0), [true, true, false, false, false]);
        assert_eq!(cloned.areas(), DATA, "{how}: a mapping was replaced");
        if armed {
            pagemap.written_and_arm(cloned.span(), &mut Vec::new()).expect("all of it is still registered");
        }
        drop(userfaultfd);
        cloned.agent.close_userfaultfd().expect("closed");
        assert_eq!(cloned.program.tell("discard-each 16 1 4"), "0");
        assert_eq!(cloned.areas(), [20..4096, 8192..8200], "nobody watches any more");
    }
}

/// Fails where a hook decides that nobody watches, and then maps what the daemon has registered meanwhile: a page that
/// is not registered cannot be armed.
#[test]
fn discards_and_daemons_that_come_and_go_leave_zeros_and_nothing_that_is_not_watched() {
    if cannot_run() {
        return;
    }
    let mut cloned = cloned("private");
    let (mut agent, span) = (cloned.program.agent(), cloned.span());
    let pagemap = Pagemap::open(cloned.program.id()).expect("pagemap");
    let done = std::sync::atomic::AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let program = &mut cloned.program;
        let discarding = scope.spawn(|| {
            let until = Instant::now() + Duration::from_secs(3);
            while Instant::now() < until {
                // Beginning again with areas, so that there is always something to hide.
                for first in [20, 21, 1000, 1001, 2500] {
                    assert_eq!(program.tell(&format!("discard-each {first} 7 200")), "0");
                }
            }
            done.store(true, std::sync::atomic::Ordering::Release);
        });
        let mut rounds = 0;
        while !done.load(std::sync::atomic::Ordering::Acquire) {
            let opened = agent.open_userfaultfd(Some(device().as_fd()), Features::TRACKING.bits()).expect("one");
            let userfaultfd = Userfaultfd::from(opened.descriptor);
            if rounds % 2 == 0 {
                agent.lend_userfaultfd().expect("lent");
            }
            // A process that another test is about to start has the last one's descriptor until it begins.
            while let Err(error) = userfaultfd.register(span.clone(), Modes::WP) {
                assert_eq!(error.errno(), Some(libc::EBUSY), "{error}");
                std::thread::yield_now();
            }
            for _ in 0..4 {
                pagemap.written_and_arm(span.clone(), &mut Vec::new()).expect("all of it is registered");
            }
            drop(userfaultfd);
            agent.close_userfaultfd().expect("closed");
            rounds += 1;
        }
        discarding.join().expect("all read zero");
        rounds
    });
    println!("{rounds} rounds");
    assert!(rounds > 3, "{rounds}");
}

#[test]
fn the_daemon_makes_zeros_of_a_part_of_an_area_and_not_while_ram_is_watched() {
    if cannot_run() {
        return;
    }
    let mut cloned = cloned("private");
    let at = |page: u64, pages: u64| AddressRange { address: cloned.block.address + page * PAGE, length: pages * PAGE };
    let (first, second, outside) = (at(20, 3), at(30, 1), at(RAM_BYTES / PAGE, 1));
    cloned.agent.map_own(&[first]).expect("mapped");
    assert_eq!([19, 20, 22, 23].map(|page| cloned.read(page) != 0), [true, false, false, true]);
    let flags = kernel_flags(cloned.program.id(), &AgentBlock { address: first.address, ..cloned.block.clone() });
    assert!(["nh", "dc"].iter().all(|wanted| flags.iter().any(|flag| flag == wanted)), "{flags:?}");
    let refused = |result: Result<(), AgentError>| match result {
        Err(AgentError::Refused { status, item, .. }) => (status, item),
        other => panic!("should be refused: {other:?}"),
    };
    assert_eq!(refused(cloned.agent.map_own(&[first, outside])), (Status::OutsideRam, 1));
    let userfaultfd = cloned.watched(Features::TRACKING, Modes::WP);
    assert_eq!(refused(cloned.agent.map_own(&[second])), (Status::AlreadyOpen, 0));
    cloned.agent.lend_userfaultfd().expect("lent");
    assert_eq!(refused(cloned.agent.map_own(&[second])), (Status::AlreadyOpen, 0));
    assert_eq!(cloned.read(30), word_of(30));
    drop(userfaultfd);
    cloned.agent.close_userfaultfd().expect("closed");
    cloned.agent.map_own(&[second]).expect("mapped");
    assert_eq!(cloned.read(30), 0);
    assert_eq!(refused_lend(&mut cloned.agent), Status::NotOpen);
}

fn refused_lend(agent: &mut Agent) -> Status {
    match agent.lend_userfaultfd() {
        Err(AgentError::Refused { status, .. }) => status,
        other => panic!("there is none to lend: {other:?}"),
    }
}

#[test]
fn a_file_that_is_mapped_over_private_ram_is_open_for_reading_only_and_its_discards_read_zero() {
    let dir = scratch();
    drop(template(dir.path(), RAM_BYTES));
    let path = dir.path().join("template");
    let mut program = Program::start_in_mode("private");
    program.tell("map shared 0 0");
    let mut agent = program.agent();
    let block = agent.blocks().expect("blocks").remove(0);
    let runs = [MapRun { at: AddressRange { address: block.address, length: 64 * PAGE }, offset: 16 * PAGE }];
    let writable = OpenOptions::new().read(true).write(true).open(&path).expect("it is there");
    match agent.map(writable.as_fd(), Sharing::Private, &runs) {
        Err(AgentError::Refused { status: Status::System, errno, .. }) => assert_eq!(errno, libc::EINVAL as u32),
        other => panic!("it can be written: {other:?}"),
    }
    agent.map(File::open(&path).expect("it is there").as_fd(), Sharing::Private, &runs).expect("mapped");
    let flags = kernel_flags(program.id(), &block);
    assert!(["nh", "dc"].iter().all(|wanted| flags.iter().any(|flag| flag == wanted)), "{flags:?}");
    assert_eq!(program.tell("read 0"), word_of(16).to_string());
    assert_eq!(program.tell("discard-each 0 1 60"), "0");
    assert_eq!(program.tell("read 60"), word_of(76).to_string());
}

#[test]
fn a_qemu_begins_as_its_template_and_one_of_another_size_does_not_start() {
    with_each_qemu(|start| {
        let dir = scratch();
        let qemu = start.memory("private").template(template(dir.path(), 64 << 20)).ram(64).go();
        let block = qemu.agent().blocks().expect("blocks").remove(0);
        let memory = File::open(format!("/proc/{}/mem", qemu.pid)).expect("QEMU's memory");
        let mut word = [0; 8];
        memory.read_exact_at(&mut word, block.address + 4000 * PAGE).expect("a mapped page");
        assert_eq!(u64::from_ne_bytes(word), word_of(4000));
        let flags = kernel_flags(qemu.pid, &AgentBlock { address: block.address + 16 * PAGE, ..block });
        assert!(["nh", "dc"].iter().all(|wanted| flags.iter().any(|flag| flag == wanted)), "{flags:?}");
    });
    if cannot_run() {
        return;
    }
    let dir = scratch();
    let start = Start::new().memory("private").template(template(dir.path(), 32 << 20)).ram(64);
    let started = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| start.go()));
    assert!(started.is_err(), "it runs without what the template holds");
}
