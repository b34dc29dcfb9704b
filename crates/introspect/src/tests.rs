//! The whole look, at a kernel made for it; and at memory that is nobody's.

use std::cell::Cell;
use std::ops::Range;
use std::sync::LazyLock;

use proptest::prelude::*;

use crate::toy::{NOTE, Ram, Toy};
use crate::{Agreement, Introspection, Look, PageCache, PageTables, Physical, Unfit, Unreadable};

fn look(toy: &Toy) -> Result<Look, Unfit> {
    Introspection::find(&toy.ram, &toy.processors())?.look(&toy.ram, &toy.processors())
}

fn cached(toy: &Toy) -> Result<PageCache, Unfit> {
    Introspection::find(&toy.ram, &toy.processors())?.page_cache(&toy.ram, &toy.processors())
}

/// A kernel with free blocks of every order.
fn some_free() -> Toy {
    static TOY: LazyLock<Toy> = LazyLock::new(Toy::default);
    let mut toy = TOY.clone();
    for order in 0..11 {
        toy.free(0x1800 + (order << 10), order);
    }
    // Neighbours become one run, the second across a stretch.
    toy.free(0x1801, 0);
    toy.free(0x4400, 10);
    toy
}

#[test]
fn free_blocks_of_every_order_are_found_exactly() {
    let toy = some_free();
    let look = look(&toy).unwrap();
    assert_eq!(look.agreement, Agreement::Exact);
    assert_eq!((look.free_pages, look.counted_pages(), look.left_out_pages), (3072, 3072, 0));
    let mut expected: Vec<Range<u64>> =
        (0..11).map(|order| 0x1800 + (order << 10)..0x1800 + (order << 10) + (1 << order)).collect();
    expected[0].end += 1;
    // The last of them ends where the next begins.
    expected[10].end = 0x4800;
    assert_eq!(look.free, expected);
}

#[test]
fn a_look_around_some_frames_finds_the_blocks_they_lie_in_and_no_others() {
    let toy = some_free();
    let found = Introspection::find(&toy.ram, &toy.processors()).unwrap();
    let all = found.look(&toy.ram, &toy.processors()).unwrap().free;
    let around = |frames: &[Range<u64>]| found.look_around(&toy.ram, frames).unwrap();
    // All RAM, and more than that; in disorder and overlapping.
    let only = |frames: Range<u64>| around(&[frames]);
    assert_eq!(only(0..u64::MAX), all);
    assert_eq!(around(&[0x3000..0x4800, 0..0x3001, 0x1000..0x2000]), all);
    // A frame in the middle of a block of 512: its first page is what tells.
    assert_eq!(only(0x3c77..0x3c78).first(), Some(&(0x3c00..0x3e00)));
    // A frame that is in use, with free ones around it; a stretch without any; nothing.
    assert_eq!(only(0x1805..0x1806).first(), Some(&(0x1800..0x1802)));
    assert_eq!(only(0x400..0x401), []);
    assert_eq!(around(&[]), []);
    assert_eq!(around(&[0x5000..0x6000, 7..7]), []);
    assert_eq!(found.counted_pages(&toy.ram, &toy.processors()), Ok(3072));
    assert!(found.counted_pages(&toy.ram, &[]).is_err());
}

#[test]
fn what_looks_like_a_block_and_cannot_be_one_is_not_named() {
    let mut toy = some_free();
    let before = look(&toy).unwrap();
    let buddy = 0xf000_0000;
    // Not aligned to its size, too big, in use, beyond the end of RAM, an order of 64 bits.
    for (frame, refcount, private) in
        [(0x101, 0, 1), (0x400, 0, 11), (0x500, 1, 0), (0x47f8, 0, 4), (0x600, 0, 1 << 32)]
    {
        toy.set_page(frame, buddy, refcount, private);
    }
    assert_eq!(look(&toy).unwrap().free, before.free);
}

