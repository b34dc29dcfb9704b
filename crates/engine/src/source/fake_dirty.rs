//! Tracked fake dirty pages: they were written again before their turn, so sending them now is in vain.
//!
//! D-Track (sections 4.3 and 5.2) keeps a second bitmap, which a thread updates while a round is sent, and leaves the
//! pages in it out of the round. Here no bitmap is needed: a look into the page tables ([`Watch`]) shows what is
//! written now, so `exact` looks at each chunk just before it is read. The paper's variants, with a thread and a map,
//! are there for comparison.
//!
//! Why this loses no write, whatever a look says: a page left out of a round is outstanding in the next ([`Rounds`]
//! puts it back itself and does not rely on the tracker to report it again), and the round with the guest stopped
//! leaves nothing out. A look that comes too early misses a write, and the page is sent in vain; a look that is out of
//! date leaves out a page that could have gone. Both are harmless.
//!
//! [`Rounds`]: crate::source::rounds::Rounds
//! [`Watch`]: crate::source::track::Watch

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_api::MigrateOptions;
use sterna_api::options::{DEFAULT_FAKE_DIRTY_DELAY_MS, FakeDirty};
use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

use super::skip::Skip;
use super::track::Watch;
use crate::error::MigrateError;

/// The longest delay of `adaptive`: a round of a small guest.
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// How `adaptive` limits its use of a processor: after a look it rests at least this many times the look's time.
const REST: u32 = 9;
/// How many pages `adaptive` lets the guest write between two looks: it misses about that many at most.
const UNSEEN_PAGES: f64 = 512.0;

/// The search for pages that were written again before their turn. The threads that send share it.
#[derive(Debug)]
pub struct FakeDirtyPages {
    layout: Layout,
    way: Way,
    cost: Arc<Cost>,
}

#[derive(Debug)]
enum Way {
    Off,
    Exact(Arc<dyn Watch>),
    Followed(Follower),
}

/// The cost of the looks.
#[derive(Debug, Default)]
struct Cost {
    looks: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Cost {
    fn look<T>(&self, look: impl FnOnce() -> T) -> (T, Duration) {
        let began = Instant::now();
        let seen = look();
        let took = began.elapsed();
        self.looks.fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        (seen, took)
    }
}

impl FakeDirtyPages {
    /// The search that the options ask for. Without a `watch` it finds nothing.
    ///
    /// # Errors
    /// No thread left.
    pub fn new(options: &MigrateOptions, layout: &Layout, watch: Option<Arc<dyn Watch>>) -> Result<Self, MigrateError> {
        let cost = Arc::new(Cost::default());
        let delay = match options.fake_dirty {
            FakeDirty::Off | FakeDirty::Exact => None,
            FakeDirty::DtrackV1 => Some(Delay::Fixed(Duration::ZERO)),
            FakeDirty::DtrackV2 => Some(Delay::Fixed(Duration::from_secs_f64(
                options.fake_dirty_delay_ms.unwrap_or(DEFAULT_FAKE_DIRTY_DELAY_MS) / 1e3,
            ))),
            FakeDirty::Adaptive => Some(Delay::Adaptive),
        };
        let way = match (watch, delay) {
            (Some(watch), Some(delay)) => Way::Followed(Follower::start(watch, layout, delay, &cost)?),
            (Some(watch), None) if options.fake_dirty == FakeDirty::Exact => Way::Exact(watch),
            _ => Way::Off,
        };
        Ok(Self { layout: layout.clone(), way, cost })
    }
}

impl Skip for FakeDirtyPages {
    /// Forgets which pages were found.
    fn collected(&mut self, _: &PageMap) {
        if let Way::Followed(follower) = &self.way {
            follower.forget();
        }
    }

    /// The pages of a chunk that are known to have been written since they were last collected.
    fn before_turn(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        match &self.way {
            Way::Off => Ok(PageSet::EMPTY),
            Way::Exact(watch) => self.cost.look(|| watch.written_in(&self.layout, chunk)).0,
            Way::Followed(follower) => follower.again(chunk),
        }
    }

