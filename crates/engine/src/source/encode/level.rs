//! The choice of a compression level where the options name none: the highest that keeps the link busy.
//!
//! The threads that encode and those that send wait for each other at a short queue, and the waits show the bottleneck:
//! senders wait for the processor, encoders for the link. So the rule goes down a step in the first case and up in the
//! second. Two exceptions keep it from errors. A step down is not always quicker (pages that shrink to a tenth may be
//! worth a busy processor), so a step that was tried and moved fewer pages per second is not tried again for a while.
//! And a window in which neither waits for long changes nothing.

use std::time::Duration;

/// The share of a window that senders or encoders must have waited, so that the window counts.
const WAITED: f64 = 0.1;
/// A quicker step moves at least this many times as many pages as another: a smaller difference is chance.
const QUICKER: f64 = 1.03;
/// The number of windows after which a step's speed is forgotten and it is tried again: the guest's memory and the link
/// change.
const FORGOTTEN: u32 = 40;

/// What was seen in a window of time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Window {
    /// Its length.
    pub length: Duration,
    /// Pages that were encoded, in any encoding.
    pub pages: u64,
    /// The mean time that a thread that sends waited for the next frame.
    pub senders_waited: Duration,
    /// The mean time that a thread that encodes waited for room in the queue.
    pub encoders_waited: Duration,
}

/// The chooser of a step on a ladder: 0 is plain, and each higher step takes more time and yields fewer bytes.
#[derive(Debug, Clone)]
pub struct Chooser {
    step: usize,
    window: u32,
    known: Vec<Option<Speed>>,
}

#[derive(Debug, Clone, Copy)]
struct Speed {
    pages_per_s: f64,
    window: u32,
}

impl Chooser {
    /// A chooser on a ladder of this many steps, which begins at this one.
    ///
    /// # Panics
    /// Where the step is not on the ladder.
    #[must_use]
    pub fn new(steps: usize, step: usize) -> Self {
        assert!(step < steps, "step {step} of {steps}");
        Self { step, window: 0, known: vec![None; steps] }
    }

    /// The step to take.
    #[must_use]
    pub fn step(&self) -> usize {
        self.step
    }

