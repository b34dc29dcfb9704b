//! Load from inside the lab's namespaces.

/// Set and get requests to memcached.
pub mod memcached;

/// A PostgreSQL for guests to work with.
pub mod postgres;

/// A server for a guest's iperf3.
pub mod iperf;

/// Peers for a guest that downloads.
pub mod peers;

/// One TCP transfer, which measures a link.
pub mod transfer;

/// Requests to a Redis cluster.
pub mod redis;

/// The values that clients store.
pub mod values;

/// Requests to a guest's web server.
pub mod web;

use serde::Serialize;

/// Throughput over the interval that ended at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// The interval's end, microseconds since 1970.
    pub at_us: i64,
    /// Requests per second.
    pub per_s: f64,
}

/// Now, microseconds since 1970: the clock that QEMU's events carry.
#[must_use]
pub fn now_us() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// The mean throughput of the samples that lie wholly between two moments; `None` where there is none.
#[must_use]
pub fn mean_between(samples: &[Sample], from_us: i64, to_us: i64) -> Option<f64> {
    let inside: Vec<f64> = samples
        .windows(2)
        .filter(|pair| pair[0].at_us >= from_us && pair[1].at_us <= to_us)
        .map(|pair| pair[1].per_s)
        .collect();
    (!inside.is_empty()).then(|| inside.iter().sum::<f64>() / inside.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_takes_only_whole_intervals() {
        let samples: Vec<Sample> = (0..5).map(|i| Sample { at_us: i * 100, per_s: i as f64 }).collect();
        assert_eq!(mean_between(&samples, 100, 300), Some(2.5));
        assert_eq!(mean_between(&samples, 150, 190), None);
    }
}