    fn looks(&self) -> (u64, Duration) {
        let nanoseconds = Duration::from_nanos(self.cost.nanoseconds.load(Ordering::Relaxed));
        (self.cost.looks.load(Ordering::Relaxed), nanoseconds)
    }
}

/// The pause between two looks of the thread.
#[derive(Debug, Clone, Copy)]
enum Delay {
    Fixed(Duration),
    Adaptive,
}

impl Delay {
    /// The pause after a look that took this long and found this many fresh pages written since the look before,
    /// `since` ago.
    fn after(self, took: Duration, fresh_pages: u64, since: Duration) -> Duration {
        match self {
            Self::Fixed(delay) => delay,
            Self::Adaptive => {
                let pages_per_s = fresh_pages as f64 / since.as_secs_f64().max(1e-6);
                let unseen = Duration::from_secs_f64((UNSEEN_PAGES / pages_per_s.max(1.0)).min(1e3));
                unseen.max(took * REST).min(LONGEST_DELAY)
            }
        }
    }
}

/// The thread that looks again and again, and the map that it keeps.
#[derive(Debug)]
struct Follower {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    map: Mutex<Map>,
    ended: Condvar,
}

#[derive(Debug)]
struct Map {
    written: PageMap,
    /// The number of collections: a look that began before a collection says nothing after it.
    epoch: u64,
    failure: Option<MigrateError>,
    end: bool,
}

impl Follower {
    fn start(watch: Arc<dyn Watch>, layout: &Layout, delay: Delay, cost: &Arc<Cost>) -> Result<Self, MigrateError> {
        let map = Map { written: PageMap::empty(layout), epoch: 0, failure: None, end: false };
        let shared = Arc::new(Shared { map: Mutex::new(map), ended: Condvar::new() });
        let (theirs, layout, cost) = (Arc::clone(&shared), layout.clone(), Arc::clone(cost));
        let thread = std::thread::Builder::new()
            .name("fake-dirty".into())
            .spawn(move || follow(&theirs, watch.as_ref(), &layout, delay, &cost))
            .map_err(MigrateError::host("starting the thread that looks for fake dirty pages"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn again(&self, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
        let mut map = self.shared.lock();
        match map.failure.take() {
            Some(error) => Err(error),
            None => Ok(*map.written.chunk(chunk)),
        }
    }

    fn forget(&self) {
        let mut map = self.shared.lock();
        map.epoch += 1;
        map.written.clear();
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.shared.lock().end = true;
        self.shared.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn follow(shared: &Shared, watch: &dyn Watch, layout: &Layout, delay: Delay, cost: &Cost) {
    let (mut known, mut looked) = (0, Instant::now());
    let mut map = shared.lock();
    while !map.end {
        let epoch = map.epoch;
        drop(map);
        let mut written = PageMap::empty(layout);
        let (result, took) = cost.look(|| watch.written(layout, &mut written));
        let (found, since) = (written.len(), std::mem::replace(&mut looked, Instant::now()).elapsed());
        map = shared.lock();
        if let Err(error) = result {
            map.failure = Some(error);
            return;
        }
        if map.epoch == epoch {
            map.written = written;
        } else {
            known = 0;
        }
        let pause = delay.after(took, found.saturating_sub(known), since);
        known = found;
        let waited = shared.ended.wait_timeout_while(map, pause, |map| !map.end);
        map = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::PageIndex;
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    /// A watch that reports what a test sets.
    #[derive(Debug)]
    struct Told(Mutex<PageMap>);

    impl Told {
        fn set(&self, pages: &[(u32, u8)]) {
            let mut map = self.0.lock().unwrap();
            map.clear();
            pages.iter().for_each(|&(chunk, page)| map.insert(PageIndex { chunk: ChunkIndex(chunk), page }));
        }
    }

    impl Watch for Told {
        fn written_in(&self, _: &Layout, chunk: ChunkIndex) -> Result<PageSet, MigrateError> {
            Ok(*self.0.lock().unwrap().chunk(chunk))
        }

        fn written(&self, _: &Layout, written: &mut PageMap) -> Result<(), MigrateError> {
            written.add(&self.0.lock().unwrap());
            Ok(())
        }
    }

    fn layout() -> Layout {
        Layout::new(&[BlockSpec { id: "ram".into(), bytes: 4 << 20, page_bytes: 4096, path: String::new() }]).unwrap()
    }

    fn pages(fake_dirty: FakeDirty) -> (Arc<Told>, FakeDirtyPages) {
        let told = Arc::new(Told(Mutex::new(PageMap::empty(&layout()))));
        let options = MigrateOptions { fake_dirty, ..MigrateOptions::default() };
        let pages = FakeDirtyPages::new(&options, &layout(), Some(told.clone())).unwrap();
        (told, pages)
    }

    /// Waits until the thread has seen something.
    fn eventually(mut seen: impl FnMut() -> bool) {
        // Ends a hopeless wait, and nothing else.
        let deadline = Instant::now() + Duration::from_secs(300);
        while !seen() {
            assert!(Instant::now() < deadline, "it was never seen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn exact_sees_a_write_at_the_next_look() {
        let (told, pages) = pages(FakeDirty::Exact);
        assert!(pages.before_turn(ChunkIndex(1)).unwrap().is_empty());
        told.set(&[(1, 7)]);
        assert!(pages.before_turn(ChunkIndex(1)).unwrap().contains(7));
        assert!(pages.before_turn(ChunkIndex(0)).unwrap().is_empty());
        assert_eq!(pages.looks().0, 3);
    }

    #[test]
    fn the_threads_see_a_write_after_a_while_and_forget_it_when_it_is_collected() {
        for variant in [FakeDirty::DtrackV1, FakeDirty::DtrackV2, FakeDirty::Adaptive] {
            let (told, mut pages) = pages(variant);
            told.set(&[(2, 9)]);
            eventually(|| pages.before_turn(ChunkIndex(2)).unwrap().contains(9));
            told.set(&[]);
            pages.collected(&PageMap::empty(&layout()));
            assert!(pages.before_turn(ChunkIndex(2)).unwrap().is_empty(), "{variant:?}");
        }
    }

    #[test]
    fn a_look_that_began_before_a_collection_says_nothing_after_it() {
        let (told, mut pages) = pages(FakeDirty::DtrackV1);
        for _ in 0..200 {
            told.set(&[(3, 1)]);
            eventually(|| pages.before_turn(ChunkIndex(3)).unwrap().contains(1));
            // The page is collected: from now on it counts as not written, whatever a look under way has seen.
            told.set(&[]);
            pages.collected(&PageMap::empty(&layout()));
            assert!(pages.before_turn(ChunkIndex(3)).unwrap().is_empty());
        }
    }

    #[test]
    fn off_and_a_tracker_that_cannot_be_looked_at_find_nothing() {
        let (told, pages) = pages(FakeDirty::Off);
        told.set(&[(0, 0)]);
        assert!(pages.before_turn(ChunkIndex(0)).unwrap().is_empty());
        let blind = FakeDirtyPages::new(&MigrateOptions::default(), &layout(), None).unwrap();
        assert!(blind.before_turn(ChunkIndex(0)).unwrap().is_empty());
    }

    #[test]
    fn the_adaptive_delay_follows_what_is_written_and_what_a_look_costs() {
        let (cheap, dear) = (Duration::from_micros(100), Duration::from_millis(10));
        let after = |took, pages| Delay::Adaptive.after(took, pages, Duration::from_millis(100));
        assert_eq!(after(cheap, 0), LONGEST_DELAY);
        assert!(after(cheap, 1_000) < after(cheap, 100));
        assert_eq!(after(dear, 1_000_000), dear * REST);
        assert_eq!(Delay::Fixed(cheap).after(dear, 5, dear), cheap);
    }
}