    /// Chooses a step after a window, all of which was spent on the step last chosen.
    pub fn seen(&mut self, window: &Window) {
        let length = window.length.as_secs_f64();
        if length <= 0.0 || window.pages == 0 {
            return;
        }
        self.window += 1;
        for speed in &mut self.known {
            *speed = speed.filter(|speed| self.window - speed.window < FORGOTTEN);
        }
        let pages_per_s = window.pages as f64 / length;
        self.known[self.step] = Some(Speed { pages_per_s, window: self.window });
        let waited = |waited: Duration| waited.as_secs_f64() / length >= WAITED;
        let target = match (waited(window.senders_waited), waited(window.encoders_waited)) {
            (true, false) => self.step.checked_sub(1),
            (false, true) => Some(self.step + 1).filter(|step| *step < self.known.len()),
            _ => None,
        };
        if let Some(step) = target
            && self.known[step].is_none_or(|there| there.pages_per_s > pages_per_s * QUICKER)
        {
            self.step = step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a step costs and yields: nanoseconds of a processor for a page, and the bytes it becomes.
    type Ladder = [(f64, f64)];

    /// As measured on pages of a booted guest: plain, then zstd −5, −1, 1, 3, 6.
    const GUEST: &Ladder =
        &[(350.0, 4096.0), (4800.0, 2300.0), (5700.0, 1900.0), (6600.0, 1770.0), (12e3, 1730.0), (30e3, 1690.0)];

    /// A window on a simulated link: the slower of processor and link decides, and the other waits for it.
    fn window(ladder: &Ladder, step: usize, threads: f64, bytes_per_s: f64) -> Window {
        let (ns, bytes) = ladder[step];
        let (encoded, sent) = (threads * 1e9 / ns, bytes_per_s / bytes);
        let pages_per_s = encoded.min(sent);
        let wait = |could: f64| Duration::from_secs_f64(0.05 * (1.0 - pages_per_s / could));
        Window {
            length: Duration::from_millis(50),
            pages: (pages_per_s * 0.05) as u64,
            senders_waited: wait(sent),
            encoders_waited: wait(encoded),
        }
    }

    /// Pages per second on average over a while, and the step at its end.
    fn run(chooser: &mut Chooser, ladder: &Ladder, threads: f64, bytes_per_s: f64) -> (f64, usize) {
        let windows = 400;
        let mut pages = 0;
        for _ in 0..windows {
            let seen = window(ladder, chooser.step(), threads, bytes_per_s);
            pages += seen.pages;
            chooser.seen(&seen);
        }
        (pages as f64 / (f64::from(windows) * 0.05), chooser.step())
    }

    /// The most pages per second that any step moves.
    fn best(ladder: &Ladder, threads: f64, bytes_per_s: f64) -> f64 {
        (0..ladder.len()).map(|step| window(ladder, step, threads, bytes_per_s).pages as f64 / 0.05).fold(0.0, f64::max)
    }

    #[test]
    fn a_slow_link_is_worth_a_high_level_and_a_quick_one_none() {
        let step = |bytes_per_s| run(&mut Chooser::new(6, 2), GUEST, 2.0, bytes_per_s).1;
        assert_eq!(step(10e6), 5, "10 MB/s: the processor has all the time");
        assert_eq!(step(4e9), 0, "4 GB/s: any compression slows down");
        let between = [50e6, 125e6, 300e6, 600e6, 1.2e9, 4e9].map(step);
        assert!(between.is_sorted_by(|a, b| a >= b), "the quicker the link, the lower the level: {between:?}");
    }

    #[test]
    fn on_any_link_nearly_as_much_moves_as_with_the_best_level() {
        for bytes_per_s in [10e6, 50e6, 125e6, 300e6, 600e6, 1.2e9, 4e9, 10e9] {
            for threads in [1.0, 2.0, 4.0, 16.0] {
                let (moved, step) = run(&mut Chooser::new(6, 2), GUEST, threads, bytes_per_s);
                let best = best(GUEST, threads, bytes_per_s);
                assert!(
                    moved > 0.9 * best,
                    "{bytes_per_s} B/s, {threads} threads: step {step}, {moved:.0} of {best:.0}"
                );
            }
        }
    }

    #[test]
    fn memory_that_shrinks_to_nothing_is_compressed_though_the_processor_is_the_bottleneck() {
        let shrinks = [(350.0, 4096.0), (2000.0, 100.0)];
        let (_, step) = run(&mut Chooser::new(2, 1), &shrinks, 1.0, 125e6);
        assert_eq!(step, 1, "500,000 pages/s compressed and 30,000 plain, and the senders wait");
    }

    #[test]
    fn a_link_that_changes_is_followed() {
        let mut chooser = Chooser::new(6, 2);
        assert_eq!(run(&mut chooser, GUEST, 2.0, 4e9).1, 0);
        assert_eq!(run(&mut chooser, GUEST, 2.0, 10e6).1, 5);
        assert_eq!(run(&mut chooser, GUEST, 2.0, 4e9).1, 0);
    }

    #[test]
    fn windows_that_say_nothing_change_nothing() {
        let mut chooser = Chooser::new(6, 2);
        let length = Duration::from_millis(50);
        chooser.seen(&Window::default());
        chooser.seen(&Window { length, pages: 5, ..Window::default() });
        chooser.seen(&Window { length, pages: 5, senders_waited: length / 2, encoders_waited: length / 2 });
        assert_eq!(chooser.step(), 2);
        let busy = Window { length, pages: 5, encoders_waited: length, ..Window::default() };
        (0..50).for_each(|_| chooser.seen(&busy));
        assert!(chooser.step() < 6, "there is nothing above the ladder's end");
    }
}
