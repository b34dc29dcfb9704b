//! Free pages of real kernels, seen from outside: as many as the guest counts itself. Needs QEMU, the guest image, and
//! a newer kernel; says what it skips.

#[path = "support/linux.rs"]
mod linux;
#[path = "support/machine.rs"]
mod machine;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use linux::{Guest, Kernel, Plan};
use machine::{Config, Disk, LONG, Machine, binaries};
use sterna_engine::memory::BlockFile;
use sterna_engine::memory::physical::GuestPhysical;
use sterna_engine::memory::shared::SharedMemory;
use sterna_engine::vmm::Source;
use sterna_introspect::{Agreement, Introspection, Look, PAGE_BYTES, Physical, Unfit};
use sterna_protocol::spec::BlockSpec;
use sterna_sys::map::Access;

/// One guest at a time: a guest under TCG keeps a processor busy.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages that a guest may use or free between its own look and ours: it starts a process each second, and little else.
const BETWEEN: u64 = 4096;

/// A look at a guest that is stopped. What each processor has not added to the counter yet, and a stop in the middle of
/// freeing a page, take another try.
#[track_caller]
fn exact(guest: &mut Guest, found: &Introspection) -> Look {
    for _ in 0..200 {
        guest.stop();
        let look = found.look(&guest.memory(), &guest.processors()).expect("a look");
        let counter: i64 = look.zones.iter().map(|zone| zone.nr_free_pages).sum();
        if look.agreement == Agreement::Exact && counter.cast_unsigned() == look.free_pages {
            assert_eq!(look.counted_pages(), look.free_pages);
            assert_eq!(look.left_out_pages, 0);
            return look;
        }
        println!("{:?}, {} found, the counter is {counter}: once more", look.agreement, look.free_pages);
        guest.go_on();
        std::thread::sleep(Duration::from_millis(300));
    }
    panic!("the guest never stands with counters that are right");
}

/// A guest as planned, looked at while it runs and while it stands. `None` where it cannot be had here.
#[track_caller]
fn looked_at(plan: &Plan) -> Option<(Guest, Introspection, Look)> {
    let mut guest = Guest::boot(plan)?;
    let memory = guest.memory();
    let found = Introspection::find(&memory, &guest.processors()).expect("a kernel");
    let running = found.look(&memory, &guest.processors()).expect("a look at a guest that runs");
    let look = exact(&mut guest, &found);
    let said = guest.free_pages_it_says();
    println!(
        "{}: {} free in {} runs, it says {said}, running {:?}",
        found.release(),
        look.free_pages,
        look.free.len(),
        running.agreement
    );
    assert!(look.free_pages.abs_diff(said) <= BETWEEN, "{} and {said}", look.free_pages);
    assert!(running.free_pages.abs_diff(said) <= BETWEEN, "{} and {said}", running.free_pages);
    // The kernel itself is not free, and every free page is RAM that can be moved.
    for run in &look.free {
        let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
        let located: u64 = memory.locate(bytes.clone()).map(|(_, range)| range.end - range.start).sum();
        assert_eq!(located, bytes.end - bytes.start);
    }
    Some((guest, found, look))
}

#[test]
fn a_guest_of_five_levels_is_seen_and_left_alone_where_its_free_pages_are_poisoned() {
    let _turn = turn();
    let plan =
        Plan { kernel: Kernel::Image, qemu_10: false, machine: "q35", memory_mib: 1024, cpu: "max,la57=on", words: "" };
    let Some((mut guest, found, look)) = looked_at(&plan) else { return };
    assert!(guest.processors().iter().all(|tables| tables.five_levels));
    // As a kernel that poisons would have left them.
    for run in &look.free {
        guest.fill(run.start * PAGE_BYTES..run.end * PAGE_BYTES, 0xaa);
    }
    assert_eq!(found.look(&guest.memory(), &guest.processors()), Err(Unfit::Poisons));
}

#[test]
fn the_newest_kernel_with_ram_above_the_hole_is_seen() {
    let _turn = turn();
    let plan =
        Plan { kernel: Kernel::New, qemu_10: true, machine: "q35", memory_mib: 5120, cpu: "max,la57=off", words: "" };
    let Some((mut guest, _, look)) = looked_at(&plan) else { return };
    assert!(guest.processors().iter().all(|tables| !tables.five_levels));
    let above: u64 = look.free.iter().filter(|run| run.start >= 1 << 20).map(|run| run.end - run.start).sum();
    assert!(above > 700_000, "most of what is above 4 GiB is free: {above}");
}

