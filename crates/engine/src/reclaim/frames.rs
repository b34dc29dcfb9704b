//! Page frames as runs: sorted, disjoint.

use std::ops::Range;

pub use sterna_introspect::runs::{count, sorted};

/// Runs of page frames: sorted, disjoint.
pub type Frames = Vec<Range<u64>>;

/// Frames that are in both.
pub fn both(one: &[Range<u64>], other: &[Range<u64>]) -> Frames {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut found = Frames::new();
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let (start, end) = (a.start.max(b.start), a.end.min(b.end));
        if start < end {
            found.push(start..end);
        }
        if a.end < b.end {
            one.next();
        } else {
            other.next();
        }
    }
    found
}

/// Runs without those frames that are fewer than `least` in their unit, of `unit` frames each, which make up `units`:
/// each run of those begins and ends where a unit does.
pub fn but_few(frames: &[Range<u64>], units: &[Range<u64>], unit: u64, least: u64) -> Frames {
    let mut few: Frames = Frames::new();
    for units in units {
        few.extend((units.start..units.end).step_by(unit as usize).map(|start| start..start + unit));
    }
    let mut inside = both(frames, &few).into_iter().peekable();
    few.retain(|unit| {
        let mut found = 0;
        while let Some(run) = inside.next_if(|run| run.start < unit.end) {
            found += run.end - run.start;
        }
        found < least
    });
    without(frames, &few)
}

/// Frames of the first that are not in the second.
fn without(frames: &[Range<u64>], others: &[Range<u64>]) -> Frames {
    let (mut left, mut others) = (Frames::new(), others.iter().peekable());
    for run in frames {
        let mut start = run.start;
        while others.next_if(|other| other.end <= start).is_some() {}
        while let Some(other) = others.peek().filter(|other| other.start < run.end) {
            left.extend((start < other.start).then_some(start..other.start));
            start = other.end;
            if other.end > run.end {
                break;
            }
            others.next();
        }
        left.extend((start < run.end).then_some(start..run.end));
    }
    left
}

/// Runs, taken portion by portion.
#[derive(Debug)]
pub struct Portions {
    /// The last first.
    left: Frames,
}

impl Portions {
    /// All of these.
    pub fn of(mut frames: Frames) -> Self {
        frames.reverse();
        Self { left: frames }
    }

    /// The next of them, as many as `limit` allows where each run counts `run_pages` more than its frames; one at
    /// least, nothing at the end.
    pub fn next(&mut self, limit: u64, run_pages: u64) -> Frames {
        let (mut portion, mut room) = (Frames::new(), limit.max(run_pages + 1));
        while room > run_pages
            && let Some(run) = self.left.pop()
        {
            let frames = (run.end - run.start).min(room - run_pages);
            portion.push(run.start..run.start + frames);
            room -= frames + run_pages;
            if run.start + frames < run.end {
                self.left.push(run.start + frames..run.end);
            }
        }
        portion
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Frames> {
        prop::collection::vec((0..200_u64, 0..20_u64), 0..12)
            .prop_map(|runs| sorted(runs.into_iter().map(|(start, length)| start..start + length).collect()))
    }

    fn set(frames: &[Range<u64>]) -> BTreeSet<u64> {
        frames.iter().cloned().flatten().collect()
    }

    proptest! {
        #[test]
        fn runs_are_the_sets_that_they_stand_for(one in frames(), other in frames()) {
            let shared = both(&one, &other);
            prop_assert_eq!(set(&shared), &set(&one) & &set(&other));
            prop_assert!(shared.is_sorted_by(|a, b| a.end <= b.start));
            prop_assert_eq!(count(&shared), set(&shared).len() as u64);
        }

        #[test]
        fn few_of_a_unit_are_left_out_and_all_others_stay(all in frames(), units in frames(), least in 0..9_u64) {
            let units = sorted(units.into_iter().map(|run| run.start * 8..run.end * 8).collect());
            let found = set(&but_few(&all, &units, 8, least));
            for unit in 0..30 {
                let of_it: BTreeSet<u64> = set(&all).range(unit * 8..(unit + 1) * 8).copied().collect();
                let few = set(&units).contains(&(unit * 8)) && (of_it.len() as u64) < least;
                let stay: BTreeSet<u64> = found.range(unit * 8..(unit + 1) * 8).copied().collect();
                prop_assert_eq!(stay, if few { BTreeSet::new() } else { of_it });
            }
        }

        #[test]
        fn portions_are_all_there_is_once_and_within_their_limit(all in frames(), limit in 0..64_u64) {
            let mut portions = Portions::of(all.clone());
            let mut taken = Frames::new();
            loop {
                let portion = portions.next(limit, 4);
                if portion.is_empty() {
                    break;
                }
                prop_assert!(count(&portion) + 4 * portion.len() as u64 <= limit.max(5));
                taken.extend(portion);
            }
            prop_assert_eq!(count(&taken), count(&all));
            prop_assert_eq!(sorted(taken), all);
        }
    }
}
