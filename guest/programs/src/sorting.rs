use crate::random::Random;

/// Parts of so few elements are sorted by insertion.
const SMALL: usize = 32;
/// Elements between two calls of whoever wants to know how far it is: a few milliseconds of an emulated processor.
const STRIDE: usize = 16 * 1024;

/// One round of `quicksort`: fills `numbers` from a seed, sorts them, and checks that they are sorted and still the same
/// numbers. `progress` is told again and again how many elements were visited since the last time; about [`visits`] in all.
///
/// Returns whether the check went well: in a guest whose memory is whole it always does.
pub fn fill_sort_check(numbers: &mut [u64], seed: u64, progress: &mut impl FnMut(usize)) -> bool {
    let mut random = Random::new(seed);
    let mut sum = 0_u64;
    for part in numbers.chunks_mut(STRIDE) {
        for number in part.iter_mut() {
            *number = random.next_u64();
            sum = sum.wrapping_add(*number);
        }
        progress(part.len());
    }
    quicksort(numbers, progress);
    let (mut last, mut sorted) = (0, true);
    for part in numbers.chunks(STRIDE) {
        for &number in part {
            sorted &= last <= number;
            last = number;
            sum = sum.wrapping_sub(number);
        }
        progress(part.len());
    }
    sorted && sum == 0
}

/// How many elements [`fill_sort_check`] visits with so many random numbers: by it a part of a sort is told from a whole one.
///
/// Each partition visits its elements once: with the median of three as pivot that is 12/7 · n · ln n in the mean, and a
/// multiple of n that depends on where insertion takes over (Sedgewick, "The analysis of Quicksort programs", 1977). One
/// sort differs from another by some 0.6 n.
#[must_use]
pub fn visits(count: usize) -> f64 {
    /// Filling, checking, insertion, and what the leading term leaves out: measured with [`SMALL`] as it is.
    const LINEAR: f64 = 4.2;
    let n = count as f64;
    n * (12.0 / 7.0 * (n / SMALL as f64).max(1.0).ln() + LINEAR)
}

/// Hoare's quicksort with the median of three as pivot; the larger part waits, so that few parts ever do.
fn quicksort(numbers: &mut [u64], progress: &mut impl FnMut(usize)) {
    let mut waiting = Vec::with_capacity(64);
    let mut small = 0;
    let mut part = Some((0, numbers.len()));
    while let Some((from, to)) = part {
        if to - from <= SMALL {
            insertion(&mut numbers[from..to]);
            small += to - from;
            if small >= STRIDE {
                progress(std::mem::take(&mut small));
            }
            part = waiting.pop();
            continue;
        }
        let middle = from + partition(&mut numbers[from..to], progress);
        let (left, right) = ((from, middle), (middle, to));
        let (shorter, longer) = if middle - from < to - middle { (left, right) } else { (right, left) };
        waiting.push(longer);
        part = Some(shorter);
    }
    progress(small);
}

fn insertion(numbers: &mut [u64]) {
    for end in 1..numbers.len() {
        let number = numbers[end];
        let mut at = end;
        while at > 0 && numbers[at - 1] > number {
            numbers[at] = numbers[at - 1];
            at -= 1;
        }
        numbers[at] = number;
    }
}

/// Puts what is not above a pivot before what is not below it; both parts have elements. Returns where the second begins.
fn partition(numbers: &mut [u64], progress: &mut impl FnMut(usize)) -> usize {
    let last = numbers.len() - 1;
    let mut three = [numbers[0], numbers[last / 2], numbers[last]];
    three.sort_unstable();
    let pivot = three[1];
    let (mut low, mut high, mut told) = (0, last, 0);
    loop {
        // Neither runs out: the pivot, or a swapped element, stops it.
        while numbers[low] < pivot {
            low += 1;
        }
        while numbers[high] > pivot {
            high -= 1;
        }
        if low >= high {
            break;
        }
        numbers.swap(low, high);
        low += 1;
        high -= 1;
        let visited = low + (last - high);
        if visited - told >= STRIDE {
            progress(visited - told);
            told = visited;
        }
    }
    progress(numbers.len().saturating_sub(told));
    low.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_numbers_are_sorted() {
        let many = |count: usize, value: fn(usize) -> u64| (0..count).map(value).collect::<Vec<_>>();
        let mut random = Random::new(3);
        for count in [0, 1, 2, 31, 32, 33, 34, 100, 1000, 10_007] {
            let mut cases = vec![
                many(count, |_| 7),
                many(count, |at| at as u64),
                many(count, |at| u64::MAX - at as u64),
                many(count, |at| at as u64 % 3),
                many(count, |at| (at as u64).min(1_000_000 - at as u64)),
            ];
            cases.push((0..count).map(|_| random.next_u64()).collect());
            for mut numbers in cases {
                let mut expected = numbers.clone();
                expected.sort_unstable();
                quicksort(&mut numbers, &mut |_| {});
                assert_eq!(numbers, expected);
            }
        }
    }

    #[test]
    fn sorts_visit_as_many_elements_as_predicted() {
        for count in [2_000, 20_000, 200_000] {
            let mut visited = 0;
            for seed in 0..10 {
                assert!(fill_sort_check(&mut vec![0; count], seed, &mut |elements| visited += elements));
            }
            let share = visited as f64 / 10.0 / visits(count);
            assert!((0.95..1.05).contains(&share), "{count}: {visited} is {share:.3} of what was predicted");
        }
    }

    #[test]
    fn progress_comes_in_small_steps() {
        let mut largest = 0;
        fill_sort_check(&mut vec![0; 500_000], 5, &mut |elements| largest = elements.max(largest));
        assert!((1..=2 * STRIDE).contains(&largest), "{largest}");
    }

    #[test]
    fn memory_that_changes_under_the_sort_is_noticed() {
        let mut numbers = vec![0; 100_000];
        let address = numbers.as_mut_ptr();
        let mut steps = 0;
        let whole = fill_sort_check(&mut numbers, 5, &mut |_| {
            steps += 1;
            if steps == 3 {
                // SAFETY: within the numbers, by this thread; the sort holds no element across the call.
                unsafe { *address ^= 1 << 40 };
            }
        });
        assert!(!whole);
    }
}
