//! Areas: parts of private guest RAM that a file stands behind, which several guests have in common until one of them
//! writes (`docs/design/memory.md`).
//!
//! A page of an area that the guest has not written is in no page table, or is there as the file's page: it has content
//! all the same. The kernel's list of mappings is the one truth. Nobody else keeps one, because the agent makes areas
//! smaller as QEMU discards pages. It never makes them larger, and it leaves them alone while a userfaultfd is open: so
//! a list that is older says *area* of pages that are zeros by now, and never the reverse.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use sterna_sys::file::FileId;
use sterna_sys::pagemap::{Categories, Pagemap, Region, Scan};
use sterna_sys::process::{Mapping, each_mapping};

/// A part of a process's memory that a file stands behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// The addresses in the process.
    pub addresses: Range<u64>,
    /// The file.
    pub file: FileId,
    /// The offset in the file at which it begins, bytes.
    pub offset: u64,
}

impl Area {
    /// Where these addresses of it lie in its file.
    pub(super) fn in_file(&self, addresses: Range<u64>) -> Range<u64> {
        let at = |address: u64| self.offset + (address - self.addresses.start);
        at(addresses.start)..at(addresses.end)
    }
}

/// The areas of a process's RAM, by their addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Areas(Vec<Area>);

impl Areas {
    /// The areas of a process among these addresses, as they are now.
    ///
    /// # Errors
    /// No such process, or this one may not trace it.
    pub fn of(pid: u32, among: &[Range<u64>]) -> io::Result<Self> {
        Ok(Self::and_mappings(pid, among)?.0)
    }

    /// The same, and one mapping of each of their files, as the kernel lists it: its file can be had by that. A process
    /// may have tens of thousands, and to read their list takes milliseconds.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn and_mappings(pid: u32, among: &[Range<u64>]) -> io::Result<(Self, HashMap<FileId, Range<u64>>)> {
        let mut among = among.to_vec();
        among.sort_unstable_by_key(|range| range.start);
        let (mut areas, mut mappings) = (Self::default(), HashMap::new());
        each_mapping(pid, |mapping| {
            let before = areas.0.len();
            areas.add(&mapping, &among);
            if let Some(file) = mapping.file.filter(|_| areas.0.len() > before) {
                mappings.entry(file).or_insert(mapping.range);
            }
        })?;
        Ok((areas, mappings))
    }

    /// Adds the parts of a mapping behind the others that lie among these addresses, which are in order.
    fn add(&mut self, mapping: &Mapping, among: &[Range<u64>]) {
        let Some(file) = mapping.file.filter(|_| !mapping.permissions.shared) else { return };
        let first = among.partition_point(|range| range.end <= mapping.range.start);
        for range in among[first..].iter().take_while(|range| range.start < mapping.range.end) {
            let Some(addresses) = common(range, &mapping.range) else { continue };
            let offset = mapping.offset.saturating_add(addresses.start - mapping.range.start);
            match self.0.last_mut() {
                // The kernel lists them apart where advice or a registration was given for a part.
                Some(last)
                    if last.file == file
                        && last.addresses.end == addresses.start
                        && last.offset.saturating_add(last.addresses.end - last.addresses.start) == offset =>
                {
                    last.addresses.end = addresses.end;
                }
                _ => self.0.push(Area { addresses, file, offset }),
            }
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, by their addresses.
    pub fn iter(&self) -> impl Iterator<Item = &Area> {
        self.0.iter()
    }

    /// The parts of these addresses that lie in areas, in order.
    pub fn within(&self, addresses: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.0.partition_point(|area| area.addresses.end <= addresses.start);
        let areas = self.0[first..].iter().map(|area| &area.addresses);
        areas.map_while(move |area| common(area, &addresses))
    }

    /// The parts of these addresses that lie in no area, in order.
    pub fn outside(&self, addresses: Range<u64>) -> Vec<Range<u64>> {
        let within: Vec<_> = self.within(addresses.clone()).collect();
        without(&[addresses], within.into_iter())
    }

    /// Puts an area in the place of whatever was there.
    pub fn put(&mut self, area: Area) {
        self.take_out(&area.addresses);
        let at = self.0.partition_point(|other| other.addresses.end <= area.addresses.start);
        let follows = |one: &Area, next: &Area| {
            one.file == next.file
                && one.addresses.end == next.addresses.start
                && one.offset + (one.addresses.end - one.addresses.start) == next.offset
        };
        match at.checked_sub(1).and_then(|before| self.0.get_mut(before)) {
            Some(before) if follows(before, &area) => before.addresses.end = area.addresses.end,
            _ => self.0.insert(at, area),
        }
    }

    /// Takes these addresses out: no file stands behind them any more.
    pub fn take_out(&mut self, addresses: &Range<u64>) {
        let first = self.0.partition_point(|area| area.addresses.end <= addresses.start);
        let behind = self.0[first..].partition_point(|area| area.addresses.start < addresses.end) + first;
        let left = self.0[first..behind].iter().flat_map(|area| {
            let part = |from: u64, to: u64| {
                let offset = area.offset + (from.max(area.addresses.start) - area.addresses.start);
                (from < to).then_some(Area { addresses: from..to, offset, ..area.clone() })
            };
            [part(area.addresses.start, addresses.start), part(addresses.end, area.addresses.end)].into_iter().flatten()
        });
        let left: Vec<_> = left.collect();
        self.0.splice(first..behind, left);
    }
}

/// The addresses with content among these, in order, in private memory that has these areas: pages of the process's
/// own, and all of the areas but what was given back there, which is mapped to the page of zeros.
///
/// # Errors
/// As [`Pagemap::scan`].
pub fn content(pagemap: &Pagemap, areas: &Areas, addresses: Range<u64>) -> sterna_sys::Result<Vec<Range<u64>>> {
    let mut regions = Vec::new();
    pagemap.with_content(addresses.clone(), &mut regions)?;
    let mut found: Vec<_> = regions.iter().map(Region::range).collect();
    let before = found.len();
    for part in areas.within(addresses) {
        pagemap.scan(part.clone(), Scan::of(Categories::ZERO_PAGE), &mut regions)?;
        found.extend(without(&[part], regions.iter().map(Region::range)));
    }
    if found.len() > before {
        found.sort_unstable_by_key(|range| range.start);
        found.dedup_by(|next, last| {
            let touch = next.start <= last.end;
            last.end = if touch { last.end.max(next.end) } else { last.end };
            touch
        });
    }
    Ok(found)
}

/// How much of a process's private memory a guest has now, or has in common with others, bytes: what it takes where it
/// shares with nobody.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn content_bytes(pid: u32, addresses: Range<u64>) -> io::Result<u64> {
    let pagemap = Pagemap::open(pid)?;
    let areas = Areas::of(pid, std::slice::from_ref(&addresses))?;
    Ok(content(&pagemap, &areas, addresses)?.iter().map(|range| range.end - range.start).sum())
}

