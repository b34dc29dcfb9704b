//! The order in which pages are pushed after the switchover, beside those that faults ask for.
//!
//! Pre-paging by bubbles (Hines and Gopalan, section III.B): the push grows both ways from the latest fault, because
//! what is touched next is likely to be near. The paper has one pivot for the guest; here each thread that faults has
//! one, because processors work in different places, and they take turns. A thread that faults again has moved, and so
//! does its pivot: the pages that were still to come around the old pivot are forgotten.
//!
//! Where a thread goes through memory in one direction, nearly all of its share lies ahead of it, and goes in longer
//! pieces: such a thread waits for the front of the push whenever it is faster than the link, and the size of the
//! pieces decides how often. A fault elsewhere does not end a walk: a processor's interrupts and its kernel touch pages
//! of their own meanwhile, and a server that reads several files in turns walks through all of them. So a thread has
//! several trails, of which those that are walks, and the latest, are pushed.
//!
//! ```text
//!              ◀── 7 ── 5 ── 3 ── 1 ┐ fault ┌ 0 ── 2 ── 4 ── 6 ──▶      a thread that jumps
//!                           ◀── 7 ──┤ fault ├ 0 ─ 1 ─ 2 ─ 3 ─ 4 ─▶      one that ascends
//! ```
//!
//! Nothing is queued here: the pages are chosen when there is room for them on the wire, so nothing has to be called
//! back.

use std::cmp::Ordering;

use crate::layout::{CHUNK_PAGES, ChunkIndex, Layout, PageIndex};
use crate::pages::{PageMap, PageSet};

/// Pages of a unit, the step by which a bubble grows: what travels in one frame. Larger frames keep a fault waiting
/// longer for a page that is on its way already.
pub const UNIT_PAGES: usize = 16;
/// The most pages of a frame ahead of a walk.
pub const WALK_PAGES: usize = 128;
/// The most trails that are kept of one thread.
const TRAILS: usize = 8;
/// The most trails that are kept of all threads: the latest ones.
pub const MAX_PIVOTS: usize = 64;
/// The units that a bubble grows each way, at most: a page more than 1 GiB away is not near.
const REACH_UNITS: u64 = 1024 * UNITS;
/// The largest distance of two faults of a thread that may be steps of one walk, pages.
const STEP_PAGES: u64 = 512;
/// The same where the thread has been elsewhere since, so that jumps here and there make no walk.
const NEAR_PAGES: u64 = 64;
/// Steps in one direction that make a walk.
const WALK: i8 = 2;
/// A walker's bubble grows one unit back in each this many units.
const BACK_EVERY: u32 = 8;
/// Faults of its thread elsewhere that end a walk.
const ASIDE: u32 = 32;
const UNITS: u64 = (CHUNK_PAGES / UNIT_PAGES) as u64;

/// The order of the push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Pages go by address.
    Linear,
    /// Pages around the latest faults go first, then all others by address.
    Bubbles,
}

/// Says which pages are pushed next.
#[derive(Debug)]
pub struct Prepager {
    order: Order,
    /// Units of the machine, those of chunks cut short included.
    units: u64,
    /// Trails of all threads, in the order of their latest faults.
    pivots: Vec<Pivot>,
    /// Whose turn it is.
    turn: usize,
    /// Where the push by address stands.
    linear: u64,
}

/// A trail: its latest fault, and the bubble around it.
#[derive(Debug)]
struct Pivot {
    thread: u32,
    page: u64,
    home: u64,
    /// Steps in one direction so far; upwards where positive.
    walk: i8,
    /// The next unit upwards.
    up: u64,
    /// The unit above the next one downwards.
    down: u64,
    grown: u32,
    /// Faults of its thread elsewhere since.
    aside: u32,
}

impl Prepager {
    /// A prepager for a machine of this layout, without a fault yet.
    #[must_use]
    pub fn new(order: Order, layout: &Layout) -> Self {
        Self { order, units: u64::from(layout.chunks()) * UNITS, pivots: Vec::new(), turn: 0, linear: 0 }
    }

