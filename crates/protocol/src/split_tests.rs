use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::layout::ChunkIndex;
use crate::store::{Claim, Holdings, most_bytes};

const CHUNK: ChunkIndex = ChunkIndex(0);
const PAGES: u8 = 6;

/// A guest with a chunk of few pages, its host, and a memory host. A content is a number; the guest never writes one
/// twice.
struct World {
    /// What the guest wrote last of each page: the truth.
    truth: BTreeMap<u8, u64>,
    /// The file here; no entry is a hole.
    file: BTreeMap<u8, u64>,
    /// Pages that the guest reaches without a fault.
    mapped: PageSet,
    /// What outlives the daemon here.
    record: Whereabouts,
    store: Holdings,
    kept: BTreeMap<u8, u64>,
    contents: u64,
}

/// The daemon was killed.
struct Killed;

/// Steps until the daemon is killed.
struct Fuse(usize);

impl Fuse {
    fn step(&mut self) -> Result<(), Killed> {
        self.0 = self.0.checked_sub(1).ok_or(Killed)?;
        Ok(())
    }
}

impl World {
    fn new() -> Self {
        let truth: BTreeMap<u8, u64> = (0..PAGES).map(|page| (page, 1 + u64::from(page))).collect();
        let claim = Claim { guest: 1, key: 1, epoch: 1 };
        Self {
            file: truth.clone(),
            truth,
            mapped: PageSet::first(PAGES.into()),
            record: Whereabouts::default(),
            store: Holdings::new(claim, most_bytes(1), 1),
            kept: BTreeMap::new(),
            contents: 100,
        }
    }

    /// The guest touches pages as long as it need not wait for them.
    fn guest(&mut self, touches: &[(u8, bool)]) {
        for (page, writes) in touches {
            if !self.mapped.contains(*page) {
                continue;
            }
            assert_eq!(self.file.get(page), self.truth.get(page), "page {page} as the guest sees it");
            if *writes {
                self.contents += 1;
                self.file.insert(*page, self.contents);
                self.truth.insert(*page, self.contents);
            }
        }
    }

    fn out(&mut self, pages: &PageSet, touches: &[(u8, bool)], fuse: &mut Fuse) -> Result<(), Killed> {
        let pages = pages.and(&self.mapped);
        if pages.is_empty() {
            return Ok(());
        }
        let number = self.record.number();
        let mut goes: BTreeMap<u8, u64> = BTreeMap::new();
        for page in pages.iter() {
            goes.insert(page, self.file[&page]);
            self.guest(touches);
        }
        let copied = self.record.copied();
        let sent: PageSet =
            pages.iter().filter(|page| !copied.contains(*page) || self.kept[page] != goes[page]).collect();
        if !sent.is_empty() {
            let put = self.store.may_put(CHUNK, number.version, number.base, sent, PageSet::EMPTY).expect("it may");
            self.store.note(CHUNK, put.before.unwrap_or_default());
            fuse.step()?;
            self.kept.extend(goes.iter().filter(|(page, _)| sent.contains(**page)));
            self.store.note(CHUNK, put.after);
            fuse.step()?;
            self.record.kept(number, &sent);
        }
        self.guest(touches);
        self.mapped = self.mapped.without(&pages);
        fuse.step()?;
        let same: PageSet = pages.iter().filter(|page| self.file[page] == goes[page]).collect();
        self.record.goes(&same);
        fuse.step()?;
        self.file.retain(|page, _| !same.contains(*page));
        fuse.step()?;
        let changed = pages.without(&same);
        self.mapped = self.mapped.or(&changed);
        fuse.step()?;
        self.release(self.record.held(), &changed);
        self.record.released(&changed);
        Ok(())
    }

    fn back(&mut self, pages: &PageSet, copies_stay: bool, fuse: &mut Fuse) -> Result<(), Killed> {
        let pages = pages.and(&self.record.away());
        if pages.is_empty() {
            return Ok(());
        }
        let version = self.record.held();
        self.store.may_get(CHUNK, version, &pages).expect("the memory host has what is on record");
        fuse.step()?;
        for page in pages.iter() {
            self.file.insert(page, self.kept[&page]);
            fuse.step()?;
        }
        self.record.comes(&pages);
        fuse.step()?;
        self.mapped = self.mapped.or(&pages);
        fuse.step()?;
        if !copies_stay {
            self.release(version, &pages);
            self.record.released(&pages);
        }
        Ok(())
    }

