//! A guest's RAM: a small kernel, with lines of its description replaced and words of its structures overwritten.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sterna_introspect::toy::Toy;
use sterna_introspect::{Introspection, PageTables, Physical};

/// Frames of the toy's RAM.
const FRAMES: u64 = 72 << 8;

/// Lines replaced (which one, by what), words written (where among structures and memory map, what), page tables of a
/// processor.
type Given = (Vec<(u8, String)>, Vec<(u32, u64)>, Option<(u64, bool)>);

static TOY: LazyLock<Toy> = LazyLock::new(|| {
    let mut toy = Toy::default();
    for order in 0..11 {
        toy.free(0x1800 + (order << 10), order);
    }
    toy
});

fuzz_target!(|given: Given| {
    let (lines, words, processor) = given;
    let mut toy = TOY.clone();
    let keys: Vec<String> = toy.lines.keys().cloned().collect();
    for (which, value) in lines {
        toy.lines.insert(keys[usize::from(which) % keys.len()].clone(), value);
    }
    toy.write_note();
    let asked: Vec<(u32, u16)> = words.iter().map(|&(at, word)| (at % (FRAMES as u32 + 1024), word as u16)).collect();
    for &(at, word) in &words {
        toy.ram.write_word((16 << 20) + u64::from(at) % (5 << 20), word);
    }
    let mut processors = toy.processors().to_vec();
    processors.extend(processor.map(|(root, five_levels)| PageTables { root, five_levels }));
    let Ok(found) = Introspection::find(&toy.ram, &processors) else { return };
    // Whatever is asked for.
    let wanted: Vec<_> =
        asked.into_iter().map(|(from, pages)| u64::from(from)..u64::from(from) + u64::from(pages)).collect();
    if let Ok(free) = found.look_around(&toy.ram, &wanted) {
        assert!(free.is_sorted_by(|one, next| one.end < next.start));
        assert!(free.iter().all(|run| run.start < run.end && run.end <= FRAMES));
    }
    if let Ok(cache) = found.page_cache(&toy.ram, &processors) {
        assert!(cache.clean.is_sorted_by(|one, next| one.end < next.start));
        assert!(cache.clean.iter().all(|run| run.start < run.end && run.end <= FRAMES));
    }
    let _ = found.counted_pages(&toy.ram, &processors);
    let Ok(look) = found.look(&toy.ram, &processors) else { return };
    assert!(look.free.is_sorted_by(|one, next| one.end < next.start));
    assert!(look.free.iter().all(|run| run.start < run.end && run.end <= FRAMES));
    assert_eq!(look.free.iter().map(|run| run.end - run.start).sum::<u64>(), look.free_pages);
    assert!(toy.ram.ranges().iter().all(|range| range.end == FRAMES * 4096));
});