    /// Takes in a fault of a thread on a page, whether the page is pending or not. The thread's bubble begins anew, and
    /// is the next to grow.
    pub fn fault(&mut self, page: PageIndex, thread: u32) {
        if self.order == Order::Linear {
            return;
        }
        let page = u64::from(page.chunk.0) * CHUNK_PAGES as u64 + u64::from(page.page);
        let home = (page / UNIT_PAGES as u64).min(self.units);
        let trails = self.pivots.iter().enumerate().filter(|(_, pivot)| pivot.thread == thread);
        let near = trails.filter_map(|(at, pivot)| Some((pivot.distance(page)?, at))).min();
        let walk = near.map_or(0, |(_, at)| self.pivots.remove(at).walk_on(page));
        self.pivots.retain_mut(|pivot| {
            pivot.aside += u32::from(pivot.thread == thread);
            pivot.aside <= ASIDE
        });
        let mut trails = self.pivots.iter().enumerate().filter(|(_, pivot)| pivot.thread == thread);
        let (oldest, count) = (trails.next(), 1 + trails.count());
        let too_many = oldest.filter(|_| count >= TRAILS).map(|(at, _)| at);
        if let Some(oldest) = too_many.or((self.pivots.len() == MAX_PIVOTS).then_some(0)) {
            self.pivots.remove(oldest);
        }
        self.pivots.push(Pivot { thread, page, home, walk, up: home, down: home, grown: 0, aside: 0 });
        self.turn = self.pivots.len() - 1;
    }

    /// Pages of this chunk are pending that were not when the push came by.
    pub fn again(&mut self, chunk: ChunkIndex) {
        self.linear = self.linear.min(u64::from(chunk.0) * UNITS);
    }

    /// The pages to push next, of one chunk and at most [`WALK_PAGES`]; `None` where nothing is pending. The caller
    /// takes them out of `pending` before it calls again: they are not offered twice.
    ///
    /// # Panics
    /// Where `pending` is of another layout.
    pub fn next(&mut self, pending: &PageMap) -> Option<(ChunkIndex, PageSet)> {
        let mut dormant = 0;
        while dormant < self.pivots.len() {
            let turn = self.turn % self.pivots.len();
            self.turn = turn + 1;
            if !self.pivots[turn].is_pushed() {
                dormant += 1;
                continue;
            }
            if let Some(found) = self.pivots[turn].grow(pending, self.units) {
                return Some(found);
            }
            // Nothing is pending around it.
            self.pivots.remove(turn);
            self.turn = turn;
        }
        upwards(pending, &mut self.linear, self.units)
    }
}

impl Pivot {
    fn walks(&self) -> bool {
        self.walk.abs() >= WALK
    }

    /// Whether it is pushed: it is a walk, or its thread was here last.
    fn is_pushed(&self) -> bool {
        self.walks() || self.aside == 0
    }

    /// The distance of a fault on `page`, pages, where it may be the next step: from the last fault, or from the front
    /// of the push.
    fn distance(&self, page: u64) -> Option<u64> {
        let (up, down) = (self.up * UNIT_PAGES as u64, self.down * UNIT_PAGES as u64);
        let front = match self.walk {
            WALK.. => up,
            walk if walk <= -WALK => down,
            _ if page > self.page => up,
            _ => down,
        };
        let distance = page.abs_diff(self.page).min(page.abs_diff(front));
        (distance <= if self.is_pushed() { STEP_PAGES } else { NEAR_PAGES }).then_some(distance)
    }

    /// The steps in one direction after a fault on `page`, which is near.
    fn walk_on(&self, page: u64) -> i8 {
        match page.cmp(&self.page) {
            Ordering::Equal => self.walk,
            Ordering::Greater => (self.walk.max(0) + 1).min(WALK),
            Ordering::Less => (self.walk.min(0) - 1).max(-WALK),
        }
    }

