//! Page frames as runs.

use std::ops::Range;

/// Page frames as runs: sorted, disjoint, not adjacent to each other.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    runs: Vec<Range<u64>>,
    limit: usize,
    /// Frames that were left out because there was no room for their run.
    pub left_out: u64,
}

impl Runs {
    /// Room for at most `limit` runs. Where a guest's free pages are more scattered than that, some are left out.
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Adds frames behind all that were added before; frames that are not behind them are left out.
    pub fn push(&mut self, frames: Range<u64>) {
        if frames.is_empty() {
            return;
        }
        let full = self.runs.len() >= self.limit;
        match self.runs.last_mut() {
            Some(last) if last.end == frames.start => last.end = frames.end,
            Some(last) if frames.start < last.end => self.left_out += frames.end - frames.start,
            _ if full => self.left_out += frames.end - frames.start,
            _ => self.runs.push(frames),
        }
    }

    pub fn into_inner(self) -> Vec<Range<u64>> {
        self.runs
    }
}

/// The number of frames in these runs.
#[must_use]
pub fn count(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end.saturating_sub(run.start)).fold(0, u64::saturating_add)
}

/// Sorts runs and joins those that touch or overlap.
#[must_use]
pub fn sorted(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
    runs.retain(|run| run.start < run.end);
    runs.sort_unstable_by_key(|run| run.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => joined.push(run),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_run_and_what_is_too_much_or_out_of_order_is_left_out() {
        let mut runs = Runs::new(2);
        for run in [0..4, 4..8, 8..8, 2..3, 16..17, 32..64, 17..20] {
            runs.push(run);
        }
        assert_eq!(runs.left_out, 33);
        let runs = runs.into_inner();
        assert_eq!(runs, [0..8, 16..20]);
        assert_eq!(count(&runs), 12);
    }
}