    fn release(&mut self, version: u64, pages: &PageSet) {
        if let Some(left) = self.store.after_release(CHUNK, version, pages) {
            self.store.note(CHUNK, left);
        }
    }

    /// The next daemon: it has the file, the record, and what the memory host says; the fence still stands.
    fn restart(&mut self) {
        let has = self.store.held(CHUNK).map(|held| (held.version, held.pages()));
        let Restart { now, punch, release, lost } = self.record.restart(has);
        assert!(lost.is_empty(), "{lost:?}");
        self.record = now;
        self.file.retain(|page, _| !punch.contains(*page));
        if let Some((version, pages)) = release {
            self.release(version, &pages);
        }
        // What was fenced and is here goes on.
        self.mapped = PageSet::first(PAGES.into()).without(&now.away());
    }

    /// Each page is right where the record has it, and once only.
    fn check(&self) {
        for page in 0..PAGES {
            if self.record.away().contains(page) {
                assert_eq!(self.kept.get(&page), self.truth.get(&page), "page {page} away");
                assert!(!self.mapped.contains(page) && !self.file.contains_key(&page), "page {page} is in two places");
            } else {
                assert_eq!(self.file.get(&page), self.truth.get(&page), "page {page} here");
            }
        }
        let held = self.store.held(CHUNK).map_or(PageSet::EMPTY, |held| held.pages());
        assert_eq!(held, self.record.away().or(&self.record.copied()), "nothing is kept in vain");
    }
}

#[derive(Debug, Clone)]
struct Step {
    out: bool,
    pages: PageSet,
    touches: Vec<(u8, bool)>,
    /// What comes back stays at the memory host, too.
    copies_stay: bool,
    /// After so many steps the daemon is killed.
    fuse: usize,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pages = proptest::collection::vec(0..PAGES, 1..4).prop_map(|pages| pages.into_iter().collect());
    let touches = proptest::collection::vec((0..PAGES, any::<bool>()), 0..4);
    let step = (any::<bool>(), pages, touches, any::<bool>(), 0usize..14);
    let step =
        step.prop_map(|(out, pages, touches, copies_stay, fuse)| Step { out, pages, touches, copies_stay, fuse });
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A guest that reads and writes whatever it can reach, pages that go and come, and a daemon that is killed after
    /// any step of that: the guest always sees what it wrote last, and so does who takes its pages over.
    #[test]
    fn whenever_the_daemon_is_killed_every_page_is_valid_where_the_record_has_it(steps in steps()) {
        let mut world = World::new();
        for Step { out, pages, touches, copies_stay, fuse } in steps {
            let mut fuse = Fuse(fuse);
            let ended = match out {
                true => world.out(&pages, &touches, &mut fuse),
                false => world.back(&pages, copies_stay, &mut fuse),
            };
            if ended.is_err() {
                world.restart();
            }
            world.check();
            world.guest(&touches);
        }
        world.back(&PageSet::first(PAGES.into()), false, &mut Fuse(usize::MAX)).map_err(|Killed| ()).unwrap();
        world.check();
        prop_assert_eq!(&world.file, &world.truth);
    }
}

/// A memory host that was given up has lost what was away, and nothing else.
#[test]
fn pages_that_nobody_has_are_named() {
    let (mut record, pages) = (Whereabouts::default(), PageSet::first(3));
    let number = record.number();
    record.kept(number, &pages);
    record.goes(&pages);
    let two = PageSet::first(2);
    let restart = record.restart(Some((number.version, two)));
    assert_eq!((restart.now.away(), restart.lost), (two, pages.without(&two)));
    let restart = record.restart(None);
    assert_eq!((restart.now.away(), restart.lost, restart.release), (PageSet::EMPTY, pages, None));
}