/// Ranges without others; all are in order and apart.
pub(crate) fn without(ranges: &[Range<u64>], others: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut others = others.peekable();
    for range in ranges {
        let mut at = range.start;
        while let Some(other) = others.peek().filter(|other| other.start < range.end) {
            if at < other.start {
                left.push(at..other.start);
            }
            at = at.max(other.end);
            if other.end > range.end {
                break;
            }
            others.next();
        }
        if at < range.end {
            left.push(at..range.end);
        }
    }
    left
}

fn common(one: &Range<u64>, other: &Range<u64>) -> Option<Range<u64>> {
    let range = one.start.max(other.start)..one.end.min(other.end);
    (!range.is_empty()).then_some(range)
}

#[cfg(test)]
mod tests {
    use sterna_sys::process::parse_maps;

    use super::*;

    fn listed(text: &[u8], among: &[Range<u64>]) -> Areas {
        let mut areas = Areas::default();
        parse_maps(text).iter().for_each(|mapping| areas.add(mapping, among));
        areas
    }

    fn one(range: Range<u64>) -> [Range<u64>; 1] {
        [range]
    }

    const MAPS: &[u8] = b"1000-3000 rw-p 00000000 00:00 0\n\
        3000-4000 rw-p 00003000 00:1f 77 /template\n\
        4000-6000 rw-p 00004000 00:1f 77 /template (deleted)\n\
        6000-7000 rw-p 00000000 00:00 0 [anon:ram]\n\
        7000-8000 rw-p 00007000 00:1f 77 /template\n\
        8000-9000 rw-p 00001000 00:1f 77 /template\n\
        9000-a000 rw-p 00002000 00:1f 78 /pool\n\
        a000-b000 rw-s 00003000 00:1f 78 /shared\n\
        rubbish\n\
        20000-30000 rw-p 00003000 00:1f 78 /elsewhere\n";

