//! Work on several machines at a time: one whose QEMU does not answer holds up only itself.

use std::sync::{Mutex, PoisonError};

/// The most machines at a time.
const THREADS: usize = 32;

/// The results of `make` for the items, in their order.
pub fn map<T: Send, R: Send>(items: Vec<T>, make: impl Fn(T) -> R + Sync) -> Vec<R> {
    let count = items.len();
    let (left, done) = (Mutex::new(items.into_iter().enumerate()), Mutex::new(Vec::with_capacity(count)));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((index, item)) = next() {
            let made = make(item);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((index, made));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(count) {
            // Where the host has no thread to spare, the threads that exist do all the work.
            let _ = std::thread::Builder::new().name("several".into()).spawn_scoped(scope, work);
        }
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn those_behind_one_that_waits_do_not_wait_and_the_order_stays() {
        // Each item waits for another: one at a time they would wait for ever.
        let pair = Barrier::new(2);
        let doubled = map((0..100).collect(), |number: u32| {
            pair.wait();
            number * 2
        });
        assert_eq!(doubled, (0..100).map(|number| number * 2).collect::<Vec<_>>());
        assert!(map(Vec::<u32>::new(), |number| number).is_empty());
    }
}
