use std::ops::Range;

use sterna_introspect::PAGE_BYTES;

use super::commands::ask_monitor;
use crate::vmm::qmp::Qmp;
use crate::vmm::{MappedRam, VmmError};

/// No command for programs tells this; the monitor for people prints what QEMU translates addresses by.
const COMMAND: &str = "info mtree -f";

/// The address space of the processors and of what they see: its views of others, such as that of a processor in system
/// management mode, differ around the firmware.
const ADDRESS_SPACE: &str = "AS \"memory\",";

/// How old machine types call a block of RAM: by where its back end is in the object tree.
const OBJECTS: &str = "/objects/";

/// Asks QEMU where the guest sees RAM. Firmware moves it around below 1 MiB while it starts, hotplug adds to it.
pub(super) fn memory_map(qmp: &mut Qmp) -> Result<Vec<MappedRam>, VmmError> {
    let refused = |reason: &str| VmmError::Refused { command: COMMAND.to_owned(), reason: reason.to_owned() };
    parse(&ask_monitor(qmp, COMMAND)?).map_err(refused)
}

/// Reads a text as this, and takes out the lines of kind `ram`:
/// ```text
/// FlatView #2
///  AS "memory", root: system
///  AS "cpu-memory-0", root: system
///  Root memory region: system
///   0000000000000000-000000000009ffff (prio 0, ram): ram
///   00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
///   00000000000c0000-00000000000cafff (prio 0, rom): ram @00000000000c0000
///   0000000100000000-00000001bfffffff (prio 0, ram): ram @0000000080000000 KVM
/// ```
/// A block's name follows, the offset in it where that is not 0, and the name of an accelerator that knows of it. What
/// the guest can only read (`rom`) is left out: nothing there is anybody's to use.
fn parse(text: &str) -> Result<Vec<MappedRam>, &'static str> {
    let mut ranges: Vec<MappedRam> = Vec::new();
    for line in view(text).ok_or("it shows no view of the guest's memory")? {
        let Some(found) = ram(line) else { continue };
        let found = found.ok_or("a line of RAM does not make sense")?;
        if ranges.last().is_some_and(|last| found.guest_physical.start < last.guest_physical.end) {
            return Err("its lines are out of order");
        }
        // Less than a page, between two devices: no page frame of the guest's.
        ranges.extend(whole_pages(found));
    }
    if ranges.is_empty() { Err("it shows no RAM") } else { Ok(ranges) }
}

/// The lines of the view that the processors have: views that are the same are printed once, with the names of all.
fn view(text: &str) -> Option<impl Iterator<Item = &str>> {
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| line.starts_with(ADDRESS_SPACE))?;
    Some(lines.take_while(|line| !line.is_empty() && !line.starts_with("FlatView")))
}

/// A line of kind `ram`; `None` for other lines, and in it where its numbers are none.
fn ram(line: &str) -> Option<Option<MappedRam>> {
    let (addresses, rest) = line.split_once(" (prio ")?;
    let (kind, rest) = rest.split_once("): ")?;
    if kind.split_once(", ")?.1 != "ram" {
        return None;
    }
    let mut words = rest.split_whitespace();
    let name = words.next()?;
    let offset = words.next().and_then(|word| word.strip_prefix('@'));
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let read = || {
        let (first, last) = addresses.split_once('-')?;
        let (start, end) = (number(first)?, number(last)?.checked_add(1)?);
        let offset = offset.map_or(Some(0), number)?;
        offset.checked_add(end.checked_sub(start)?)?;
        let block = name.strip_prefix(OBJECTS).unwrap_or(name).to_owned();
        (start < end).then_some(MappedRam { guest_physical: start..end, block, offset })
    };
    Some(read())
}

