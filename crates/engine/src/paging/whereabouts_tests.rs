use sterna_protocol::spec::BlockSpec;

use super::*;

fn layout(bytes: u64) -> Layout {
    Layout::new(&[BlockSpec { id: "ram".into(), bytes, page_bytes: 4096, path: String::new() }]).unwrap()
}

fn some_pages(layout: &Layout) -> PageMap {
    let mut pages = PageMap::empty(layout);
    pages.insert_all(ChunkIndex(2), &PageSet::first(10));
    pages.insert_all(ChunkIndex(7), &PageSet::first(256));
    pages
}

/// The file as version 1 wrote it.
fn version_1(layout: &Layout, pages: &PageMap) -> File {
    let file = tempfile::tempfile().unwrap();
    let mut bytes = b"STPAGES1".to_vec();
    bytes.extend(layout.chunks().to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    layout.iter().for_each(|chunk| bytes.extend(pages.chunk(chunk).to_bytes()));
    file.write_all_at(&bytes, 0).unwrap();
    file
}

#[test]
fn another_daemon_finds_what_the_last_one_left() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    assert!(Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().is_none());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    known.begin(some_pages(&layout), &layout).unwrap();
    known.arrived(ChunkIndex(2), &PageSet::first(4)).unwrap();
    known.arrived(ChunkIndex(2), &PageSet::first(5)).unwrap();
    assert_eq!(known.away(), 5 + 256);
    let mut found = Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().unwrap();
    assert_eq!((found.pages_away(), found.away()), (known.pages_away(), 261));
    assert!(!found.is_away(ChunkIndex(2), 4) && found.is_away(ChunkIndex(2), 5));
    // The last page of all arrives, and the last of a chunk.
    found.arrived(ChunkIndex(7), &PageSet::first(256)).unwrap();
    found.arrived(ChunkIndex(2), &PageSet::first(10)).unwrap();
    assert_eq!(Whereabouts::recover(file, &layout).unwrap().unwrap().away(), 0);
}

#[test]
fn pages_that_depart_are_at_their_holder_for_the_next_daemon_too() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    known.begin(PageMap::empty(&layout), &layout).unwrap();
    let [first, second] = [0, 1].map(|number| Holder::host(number).unwrap());
    let last = Holder::host(Holder::MAX_HOSTS - 1).unwrap();
    assert_eq!((first.host_number(), Holder::SOURCE.host_number()), (Some(0), None));
    assert!(Holder::host(Holder::MAX_HOSTS).is_none());
    for chunk in [1, 2, 5] {
        known.departed(ChunkIndex(chunk), &PageSet::first(3), last).unwrap();
    }
    known.departed(ChunkIndex(2), &PageSet::first(7), last).unwrap();
    assert!(known.departed(ChunkIndex(2), &PageSet::first(9), first).is_err(), "all of a chunk are at one");
    known.arrived(ChunkIndex(1), &PageSet::first(3)).unwrap();
    known.departed(ChunkIndex(1), &PageSet::first(1), second).unwrap();
    let found = Whereabouts::recover(file, &layout).unwrap().unwrap();
    assert_eq!((found.pages_away(), found.away()), (known.pages_away(), 1 + 7 + 3));
    assert_eq!([0, 1, 2, 5].map(|chunk| found.holder(ChunkIndex(chunk))), [None, Some(second), Some(last), Some(last)]);
}

#[test]
fn of_two_hosts_one_may_be_believed_alone_until_the_other_has_the_pages_too() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    known.begin(PageMap::empty(&layout), &layout).unwrap();
    let found = || Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().unwrap();
    let (chunk, both) = (ChunkIndex(2), Holder::host(3).unwrap());
    let [first, second] = [0, 1].map(|which| Holder::one_of(3, which).unwrap());
    assert_eq!([both, first, second].map(Holder::host_number), [Some(3); 3]);
    assert_eq!([both, first, second].map(Holder::alone), [None, Some(0), Some(1)]);
    assert!(Holder::one_of(Holder::MAX_HOSTS, 0).is_none() && Holder::one_of(3, 2).is_none());
    known.departed(chunk, &PageSet::first(3), both).unwrap();
    known.departed(chunk, &PageSet::first(5), second).unwrap();
    assert_eq!((found().holder(chunk), found().away()), (Some(second), 5));
    assert_eq!((known.alone(), found().alone()), (1, 1));
    for other in [both, first] {
        assert!(known.departed(chunk, &PageSet::first(7), other).is_err(), "it has them as they were before");
    }
    known.mended(chunk).unwrap();
    assert_eq!((found().holder(chunk), found().away()), (Some(both), 5));
    assert_eq!((known.alone(), found().alone()), (0, 0));
    known.departed(chunk, &PageSet::first(7), both).unwrap();
    known.left_alone(chunk, first).unwrap();
    assert_eq!(found().holder(chunk), Some(first));
    assert!(known.left_alone(chunk, second).is_err() && known.left_alone(ChunkIndex(3), first).is_err());
    // Where nothing is away any more, anybody may have the next.
    known.arrived(chunk, &PageSet::first(6)).unwrap();
    assert_eq!(known.alone(), 1);
    known.arrived(chunk, &PageSet::first(7)).unwrap();
    assert_eq!(known.alone(), 0);
    known.departed(chunk, &PageSet::first(1), second).unwrap();
    assert_eq!((found().holder(chunk), known.alone(), found().alone()), (Some(second), 1, 1));
}

