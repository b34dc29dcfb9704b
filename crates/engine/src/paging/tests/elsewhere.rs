//! A split guest that has come here: its pages leave and come back while both sides are compared.

use super::depart::Copy;
use super::*;
use crate::faults::fence::Fence;

const HOST: usize = 0;

/// Has a page leave, which its memory host has as it is.
fn leaves(pager: &Pager, fence: &Fence, page: u64) {
    assert_eq!(departs(pager, fence, page), [at(page).page].into_iter().collect(), "page {page}");
}

/// What leaves where a page is to, which its memory host has as it is in the file.
fn departs(pager: &Pager, fence: &Fence, page: u64) -> PageSet {
    let (chunk, mut body) = (at(page).chunk, [0; 4096]);
    let pages: PageSet = [at(page).page].into_iter().collect();
    pager.ram().load(chunk, &pages, &mut body).unwrap();
    let (digester, holder) = (Digester::UNSEEDED, Holder::host(HOST).unwrap());
    let digests = [digester.page(&body)];
    let copy = Copy { chunk, pages, digests: &digests, digester, holder, zero: PageSet::EMPTY };
    pager.depart(fence, &copy, &fence.patience(Duration::from_secs(60))).unwrap().away
}

fn begun(guest: &Guest, away: &[u64]) -> (Arc<Pager>, Fence) {
    let pager = guest.pager(true);
    let map = residue(&pager, away.iter().copied());
    pager.begin_elsewhere(&[(Holder::host(HOST).unwrap(), map)], residue(&pager, [])).unwrap();
    let fence = Fence::new(Arc::clone(&pager.faults), vec![guest.here.mapping.addresses()]).unwrap();
    (pager, fence)
}

#[test]
fn what_leaves_unseen_and_comes_back_is_compared_as_it_came_and_what_was_away_is_not() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    // What a round brought of a page that is away counts no more.
    [1, 2, 3, 40, 45, 300].into_iter().for_each(|page| guest.round(page, page as u8 | 1));
    let mut expected = guest.ram().page_digests(ChunkIndex(0), Digester::UNSEEDED).unwrap();
    let (pager, fence) = begun(&guest, &[300]);
    let writes = |page: u64| guest.here.mapping.copy_in(page * 4096, &[100; 16]).unwrap();
    // The guest has seen one of those that leave. Two come back, and it writes them.
    writes(3);
    [1, 2, 3].into_iter().for_each(|page| leaves(&pager, &fence, page));
    for page in [2, 3, 300] {
        arrives(&pager, page, 7);
        writes(page);
    }
    // It gives one back that it has not seen, uses it again, and that one leaves.
    guest.gives_back(40);
    assert!(pager.given_back(ChunkIndex(0)).contains(40));
    writes(40);
    leaves(&pager, &fence, 40);
    expected[40] = 0;
    let is_as_it_came = |pager: &Pager| {
        assert_eq!(pager.page_digests(ChunkIndex(0)).unwrap(), expected);
        assert_eq!(pager.page_digests(ChunkIndex(1)).unwrap(), [0; 256]);
        assert_eq!(pager.chunk_digest(ChunkIndex(0)).unwrap(), Digester::UNSEEDED.pages(&expected));
        assert_eq!(pager.given_back(ChunkIndex(0)).iter().collect::<Vec<_>>(), [40], "why it is zeros");
    };
    is_as_it_came(&pager);
    // To look brings nothing here, and gives memory to nothing.
    assert_eq!(pager.away_in(ChunkIndex(0)).iter().collect::<Vec<_>>(), [1, 40]);
    assert_eq!(pager.ram().allocated().unwrap().len(), 4);

    // All of it comes together, and nobody looks after its pages any more.
    [1, 40].into_iter().for_each(|page| arrives(&pager, page, 7));
    drop(fence);
    pager.note_all();
    pager.end();
    [1, 9, 45, 301].into_iter().for_each(writes);
    is_as_it_came(&pager);
    pager.nothing_is_compared();
    assert!(pager.page_digests(ChunkIndex(0)).is_err());
}