    /// The next unit with anything pending, on the side whose turn it is, else on the other.
    fn grow(&mut self, pending: &PageMap, units: u64) -> Option<(ChunkIndex, PageSet)> {
        let rarely = self.grown % BACK_EVERY == BACK_EVERY - 1;
        let up_first = match self.walk {
            walk if walk >= WALK => !rarely,
            walk if walk <= -WALK => rarely,
            _ => self.grown.is_multiple_of(2),
        };
        self.grown = self.grown.wrapping_add(1);
        let (top, bottom) = ((self.home + REACH_UNITS).min(units), self.home.saturating_sub(REACH_UNITS));
        for up in [up_first, !up_first] {
            let found =
                if up { upwards(pending, &mut self.up, top) } else { downwards(pending, &mut self.down, bottom) };
            let Some((chunk, pages)) = found else { continue };
            let ahead = self.walks() && up == (self.walk > 0);
            return Some((chunk, if ahead { pages.or(&self.longer(pending, chunk, top, bottom)) } else { pages }));
        }
        None
    }

    /// The pending pages behind the first unit of a piece ahead of a walk, in the same chunk.
    fn longer(&mut self, pending: &PageMap, chunk: ChunkIndex, top: u64, bottom: u64) -> PageSet {
        let mut pages = PageSet::EMPTY;
        for _ in 1..WALK_PAGES / UNIT_PAGES {
            let next = if self.walk > 0 { Some(self.up) } else { self.down.checked_sub(1) };
            let inside = |at: &u64| (bottom..top).contains(at) && chunk_of(*at) == chunk;
            let Some(next) = next.filter(inside) else { break };
            pages = unit(pending, next).map_or(pages, |(_, found)| pages.or(&found));
            if self.walk > 0 { self.up = next + 1 } else { self.down = next }
        }
        pages
    }
}

/// The first unit from `at` up to `end` with anything pending; `at` is moved behind it.
fn upwards(pending: &PageMap, at: &mut u64, end: u64) -> Option<(ChunkIndex, PageSet)> {
    while *at < end {
        if pending.chunk(chunk_of(*at)).is_empty() {
            *at = (*at / UNITS + 1) * UNITS;
            continue;
        }
        let found = unit(pending, *at);
        *at += 1;
        if found.is_some() {
            return found;
        }
    }
    None
}

/// The first unit below `at` with anything pending; `at` is moved to it.
fn downwards(pending: &PageMap, at: &mut u64, end: u64) -> Option<(ChunkIndex, PageSet)> {
    while *at > end {
        *at -= 1;
        if pending.chunk(chunk_of(*at)).is_empty() {
            *at = *at / UNITS * UNITS;
            continue;
        }
        if let Some(found) = unit(pending, *at) {
            return Some(found);
        }
    }
    None
}

/// The pending pages of a unit.
fn unit(pending: &PageMap, unit: u64) -> Option<(ChunkIndex, PageSet)> {
    let mut pages = PageSet::EMPTY;
    pages.insert_run((unit % UNITS) as usize * UNIT_PAGES, UNIT_PAGES);
    let pages = pages.and(pending.chunk(chunk_of(unit)));
    (!pages.is_empty()).then(|| (chunk_of(unit), pages))
}

