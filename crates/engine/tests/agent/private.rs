//! Private memory mode: RAM that is the program's own, anonymous memory.

use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use sterna_engine::agent::{AddressRange, Advice, AgentBlock, Backing, Discard, Discards, MapRun, Sharing};

use crate::fixture::{eventually, identity, scratch, with_each_qemu};
use crate::program::{PAGE, Program, RAM_BYTES, word_of};

const PAGES: u64 = RAM_BYTES / PAGE;

/// A program whose RAM is private and written, every page of it; its block.
fn private_program(memory: &str) -> (Program, AgentBlock) {
    let mut program = Program::start_in_mode(memory);
    program.tell("map shared 0 0");
    assert_eq!(program.tell(&format!("fill {PAGES}")), "");
    assert_eq!(program.tell(&format!("check 1 {PAGES}")), "0");
    let blocks = program.agent().blocks().expect("blocks");
    let [block] = blocks.try_into().expect("one block");
    (program, block)
}

/// Whether the kernel, too, says that the block is anonymous memory.
fn is_anonymous(pid: u32, block: &AgentBlock) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    let mapping = format!("{:x}-{:x} rw-p 00000000 00:00 0", block.address, block.address + block.length);
    maps.lines().any(|line| line.trim_end() == mapping)
}

/// The kernel's flags of the mapping in which the block begins.
pub fn kernel_flags(pid: u32, block: &AgentBlock) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process runs");
    let (_, mapping) = maps.split_once(&format!("\n{:x}-", block.address)).expect("it is mapped");
    let flags = mapping.lines().find_map(|line| line.strip_prefix("VmFlags:")).expect("smaps has flags");
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Offsets and lengths, all of this program's RAM.
fn ranges(program: &Program, discards: Discards) -> Vec<(u64, u64)> {
    let Discards::Ranges(ranges) = discards else { panic!("the log is complete") };
    let of_ram = identity(&program.ram);
    assert!(ranges.iter().all(|range| (range.device, range.inode) == of_ram));
    ranges.iter().map(|range| (range.offset, range.length)).collect()
}

/// Whether the kernel has this, which lies in a directory of its own where it is there.
fn kernel_has(what: &str) -> bool {
    let there = Path::new("/sys/kernel/mm").join(what).exists();
    if !there {
        eprintln!("not looked at: this kernel has no {what}");
    }
    there
}

#[test]
fn private_ram_is_anonymous_and_its_file_stays_empty() {
    for memory in ["private", "private,mergeable"] {
        let (program, block) = private_program(memory);
        assert!(is_anonymous(program.id(), &block));
        assert_eq!((block.device, block.inode), identity(&program.ram));
        assert_eq!((block.length, block.offset, block.page_size), (RAM_BYTES, 0, PAGE));
        assert_eq!((block.sharing, &block.backing), (Sharing::Private, &Backing::Named(program.ram.clone())));
        let file = std::fs::metadata(&program.ram).expect("the file is there");
        assert_eq!((file.len(), file.blocks()), (RAM_BYTES, 0));
    }
}

#[test]
fn shared_by_its_name_is_as_without_the_variable() {
    let (program, block) = private_program("shared");
    assert_eq!(block.sharing, Sharing::Shared);
    assert!(!is_anonymous(program.id(), &block));
    assert_eq!(std::fs::metadata(&program.ram).expect("the file is there").blocks(), RAM_BYTES / 512);
}

#[test]
fn a_private_mapping_of_a_programs_own_stays_one_of_the_file() {
    let mut program = Program::start_in_mode("private");
    program.tell("map private 0 0");
    let block = program.agent().blocks().expect("blocks").remove(0);
    assert_eq!(block.sharing, Sharing::Private);
    assert!(!is_anonymous(program.id(), &block));
}

#[test]
fn pages_that_a_program_drops_of_private_ram_read_zero_and_are_logged() {
    let (mut program, _) = private_program("private");
    let mut log = program.agent().discard_log().expect("the log");
    assert_eq!(program.tell(&format!("advise {} 8192 12288", libc::MADV_DONTNEED)), "0");
    assert_eq!(
        [1, 2, 3, 4, 5].map(|page| program.tell(&format!("read {page}")) == "0"),
        [false, true, true, true, false]
    );
    assert_eq!(ranges(&program, log.drain()), [(8192, 12288)]);
    assert_eq!(program.tell(&format!("check 1 {PAGES}")), "3");
}

#[test]
fn a_discard_as_qemu_does_it_is_logged_again_once_its_pages_are_gone() {
    let (mut program, _) = private_program("private");
    let mut log = program.agent().discard_log().expect("the log");
    // The file has no page there, so the hole changes nothing.
    assert_eq!(program.tell("punch 4096 8192"), "0");
    assert_eq!(ranges(&program, log.drain()), [(4096, 8192)]);
    assert_ne!(program.tell("read 1"), "0");
    assert_eq!(program.tell(&format!("advise {} 4096 8192", libc::MADV_DONTNEED)), "0");
    assert_eq!(program.tell("read 1"), "0");
    assert_eq!(ranges(&program, log.drain()), [(4096, 8192)]);
}