    #[test]
    fn areas_are_private_mappings_of_files_and_what_touches_in_both_is_one() {
        let areas = listed(MAPS, &[0x1000..0x5000, 0x5000..0xb000]);
        let found: Vec<_> = areas.iter().map(|area| (area.addresses.clone(), area.file.inode, area.offset)).collect();
        let expected = [
            (0x3000..0x6000, 77, 0x3000),
            (0x7000..0x8000, 77, 0x7000),
            (0x8000..0x9000, 77, 0x1000),
            (0x9000..0xa000, 78, 0x2000),
        ];
        assert_eq!(found, expected);
        assert!(listed(MAPS, &one(0x1000..0x3000)).is_empty());
        let part = listed(MAPS, &one(0x4000..0x5000));
        assert_eq!(
            part.iter().next().map(|area| (area.addresses.clone(), area.offset)),
            Some((0x4000..0x5000, 0x4000))
        );
    }

    #[test]
    fn addresses_are_in_an_area_or_outside_and_never_both() {
        let areas = listed(MAPS, &one(0..0x10000));
        let within = |range: Range<u64>| areas.within(range).collect::<Vec<_>>();
        assert_eq!(within(0..0x3000), [0; 0].map(|_: u64| 0..0));
        assert_eq!(within(0x5000..0x7800), [0x5000..0x6000, 0x7000..0x7800]);
        assert_eq!(areas.outside(0x5000..0x7800), vec![0x6000..0x7000]);
        assert_eq!(areas.outside(0x3000..0x4000), vec![]);
        assert_eq!(areas.outside(0..0x10000), vec![0..0x3000, 0x6000..0x7000, 0xa000..0x10000]);
    }

    #[test]
    fn what_is_taken_out_is_in_no_area_and_the_rest_keeps_its_place_in_the_file() {
        let mut areas = listed(MAPS, &one(0..0x10000));
        areas.take_out(&(0x4000..0x5000));
        areas.take_out(&(0x7000..0x8800));
        let found: Vec<_> = areas.iter().map(|area| (area.addresses.clone(), area.offset)).collect();
        let expected =
            [(0x3000..0x4000, 0x3000), (0x5000..0x6000, 0x5000), (0x8800..0x9000, 0x1800), (0x9000..0xa000, 0x2000)];
        assert_eq!(found, expected);
        areas.take_out(&(0..u64::MAX));
        assert!(areas.is_empty());
    }

    #[test]
    fn an_area_takes_the_place_of_what_was_there_and_goes_on_with_the_one_before_it() {
        let mut areas = listed(MAPS, &one(0..0x10000));
        let (template, pool) = (areas.0[0].file, areas.0[3].file);
        let area = |addresses, file, offset| Area { addresses, file, offset };
        areas.put(area(0x4000..0x5000, pool, 0));
        areas.put(area(0xa000..0xb000, pool, 0x3000));
        areas.put(area(0x1000..0x2000, pool, 0x9000));
        let expected = [
            area(0x1000..0x2000, pool, 0x9000),
            area(0x3000..0x4000, template, 0x3000),
            area(0x4000..0x5000, pool, 0),
            area(0x5000..0x6000, template, 0x5000),
            area(0x7000..0x8000, template, 0x7000),
            area(0x8000..0x9000, template, 0x1000),
            area(0x9000..0xb000, pool, 0x2000),
        ];
        assert_eq!(areas.0, expected);
        areas.put(area(0..0x10000, pool, 0));
        assert_eq!(areas.0, [area(0..0x10000, pool, 0)]);
    }

    #[test]
    fn one_range_may_end_several_and_several_one() {
        let left = |others: &[Range<u64>]| without(&[0..10, 20..30], others.iter().cloned());
        assert_eq!(left(&[]), [0..10, 20..30]);
        assert_eq!(left(&one(5..25)), [0..5, 25..30]);
        assert_eq!(left(&[0..1, 3..4, 9..10, 29..40]), [1..3, 4..9, 20..29]);
        assert_eq!(left(&one(0..30)), [0; 0].map(|_: u64| 0..0));
    }
}
