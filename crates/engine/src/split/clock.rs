//! Which chunk leaves next: a clock with a second chance, as kernels have for page frames.
//!
//! The hand goes round the chunks. A chunk that came back since the hand passed by is wanted, and stays for this round;
//! so what the guest uses stays, as far as there is room, and what it does not use leaves within two rounds.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use sterna_protocol::layout::ChunkIndex;

/// The part of all chunks that are named ahead of the hand, and how many at a time at least.
const AHEAD: u32 = 8;
const AT_A_TIME: u32 = 16;

/// The clock of one guest's chunks. Any number of threads note what comes back; one turns the hand.
#[derive(Debug)]
pub struct Clock {
    /// Came back since the hand passed by.
    wanted: Vec<AtomicBool>,
    hand: AtomicU32,
    /// How far the chunks are named that the hand comes to next: so many ahead of it.
    named: AtomicU32,
}

impl Clock {
    /// Of so many chunks, none of which is wanted.
    #[must_use]
    pub fn new(chunks: u32) -> Self {
        let wanted = (0..chunks).map(|_| AtomicBool::new(false)).collect();
        Self { wanted, hand: AtomicU32::new(0), named: AtomicU32::new(0) }
    }

    /// Notes that the guest wanted a chunk back.
    pub fn came(&self, chunk: ChunkIndex) {
        if let Some(wanted) = self.wanted.get(chunk.index()) {
            wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Chunks that the hand comes to some time from now and that were not named yet: an eighth of all are named ahead
    /// of it, some at a time. Those that it comes to very soon are not among them.
    pub fn ahead(&self) -> Vec<ChunkIndex> {
        let count = self.wanted.len() as u32;
        let far = (count / AHEAD).max((2 * AT_A_TIME).min(count));
        let (some, soon) = (AT_A_TIME.min(far / 2), far / 4);
        let named = self.named.load(Ordering::Relaxed).max(soon);
        if far - named < some || some == 0 {
            return Vec::new();
        }
        self.named.store(far, Ordering::Relaxed);
        let hand = self.hand.load(Ordering::Relaxed);
        (named..far).map(|ahead| ChunkIndex((hand + ahead) % count)).collect()
    }

    /// The next chunk that may leave; `None` where all were passed by once and all were wanted: the next call finds
    /// one.
    pub fn next(&self) -> Option<ChunkIndex> {
        for _ in 0..self.wanted.len() {
            let at = self.hand.load(Ordering::Relaxed);
            self.hand.store((at + 1) % self.wanted.len() as u32, Ordering::Relaxed);
            self.named.store(self.named.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
            if !self.wanted[at as usize].swap(false, Ordering::Relaxed) {
                return Some(ChunkIndex(at));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_back_since_the_last_round_stays_for_one_more() {
        let clock = Clock::new(4);
        let next = |times: usize| (0..times).map(|_| clock.next().map(|chunk| chunk.0)).collect::<Vec<_>>();
        assert_eq!(next(5), [0, 1, 2, 3, 0].map(Some));
        clock.came(ChunkIndex(2));
        clock.came(ChunkIndex(0));
        clock.came(ChunkIndex(9));
        assert_eq!(next(4), [1, 3, 1, 2].map(Some), "0 and 2 once not");
        (0..4).for_each(|chunk| clock.came(ChunkIndex(chunk)));
        assert_eq!(next(2), [None, Some(3)], "all are wanted, and one must go");
        assert_eq!(Clock::new(0).next(), None);
    }

    #[test]
    fn an_eighth_of_all_is_named_ahead_of_the_hand_each_once_a_round_and_many_at_a_time() {
        let clock = Clock::new(256);
        let mut named = Vec::new();
        for turn in 0..256 {
            let ahead: Vec<_> = clock.ahead().into_iter().map(|chunk| chunk.0).collect();
            assert!(ahead.is_empty() || ahead.len() >= AT_A_TIME as usize, "{ahead:?}");
            named.extend(ahead);
            let chunk = clock.next().unwrap().0;
            // But for the first, which come too soon.
            assert!(turn < 8 || named.contains(&chunk), "{chunk} was not named");
        }
        assert_eq!(named[..256], (0..256).map(|chunk| (chunk + 8) % 256).collect::<Vec<_>>());
        assert!(Clock::new(0).ahead().is_empty() && Clock::new(8).ahead().len() == 6);
    }

    /// A guest that uses a part of its chunks over and over, and the others seldom: with room for that part and a
    /// little more, few of its accesses find a chunk away.
    #[test]
    fn a_working_set_that_fits_stays() {
        const CHUNKS: u32 = 100;
        let clock = Clock::new(CHUNKS);
        let mut here = vec![true; CHUNKS as usize];
        let (mut random, mut misses, mut accesses) = (7u64, 0, 0);
        for step in 0..200_000u32 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Of a hundred accesses one is to any chunk, the others to the first thirty.
            let chunk = (random % if step % 100 == 0 { u64::from(CHUNKS) } else { 30 }) as usize;
            if step > 20_000 {
                (accesses, misses) = (accesses + 1, misses + u32::from(!here[chunk]));
            }
            if !here[chunk] {
                here[chunk] = true;
                clock.came(ChunkIndex(chunk as u32));
            }
            while here.iter().filter(|here| **here).count() > 50 {
                if let Some(leaves) = clock.next() {
                    here[leaves.index()] = false;
                }
            }
        }
        assert!(f64::from(misses) < 0.03 * f64::from(accesses), "{misses} of {accesses}");
    }
}
