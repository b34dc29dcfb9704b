//! The pending pages, which all threads that send them share.
//!
//! The thread that sends a page takes it out under one lock first. So it goes at most once, whether a fault asks for it
//! or for its neighbour, or the push reaches it. Pages that were taken and lost with a link come back when the
//! destination is asked what is missing there (`resume.rs`): this set is then made anew.
//!
//! The races, and why nothing is lost and nothing goes twice:
//!
//! * **a fault asks for a page that the push has just taken**: it is on its way, and the fault only moves the pivot
//!   there. If it does not arrive, the link is broken, and the set is made anew
//! * **the push wants the neighbours of a fault that takes them at the same time**: the lock decides: one of the two
//!   has them
//! * **a fault comes before the answer to `LoadPostcopy`, because loading the devices reads guest RAM**: the set is
//!   filled before that request is sent
//! * **a fault asks for a page that is on its way to a memory host** (`straight.rs`): it goes, and the destination,
//!   which knows that somebody waits for it, does not take it from there
//! * **a request for a page that was never to be sent, or that the machine does not have**: it is not in the set:
//!   nothing is sent

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_api::options::Prepaging;
use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, Layout, PageIndex};
use sterna_protocol::message::PageRequest;
use sterna_protocol::pages::{PageMap, PageSet};
use sterna_protocol::prepage::{Order, Prepager};

/// The most neighbours that come with a requested page.
pub const NEIGHBOURS: usize = 7;
/// The number of faults that still counts as few.
const FEW: usize = 8;
/// How long nothing is pushed after a fault, without pre-paging.
const HOLD: Duration = Duration::from_millis(100);
/// How often the push looks whether something was put back, where all else has gone.
const ASIDE: Duration = Duration::from_millis(5);

/// The set of pending pages, and the order of the push.
#[derive(Debug)]
pub struct Pending {
    layout: Layout,
    holds: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pages: PageMap,
    /// Pages that are on their way to a memory host: a fault takes them as any other, and the push does not.
    aside: PageMap,
    /// Pages that went as references to a body that another page brings.
    referred: PageMap,
    left: u64,
    prepager: Prepager,
    asked: Option<Instant>,
    /// The latest faults that had to wait for a page to be sent, the oldest first.
    served: VecDeque<Instant>,
}

/// The next step of the push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Send these pages, which are the caller's from now on.
    Send(ChunkIndex, PageSet),
    /// Send nothing for this long.
    Wait(Duration),
    /// The end: no page is pending.
    End,
}

impl Pending {
    /// An empty set.
    #[must_use]
    pub fn new(layout: &Layout, prepaging: Prepaging) -> Self {
        let order = if prepaging == Prepaging::Bubble { Order::Bubbles } else { Order::Linear };
        let (pages, prepager) = (PageMap::empty(layout), Prepager::new(order, layout));
        let state = Mutex::new(State {
            referred: pages.clone(),
            aside: pages.clone(),
            pages,
            left: 0,
            prepager,
            asked: None,
            served: VecDeque::with_capacity(FEW),
        });
        Self { layout: layout.clone(), holds: prepaging == Prepaging::Off, state }
    }

    /// Makes these pages pending.
    pub fn fill(&self, pages: PageMap) {
        let mut state = self.lock();
        (state.left, state.pages) = (pages.len(), pages);
    }

    /// Those of these pages that are not pending, because they were taken already or never there.
    #[must_use]
    pub fn not_in(&self, pages: &PageMap) -> PageMap {
        let mut gone = pages.clone();
        gone.take_out(&self.lock().pages);
        gone
    }

    /// Sets what is pending of a chunk aside, for another way than the push. Returns it.
    #[must_use]
    pub fn set_aside(&self, chunk: ChunkIndex) -> PageSet {
        if chunk.0 >= self.layout.chunks() {
            return PageSet::EMPTY;
        }
        let mut state = self.lock();
        let pages = std::mem::take(state.pages.chunk_mut(chunk));
        state.aside.insert_all(chunk, &pages);
        pages
    }