fn chunk_of(unit: u64) -> ChunkIndex {
    ChunkIndex((unit / UNITS) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::BlockSpec;

    const CHUNKS: u32 = 40;

    fn layout() -> Layout {
        let block = |id: &str, bytes| BlockSpec { id: id.into(), bytes, page_bytes: 4096, path: String::new() };
        Layout::new(&[block("a", (29 << 20) + 8192), block("b", 10 << 20)]).unwrap()
    }

    fn full() -> PageMap {
        let layout = layout();
        let mut map = PageMap::empty(&layout);
        layout.iter().for_each(|chunk| map.insert_all(chunk, &PageSet::first(layout.place(chunk).unwrap().pages)));
        map
    }

    fn page(number: u64) -> PageIndex {
        PageIndex { chunk: ChunkIndex((number / 256) as u32), page: (number % 256) as u8 }
    }

    fn take(map: &mut PageMap, (chunk, pages): (ChunkIndex, PageSet)) -> Vec<u64> {
        let left = map.chunk(chunk).without(&pages);
        assert_eq!(left.or(&pages), *map.chunk(chunk), "pages that are not pending");
        *map.chunk_mut(chunk) = left;
        pages.iter().map(|page| u64::from(chunk.0) * 256 + u64::from(page)).collect()
    }

    fn push(prepager: &mut Prepager, pending: &mut PageMap) -> Vec<u64> {
        let next = prepager.next(pending).expect("something is pending");
        take(pending, next)
    }

    proptest! {
        #[test]
        fn every_pending_page_is_pushed_once_whatever_faults_come(
            bubbles: bool,
            sets in prop::collection::vec(any::<[u64; 4]>(), CHUNKS as usize),
            // A fault before every few pushes: its page (also of chunks that the machine does not have), its
            // thread.
            faults in prop::collection::vec((0u64..u64::from(CHUNKS) * 256 + 5000, 0u32..40, 0usize..8), 0..200),
        ) {
            let (layout, mut pending) = (layout(), full());
            for (chunk, set) in layout.iter().zip(sets) {
                *pending.chunk_mut(chunk) = pending.chunk(chunk).and(&PageSet(set));
            }
            let mut missing: std::collections::BTreeSet<u64> = layout
                .iter()
                .flat_map(|chunk| {
                    pending.chunk(chunk).iter().map(move |page| u64::from(chunk.0) * 256 + u64::from(page))
                })
                .collect();
            let mut prepager = Prepager::new(if bubbles { Order::Bubbles } else { Order::Linear }, &layout);
            for (at, thread, pushes) in faults {
                let asked = page(at);
                prepager.fault(asked, thread);
                // The page that was asked for goes by itself.
                if layout.place(asked.chunk).is_some() && pending.chunk(asked.chunk).contains(asked.page) {
                    let one: PageSet = [asked.page].into_iter().collect();
                    take(&mut pending, (asked.chunk, one)).iter().for_each(|page| assert!(missing.remove(page)));
                }
                for _ in 0..pushes {
                    let Some(next) = prepager.next(&pending) else { break };
                    prop_assert!(next.1.len() <= WALK_PAGES);
                    take(&mut pending, next).iter().for_each(|page| assert!(missing.remove(page)));
                }
            }
            while let Some(next) = prepager.next(&pending) {
                take(&mut pending, next).iter().for_each(|page| assert!(missing.remove(page)));
            }
            prop_assert!(missing.is_empty() && pending.is_empty());
        }

        #[test]
        fn what_is_near_a_fault_goes_before_what_is_far(at in 0u64..29 * 256, pushes in 1u64..200) {
            let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
            prepager.fault(page(at), 1);
            let mut pushed = Vec::new();
            for _ in 0..pushes {
                pushed.extend(push(&mut prepager, &mut pending));
            }
            // Both sides grow alike until one reaches an end.
            let reach = pushes.div_ceil(2) * UNIT_PAGES as u64;
            for near in at.saturating_sub(reach - UNIT_PAGES as u64).max(reach)..at.min(28 * 256 - reach) {
                let beyond = near.abs_diff(at) + 2 * UNIT_PAGES as u64 > reach;
                prop_assert!(pushed.contains(&near) || beyond, "{near} of {at}");
            }
        }
    }

    #[test]
    fn a_walk_pushes_what_lies_ahead() {
        for (step, ahead) in [(20, true), (-20_i64, false)] {
            let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
            let mut at = 4000_i64;
            for _ in 0..4 {
                prepager.fault(page(at as u64), 7);
                at += step;
            }
            let last = (at - step) as u64 / 16;
            let units: Vec<u64> = (0..16).map(|_| push(&mut prepager, &mut pending)[0] / 16).collect();
            let forward = units.iter().filter(|unit| if ahead { **unit >= last } else { **unit < last }).count();
            assert_eq!(forward, 14, "{units:?}");
        }
    }

    #[test]
    fn a_walker_that_overtook_the_push_finds_it_ahead_of_its_fault() {
        let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
        [1000, 1020, 1040].iter().for_each(|at| prepager.fault(page(*at), 7));
        let first = push(&mut prepager, &mut pending);
        // It faults on a page that is on its way: the push goes on behind what was sent.
        prepager.fault(page(first[0] + 3), 7);
        assert_eq!(push(&mut prepager, &mut pending)[0], first.last().unwrap() + 1);
    }

    #[test]
    fn a_walk_goes_in_long_pieces_and_is_not_ended_by_a_fault_elsewhere() {
        for step in [20, -20_i64] {
            let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
            let walk = |count: i64| (4100 + count * step) as u64;
            (0..3).for_each(|count| prepager.fault(page(walk(count)), 7));
            prepager.fault(page(9000), 7);
            let pushed: Vec<_> = (0..12).map(|_| push(&mut prepager, &mut pending)).collect();
            let (aside, walked): (Vec<_>, Vec<_>) = pushed.iter().partition(|pages| pages[0] > 8000);
            assert!(aside.len() == 6 && aside.iter().all(|pages| pages.len() == UNIT_PAGES), "{pushed:?}");
            let pages: usize = walked.iter().map(|pages| pages.len()).sum();
            assert!(pages > 5 * UNIT_PAGES * 5, "{pages} pages in six pieces");
            // It goes on at the front of what was pushed for it.
            let front = walked
                .iter()
                .flat_map(|pages| pages.iter())
                .fold(4100, |front: u64, page| if step > 0 { front.max(*page) } else { front.min(*page) });
            prepager.fault(page(front), 7);
            let next = push(&mut prepager, &mut pending);
            assert!(next.len() > UNIT_PAGES && next.iter().all(|page| page.abs_diff(front) <= 256), "{next:?}");
        }
    }

    #[test]
    fn a_thread_that_reads_several_files_in_turns_walks_through_all_of_them() {
        let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
        let files = [512, 2048, 3584, 5120, 6656, 7936];
        for count in 0..3 {
            files.iter().for_each(|file| prepager.fault(page(file + count * 20), 7));
        }
        let pushed: Vec<_> = files.map(|_| push(&mut prepager, &mut pending)).into();
        for file in files {
            let of_file = pushed.iter().find(|pages| pages[0].abs_diff(file) < 100);
            assert!(of_file.is_some_and(|pages| pages.len() > UNIT_PAGES), "{file}: {pushed:?}");
        }
    }

    #[test]
    fn a_walk_that_its_thread_has_left_is_forgotten() {
        let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
        (0..3).for_each(|count| prepager.fault(page(1000 + count * 20), 7));
        (0..=u64::from(ASIDE)).for_each(|count| prepager.fault(page(3000 + count % 3 * 2500), 7));
        let pushed: Vec<_> = (0..8).map(|_| push(&mut prepager, &mut pending)[0]).collect();
        assert!(pushed.iter().all(|page| *page > 2500), "{pushed:?}");
    }

    #[test]
    fn pivots_take_turns_and_a_new_fault_forgets_the_old_bubble() {
        let (mut pending, mut prepager) = (full(), Prepager::new(Order::Bubbles, &layout()));
        prepager.fault(page(1000), 1);
        prepager.fault(page(5000), 2);
        let near = |at: u64, pages: &[u64]| pages.iter().all(|page| page.abs_diff(at) < 128);
        let four: Vec<_> = (0..4).map(|_| push(&mut prepager, &mut pending)).collect();
        assert!(
            near(5000, &four[0]) && near(1000, &four[1]) && near(5000, &four[2]) && near(1000, &four[3]),
            "{four:?}"
        );
        prepager.fault(page(3000), 1);
        let four: Vec<_> = (0..4).map(|_| push(&mut prepager, &mut pending)).collect();
        assert!(
            near(3000, &four[0]) && near(5000, &four[1]) && near(3000, &four[2]) && near(5000, &four[3]),
            "{four:?}"
        );
    }

    #[test]
    fn a_peer_that_names_ever_new_threads_takes_no_memory() {
        let mut prepager = Prepager::new(Order::Bubbles, &layout());
        (0..100_000).for_each(|thread| prepager.fault(page(u64::from(thread) % 9000), thread));
        assert_eq!(prepager.pivots.len(), MAX_PIVOTS);
        assert_eq!(prepager.pivots.last().unwrap().thread, 99_999);
    }
}
