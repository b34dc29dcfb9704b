//! Reading the RAM of a guest some of whose pages are elsewhere, and come and go meanwhile.
//!
//! A page that leaves is away on record before it is taken out of the file, and one that comes is in the file before it
//! is here on record. So what was read of a page is its content where it was here before and after, and nothing of its
//! chunk has come in between: then it was here all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_api::Problem;
use sterna_protocol::layout::ChunkIndex;
use sterna_protocol::pages::{PageMap, PageSet};

/// How often it is tried to read a page that leaves meanwhile.
const ATTEMPTS: u32 = 8;

/// What knows of a guest's pages that are elsewhere, and brings them.
pub trait PagesElsewhere: Send + Sync {
    /// All pages that are not here.
    fn away(&self) -> PageMap;

    /// The pages of a chunk that are not here, and how often some of the chunk have come.
    fn presence(&self, chunk: ChunkIndex) -> (PageSet, u32);

    /// Brings those of these pages that are not here, perhaps others with them. Returns how many have come.
    ///
    /// # Errors
    /// Whoever has them does not answer.
    fn bring(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<u64, Problem>;
}

/// Reads what is here, and has come what is not, as far as that is allowed.
pub(super) struct Fetching {
    from: Arc<dyn PagesElsewhere>,
    /// How many pages may still come.
    budget: AtomicU64,
    only_here: AtomicBool,
    fell_short: AtomicBool,
}

impl Fetching {
    /// From there, so many pages at most.
    pub fn new(from: Arc<dyn PagesElsewhere>, budget: u64) -> Self {
        Self {
            from,
            budget: AtomicU64::new(budget),
            only_here: AtomicBool::new(false),
            fell_short: AtomicBool::new(false),
        }
    }

    /// Whether nothing comes from now on: what is not here is unreadable.
    pub fn only_here(&self, only: bool) {
        self.only_here.store(only, Ordering::Relaxed);
    }

    /// Calls `read`, which reads these pages in the file, until what it has read is theirs. Returns whether it is.
    pub fn read(&self, pages: &[(ChunkIndex, PageSet)], read: impl FnMut() -> bool) -> bool {
        let is_theirs = self.try_to_read(pages, read);
        self.fell_short.fetch_or(!is_theirs, Ordering::Relaxed);
        is_theirs
    }

    /// Whether something was not read, as it is elsewhere and did not come.
    pub fn fell_short(&self) -> bool {
        self.fell_short.load(Ordering::Relaxed)
    }

    fn try_to_read(&self, pages: &[(ChunkIndex, PageSet)], mut read: impl FnMut() -> bool) -> bool {
        (0..ATTEMPTS).any(|_| {
            let before: Vec<_> = pages.iter().map(|(chunk, _)| self.from.presence(*chunk)).collect();
            let missing = pages.iter().zip(&before).map(|((chunk, set), (away, _))| (*chunk, set.and(away)));
            let missing: Vec<_> = missing.filter(|(_, set)| !set.is_empty()).collect();
            if !missing.is_empty() {
                missing.iter().for_each(|(chunk, set)| self.bring(*chunk, set));
                return false;
            }
            let all = || pages.iter().zip(&before);
            read()
                && all().all(|((chunk, set), (_, arrivals))| {
                    let (away, now) = self.from.presence(*chunk);
                    now == *arrivals && set.and(&away).is_empty()
                })
        })
    }

    fn bring(&self, chunk: ChunkIndex, pages: &PageSet) {
        if self.only_here.load(Ordering::Relaxed) || self.budget.load(Ordering::Relaxed) == 0 {
            return;
        }
        let came = self.from.bring(chunk, pages).unwrap_or_else(|problem| {
            tracing::debug!("pages that were to be looked at did not come: {}", problem.with_causes());
            // Whoever asks again would wait as long.
            u64::MAX
        });
        let less = |budget: u64| Some(budget.saturating_sub(came));
        let _ = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

impl std::fmt::Debug for Fetching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetching").field("budget", &self.budget).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use sterna_api::{Blame, Code};

    use super::*;

    /// One chunk; what is away of it, how often some came, and what happens at each question.
    #[derive(Default)]
    struct Chunk {
        now: Mutex<(PageSet, u32)>,
        brings: bool,
    }

    impl PagesElsewhere for Chunk {
        fn away(&self) -> PageMap {
            unreachable!()
        }

        fn presence(&self, _: ChunkIndex) -> (PageSet, u32) {
            *self.now.lock().unwrap()
        }

        fn bring(&self, _: ChunkIndex, pages: &PageSet) -> Result<u64, Problem> {
            if !self.brings {
                return Err(Problem::new(Code::PeerUnreachable, Blame::Peer, "nobody answers"));
            }
            let mut now = self.now.lock().unwrap();
            *now = (now.0.without(pages), now.1 + 1);
            Ok(pages.len() as u64)
        }
    }

    const AT: ChunkIndex = ChunkIndex(0);

    fn one(page: u8) -> PageSet {
        [page].into_iter().collect()
    }

    #[test]
    fn what_is_away_comes_within_the_budget_and_is_read_then() {
        let chunk = Arc::new(Chunk { brings: true, ..Chunk::default() });
        chunk.now.lock().unwrap().0 = [3, 4].into_iter().collect();
        let from: Arc<dyn PagesElsewhere> = Arc::<Chunk>::clone(&chunk);
        let fetching = Fetching::new(from, 1);
        fetching.only_here(true);
        assert!(!fetching.read(&[(AT, one(3))], || panic!("it is not here")));
        fetching.only_here(false);
        assert!(fetching.read(&[(AT, one(3))], || true) && fetching.read(&[(AT, one(9))], || true));
        assert!(fetching.fell_short(), "at first");
        assert!(!fetching.read(&[(AT, one(4))], || panic!("one was allowed")));
        assert!(!fetching.read(&[(AT, one(3))], || false), "the file cannot be read");
    }

    #[test]
    fn a_page_that_leaves_while_it_is_read_is_read_again_also_where_it_is_back_in_time() {
        let chunk = Arc::new(Chunk { brings: true, ..Chunk::default() });
        let from: Arc<dyn PagesElsewhere> = Arc::<Chunk>::clone(&chunk);
        let fetching = Fetching::new(from, u64::MAX);
        let mut reads = 0;
        let read = || {
            reads += 1;
            let mut now = chunk.now.lock().unwrap();
            match reads {
                1 => now.0 = one(3),
                2 => now.1 += 1,
                _ => {}
            }
            true
        };
        assert!(fetching.read(&[(AT, one(3))], read));
        assert_eq!(reads, 3, "it had left, and had left and come back");
        let silent = Arc::new(Chunk::default());
        silent.now.lock().unwrap().0 = one(3);
        assert!(!Fetching::new(silent, u64::MAX).read(&[(AT, one(3))], || panic!("it is not here")));
    }
}
