//! Quiet: while a guest stands still, the other migrations away from its host begin to send nothing, so that what it
//! waits for meets an idle link, and both hosts' processors have time for it. Pauses take milliseconds, and so does
//! what the others wait.
//!
//! It is an allowance, not a right: when it is used up (a pause that has much to send, or very many pauses) the others
//! go on. It grows again with time.

use std::time::{Duration, Instant};

/// The most quiet that there is at a time.
const ALLOWANCE: Duration = Duration::from_millis(300);
/// The allowance grows by one part in so many of the time without quiet.
const GROWS: u32 = 5;

/// How long there is quiet.
#[derive(Debug)]
pub(super) struct Quiet {
    /// Since when there is quiet, and whether that counts.
    since: Option<(Instant, bool)>,
    /// What was left of the allowance when the quiet began, or when the last one ended.
    left: Duration,
    /// When the last one ended.
    ended: Option<Instant>,
}

impl Default for Quiet {
    fn default() -> Self {
        Self { since: None, left: ALLOWANCE, ended: None }
    }
}

impl Quiet {
    /// A guest is about to stand still. Where there is quiet already, that one goes on.
    pub fn begin(&mut self, now: Instant) {
        if self.since.is_none() {
            let grown = self.ended.map_or(ALLOWANCE, |ended| now.saturating_duration_since(ended) / GROWS);
            self.left = self.left.saturating_add(grown).min(ALLOWANCE);
            self.since = Some((now, false));
        }
    }

    /// The others have sent what they had begun to send: only from now on do they lose anything.
    pub fn counts(&mut self, now: Instant) {
        self.since = self.since.map(|(since, counts)| (if counts { since } else { now }, true));
    }

    /// No guest stands still any more.
    pub fn end(&mut self, now: Instant) {
        if let Some((since, _)) = self.since.take() {
            self.left = self.left.saturating_sub(now.saturating_duration_since(since));
            self.ended = Some(now);
        }
    }

    /// Until when others wait, where there is quiet at `now`. It may end before.
    pub fn until(&self, now: Instant) -> Option<Instant> {
        self.since.map(|(since, _)| since + self.left).filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn others_wait_while_a_guest_stands_still_and_not_for_ever() {
        let (mut quiet, now) = (Quiet::default(), Instant::now());
        assert_eq!(quiet.until(now), None);
        quiet.begin(now);
        quiet.begin(now + MS);
        assert_eq!(quiet.until(now + MS), Some(now + ALLOWANCE), "a second guest does not make it longer");
        assert_eq!(quiet.until(now + ALLOWANCE), None, "it hangs in its pause");
        quiet.end(now + ALLOWANCE);
        assert_eq!(quiet.until(now + ALLOWANCE), None);
    }

    #[test]
    fn what_the_others_still_send_does_not_count() {
        let (mut quiet, now) = (Quiet::default(), Instant::now());
        quiet.counts(now);
        assert_eq!(quiet.until(now), None);
        quiet.begin(now);
        quiet.counts(now + 100 * MS);
        quiet.counts(now + 110 * MS);
        quiet.end(now + 120 * MS);
        quiet.begin(now + 120 * MS);
        assert_eq!(quiet.until(now + 120 * MS), Some(now + 100 * MS + ALLOWANCE));
    }

    #[test]
    fn many_pauses_in_a_row_leave_the_others_most_of_the_time() {
        let (mut quiet, start) = (Quiet::default(), Instant::now());
        let (mut now, mut waited) = (start, Duration::ZERO);
        for _ in 0..256 {
            quiet.begin(now);
            let until = quiet.until(now).map_or(now, |until| until.min(now + 30 * MS));
            waited += until - now;
            now += 30 * MS;
            quiet.end(now);
            now += 10 * MS;
        }
        assert!(waited <= ALLOWANCE + (now - start) / GROWS, "{waited:?} of {:?}", now - start);
        assert!(waited >= ALLOWANCE, "{waited:?}");
        quiet.begin(now + GROWS * ALLOWANCE);
        assert_eq!(quiet.until(now + GROWS * ALLOWANCE), Some(now + (GROWS + 1) * ALLOWANCE), "it has grown again");
    }
}