#[test]
fn a_kernel_that_counts_otherwise_is_not_believed() {
    let mut toy = some_free();
    for block in 0..6 {
        // Marked as free, and not counted.
        toy.set_page(0x400 * block, 0xf000_0000, 0, 10);
    }
    let error = look(&toy).unwrap_err();
    assert!(matches!(error, Unfit::CountersDisagree { found_pages: 9216, counted_pages: 3072, .. }), "{error}");
    assert!(error.may_pass());
}

#[test]
fn a_kernel_that_relies_on_what_free_pages_hold_is_left_alone() {
    let mut toy = some_free();
    let free = look(&toy).unwrap().free;
    for run in free.clone() {
        toy.ram.write(run.start * 4096, &vec![0xaa; ((run.end - run.start) * 4096) as usize]);
    }
    assert_eq!(look(&toy), Err(Unfit::Poisons));
    // Some of it used meanwhile changes nothing, most of it would.
    toy.ram.write(0x1800 << 12, &[1; 8192]);
    assert_eq!(look(&toy), Err(Unfit::Poisons));

    let mut toy = some_free();
    toy.hide(&free.into_iter().flatten().collect::<Vec<_>>());
    assert_eq!(look(&toy), Err(Unfit::Hides));
    let mut toy = some_free();
    toy.hide(&[]);
    assert!(look(&toy).is_ok());
}

#[test]
fn a_kernel_that_no_longer_runs_is_not_believed() {
    let toy = some_free();
    let found = Introspection::find(&toy.ram, &toy.processors()).unwrap();
    let not_running = Unfit::NotRunning { release: "6.18.0-toy".into() };
    let [running] = toy.processors();
    let other = PageTables { root: 0x5000, five_levels: false };
    // A firmware, another kernel, another kernel with the first one's processors at rest, the wrong depth.
    for processors in [vec![], vec![other], vec![other, running], vec![PageTables { five_levels: true, ..running }]] {
        assert_eq!(found.look(&toy.ram, &processors), Err(not_running.clone()), "{processors:?}");
        assert_eq!(Introspection::find(&toy.ram, &processors), Err(not_running.clone()));
    }
    // A processor that runs a program, with page tables for that.
    let isolated = PageTables { root: running.root | 0x1fff & !0x1000, ..running };
    assert!(found.look(&toy.ram, &[running, isolated]).is_ok());
    // The same place, another kernel.
    let mut later = toy.clone();
    later.ram.write((16 << 20) + 0x8000 + 130, b"6.19");
    assert_eq!(found.look(&later.ram, &toy.processors()), Err(not_running));
    let mut gone = toy.clone();
    gone.ram.write(NOTE, &[0; 64]);
    assert_eq!(found.look(&gone.ram, &toy.processors()), Err(Unfit::Replaced { release: "6.18.0-toy".into() }));
    assert_eq!(Introspection::find(&gone.ram, &toy.processors()), Err(Unfit::NoKernel));
}

#[test]
fn each_line_that_is_missing_or_absurd_is_told_or_does_without() {
    let optional = ["OSRELEASE", "OFFSET(uts_namespace.name)", "NUMBER(SECTION_SIZE_BITS)"];
    let of_the_cache = [
        "OFFSET(page.flags)",
        "OFFSET(page.compound_head)",
        "OFFSET(page.mapping)",
        "NUMBER(PG_lru)",
        "NUMBER(PG_swapbacked)",
    ];
    for key in Toy::default().lines.into_keys() {
        if !optional.contains(&key.as_str()) {
            let mut toy = Toy::default();
            toy.lines.remove(&key);
            toy.write_note();
            let error = if of_the_cache.contains(&key.as_str()) {
                assert!(look(&toy).is_ok(), "{key}");
                cached(&toy).unwrap_err()
            } else {
                look(&toy).unwrap_err()
            };
            assert!(matches!(error, Unfit::Missing { .. } | Unfit::Malformed { .. }), "{key}: {error}");
        }
        for value in ["", "-1", "0", "1", "3", "4294967295", "ffffffffffffffff", "18446744073709551615", "\u{7f}"] {
            let mut toy = some_free();
            toy.lines.insert(key.clone(), value.to_owned());
            toy.write_note();
            // Never more than the kernel itself could call free.
            if let Ok(look) = look(&toy) {
                assert!(look.free_pages <= 3072, "{key}={value}");
            }
        }
    }
    let mut toy = Toy::default();
    toy.lines.insert("NUMBER(sme_mask)".into(), "2048".into());
    toy.write_note();
    assert_eq!(look(&toy), Err(Unfit::Encrypted));
}