#[test]
fn the_newest_kernel_with_five_levels_in_little_ram_is_seen() {
    let _turn = turn();
    // QEMU 7.2's TCG lets every other boot of this kernel with five levels panic.
    let plan =
        Plan { kernel: Kernel::New, qemu_10: true, machine: "pc", memory_mib: 384, cpu: "max,la57=on", words: "" };
    looked_at(&plan);
}

#[test]
fn a_guest_that_starts_again_is_not_taken_for_the_one_before() {
    let _turn = turn();
    // Debian's kernel is built without what these two words ask for: it poisons nothing, and is seen as it is.
    let words = "page_poison=1 debug_pagealloc=on";
    let plan =
        Plan { kernel: Kernel::Image, qemu_10: true, machine: "pc", memory_mib: 4096, cpu: "max,la57=off", words };
    let Some((mut guest, found, _)) = looked_at(&plan) else { return };
    guest.reset();
    let memory = guest.memory();
    let not_running = Unfit::NotRunning { release: found.release().to_owned() };
    // Its RAM still holds all of the earlier kernel.
    assert_eq!(found.look(&memory, &guest.processors()), Err(not_running.clone()));
    assert_eq!(Introspection::find(&memory, &guest.processors()), Err(not_running));
    guest.go_on();
    guest.wait_up(2);
    let again = Introspection::find(&guest.memory(), &guest.processors()).expect("a kernel");
    let error = found.look(&guest.memory(), &guest.processors());
    assert!(again == found || error.is_err(), "the earlier kernel lay elsewhere and does not run: {error:?}");
    exact(&mut guest, &again);
}

#[test]
fn a_guest_that_allocates_and_frees_all_the_time_is_seen() {
    let _turn = turn();
    // 128 MiB of files and 64 MiB of a process, ten times a second, and compilers.
    let words = "sterna.run=watch:-t,-n,0.1,dd,if=/dev/zero,of=/tmp/x,bs=64M,count=2;builder";
    let plan =
        Plan { kernel: Kernel::Image, qemu_10: false, machine: "q35", memory_mib: 1024, cpu: "max,la57=off", words };
    let Some(mut guest) = Guest::boot(&plan) else { return };
    let memory = guest.memory();
    let found = Introspection::find(&memory, &guest.processors()).expect("a kernel");
    let (mut looks, mut moved) = (0, 0);
    let deadline = Instant::now() + LONG;
    // A look is so short that few see it change anything.
    while looks < 100 || moved == 0 {
        assert!(Instant::now() < deadline, "the guest does nothing");
        let look = found.look(&memory, &guest.processors()).expect("a look at a guest that works");
        looks += 1;
        moved += u32::from(look.agreement != Agreement::Exact);
        assert!(look.free.iter().all(|run| run.end * PAGE_BYTES <= memory.ranges().last().expect("RAM").end));
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{moved} of {looks} looks saw the guest at work");
    exact(&mut guest, &found);
}

#[test]
fn a_guest_that_is_no_linux_is_told_as_such() {
    for binary in binaries() {
        let disk = Disk::new();
        let machine = Machine::source(&binary, &Config::new("q35"), &disk);
        let mut source = machine.as_source();
        let map = source.memory_map().expect("a map");
        let spec = BlockSpec { id: "ram".into(), bytes: machine::RAM_BYTES, page_bytes: 4096, path: String::new() };
        let block = BlockFile { spec, file: machine.ram(), address: 0, process: None };
        let ram = SharedMemory::open(&[block], Access::Read).expect("a mapping");
        let memory = GuestPhysical::new(&map, Arc::new(ram)).expect("RAM");
        assert_eq!(memory.ranges().last().map(|range| range.end), Some(machine::RAM_BYTES));
        let processors = source.page_tables().expect("registers");
        // A boot sector.
        assert_eq!(processors, []);
        assert_eq!(Introspection::find(&memory, &processors), Err(Unfit::NoKernel));
    }
}

#[test]
fn where_a_guest_sees_its_ram_is_told_for_every_machine() {
    for binary in binaries() {
        for (machine, low_end) in [("q35", 0x8000_0000), ("pc", 0xc000_0000_u64), ("microvm", 0xc000_0000)] {
            let plan = Plan { kernel: Kernel::None, qemu_10: false, machine, memory_mib: 5120, cpu: "max", words: "" };
            let Some(mut guest) = Guest::start(&plan, &binary, LONG) else { continue };
            let ranges = guest.memory().ranges().to_vec();
            assert_eq!(ranges.first().map(|range| range.start), Some(0), "{ranges:x?}");
            let high_end = (4 << 30) + (5120 << 20) - low_end;
            assert_eq!(
                ranges[ranges.len() - 2..].iter().map(|range| range.end).collect::<Vec<_>>(),
                [low_end, high_end]
            );
            assert_eq!(ranges.last().map(|range| range.start), Some(4 << 30));
        }
    }
}
