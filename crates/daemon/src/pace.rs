//! How often something is looked at that costs the more the more there is to see.

use std::time::Duration;

use sterna_sys::process::thread_cpu_time;

/// Has a look taken, and returns how long there is to be none: `least`, or `times` the look's processor time where that
/// is longer. By the clock a look takes any time where the processors are busy, and just then the next one must not be
/// put off for minutes.
pub fn pause_after(least: Duration, times: u32, look: impl FnOnce()) -> Duration {
    let before = thread_cpu_time();
    look();
    least.max(thread_cpu_time().saturating_sub(before) * times)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Failed while the pause was a multiple of the look's time by the clock: on a host whose processors were busy what
    /// forks had left stayed for minutes.
    #[test]
    fn a_look_that_had_to_wait_is_followed_by_the_next_one_soon_and_one_that_worked_is_paid_for() {
        let least = Duration::from_millis(20);
        assert_eq!(pause_after(least, 50, || std::thread::sleep(Duration::from_millis(400))), least);
        let works = || {
            let begun = thread_cpu_time();
            while thread_cpu_time() - begun < Duration::from_millis(100) {}
        };
        assert!(pause_after(least, 50, works) >= Duration::from_secs(5));
    }
}
