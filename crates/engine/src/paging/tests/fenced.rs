//! Pages that are fenced in while others follow their guest: a thread that touches one waits, whatever becomes of the
//! page meanwhile.

use super::*;
use crate::faults::fence::Fence;

impl Guest {
    /// The addresses of a run of pages, as the fence takes them.
    fn run(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let base = self.here.mapping.addresses().start;
        let run = base + pages.start * 4096..base + pages.end * 4096;
        vec![run]
    }

    fn writes(&self, page: u64, byte: u8) -> JoinHandle<()> {
        let mapping = Arc::clone(&self.here.mapping);
        std::thread::spawn(move || mapping.copy_in(page * 4096, &[byte; 16]).unwrap())
    }
}

fn wait_until(mut it: impl FnMut() -> bool) {
    while !it() {
        std::thread::yield_now();
    }
}

#[test]
fn what_is_fenced_in_stays_as_it_is_while_pages_arrive_and_are_mapped_ahead() {
    if !works() {
        return;
    }
    for verify in [false, true] {
        let guest = Guest::new();
        [1, 2, 3, 5].into_iter().for_each(|page| guest.round(page, 1));
        let pager = guest.pager(verify);
        pager.begin(residue(&pager, [2, 4])).unwrap();
        assert_eq!(guest.looks(1).join().unwrap(), [1; 16]);
        let fence = Fence::new(Arc::clone(&pager.faults), vec![guest.here.mapping.addresses()]).unwrap();
        let patience = fence.patience(Duration::from_secs(60));
        let fenced = fence.close(guest.run(1..5), &patience).unwrap().expect("nobody waits");
        // One page is current, one is stale, one is a hole, and one lies behind the fence.
        let (mapped, stale, hole, open) = (guest.writes(1, 9), guest.looks(2), guest.looks(4), guest.looks(5));
        assert_eq!(open.join().unwrap(), [1; 16]);
        wait_until(|| fence.waits().unwrap() == 3);
        pager.map_ahead(false).unwrap();
        arrives(&pager, 2, 2);
        arrives(&pager, 4, 3);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!mapped.is_finished() && !stale.is_finished() && !hole.is_finished(), "they wait");
        let mut body = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&guest.file, &mut body, 4096).unwrap();
        assert_eq!(body, [1; 4096], "nobody wrote what is fenced in");
        fenced.open().unwrap();
        mapped.join().unwrap();
        assert_eq!((stale.join().unwrap(), hole.join().unwrap()), ([2; 16], [3; 16]));
        assert_eq!(guest.looks(1).join().unwrap(), [9; 16]);
        assert_eq!((guest.looks(3).join().unwrap(), guest.looks(7).join().unwrap()), ([1; 16], [0; 16]));
        drop(fence);
        pager.end();
        assert!(guest.here.kept.lock().unwrap().is_none());
    }
}

#[test]
fn a_page_that_is_away_and_fenced_in_is_asked_for_once_it_is_let_go() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [2])).unwrap();
    let fence = Fence::new(Arc::clone(&pager.faults), vec![guest.here.mapping.addresses()]).unwrap();
    let patience = fence.patience(Duration::from_secs(60));
    let fenced = fence.close(guest.run(2..3), &patience).unwrap().expect("nobody waits");
    let looks = guest.looks(2);
    wait_until(|| fence.waits().unwrap() == 1);
    assert_eq!(pager.fault_count(), 0);
    fenced.open().unwrap();
    waits_for(&pager, 2);
    arrives(&pager, 2, 4);
    assert_eq!(looks.join().unwrap(), [4; 16]);
    pager.end();
}

#[test]
fn a_pager_that_ends_while_pages_are_fenced_in_leaves_them_so_until_they_are_let_go() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    guest.round(1, 1);
    let pager = guest.pager(false);
    pager.begin(residue(&pager, [])).unwrap();
    let fence = Fence::new(Arc::clone(&pager.faults), vec![guest.here.mapping.addresses()]).unwrap();
    let patience = fence.patience(Duration::from_secs(60));
    let fenced = fence.close(guest.run(1..2), &patience).unwrap().expect("nobody waits");
    pager.end();
    let write = guest.writes(1, 9);
    wait_until(|| fence.waits().unwrap() == 1);
    assert!(!write.is_finished() && guest.here.kept.lock().unwrap().is_some());
    fenced.open().unwrap();
    write.join().unwrap();
    assert_eq!(guest.looks(1).join().unwrap()[0], 9);
    assert!(guest.here.kept.lock().unwrap().is_none(), "the last has closed it");
}
