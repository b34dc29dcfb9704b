//! Machines of one migration: how their pauses lie, and what their reports add up to.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::report::{Report, Status};

/// How the pauses of machines that leave together lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GangPauses {
    /// One after the other: none is stopped while another stands still, so that no pause makes another longer.
    #[default]
    Staggered,
    /// All at the same time: none is stopped before each of them can be, so that no guest runs there while one that it
    /// talks to is still here.
    Together,
}

/// The reports of machines that moved together, summed up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Totals {
    /// The number of machines that have ended.
    pub machines: usize,
    /// Those of them that moved.
    pub completed: usize,
    /// The time from the accepted request until the last one had ended, milliseconds.
    pub total_ms: f64,
    /// The longest downtime, milliseconds.
    pub downtime_ms: f64,
    /// Bytes of frames of all machines, headers included.
    pub bytes_on_wire: u64,
    /// Page bodies that were sent.
    pub pages_sent: u64,
    /// Pages that went as references to a body that another page, mostly another machine's, had sent.
    pub shared_reference: u64,
}

impl Totals {
    /// The sum of these reports.
    #[must_use]
    pub fn of(reports: &[Report]) -> Self {
        let longest = |time: fn(&Report) -> f64| reports.iter().map(time).fold(0.0, f64::max);
        let sum = |count: fn(&Report) -> u64| reports.iter().map(count).sum();
        Self {
            machines: reports.len(),
            completed: reports.iter().filter(|report| report.status == Status::Completed).count(),
            total_ms: longest(|report| report.total_ms),
            downtime_ms: longest(|report| report.downtime_ms),
            bytes_on_wire: sum(|report| report.bytes_on_wire),
            pages_sent: sum(|report| report.pages.sent),
            shared_reference: sum(|report| report.pages.shared_reference),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_of_times_the_longest_counts() {
        let report = |status, time, bytes_on_wire, shared_reference| {
            let mut report =
                Report { status, total_ms: time, downtime_ms: time / 10.0, bytes_on_wire, ..Report::default() };
            report.pages.shared_reference = shared_reference;
            report
        };
        let totals = Totals::of(&[
            report(Status::Completed, 50.0, 7, 1),
            report(Status::Failed, 90.0, 3, 2),
            report(Status::Completed, 70.0, 5, 3),
        ]);
        let expected = Totals {
            machines: 3,
            completed: 2,
            total_ms: 90.0,
            downtime_ms: 9.0,
            bytes_on_wire: 15,
            pages_sent: 0,
            shared_reference: 6,
        };
        assert_eq!(totals, expected);
        assert_eq!(Totals::of(&[]), Totals::default());
    }
}