    /// Of what was set aside these pages are gone, as far as no fault has taken them.
    pub fn went(&self, chunk: ChunkIndex, pages: &PageSet) {
        let mut state = self.lock();
        let gone = state.aside.chunk(chunk).and(pages);
        state.take(chunk, &gone);
    }

    /// And these are to be pushed, after all.
    pub fn put_back(&self, chunk: ChunkIndex, pages: &PageSet) {
        let mut state = self.lock();
        let aside = state.aside.chunk_mut(chunk);
        let back = aside.and(pages);
        *aside = aside.without(&back);
        state.pages.insert_all(chunk, &back);
        state.prepager.again(chunk);
    }

    /// How many pages nobody has taken yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.lock().left
    }

    /// Whether hardly a fault had to wait for its page to be sent in the time before `now`. One that finds its page on
    /// its way does not count: the sooner the push goes, the sooner it comes.
    #[must_use]
    pub fn quiet_for(&self, time: Duration, now: Instant) -> bool {
        let state = self.lock();
        let waited = |first: &Instant| now.saturating_duration_since(*first);
        state.served.len() < FEW || state.served.front().is_none_or(|first| waited(first) >= time)
    }

    /// Notes that pages go as references. Whoever asks for one afterwards lacks its body, and gets it, once.
    pub fn referred(&self, chunk: ChunkIndex, pages: &PageSet) {
        if !pages.is_empty() {
            self.lock().referred.insert_all(chunk, pages);
        }
    }

    /// Whether this page, which is not pending, went as a reference and is asked for all the same: then its body is the
    /// caller's to send.
    #[must_use]
    pub fn owes_body(&self, page: PageIndex) -> bool {
        if page.chunk.0 >= self.layout.chunks() {
            return false;
        }
        let mut state = self.lock();
        let referred = state.referred.chunk_mut(page.chunk);
        let owed = referred.contains(page.page);
        referred.remove(page.page);
        owed
    }

    /// A fault asks for a page at `now`: whether it is the caller's to send. The peer may ask for anything.
    #[must_use]
    pub fn ask(&self, request: &PageRequest, now: Instant) -> bool {
        let page = request.page;
        if self.layout.place(page.chunk).is_none_or(|place| usize::from(page.page) >= place.pages) {
            return false;
        }
        let mut state = self.lock();
        state.asked = Some(now);
        state.prepager.fault(page, request.thread);
        let is_aside = state.aside.chunk(page.chunk).contains(page.page);
        let pending = is_aside || state.pages.chunk(page.chunk).contains(page.page);
        if pending {
            state.take(page.chunk, &[page.page].into_iter().collect());
            if state.served.len() == FEW {
                state.served.pop_front();
            }
            state.served.push_back(now);
        }
        pending
    }

    /// Takes the next pages behind a requested one, up to the first that is not pending. The caller must send them.
    #[must_use]
    pub fn neighbours(&self, request: &PageRequest) -> PageSet {
        let (chunk, page) = (request.page.chunk, usize::from(request.page.page));
        let mut state = self.lock();
        let behind = (page + 1..CHUNK_PAGES.min(page + 1 + NEIGHBOURS)).map(|page| page as u8);
        let pages: PageSet = behind.take_while(|page| state.pages.chunk(chunk).contains(*page)).collect();
        state.take(chunk, &pages);
        pages
    }

    /// What to push at `now`.
    #[must_use]
    pub fn next(&self, now: Instant) -> Next {
        let mut state = self.lock();
        if state.left == 0 {
            return Next::End;
        }
        if self.holds
            && let Some(left) = state.asked.and_then(|asked| HOLD.checked_sub(now.saturating_duration_since(asked)))
        {
            return Next::Wait(left);
        }
        let State { pages, prepager, .. } = &mut *state;
        let Some((chunk, pages)) = prepager.next(pages) else { return Next::Wait(ASIDE) };
        state.take(chunk, &pages);
        Next::Send(chunk, pages)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes pending pages out.
    fn take(&mut self, chunk: ChunkIndex, pages: &PageSet) {
        for map in [&mut self.pages, &mut self.aside] {
            let set = map.chunk_mut(chunk);
            *set = set.without(pages);
        }
        self.left -= pages.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use sterna_protocol::layout::PageIndex;
    use sterna_protocol::spec::BlockSpec;

    use super::*;

    fn pending(prepaging: Prepaging) -> Pending {
        let block = BlockSpec { id: "a".into(), bytes: (40 << 20) + 8192, page_bytes: 4096, path: String::new() };
        let layout = Layout::new(&[block]).unwrap();
        let mut map = PageMap::empty(&layout);
        layout.iter().for_each(|chunk| map.insert_all(chunk, &PageSet::first(layout.place(chunk).unwrap().pages)));
        let pending = Pending::new(&layout, prepaging);
        pending.fill(map);
        pending
    }

    fn request(page: u32) -> PageRequest {
        PageRequest { page: PageIndex { chunk: ChunkIndex(page / 256), page: page as u8 }, thread: 1 }
    }

    #[test]
    fn every_page_is_taken_once_by_faults_and_pushes_at_the_same_time() {
        let (pending, taken) = (pending(Prepaging::Bubble), (0..10_242).map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
        let took = |chunk: ChunkIndex, pages: PageSet| {
            pages.iter().for_each(|page| {
                taken[chunk.index() * 256 + usize::from(page)].fetch_add(1, Ordering::Relaxed);
            });
        };
        std::thread::scope(|scope| {
            for seed in 1..3u32 {
                let (pending, took) = (&pending, &took);
                scope.spawn(move || {
                    let mut random = seed;
                    for _ in 0..20_000 {
                        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let asked = request(random % 11_000);
                        if pending.ask(&asked, Instant::now()) {
                            took(asked.page.chunk, [asked.page.page].into_iter().collect());
                            took(asked.page.chunk, pending.neighbours(&asked));
                        }
                    }
                });
                scope.spawn(move || {
                    while let Next::Send(chunk, pages) = pending.next(Instant::now()) {
                        took(chunk, pages);
                    }
                });
            }
        });
        assert_eq!(pending.left(), 0);
        assert!(taken.iter().all(|times| times.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn pages_that_the_machine_does_not_have_are_not_sent() {
        let (pending, now) = (pending(Prepaging::Bubble), Instant::now());
        for page in [10_242, 11_000, 256 * 41, u32::MAX] {
            assert!(!pending.ask(&request(page), now), "{page}");
        }
        assert!(pending.ask(&request(10_241), now));
        assert!(!pending.ask(&request(10_241), now), "a page goes once");
        assert_eq!(pending.left(), 10_241);
    }

    #[test]
    fn neighbours_are_those_behind_the_page_and_end_where_one_is_on_its_way() {
        let (pending, now) = (pending(Prepaging::Linear), Instant::now());
        assert!(pending.ask(&request(105), now) && pending.ask(&request(100), now));
        assert_eq!(pending.neighbours(&request(100)).iter().collect::<Vec<_>>(), [101, 102, 103, 104]);
        assert_eq!(pending.neighbours(&request(105)).iter().collect::<Vec<_>>(), (106..113).collect::<Vec<_>>());
        assert!(pending.ask(&request(254), now));
        assert_eq!(pending.neighbours(&request(254)).iter().collect::<Vec<_>>(), [255], "no further than the chunk");
        assert!(pending.neighbours(&request(255)).is_empty());
    }

    #[test]
    fn without_pre_paging_the_push_waits_after_a_fault() {
        let (pending, start) = (pending(Prepaging::Off), Instant::now());
        let instant = Duration::from_nanos(1);
        assert!(matches!(pending.next(start), Next::Send(..)), "no fault has come");
        assert!(pending.ask(&request(5000), start));
        assert_eq!(pending.next(start), Next::Wait(HOLD));
        assert_eq!(pending.next(start - instant), Next::Wait(HOLD), "a push that looked at the clock before the fault");
        assert_eq!(pending.next(start + HOLD - instant), Next::Wait(instant));
        assert!(matches!(pending.next(start + HOLD + instant), Next::Send(..)));
    }

    #[test]
    fn a_fault_during_the_wait_of_the_push_prolongs_it_even_where_its_page_is_on_its_way() {
        let (pending, start) = (pending(Prepaging::Off), Instant::now());
        assert!(pending.ask(&request(5000), start));
        assert!(!pending.ask(&request(5000), start + HOLD / 2));
        assert_eq!(pending.next(start + HOLD), Next::Wait(HOLD / 2));
        assert!(matches!(pending.next(start + HOLD * 2), Next::Send(..)));
    }

    #[test]
    fn with_pre_paging_the_push_never_waits() {
        for prepaging in [Prepaging::Bubble, Prepaging::Linear] {
            let (pending, start) = (pending(prepaging), Instant::now());
            assert!(pending.ask(&request(5000), start));
            assert!(matches!(pending.next(start), Next::Send(..)));
        }
    }

    #[test]
    fn what_is_set_aside_is_pushed_only_once_it_is_put_back_and_goes_to_whoever_asks_for_it() {
        let (pending, now) = (pending(Prepaging::Linear), Instant::now());
        let (last, of) = (ChunkIndex(39), |pages: &[u8]| pages.iter().copied().collect::<PageSet>());
        assert_eq!(pending.set_aside(last).len(), 256);
        assert!(pending.set_aside(last).is_empty() && pending.set_aside(ChunkIndex(99)).is_empty());
        assert!(pending.ask(&request(39 * 256 + 7), now) && !pending.ask(&request(39 * 256 + 7), now));
        assert!(pending.neighbours(&request(39 * 256 + 7)).is_empty(), "those are on their way");
        let mut pushed = 0;
        while let Next::Send(chunk, pages) = pending.next(now) {
            assert_ne!(chunk, last);
            pushed += pages.len();
        }
        assert_eq!((pushed, pending.left(), pending.next(now)), (10_242 - 256, 255, Next::Wait(ASIDE)));
        // Of what is gone one was asked for before, and one is asked for too late.
        pending.went(last, &of(&[7, 8, 9]));
        assert!(!pending.ask(&request(39 * 256 + 8), now));
        pending.put_back(last, &of(&[7, 8, 9, 10, 11]));
        assert!(matches!(pending.next(now), Next::Send(chunk, pages) if chunk == last && pages == of(&[10, 11])));
        pending.put_back(last, &PageSet::first(256));
        while let Next::Send(..) = pending.next(now) {}
        assert_eq!((pending.left(), pending.next(now)), (0, Next::End));
    }

    #[test]
    fn it_is_quiet_where_fewer_than_a_few_faults_came_within_the_time() {
        let (pending, start) = (pending(Prepaging::Bubble), Instant::now());
        let (time, ms) = (Duration::from_millis(250), Duration::from_millis(1));
        for fault in 0..FEW as u32 {
            assert!(pending.quiet_for(time, start + ms * fault), "{fault} faults are fewer");
            assert!(pending.ask(&request(fault * 300), start + ms * fault));
        }
        let last = start + ms * (FEW as u32 - 1);
        assert!(!pending.quiet_for(time, last));
        assert!(!pending.quiet_for(time, start - ms), "the clock was looked at before the faults");
        assert!(!pending.quiet_for(time, start + time - Duration::from_nanos(1)));
        assert!(pending.quiet_for(time, start + time), "the first of them is as long ago");
        for _ in 0..100 {
            assert!(!pending.ask(&request(0), start + time));
        }
        assert!(pending.quiet_for(time, start + time), "none of these had to wait for its page to be sent");
        assert!(pending.ask(&request(9000), start + time));
        assert!(!pending.quiet_for(time, start + time), "the second is not");
    }
}