#[test]
fn in_a_map_without_holders_nothing_departs() {
    let layout = layout(8 << 20);
    let file = version_1(&layout, &some_pages(&layout));
    let mut found = Whereabouts::recover(file, &layout).unwrap().unwrap();
    assert_eq!((found.holder(ChunkIndex(2)), found.at_source_in(ChunkIndex(2)).len()), (None, 10));
    assert!(found.departed(ChunkIndex(3), &PageSet::first(1), Holder::host(0).unwrap()).is_err());
}

#[test]
fn a_map_that_an_earlier_version_began_is_gone_on_with() {
    let layout = layout(8 << 20);
    let file = version_1(&layout, &some_pages(&layout));
    let mut found = Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().unwrap();
    assert_eq!((found.pages_away(), found.away()), (&some_pages(&layout), 266));
    found.arrived(ChunkIndex(2), &PageSet::first(9)).unwrap();
    found.arrived(ChunkIndex(7), &PageSet::first(256)).unwrap();
    // This version reads it, and its bytes are as the earlier version would write them: that version may come back.
    let again = Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().unwrap();
    assert_eq!((again.away(), again.is_away(ChunkIndex(2), 9)), (1, true));
    let mut left = PageMap::empty(&layout);
    left.insert_all(ChunkIndex(2), &[9].into_iter().collect());
    let bytes = |file: File| {
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert_eq!(bytes(file), bytes(version_1(&layout, &left)));
}

#[test]
fn a_map_of_another_machine_or_cut_short_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let small = layout(8 << 20);
    Whereabouts::all_here(file.try_clone().unwrap(), &small).begin(PageMap::empty(&small), &small).unwrap();
    assert!(Whereabouts::recover(file.try_clone().unwrap(), &layout(16 << 20)).is_err());
    file.set_len(100).unwrap();
    assert!(Whereabouts::recover(file, &small).is_err());
}

#[test]
fn a_holder_or_a_version_that_is_not_known_is_refused() {
    let layout = layout(8 << 20);
    let file = tempfile::tempfile().unwrap();
    Whereabouts::all_here(file.try_clone().unwrap(), &layout).begin(some_pages(&layout), &layout).unwrap();
    let holder_of = |chunk: u64| 32 + 40 * chunk + 32;
    // In a chunk that has no page away, the holder means nothing.
    file.write_all_at(&[99], holder_of(1)).unwrap();
    assert!(Whereabouts::recover(file.try_clone().unwrap(), &layout).is_ok());
    // None that there is; the source as one of two; and either of two alone.
    for unknown in [0, 18, 99, 64 + 1, 64 + 128 + 2] {
        file.write_all_at(&[unknown], holder_of(2)).unwrap();
        assert!(Whereabouts::recover(file.try_clone().unwrap(), &layout).is_err(), "{unknown}");
    }
    file.write_all_at(&[1], holder_of(2)).unwrap();
    assert!(Whereabouts::recover(file.try_clone().unwrap(), &layout).is_ok());
    file.write_all_at(b"STPAGES3", 0).unwrap();
    assert!(Whereabouts::recover(file, &layout).is_err());
}