#[test]
fn sections_without_a_map_or_not_in_use_have_no_free_pages() {
    for (flags, counted) in [(0xf, true), (0x7, true), (0x3, false), (0x5, false), (0, false)] {
        let mut toy = some_free();
        toy.set_section(flags);
        // Too far from what is counted: an error either way.
        assert_eq!(look(&toy).is_ok(), counted, "{flags:#x}");
    }
}

/// RAM whose owner changes a page between two reads of it.
struct Changing<'a> {
    toy: &'a Toy,
    page: u64,
    /// What each read of the page yields in turn: mark, order. The last one stays.
    reads: &'a [(u32, u64)],
    next: Cell<usize>,
}

impl Physical for Changing<'_> {
    fn ranges(&self) -> &[Range<u64>] {
        self.toy.ram.ranges()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.toy.ram.read(address, into)?;
        let at = (18 << 20) + self.page * 64;
        if (address..address + into.len() as u64).contains(&at) && address >= 18 << 20 {
            let (mark, order) = self.reads[self.next.get().min(self.reads.len() - 1)];
            self.next.set(self.next.get() + 1);
            let page = &mut into[(at - address) as usize..][..64];
            page[40..48].copy_from_slice(&order.to_le_bytes());
            page[48..52].copy_from_slice(&mark.to_le_bytes());
            page[52..56].copy_from_slice(&u32::from(mark != 0xf000_0000).to_le_bytes());
        }
        Ok(())
    }
}

#[test]
fn a_block_whose_mark_or_order_changes_under_the_look_is_not_named() {
    let toy = some_free();
    let free = 0xf000_0000;
    let named = |reads: &[(u32, u64)]| {
        let changing = Changing { toy: &toy, page: 0x400, reads, next: Cell::new(0) };
        let found = Introspection::find(&toy.ram, &toy.processors()).unwrap();
        let look = found.look(&changing, &toy.processors()).unwrap();
        look.free.iter().find(|run| run.contains(&0x400)).cloned()
    };
    assert_eq!(named(&[(free, 3)]), Some(0x400..0x408));
    for reads in [
        // Allocated after the first copy; in the midst of it; freed after it; a bigger block now; a smaller one.
        &[(free, 3), (u32::MAX, 0)][..],
        &[(free, 0xffff_8880_0000_0000), (free, 3)],
        &[(u32::MAX, 3), (free, 3)],
        &[(free, 3), (free, 4)],
        &[(free, 9), (free, 0)],
    ] {
        assert_eq!(named(reads), None, "{reads:x?}");
    }
}

#[test]
fn a_kernel_beside_the_descriptions_of_others_is_found() {
    let mut toy = some_free();
    // One that makes no sense, one that runs no more: its name is not where it says.
    toy.ram.write(0x3000, b"OSRELEASE=1\n");
    let mut stale = Toy::default();
    stale.lines.insert("OSRELEASE".into(), "5.4.0-stale".into());
    stale.write_note();
    let mut text = vec![0; 4096];
    stale.ram.read(NOTE, &mut text).unwrap();
    toy.ram.write(0x10_0000, &text);
    let found = Introspection::find(&toy.ram, &toy.processors()).unwrap();
    assert_eq!(found.release(), "6.18.0-toy");
    toy.ram.write(NOTE, &[0; 64]);
    let error = Introspection::find(&toy.ram, &toy.processors()).unwrap_err();
    assert_eq!(error, Unfit::NotRunning { release: "5.4.0-stale".into() });
}

#[test]
fn descriptions_without_end_are_not_all_tried() {
    let mut ram = Ram::new(4 << 20);
    for page in 0..1024 {
        ram.write(page << 12, b"OSRELEASE=1\n");
    }
    assert!(matches!(Introspection::find(&ram, &[]), Err(Unfit::Malformed { .. })));
}