#[test]
fn a_removal_that_the_kernel_refuses_is_not_logged() {
    let (mut program, _) = private_program("private");
    let mut log = program.agent().discard_log().expect("the log");
    assert_eq!(program.tell(&format!("advise {} 0 8192", libc::MADV_REMOVE)), format!("errno {}", libc::EINVAL));
    assert_eq!(program.tell(&format!("check 1 {PAGES}")), "0");
    assert_eq!(log.drain(), Discards::Ranges(vec![]));
}

#[test]
fn what_is_left_of_private_ram_that_is_unmapped_in_part_keeps_its_offsets() {
    let (mut program, block) = private_program("private");
    let mut log = program.agent().discard_log().expect("the log");
    assert_eq!(program.tell("unmap 8192 4096"), "0");
    let mut left = program.agent().blocks().expect("blocks");
    left.sort_unstable_by_key(|block| block.offset);
    let extents: Vec<_> = left.iter().map(|block| (block.address, block.length, block.offset)).collect();
    assert_eq!(extents, [(block.address, 8192, 0), (block.address + 12288, RAM_BYTES - 12288, 12288)]);
    assert!(left.iter().all(|block| block.sharing == Sharing::Private));
    assert_eq!(program.tell(&format!("advise {} 16384 4096", libc::MADV_DONTNEED)), "0");
    assert_eq!(ranges(&program, log.drain()), [(16384, 4096)]);
}

#[test]
fn the_daemon_drops_pages_of_private_ram() {
    let (mut program, block) = private_program("private");
    let mut agent = program.agent();
    let mut log = agent.discard_log().expect("the log");
    agent.advise(Advice::DontNeed, &[AddressRange { address: block.address + PAGE, length: PAGE }]).expect("advise");
    assert_eq!([0, 1, 2].map(|page| program.tell(&format!("read {page}")) == "0"), [false, true, false]);
    assert_eq!(log.drain(), Discards::Ranges(vec![]), "what the daemon asked for it knows");
}

/// The anonymous memory of a process, bytes.
fn own_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    own.expect("the kernel tells").trim().parse::<u64>().expect("a number") << 10
}

#[test]
fn what_is_mapped_over_private_pages_reads_as_the_file_and_the_pages_go_later() {
    let (mut program, block) = private_program("private");
    let mut agent = program.agent();
    let dir = scratch();
    let path = dir.path().join("layer");
    let layer = std::fs::File::create_new(&path).expect("a file");
    layer.set_len(RAM_BYTES).expect("a file");
    let runs = [(0, 1), (100, 4000), (PAGES - 20, 20)];
    for page in runs.into_iter().flat_map(|(first, count)| first..first + count) {
        layer.write_all_at(&(!page).to_ne_bytes(), page * PAGE).expect("written");
    }
    let layer = std::fs::File::open(&path).expect("it is there");
    let at = |(first, count)| AddressRange { address: block.address + first * PAGE, length: count * PAGE };
    let runs: Vec<_> = runs.iter().map(|run| MapRun { at: at(*run), offset: run.0 * PAGE }).collect();
    let pid = program.id();
    let before = own_bytes(pid);
    agent.map_over(layer.as_fd(), &runs).expect("mapped");
    eventually("the pages are freed", || (own_bytes(pid) + 4000 * PAGE <= before).then_some(()));
    let shown = [0, 1, 99, 100, 4099, 4100, PAGES - 21, PAGES - 20, PAGES - 1];
    let layered = |page: u64| page == 0 || (100..4100).contains(&page) || page >= PAGES - 20;
    let expected = shown.map(|page| if layered(page) { !page } else { word_of(page) });
    assert_eq!(shown.map(|page| program.tell(&format!("read {page}")).parse::<u64>().expect("a number")), expected);
    // They are the program's to write, and the file stays as it is.
    program.tell(&format!("fill {PAGES}"));
    assert_eq!(program.tell(&format!("check 1 {PAGES}")), "0");
    let mut word = [0; 8];
    layer.read_exact_at(&mut word, 100 * PAGE).expect("a word");
    assert_eq!(u64::from_ne_bytes(word), !100);
    assert_eq!(agent.blocks().expect("blocks"), [block], "for the program it is the same block");
}

#[test]
fn private_ram_is_merged_only_where_that_was_asked_for() {
    if !kernel_has("ksm") {
        return;
    }
    for (memory, merged) in [("private", false), ("private,mergeable", true)] {
        let (mut program, block) = private_program(memory);
        assert_eq!(program.tell(&format!("advise {} 0 {RAM_BYTES}", libc::MADV_MERGEABLE)), "0");
        let flags = kernel_flags(program.id(), &block);
        assert_eq!(flags.iter().any(|flag| flag == "mg"), merged, "{memory}: {flags:?}");
    }
}