/// The whole pages of a range: whole to the guest and in their block.
fn whole_pages(found: MappedRam) -> Option<MappedRam> {
    let Range { start, end } = found.guest_physical;
    let (first, last) = (start.checked_next_multiple_of(PAGE_BYTES)?, end / PAGE_BYTES * PAGE_BYTES);
    let offset = found.offset.checked_add(first - start)?;
    let whole = first < last && offset % PAGE_BYTES == 0;
    whole.then_some(MappedRam { guest_physical: first..last, offset, ..found })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(text: &str, name: &str) -> Vec<(Range<u64>, u64)> {
        let ranges = parse(text).unwrap().into_iter().filter(|range| range.block == name);
        ranges.map(|range| (range.guest_physical, range.offset)).collect()
    }

    #[test]
    fn the_views_that_qemu_7_2_prints_are_read() {
        let started = include_str!("recorded/mtree-7.2-q35-1G.txt");
        assert_eq!(
            block(started, "ram"),
            [
                (0..0xa_0000, 0),
                (0xc_b000..0xc_e000, 0xc_b000),
                (0xe_8000..0xf_0000, 0xe_8000),
                (0x10_0000..1 << 30, 0x10_0000)
            ]
        );
        assert_eq!(block(started, "vga.vram"), [(0xfd00_0000..0xfe00_0000, 0)]);
        let halted = include_str!("recorded/mtree-7.2-pc-5G.txt");
        assert_eq!(
            block(halted, "ram"),
            [(0..0xa_0000, 0), (0x10_0000..0xc000_0000, 0x10_0000), (1 << 32..6 << 30, 3 << 30)]
        );
    }

    #[test]
    fn the_views_that_qemu_10_0_prints_are_read() {
        let started = include_str!("recorded/mtree-10.0-q35-5G.txt");
        let ranges = block(started, "ram");
        assert_eq!(ranges.last(), Some(&(1 << 32..7 << 30, 2 << 30)));
        assert_eq!(ranges[ranges.len() - 2], (0x10_0000..2 << 30, 0x10_0000));
        let microvm = include_str!("recorded/mtree-10.0-microvm-5G.txt");
        assert_eq!(
            block(microvm, "ram"),
            [(0..0xe_0000, 0), (0x10_0000..0xc000_0000, 0x10_0000), (1 << 32..6 << 30, 3 << 30)]
        );
    }

    #[test]
    fn names_and_words_that_differ_between_machines_make_no_difference() {
        let view = |line: &str| {
            format!("FlatView #0\r\n AS \"memory\", root: system\r\n  {line}\r\n\r\nFlatView #1\r\n  x\r\n")
        };
        let expected = [(0..0x20_0000, 0x1000)];
        for line in [
            "0000000000000000-00000000001fffff (prio 0, ram): ram @0000000000001000 KVM",
            "0000000000000000-00000000001fffff (prio -1, ram): /objects/ram @0000000000001000",
        ] {
            assert_eq!(block(&view(line), "ram"), expected);
        }
        let whole = view("0000000000000000-00000000001fffff (prio 0, ram): ram KVM");
        assert_eq!(block(&whole, "ram"), [(0..0x20_0000, 0)]);
        // Parts of pages belong to nobody.
        let parts = view("0000000000000800-00000000000027ff (prio 0, ram): ram @0000000000000800");
        assert_eq!(block(&parts, "ram"), [(0x1000..0x2000, 0x1000)]);
        let shifted = view("0000000000000000-0000000000001fff (prio 0, ram): ram @0000000000000800");
        assert_eq!(parse(&shifted), Err("it shows no RAM"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let view = |lines: &str| format!("FlatView #0\n AS \"memory\", root: system\n{lines}\n");
        for text in [
            String::new(),
            "FlatView #0\n AS \"I/O\", root: io\n  0-fff (prio 0, ram): ram\n".to_owned(),
            view("  No rendered FlatView"),
            view("  0-fff (prio 0, rom): ram"),
            view("  2000-fff (prio 0, ram): ram"),
            view("  0-ffffffffffffffff (prio 0, ram): ram"),
            view("  0-fff (prio 0, ram): ram @ffffffffffffffff"),
            view("  x-fff (prio 0, ram): ram"),
            view("  0-1fff (prio 0, ram): ram\n  1000-2fff (prio 0, ram): ram @1000"),
        ] {
            assert!(parse(&text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_to_ranges_in_order_or_refused(
            lines in proptest::collection::vec("[ 0-9a-f]{0,17}-[0-9a-f]{0,17}[ (]{1,2}(prio )?[0-9]?(, )?(ram|rom|i/o)?[)]?:? ?[a-z/ @0-9]{0,20}", 0..12)
        ) {
            let text = format!(" AS \"memory\", root: system\n{}", lines.join("\n"));
            if let Ok(ranges) = parse(&text) {
                prop_assert!(ranges.is_sorted_by(|one, next| one.guest_physical.end <= next.guest_physical.start));
                for range in ranges {
                    let Range { start, end } = range.guest_physical;
                    prop_assert!(start < end && (start | end | range.offset) % 4096 == 0);
                    prop_assert!(range.offset.checked_add(end - start).is_some());
                }
            }
        }
    }
}
