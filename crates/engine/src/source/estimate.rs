//! The estimate of a migration, by a short look at the guest: for each mode, and in pre-copy for each compressor.

use std::time::Duration;

use sterna_api::estimate::{Observed, Point, Way};
use sterna_api::options::{Compress, DEFAULT_PRECOPY_ROUNDS};
use sterna_api::{Estimate, Mode};
use sterna_protocol::estimate::{self, Order, Terms, predict};
use sterna_protocol::frame::HEADER_BYTES;
use sterna_protocol::layout::PAGE_BYTES;

use super::observe::Observation;
use super::precopy::DEVICE_TIME;
use super::sample::{BLOCK_PAGES, Compressed};

/// The time assumed for reaching the destination and starting its VMM. The destination is not asked, and hosts differ
/// (the report's `setup_ms` has the real time).
const SETUP_TIME: Duration = Duration::from_millis(150);
/// The bytes of a page's digest in a frame, and of a compressed block's length.
const WORD_BYTES: f64 = 8.0;

/// The estimate for a machine that was observed, over a link of `bytes_per_s`, with this downtime limit.
#[must_use]
pub fn estimate(vm: &str, seen: &Observation, bytes_per_s: u64, downtime_limit: Duration) -> Estimate {
    let terms =
        Terms { bytes_per_s: bytes_per_s as f64, downtime_limit, device_time: DEVICE_TIME, setup_time: SETUP_TIME };
    let way = |mode, compress, compressed: Option<Compressed>| {
        let order = match mode {
            Mode::StopAndCopy => Order::Paused,
            Mode::Precopy => Order::Before,
            Mode::Auto => Order::Auto,
            Mode::Hybrid => Order::After { rounds: DEFAULT_PRECOPY_ROUNDS },
            Mode::Postcopy => Order::After { rounds: 0 },
        };
        let way = estimate::Way {
            order,
            bytes_per_body: bytes_per_body(seen, compressed),
            seconds_per_page: seconds_per_page(seen, compressed),
            skips_rewritten: matches!(mode, Mode::Precopy | Mode::Hybrid | Mode::Auto),
        };
        let found = predict(&seen.guest, &way, &terms);
        Way {
            mode,
            compress,
            total_ms: found.total.as_secs_f64() * 1e3,
            downtime_ms: found.downtime.as_secs_f64() * 1e3,
            bytes_on_wire: found.bytes_on_wire,
            rounds: found.rounds,
            reaches_downtime_limit: found.reaches_limit,
        }
    };
    let mut ways = vec![way(Mode::StopAndCopy, Compress::Off, None), way(Mode::Precopy, Compress::Off, None)];
    for (compress, compressed) in [(Compress::Lz4, seen.sampled.lz4), (Compress::Zstd, seen.sampled.zstd)] {
        ways.extend(compressed.map(|compressed| way(Mode::Precopy, compress, Some(compressed))));
    }
    ways.extend([Mode::Hybrid, Mode::Postcopy, Mode::Auto].map(|mode| way(mode, Compress::Off, None)));
    Estimate {
        vm: vm.into(),
        bandwidth_bytes_per_s: bytes_per_s,
        downtime_limit_ms: downtime_limit.as_secs_f64() * 1e3,
        observed: observed(seen),
        ways,
    }
}

/// The bytes per body: the body, its digest, and its parts of the frame's header and of its block's length.
fn bytes_per_body(seen: &Observation, compressed: Option<Compressed>) -> f64 {
    let pages_per_frame = seen.guest.used_pages as f64 / seen.chunks.max(1) as f64;
    let own = WORD_BYTES + HEADER_BYTES as f64 / pages_per_frame.max(1.0);
    match compressed {
        None => PAGE_BYTES as f64 + own,
        Some(compressed) => PAGE_BYTES as f64 * compressed.ratio + own + WORD_BYTES / BLOCK_PAGES as f64,
    }
}

/// The time that this host needs per page: one thread reads and digests; all processors share the compression.
fn seconds_per_page(seen: &Observation, compressed: Option<Compressed>) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let compressing = compressed.map_or(0.0, |compressed| compressed.time_per_page.as_secs_f64() / threads);
    seen.sampled.time_per_page.as_secs_f64() + compressing
}

fn observed(seen: &Observation) -> Observed {
    Observed {
        duration_ms: seen.duration.as_secs_f64() * 1e3,
        looks: seen.looks,
        look_ms: seen.look_time.as_secs_f64() * 1e3,
        write_faults: seen.write_faults,
        total_pages: seen.total_pages,
        allocated_pages: seen.allocated_pages,
        free_pages: seen.free_pages,
        page_cache_pages: None,
        zero_share: seen.guest.zero_share,
        silent_share: seen.guest.silent_share,
        written: seen.written.iter().map(|&(seconds, pages)| Point { ms: seconds * 1e3, pages }).collect(),
        sampled_pages: seen.sampled.pages,
        lz4_ratio: seen.sampled.lz4.map(|compressed| compressed.ratio),
        zstd_ratio: seen.sampled.zstd.map(|compressed| compressed.ratio),
    }
}