#[test]
fn pages_of_a_chunk_may_be_at_the_source_and_at_a_memory_host_for_the_next_daemon_too() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    let of = |pages: &[u8]| pages.iter().copied().collect::<PageSet>();
    let map = |pages: &[(u32, &[u8])]| {
        let mut map = PageMap::empty(&layout);
        pages.iter().for_each(|(chunk, set)| map.insert_all(ChunkIndex(*chunk), &of(set)));
        map
    };
    let (host, other) = (Holder::host(3).unwrap(), Holder::host(0).unwrap());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    let twice = known.begin_elsewhere(&[(host, map(&[(1, &[4])]))], map(&[(1, &[4])]), &layout);
    assert!(twice.is_err(), "a page is at one of them");
    let (away, to_come) = (map(&[(1, &[1, 2]), (2, &[7])]), map(&[(1, &[3, 9]), (5, &[0])]));
    known.begin_elsewhere(&[(host, away)], to_come, &layout).unwrap();
    let found = || Whereabouts::recover(file.try_clone().unwrap(), &layout).unwrap().unwrap();
    let counts = |map: &Whereabouts| (map.away(), map.to_come(), map.has_both());
    assert_eq!((counts(&known), counts(&found())), ((6, 3, true), (6, 3, true)));
    let both = |map: &Whereabouts, chunk| (map.at_hosts_in(ChunkIndex(chunk)), map.at_source_in(ChunkIndex(chunk)));
    assert_eq!(both(&found(), 1), (of(&[1, 2]), of(&[3, 9])));
    assert_eq!([1, 2, 5].map(|chunk| found().holder(ChunkIndex(chunk))), [Some(host), Some(host), None]);
    assert!(known.departed(ChunkIndex(1), &of(&[100]), other).is_err(), "all of a chunk are at one memory host");
    known.arrived(ChunkIndex(1), &of(&[3])).unwrap();
    known.arrived(ChunkIndex(5), &of(&[0])).unwrap();
    assert_eq!((counts(&known), counts(&found())), ((4, 1, true), (4, 1, true)));
    // The next daemon, too, takes what leaves then for what it is, also where it was at the source once.
    let mut next = found();
    next.departed(ChunkIndex(1), &of(&[3, 100]), host).unwrap();
    next.departed(ChunkIndex(5), &of(&[0]), other).unwrap();
    let last = found();
    assert_eq!((both(&last, 1), last.to_come()), ((of(&[1, 2, 3, 100]), of(&[9])), 1));
    assert_eq!((last.holder(ChunkIndex(5)), last.by_holder(&layout).len()), (Some(other), 2));
}

#[test]
fn pages_that_go_past_this_host_are_at_a_memory_host_for_the_next_daemon_too() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    let set = |pages: &[u8]| pages.iter().copied().collect::<PageSet>();
    let (chunk, host, other) = (ChunkIndex(1), Holder::host(3).unwrap(), Holder::host(4).unwrap());
    let mut to_come = PageMap::empty(&layout);
    to_come.insert_all(chunk, &set(&[1, 2, 3, 4]));
    known.begin_elsewhere(&[], to_come, &layout).unwrap();
    known.arrived(chunk, &set(&[4])).unwrap();
    known.left_source(chunk, &set(&[1]), host).unwrap();
    known.left_source(chunk, &PageSet::EMPTY, other).unwrap();
    for refused in [(&[2], other), (&[1], host), (&[4], host), (&[9], host)] {
        assert!(known.left_source(chunk, &set(refused.0), refused.1).is_err(), "{refused:?}");
    }
    known.left_source(chunk, &set(&[2]), host).unwrap();
    for known in [&known, &Whereabouts::recover(file, &layout).unwrap().unwrap()] {
        assert_eq!((known.away(), known.to_come(), known.holder(chunk)), (3, 1, Some(host)));
        assert_eq!((known.at_hosts_in(chunk), known.at_source_in(chunk)), (set(&[1, 2]), set(&[3])));
    }
    // All of a source's is never said to be at a memory host in a map that has no place for both.
    let mut whole = Whereabouts::all_here(tempfile::tempfile().unwrap(), &layout);
    whole.begin(some_pages(&layout), &layout).unwrap();
    assert!(whole.left_source(ChunkIndex(2), &set(&[100]), host).is_err());
}

#[test]
fn a_guest_whose_pages_have_all_come_has_a_map_that_an_earlier_version_reads() {
    let (layout, file) = (layout(8 << 20), tempfile::tempfile().unwrap());
    let mut known = Whereabouts::all_here(file.try_clone().unwrap(), &layout);
    known
        .begin_elsewhere(&[(Holder::host(0).unwrap(), some_pages(&layout))], PageMap::empty(&layout), &layout)
        .unwrap();
    // What is all of a source's and of one memory host's is not told apart there.
    let mut whole = Whereabouts::all_here(tempfile::tempfile().unwrap(), &layout);
    whole.begin(some_pages(&layout), &layout).unwrap();
    assert!(whole.departed(ChunkIndex(2), &[100].into_iter().collect(), Holder::host(0).unwrap()).is_err());
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0).unwrap();
    assert_eq!((&magic, known.to_come()), (b"STPAGES2", 0));
}