#[test]
fn private_ram_of_a_process_whose_memory_is_all_mergeable_is_merged_only_where_that_was_asked_for() {
    for (memory, merged) in [("private", false), ("private,mergeable", true)] {
        let mut program = Program::start_in_mode(memory);
        let answer = program.tell("merge-all-memory");
        if answer != "0" {
            return eprintln!("skipped: the kernel does not make a process's memory mergeable: {answer}");
        }
        program.tell("map shared 0 0");
        let block = program.agent().blocks().expect("blocks").remove(0);
        let flags = kernel_flags(program.id(), &block);
        assert_eq!(flags.iter().any(|flag| flag == "mg"), merged, "{memory}: {flags:?}");
    }
}

#[test]
fn private_ram_stays_in_small_pages() {
    if !kernel_has("transparent_hugepage") {
        return;
    }
    for memory in ["private", "private,mergeable"] {
        let (mut program, block) = private_program(memory);
        assert_eq!(program.tell(&format!("advise {} 0 {RAM_BYTES}", libc::MADV_HUGEPAGE)), "0");
        let flags = kernel_flags(program.id(), &block);
        let has = |wanted| flags.iter().any(|flag| flag == wanted);
        assert!(has("nh") && !has("hg"), "{memory}: {flags:?}");
    }
}

#[test]
fn advice_that_makes_no_sense_gets_the_kernels_answer() {
    let (mut program, _) = private_program("private");
    assert_eq!(program.tell(&format!("advise {} 1 4096", libc::MADV_HUGEPAGE)), format!("errno {}", libc::EINVAL));
    assert_eq!(program.tell("advise 9999 0 4096"), format!("errno {}", libc::EINVAL));
}

#[test]
fn no_ram_is_mapped_in_a_mode_that_is_unknown() {
    for memory in ["", "Private", "private,mergable"] {
        let mut program = Program::start_in_mode(memory);
        for sharing in ["shared", "private"] {
            assert_eq!(
                program.tell(&format!("try-map {sharing} 0 0")),
                format!("errno {}", libc::EINVAL),
                "'{memory}'"
            );
        }
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.id())).expect("it runs");
        assert!(!maps.contains(program.ram.to_str().expect("a name")), "{maps}");
    }
}

#[test]
fn where_anonymous_memory_is_refused_the_file_is_not_mapped_either() {
    let mut program = Program::start_in_mode("private");
    assert_eq!(program.tell("refuse-anonymous"), "0");
    assert_eq!(program.tell("try-map shared 0 0"), format!("errno {}", libc::ENOMEM));
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.id())).expect("it runs");
    assert!(!maps.contains(program.ram.to_str().expect("a name")), "{maps}");
}

#[test]
fn huge_pages_are_refused_in_private_mode() {
    let told = |memory| Program::start_in_mode(memory).tell("try-map-huge");
    let shared = told("shared");
    if shared != "0" {
        return eprintln!("skipped: no file of huge pages can be mapped: {shared}");
    }
    assert_eq!(told("private"), format!("errno {}", libc::EINVAL));
    assert_eq!(told("private,mergeable"), format!("errno {}", libc::EINVAL));
}

#[test]
fn a_childs_environment_has_nothing_of_the_mode() {
    assert_eq!(Program::start_in_mode("private").tell("environment"), "");
}

#[test]
fn a_qemu_with_private_ram_asks_for_merging_in_vain_and_its_discards_are_logged() {
    with_each_qemu(|start| {
        let mut qemu = start.memory("private").ram(64).with("-M pc -m 64M,slots=4,maxmem=1G").go();
        let mut agent = qemu.agent();
        let ram = qemu.dir.path().join("ram");
        let block = agent.blocks().expect("blocks").remove(0);
        assert_eq!((block.device, block.inode), identity(&ram));
        assert_eq!(block.sharing, Sharing::Private);
        assert!(is_anonymous(qemu.pid, &block));
        let flags = kernel_flags(qemu.pid, &block);
        assert!(!flags.iter().any(|flag| flag == "mg" || flag == "hg"), "{flags:?}");
        assert!(flags.iter().any(|flag| flag == "dc"), "the rest of its advice is taken: {flags:?}");

        let mut log = agent.discard_log().expect("the log");
        let bytes = 128 << 20;
        let more = qemu.plug_memory(bytes);
        let (device, inode) = identity(&more);
        let Discards::Ranges(ranges) = log.drain() else { panic!("the log is complete") };
        let whole = Discard { device, inode, offset: 0, length: bytes };
        assert_eq!(ranges.iter().filter(|range| **range == whole).count(), 2, "punched, then dropped: {ranges:?}");
        let blocks = agent.blocks().expect("blocks");
        let added = blocks.iter().find(|block| (block.device, block.inode) == (device, inode)).expect("it is mapped");
        assert!(added.sharing == Sharing::Private && is_anonymous(qemu.pid, added));
        assert_eq!([&ram, &more].map(|file| std::fs::metadata(file).expect("it is there").blocks()), [0, 0]);
    });
}