#[test]
fn clean_pages_of_files_are_told_from_all_others() {
    const UP_TO_DATE: u64 = 1 << 3;
    const DIRTY: u64 = 1 << 4;
    const LRU: u64 = 1 << 5;
    const SWAP_BACKED: u64 = 1 << 19;
    const OTHER: u64 = 1 << 40 | 1;
    let clean = LRU | UP_TO_DATE;
    let file = 0xffff_8880_0123_4560;
    let mut toy = some_free();
    for (frame, flags, mapping, compound) in [
        (0x2000, clean, file, 0),
        (0x2001, clean | OTHER, file, 0xdead_beee),
        // Not one: dirty; still being read; of a tmpfs; a program's own; movable; nobody's; not in a list.
        (0x2002, clean | DIRTY, file, 0),
        (0x2003, LRU, file, 0),
        (0x2004, clean | SWAP_BACKED, file, 0),
        (0x2005, clean, file | 1, 0),
        (0x2006, clean, file | 2, 0),
        (0x2007, clean, 0, 0),
        (0x2008, UP_TO_DATE, file, 0),
        // A folio of four across a stretch, and one that is dirty.
        (0x23fe, clean, file, 0),
        (0x23ff, 0, 0, Toy::structure_of(0x23fe) | 1),
        (0x2400, 0, 0, Toy::structure_of(0x23fe) | 1),
        (0x2401, 0, 0, Toy::structure_of(0x23fe) | 1),
        (0x2402, clean | DIRTY, file, 0),
        (0x2403, 0, 0, Toy::structure_of(0x2402) | 1),
        // What follows no folio's first page.
        (0x2405, 0, 0, Toy::structure_of(0x23fe) | 1),
    ] {
        toy.set_use(frame, flags, mapping, compound);
    }
    let cache = cached(&toy).unwrap();
    assert_eq!(cache.clean, [0x2000..0x2002, 0x23fe..0x2402]);
    assert_eq!((cache.pages, cache.left_out_pages), (6, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Words of the kernel's own structures and of its description, overwritten at random.
    #[test]
    fn whatever_a_guest_writes_a_look_ends_and_names_only_ram(
        words in proptest::collection::vec((0_u64..0x60_0000, any::<u64>()), 0..64),
        structures in proptest::collection::vec((0_u64..0x1a00, 0_usize..12), 0..16),
        letters in proptest::collection::vec((0_u64..1200, b' '..=b'~'), 0..8),
    ) {
        let mut toy = some_free();
        for (at, word) in words {
            toy.ram.write_word((16 << 20) + at, word);
        }
        let likely = [
            0, 1, 0x63, u64::MAX, 0xe3, 0x100_1063, 0xffff_8880_0100_0000, 0xffff_ffff_8100_0000,
            1 << 63, 0xf, 0xfff, 0x7ff_f063,
        ];
        for (at, which) in structures {
            toy.ram.write_word((16 << 20) + 8 * at, likely[which]);
        }
        for (at, letter) in letters {
            toy.ram.write(NOTE + 11 + at, &[letter]);
        }
        if let Ok(found) = Introspection::find(&toy.ram, &toy.processors())
            && let Ok(free) = found.look_around(&toy.ram, &[0x17ff..0x2801, 0x47f0..0x4801])
        {
            prop_assert!(free.is_sorted_by(|one, next| one.end < next.start));
            prop_assert!(free.iter().all(|run| run.start < run.end && run.end <= 0x4800));
        }
        if let Ok(cache) = cached(&toy) {
            prop_assert!(cache.clean.is_sorted_by(|one, next| one.end < next.start));
            prop_assert!(cache.clean.iter().all(|run| run.start < run.end && run.end <= 0x4800));
        }
        if let Ok(look) = look(&toy) {
            prop_assert!(look.free.is_sorted_by(|one, next| one.end < next.start));
            prop_assert!(look.free.iter().all(|run| run.start < run.end && run.end <= 0x4800));
            prop_assert_eq!(look.free.iter().map(|run| run.end - run.start).sum::<u64>(), look.free_pages);
        }
    }
}
