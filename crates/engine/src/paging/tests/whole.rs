//! Pages that are all here before the guest runs, and are compared as it first saw them.

use super::*;

#[test]
fn pages_are_digested_as_they_were_however_many_threads_write_them_from_the_first_moment_on() {
    if !works() {
        return;
    }
    let guest = Guest::new();
    let pager = guest.pager(true);
    // Every third page is a hole.
    (0..PAGES).filter(|page| page % 3 != 2).for_each(|page| guest.round(page, page as u8 | 1));
    let chunks: Vec<ChunkIndex> = pager.ram().layout().iter().collect();
    let before: Vec<_> =
        chunks.iter().map(|chunk| pager.ram().page_digests(*chunk, Digester::UNSEEDED).unwrap()).collect();
    pager.begin_whole().unwrap();
    assert!(guest.here.kept.lock().unwrap().is_none(), "a guest whose daemon dies waits for nobody");
    std::thread::scope(|scope| {
        for seed in 1..5_u64 {
            let mapping = &guest.here.mapping;
            scope.spawn(move || {
                for page in (0..PAGES).map(|step| step * (seed * 2 + 1) * 37 % PAGES) {
                    mapping.copy_in(page * 4096 + seed * 16, &[100; 16]).unwrap();
                }
            });
        }
        pager.map_ahead().unwrap();
        // The source asks meanwhile.
        for (chunk, before) in chunks.iter().zip(&before).rev() {
            assert_eq!(&pager.page_digests(*chunk).unwrap(), before, "{chunk:?}");
        }
    });
    for (chunk, before) in chunks.iter().zip(&before) {
        assert_eq!(&pager.page_digests(*chunk).unwrap(), before, "{chunk:?}");
    }
    pager.end();
    for page in 0..PAGES {
        let mut found = [0; 16];
        guest.here.mapping.copy_out(page * 4096 + 16..page * 4096 + 32, &mut found);
        assert_eq!(found, [100; 16], "what the guest wrote is lost, page {page}");
    }
}