/// Has a guest that touches a page have the next three.
struct Ahead;

impl Supplier for Ahead {
    fn ask(&self, _: PageIndex, _: u32) {}

    fn touched_next(&self, page: PageIndex, here: &PageSet) -> PageSet {
        (page.page + 1..page.page + 4).collect::<PageSet>().and(here)
    }

    fn heard(&self) -> Instant {
        Instant::now()
    }

    fn hang_up(&self) {}

    fn dismiss(&self) {}
}

#[test]
fn pages_of_zeros_that_a_guest_has_before_it_touches_them_are_compared_as_zeros() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let (pager, _fence) = begun(&guest, &[300]);
    let supplier: Arc<dyn Supplier> = Arc::new(Ahead);
    pager.attach(Whose::MemoryHosts, &supplier);
    assert_eq!(guest.looks(10).join().unwrap(), [0; 16]);
    while !pager.ram().allocated_in(ChunkIndex(0)).unwrap().contains(13) {
        std::thread::yield_now();
    }
    (10..14).for_each(|page| guest.here.mapping.copy_in(page * 4096, &[100; 16]).unwrap());
    assert_eq!(pager.page_digests(ChunkIndex(0)).unwrap(), [0; 256]);
    pager.end();
}

/// A link that broke brings a page a second time, late: it was written meanwhile, and is at a memory host.
#[test]
fn what_came_from_the_source_and_has_left_since_is_not_taken_from_there_again() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    guest.round(2, 9);
    let pager = guest.pager(false);
    let at_host = [(Holder::host(HOST).unwrap(), residue(&pager, [300]))];
    pager.begin_elsewhere(&at_host, residue(&pager, [301, 2])).unwrap();
    assert_eq!((pager.missing(), pager.away(), pager.to_come()), (3, 1, 2));
    let fence = Fence::new(Arc::clone(&pager.faults), vec![guest.here.mapping.addresses()]).unwrap();
    let from = |whose, page: u64, byte: u8| {
        let body = [byte; 4096];
        let bodies = [([at(page).page].into_iter().collect(), body.as_slice())];
        let suspect = PageSet::EMPTY;
        let arrival = Arrival { chunk: at(page).chunk, bodies: &bodies, zero: suspect, pooled: None, suspect };
        pager.place(whose, &arrival).unwrap();
    };
    let first = |page: u64| {
        let mut found = [0; 16];
        guest.here.mapping.copy_out(page * 4096..page * 4096 + 16, &mut found);
        found[0]
    };
    // What is at one side does not come from the other.
    from(Whose::Source, 300, 9);
    from(Whose::MemoryHosts, 301, 9);
    assert_eq!((pager.missing(), pager.duplicate()), (3, 2));
    // What a round brought of a page that follows is not the page.
    assert_eq!((departs(&pager, &fence, 2), pager.to_come()), (PageSet::EMPTY, 2));
    from(Whose::Source, 2, 1);
    guest.here.mapping.copy_in(2 * 4096, &[77; 4096]).unwrap();
    leaves(&pager, &fence, 2);
    from(Whose::Source, 2, 1);
    assert_eq!(pager.away_in(ChunkIndex(0)).iter().collect::<Vec<_>>(), [2], "it is where it was written to");
    from(Whose::MemoryHosts, 2, 77);
    assert_eq!(first(2), 77);
    from(Whose::Source, 301, 5);
    from(Whose::MemoryHosts, 300, 6);
    assert_eq!((first(301), first(300), pager.missing()), (5, 6, 0));
    leaves(&pager, &fence, 301);
    assert_eq!((pager.away(), pager.to_come()), (1, 0));
    from(Whose::MemoryHosts, 301, 5);
    drop(fence);
    pager.end();
}
