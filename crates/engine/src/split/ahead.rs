//! Which pages of a chunk come along with the one that is waited for.
//!
//! A page is on a link of 1 Gbit/s for 33 µs, a chunk for 9 ms, and what comes makes other pages leave. So a guest that
//! reads here and there is to have the pages it asks for and no others, and one that goes through its memory is not to
//! wait for each page. Its faults tell them apart, as reads of a file tell a kernel how far to read ahead: each further
//! fault in one of the last chunks with faults has four times as many pages come as the one before. Who has a whole
//! chunk come has the next one come whole, too.

use std::collections::VecDeque;

use sterna_protocol::layout::{CHUNK_PAGES, ChunkIndex, PageIndex};
use sterna_protocol::pages::PageSet;

/// How many chunks are remembered. A guest that jumps about in many more seldom finds one of them again.
const RECENT: usize = 16;
/// How many pages come with the second fault in a chunk, and how many times more with each further one.
const WIDER: usize = 4;

/// The chunks in which a guest waited for pages, and where.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The latest is the first.
    trails: VecDeque<Trail>,
}

/// The faults in one chunk.
#[derive(Debug)]
struct Trail {
    chunk: ChunkIndex,
    last: u8,
    /// From the fault before to the last one; 0 where there was none.
    step: i16,
    /// The step of a guest that takes the same one again and again, where that is not to the next page; 0 where not.
    stride: i16,
    /// How many pages come with the last one.
    width: usize,
}

impl Ahead {
    /// Somebody waits for a page. Which pages of its chunk, of those that are `left`, are to come as well.
    pub fn wanted(&mut self, page: PageIndex, left: &PageSet) -> PageSet {
        let known = self.trails.iter().position(|trail| trail.chunk == page.chunk);
        let trail = match known.and_then(|at| self.trails.remove(at)) {
            Some(trail) => trail.goes_on(page.page),
            None => self.begin(page),
        };
        let pages = trail.pages().and(left);
        self.trails.push_front(trail);
        self.trails.truncate(RECENT);
        pages
    }

    /// A trail in another chunk: one of the whole chunk, where the guest comes from such a one beside it.
    fn begin(&self, page: PageIndex) -> Trail {
        let beside = |trail: &&Trail| trail.chunk.0.abs_diff(page.chunk.0) == 1 && trail.width == CHUNK_PAGES;
        let width = self.trails.iter().find(beside).map_or(0, |trail| trail.width);
        Trail { chunk: page.chunk, last: page.page, step: 0, stride: 0, width }
    }
}

impl Trail {
    fn goes_on(self, page: u8) -> Self {
        let step = i16::from(page) - i16::from(self.last);
        let again = step == self.step && step.abs() > 1;
        // Who is given the next steps faults some of them later.
        let along = self.stride != 0 && step % self.stride == 0;
        let stride = if again { step } else { self.stride * i16::from(along) };
        Self { last: page, step, stride, width: (self.width * WIDER).clamp(WIDER, CHUNK_PAGES), ..self }
    }

    /// The pages that are to come: the next ones in the direction of the guest, in steps of its stride.
    fn pages(&self) -> PageSet {
        if self.stride == 0 && self.width == CHUNK_PAGES {
            return PageSet::first(CHUNK_PAGES);
        }
        let step = match self.stride {
            0 if self.step < 0 => -1,
            0 => 1,
            stride => stride,
        };
        let steps = (1..=self.width as i32).map(|count| i32::from(self.last) + count * i32::from(step));
        steps.map_while(|page| u8::try_from(page).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = CHUNK_PAGES;

    fn page(chunk: u32, page: u8) -> PageIndex {
        PageIndex { chunk: ChunkIndex(chunk), page }
    }

    /// How many pages come with each of these, where all are away.
    fn counts(ahead: &mut Ahead, pages: impl IntoIterator<Item = PageIndex>) -> Vec<usize> {
        pages.into_iter().map(|page| ahead.wanted(page, &PageSet::first(ALL)).len()).collect()
    }

    #[test]
    fn a_guest_that_reads_here_and_there_has_what_it_asks_for() {
        let mut ahead = Ahead::default();
        assert_eq!(counts(&mut ahead, (0..200).map(|n| page(n * 37 % 101, 9))), [0; 200]);
    }

    #[test]
    fn a_guest_that_goes_through_its_memory_has_ever_more_and_then_whole_chunks() {
        let (mut ahead, mut here, mut faults) = (Ahead::default(), PageSet::EMPTY, Vec::new());
        for number in 0..=255_u8 {
            here = PageSet::first(usize::from(number)).or(&here);
            if !here.contains(number) {
                faults.push(number);
                here = here.or(&ahead.wanted(page(5, number), &PageSet::first(ALL).without(&here)));
            }
        }
        assert_eq!(faults, [0, 1, 6, 23, 88]);
        assert_eq!(counts(&mut ahead, [page(6, 0), page(8, 0), page(7, 0)]), [ALL, 0, ALL]);
    }

    #[test]
    fn one_that_goes_backwards_has_the_pages_before() {
        let mut ahead = Ahead::default();
        assert_eq!(counts(&mut ahead, [page(5, 200), page(5, 199)]), [0, 4]);
        let (left, before) = (PageSet::first(197), [193, 194, 195, 196].into_iter().collect());
        assert_eq!(ahead.wanted(page(5, 197), &left).and(&before), before);
        assert_eq!(ahead.wanted(page(4, 255), &left), PageSet::EMPTY, "not yet whole chunks");
    }

    #[test]
    fn one_that_takes_the_same_step_again_is_followed_in_such_steps() {
        let mut ahead = Ahead::default();
        let left = PageSet::first(ALL);
        let mut wanted = |number: u8| ahead.wanted(page(5, number), &left);
        assert_eq!((wanted(0).len(), wanted(8).len()), (0, 4));
        assert_eq!(wanted(16), (3..19).map(|step| step * 8).collect());
        assert_eq!(wanted(152), (20..32).map(|step| step * 8).collect());
        assert_eq!(wanted(153), left, "it takes other steps now");
    }

    #[test]
    fn only_what_is_away_comes_and_old_chunks_are_forgotten() {
        let mut ahead = Ahead::default();
        let left: PageSet = [3, 4].into_iter().collect();
        assert!(ahead.wanted(page(5, 1), &left).is_empty());
        assert_eq!(ahead.wanted(page(5, 2), &left), left);
        counts(&mut ahead, (0..RECENT as u32).map(|n| page(20 + 2 * n, 0)));
        assert!(ahead.wanted(page(5, 0), &left).is_empty());
        assert_eq!(ahead.trails.len(), RECENT);
    }
}
