//! Foresight: whether rounds can reach the downtime limit at all ([`sterna_protocol::foresight`]), by what collections
//! yield.
//!
//! A collection after a few tenths of a second shows how fast the guest writes; so the first round is cut there, and
//! goes on as if it had not been. Where that is too fast, further short windows show whether it stays so, and how much
//! of it changes anything.

use std::time::{Duration, Instant};

use sterna_protocol::convergence::Goal;
use sterna_protocol::foresight::{Foresight as Rules, Window};

use super::rounds::{Collected, Rounds};
use super::silent::Held;
use crate::error::MigrateError;

/// The foresight of a migration that may leave the rest of the pages to post-copy.
#[derive(Debug)]
pub struct Foresight {
    rules: Rules,
    held: Option<Held>,
}

impl Foresight {
    /// Of a migration with this goal, in whose pause the devices take so long; `None` where rounds go on even in vain,
    /// as something else was asked for.
    #[must_use]
    pub fn of(goal: &Goal, device_time: Duration) -> Option<Self> {
        goal.turns_at_once().then(|| Self { rules: Rules::new(goal.downtime_limit, device_time), held: None })
    }

    /// When a round that begins now is to be cut, if it is, once it has measured the link: without the link's speed
    /// nothing is judged, and a later round may measure nothing, because the guest writes all pages before their turn.
    #[must_use]
    pub fn cut(&self) -> Option<Instant> {
        self.rules.window().and_then(|window| Instant::now().checked_add(window))
    }

    /// Judges what was collected. Returns whether the guest is too fast for rounds.
    ///
    /// # Errors
    /// The RAM cannot be read.
    pub fn step(&mut self, rounds: &Rounds, collected: &Collected) -> Result<bool, MigrateError> {
        let mut speed = rounds.throughput.known();
        if let Some((held, speed)) = self.held.as_ref().zip(speed.as_mut())
            && let Some(silent) = held.silent_share(rounds.ram, rounds.written())?
        {
            speed.body_share = speed.body_share.min(1.0 - silent);
        }
        let Collected { pages, after, .. } = *collected;
        let too_fast = self.rules.step(&Window { took: after, written: pages, speed, left: rounds.left() });
        tracing::debug!(pages, ?after, ?speed, too_fast, doubts = self.rules.doubts(), "foresight");
        self.held = if self.rules.doubts() { Some(Held::of(rounds.ram, rounds.written())?) } else { None };
        Ok(too_fast)
    }
}
