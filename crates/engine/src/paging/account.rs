//! What faults cost the guest: latencies, and how long each thread waited.

use std::collections::HashMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use sterna_api::report::{Blocktime, Faults, Latency};

/// The most threads whose waiting is told apart: a VMM has one for each virtual processor and a few more.
const MAX_THREADS: usize = 4096;
/// The longest latency that is told from longer ones, microseconds.
const LONGEST_US: u64 = 3_600_000_000;

/// The account of faults so far.
#[derive(Debug)]
pub struct Account {
    latencies: Histogram<u64>,
    threads: HashMap<u32, (u64, Duration)>,
    blocked: Duration,
    local: u64,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            latencies: Histogram::new_with_bounds(1, LONGEST_US, 3).expect("bounds that can be"),
            threads: HashMap::new(),
            blocked: Duration::ZERO,
            local: 0,
        }
    }
}

impl Account {
    /// Notes how long a thread waited for a page from the source: from the moment its fault was read to the moment the
    /// page was mapped.
    pub fn came(&mut self, thread: u32, waited: Duration) {
        self.latencies.saturating_record((waited.as_micros() as u64).max(1));
        self.blocked += waited;
        if self.threads.len() < MAX_THREADS || self.threads.contains_key(&thread) {
            let (faults, blocked) = self.threads.entry(thread).or_default();
            *faults += 1;
            *blocked += waited;
        }
    }

    /// Notes a fault that was settled without the source.
    pub fn local(&mut self) {
        self.local += 1;
    }

    /// The number of faults that waited for the source.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.latencies.len()
    }

    /// The account for the report.
    #[must_use]
    pub fn report(&self) -> Faults {
        let mut threads: Vec<Blocktime> = self
            .threads
            .iter()
            .map(|(thread, (faults, blocked))| Blocktime {
                thread: *thread,
                faults: *faults,
                ms: blocked.as_secs_f64() * 1e3,
            })
            .collect();
        threads.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        let mut by_log2: Vec<u64> = Vec::new();
        for value in self.latencies.iter_recorded() {
            let power = value.value_iterated_to().max(1).ilog2() as usize;
            by_log2.resize(by_log2.len().max(power + 1), 0);
            by_log2[power] += value.count_at_value();
        }
        Faults {
            count: self.latencies.len(),
            latency_us: Latency {
                p50: self.latencies.value_at_quantile(0.5) as f64,
                p99: self.latencies.value_at_quantile(0.99) as f64,
                max: self.latencies.max() as f64,
            },
            histogram_log2_us: by_log2,
            local: self.local,
            blocktime_ms: self.blocked.as_secs_f64() * 1e3,
            blocktime_by_thread: threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_told_by_quantile_by_power_of_two_and_by_thread() {
        let mut account = Account::default();
        for us in 1..=100 {
            account.came(7, Duration::from_micros(us));
        }
        account.came(8, Duration::from_millis(50));
        account.local();
        let faults = account.report();
        assert_eq!((faults.count, faults.local), (101, 1));
        assert_eq!((faults.latency_us.p50, faults.latency_us.p99), (51.0, 100.0));
        assert!((50_000.0..50_100.0).contains(&faults.latency_us.max));
        assert_eq!(faults.histogram_log2_us[..7], [1, 2, 4, 8, 16, 32, 37]);
        assert_eq!(faults.histogram_log2_us.iter().sum::<u64>(), 101);
        assert_eq!(
            faults.blocktime_by_thread.iter().map(|t| (t.thread, t.faults)).collect::<Vec<_>>(),
            [(8, 1), (7, 100)]
        );
        assert!((faults.blocktime_ms - 55.05).abs() < 0.01);
    }

    #[test]
    fn nothing_is_nothing() {
        assert_eq!(Account::default().report(), Faults::default());
    }
}
