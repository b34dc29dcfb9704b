//! The options of a migration. Absent fields mean the default that the contract names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::gang::GangPauses;

/// The migration mode asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Pre-copy while its rounds pay; post-copy once they cannot reach the downtime limit.
    #[default]
    Auto,
    /// Rounds over dirty pages while the guest runs, the rest in the pause.
    Precopy,
    /// The devices first, all pages after, while the guest runs at the destination.
    Postcopy,
    /// Some rounds of pre-copy, then the devices, then the pages that are left.
    Hybrid,
    /// All pages go in the pause.
    StopAndCopy,
}

/// What happens when `timeout_ms` has passed and the rounds have not converged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnTimeout {
    /// Give up; the guest runs on at the source.
    #[default]
    Cancel,
    /// Switch over, however long the pause will be.
    Force,
    /// Switch over at once and send the pages that are left after it.
    Postcopy,
}

/// The order in which pages are pushed after the switchover, beside those that faults ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Prepaging {
    /// No order: pages go when a fault asks for them, and are pushed only while no fault does.
    Off,
    /// In the order of their addresses, whatever faults ask for.
    Linear,
    /// In bubbles around the latest faults, one for each virtual processor.
    #[default]
    Bubble,
}

/// The search for tracked fake dirty pages, which were written again before their turn; they wait for the next round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FakeDirty {
    /// Off.
    Off,
    /// A thread looks again and again, as in D-Track.
    DtrackV1,
    /// A thread looks with a fixed delay between its looks, as in D-Track's second version.
    DtrackV2,
    /// A thread looks with a delay that follows the dirty rate and what a look costs.
    Adaptive,
    /// A look at each chunk just before it is read.
    #[default]
    Exact,
}

/// The search for content fake dirty pages, whose writes changed nothing (silent stores): by a hash of what was last
/// sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ContentHash {
    /// Off.
    Off,
    /// SHA-1, as in the papers.
    Sha1,
    /// MD5.
    Md5,
    /// MurmurHash3, 128 bits.
    Murmur3,
    /// XXH3: the digest that travels with each body anyway.
    #[default]
    Xxh3,
    /// BLAKE3.
    Blake3,
}

/// Whether pages that were sent before travel as deltas to what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Delta {
    /// They travel whole.
    #[default]
    Off,
    /// They travel as runs of bytes that differ, against a bounded cache of what was sent.
    Xbzrle,
}

/// How bodies are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Compress {
    /// Off.
    #[default]
    Off,
    /// LZ4: quick.
    Lz4,
    /// Zstandard: smaller.
    Zstd,
}

/// The search for pages that the guest itself holds free: they do not travel, and read as zeros at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SkipFree {
    /// Off.
    Off,
    /// Introspection: the memory map of the guest's kernel is read from outside, where the kernel is a Linux and the
    /// map agrees with its counters.
    #[default]
    Vmi,
    /// The hints of virtio-balloon. Refused: QEMU keeps them to itself.
    BalloonHints,
}

/// Whether machines that leave together keep the pages that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PreserveSharing {
    /// Each machine's pages go for themselves.
    Off,
    /// A shared body goes once, and stays shared. All machines must be of one trust group and in private memory.
    On,
}

/// What happens to pages that were written in each of the last rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HotPages {
    /// They are held back until they cool down, or the guest has stopped.
    #[default]
    Hold,
    /// They go with the others.
    Send,
}

/// Options of one migration, in the units of their names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MigrateOptions {
    /// The migration mode.
    pub mode: Mode,
    /// `auto` stays pre-copy to its end.
    pub no_postcopy: bool,
    /// `hybrid`'s rounds before the switchover.
    pub precopy_rounds: Option<u32>,
    /// The order of the push after the switchover.
    pub prepaging: Prepaging,
    /// Limit on the push after the switchover, bytes per second; absent: about nine tenths of what the link carries, so
    /// that faults overtake the push.
    pub postcopy_bandwidth_bytes_per_s: Option<u64>,
    /// The search for pages written again before their turn.
    pub fake_dirty: FakeDirty,
    /// `dtrack-v2`'s delay between two looks, milliseconds.
    pub fake_dirty_delay_ms: Option<f64>,
    /// The search for pages whose writes changed nothing.
    pub content_hash: ContentHash,
    /// What happens to hot pages, written in each of the last rounds.
    pub hot_pages: HotPages,
    /// The search for pages that the guest holds free.
    pub skip_free: SkipFree,
    /// Whether pages that the machines share go once, and stay shared; absent: among those of one trust group in
    /// private memory.
    pub preserve_sharing: Option<PreserveSharing>,
    /// How the pauses of machines that leave together lie.
    pub gang_pauses: GangPauses,
    /// Whether pages travel as deltas.
    pub delta: Delta,
    /// The most bytes of sent pages that are kept for deltas.
    pub delta_cache_bytes: Option<u64>,
    /// How bodies are compressed.
    pub compress: Compress,
    /// The compressor's level; absent: the highest that keeps the link busy.
    pub compress_level: Option<i32>,
    /// Threads that encode pages beside those that send them.
    pub compress_threads: Option<u32>,
    /// Limit on everything sent, bytes per second; none where absent.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// TCP connections that carry pages, 1 to 16.
    pub streams: u32,
    /// The longest pause the guest's users accept, milliseconds.
    pub downtime_limit_ms: f64,
    /// The longest pause accepted where rounds do not reach the limit: each stall raises the limit a step, up to this.
    pub downtime_ramp_ms: Option<f64>,
    /// The most of the guest's processor time that is taken away where rounds do not converge, percent; none where
    /// absent.
    pub throttle_percent: Option<u8>,
    /// The time after which the rounds must have converged, milliseconds from the start; no limit where absent.
    pub timeout_ms: Option<f64>,
    /// What to do after that time.
    pub on_timeout: OnTimeout,
    /// Compare every page of both sides in the pause.
    pub verify: bool,
}

/// The lowest bandwidth, bytes per second: below it no migration ends.
pub const MIN_BANDWIDTH_BYTES_PER_S: u64 = 64 * 1024;
/// The default number of `hybrid`'s rounds.
pub const DEFAULT_PRECOPY_ROUNDS: u32 = 1;
/// The most rounds that may be asked for.
pub const MAX_PRECOPY_ROUNDS: u32 = 1000;
/// The most connections one migration may use.
pub const MAX_STREAMS: u32 = 16;
/// The most threads that may encode one migration's pages.
pub const MAX_COMPRESS_THREADS: u32 = 64;
/// The default size of the delta cache, as QEMU's.
pub const DEFAULT_DELTA_CACHE_BYTES: u64 = 64 << 20;
/// The default of `dtrack-v2`'s delay.
pub const DEFAULT_FAKE_DIRTY_DELAY_MS: f64 = 100.0;
/// The most processor time that may be taken from a guest, percent.
pub const MAX_THROTTLE_PERCENT: u8 = 99;

impl Default for MigrateOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            no_postcopy: false,
            precopy_rounds: None,
            prepaging: Prepaging::Bubble,
            postcopy_bandwidth_bytes_per_s: None,
            fake_dirty: FakeDirty::Exact,
            fake_dirty_delay_ms: None,
            content_hash: ContentHash::Xxh3,
            hot_pages: HotPages::Hold,
            skip_free: SkipFree::Vmi,
            preserve_sharing: None,
            gang_pauses: GangPauses::default(),
            delta: Delta::Off,
            delta_cache_bytes: None,
            compress: Compress::Off,
            compress_level: None,
            compress_threads: None,
            bandwidth_bytes_per_s: None,
            streams: 1,
            downtime_limit_ms: 300.0,
            downtime_ramp_ms: None,
            throttle_percent: None,
            timeout_ms: None,
            on_timeout: OnTimeout::Cancel,
            verify: false,
        }
    }
}

impl MigrateOptions {
    /// Checks these options. Options that contradict each other are wrong: none is ignored in silence.
    ///
    /// # Errors
    /// A sentence that names the option and what it may be.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_STREAMS).contains(&self.streams) {
            return Err(format!("streams is {}: it must be between 1 and {MAX_STREAMS}", self.streams));
        }
        if let Some(rate) = self.bandwidth_bytes_per_s
            && rate < MIN_BANDWIDTH_BYTES_PER_S
        {
            return Err(format!("bandwidth is {rate} bytes/s: below 64 KiB/s no migration ends"));
        }
        if self.skip_free == SkipFree::BalloonHints {
            return Err("skip-free balloon-hints cannot be had: QEMU asks the guest for these hints only while it migrates RAM itself, \
                        and tells nobody what they were. Use skip-free vmi"
                .into());
        }
        self.check_encoding()?;
        self.check_postcopy()?;
        self.check_convergence()
    }

    /// Whether the guest may run at the destination before all its pages are there.
    #[must_use]
    pub fn may_postcopy(&self) -> bool {
        self.must_postcopy() || (self.mode == Mode::Auto && !self.no_postcopy)
    }

    /// Whether the options insist on that, so that a destination that cannot do it must refuse.
    #[must_use]
    pub fn must_postcopy(&self) -> bool {
        matches!(self.mode, Mode::Postcopy | Mode::Hybrid) || self.on_timeout == OnTimeout::Postcopy
    }

    fn check_postcopy(&self) -> Result<(), String> {
        if self.no_postcopy && self.must_postcopy() {
            return Err("no-postcopy contradicts mode postcopy, mode hybrid and on-timeout postcopy".into());
        }
        match self.precopy_rounds {
            Some(_) if self.mode != Mode::Hybrid => return Err("precopy-rounds is for mode hybrid".into()),
            Some(rounds) if !(1..=MAX_PRECOPY_ROUNDS).contains(&rounds) => {
                return Err(format!("precopy-rounds is {rounds}: it must be between 1 and {MAX_PRECOPY_ROUNDS}"));
            }
            _ => {}
        }
        if !self.may_postcopy() && self.prepaging != Prepaging::default() {
            return Err("prepaging is for modes that push pages after the switchover: auto, hybrid, postcopy".into());
        }
        match self.postcopy_bandwidth_bytes_per_s {
            Some(_) if !self.may_postcopy() => {
                Err("postcopy-bandwidth is for modes that push pages after the switchover: auto, hybrid, postcopy"
                    .into())
            }
            Some(rate) if rate < MIN_BANDWIDTH_BYTES_PER_S => {
                Err(format!("postcopy-bandwidth is {rate} bytes/s: below 64 KiB/s no migration ends"))
            }
            _ => Ok(()),
        }
    }

    fn check_encoding(&self) -> Result<(), String> {
        if let Some(delay) = self.fake_dirty_delay_ms {
            if self.fake_dirty != FakeDirty::DtrackV2 {
                return Err("fake-dirty-delay is for fake-dirty dtrack-v2 alone".into());
            }
            positive("fake-dirty-delay", delay)?;
        }
        if let Some(bytes) = self.delta_cache_bytes {
            if self.delta == Delta::Off {
                return Err("delta-cache needs delta xbzrle".into());
            }
            if bytes < 1 << 20 {
                return Err(format!("delta-cache is {bytes} bytes: below 1 MiB nothing is found in it"));
            }
        }
        if !self.has_rounds() && self.delta != Delta::Off {
            return Err(
                "delta has nothing to tell a difference to in stop-and-copy and postcopy: every page goes once".into(),
            );
        }
        match (self.compress, self.compress_level) {
            (_, None) => {}
            (Compress::Off, Some(_)) => return Err("compress-level needs compress".into()),
            (Compress::Lz4, Some(_)) => {
                return Err("compress-level is for compress zstd alone: lz4 has one level".into());
            }
            (Compress::Zstd, Some(level)) if !(-7..=19).contains(&level) => {
                return Err(format!("compress-level is {level}: zstd's are -7 to 19"));
            }
            (Compress::Zstd, Some(_)) => {}
        }
        match self.compress_threads {
            Some(_) if self.compress == Compress::Off => Err("compress-threads needs compress".into()),
            Some(threads) if !(1..=MAX_COMPRESS_THREADS).contains(&threads) => {
                Err(format!("compress-threads is {threads}: it must be between 1 and {MAX_COMPRESS_THREADS}"))
            }
            _ => Ok(()),
        }
    }

    fn check_convergence(&self) -> Result<(), String> {
        positive("downtime limit", self.downtime_limit_ms)?;
        let live = self.has_rounds();
        if let Some(ramp) = self.downtime_ramp_ms {
            positive("downtime-ramp", ramp)?;
            if ramp <= self.downtime_limit_ms {
                return Err(format!(
                    "downtime-ramp is {ramp} ms: it must be above the downtime limit of {} ms",
                    self.downtime_limit_ms
                ));
            }
            if !live {
                return Err("downtime-ramp is for rounds: stop-and-copy and postcopy have none".into());
            }
        }
        if let Some(percent) = self.throttle_percent {
            if !(1..=MAX_THROTTLE_PERCENT).contains(&percent) {
                return Err(format!("throttle is {percent} %: it must be between 1 and {MAX_THROTTLE_PERCENT}"));
            }
            if !live {
                return Err("throttle is for rounds: stop-and-copy and postcopy have none".into());
            }
        }
        if let Some(timeout) = self.timeout_ms {
            positive("timeout", timeout)?;
        }
        if self.timeout_ms.is_none() && self.on_timeout != OnTimeout::Cancel {
            return Err("on-timeout needs a timeout".into());
        }
        if !live && self.on_timeout == OnTimeout::Postcopy {
            return Err("on-timeout postcopy is for rounds: stop-and-copy and postcopy have none".into());
        }
        Ok(())
    }

    /// Whether pages travel in rounds while the guest runs at the source.
    #[must_use]
    pub fn has_rounds(&self) -> bool {
        !matches!(self.mode, Mode::StopAndCopy | Mode::Postcopy)
    }

    /// The options with the values that follow from the mode and from other options, for the report.
    #[must_use]
    pub fn resolved(&self) -> Self {
        let mut options = self.clone();
        if options.mode == Mode::Auto && options.no_postcopy {
            options.mode = Mode::Precopy;
        }
        if options.mode == Mode::Hybrid {
            options.precopy_rounds.get_or_insert(DEFAULT_PRECOPY_ROUNDS);
        }
        if !options.has_rounds() {
            (options.fake_dirty, options.hot_pages) = (FakeDirty::Off, HotPages::Send);
        }
        if options.fake_dirty == FakeDirty::DtrackV2 {
            options.fake_dirty_delay_ms.get_or_insert(DEFAULT_FAKE_DIRTY_DELAY_MS);
        }
        if options.delta != Delta::Off {
            options.delta_cache_bytes.get_or_insert(DEFAULT_DELTA_CACHE_BYTES);
        }
        options
    }
}

fn positive(what: &str, ms: f64) -> Result<(), String> {
    if ms.is_finite() && ms > 0.0 { Ok(()) } else { Err(format!("{what} is {ms} ms: it must be above 0")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut MigrateOptions)) -> String {
        let mut options = MigrateOptions::default();
        change(&mut options);
        options.check().unwrap_err()
    }

    #[test]
    fn the_defaults_are_accepted() {
        assert_eq!(MigrateOptions::default().check(), Ok(()));
        assert_eq!(MigrateOptions::default().resolved().check(), Ok(()));
    }

    #[test]
    fn contradictions_are_refused_with_a_reason() {
        assert!(refused(|o| o.fake_dirty_delay_ms = Some(5.0)).contains("dtrack-v2"));
        assert!(refused(|o| o.delta_cache_bytes = Some(1 << 30)).contains("delta"));
        assert!(refused(|o| o.compress_level = Some(1)).contains("compress"));
        assert!(refused(|o| o.compress_threads = Some(1)).contains("compress"));
        assert!(refused(|o| (o.compress, o.compress_level) = (Compress::Lz4, Some(3))).contains("lz4"));
        assert!(refused(|o| (o.compress, o.compress_level) = (Compress::Zstd, Some(99))).contains("-7 to 19"));
        assert!(refused(|o| (o.mode, o.delta) = (Mode::StopAndCopy, Delta::Xbzrle)).contains("stop-and-copy"));
        assert!(refused(|o| (o.mode, o.throttle_percent) = (Mode::StopAndCopy, Some(50))).contains("stop-and-copy"));
        assert!(refused(|o| o.throttle_percent = Some(100)).contains("between 1 and 99"));
        assert!(refused(|o| o.downtime_ramp_ms = Some(100.0)).contains("above the downtime limit"));
        assert!(refused(|o| o.on_timeout = OnTimeout::Force).contains("timeout"));
        assert!(refused(|o| o.timeout_ms = Some(f64::NAN)).contains("above 0"));
        assert!(refused(|o| (o.mode, o.no_postcopy) = (Mode::Hybrid, true)).contains("contradicts"));
        assert!(refused(|o| o.precopy_rounds = Some(2)).contains("hybrid"));
        assert!(refused(|o| (o.mode, o.precopy_rounds) = (Mode::Hybrid, Some(0))).contains("between 1"));
        assert!(
            refused(|o| (o.mode, o.prepaging) = (Mode::Precopy, Prepaging::Linear)).contains("after the switchover")
        );
        assert!(
            refused(|o| (o.no_postcopy, o.postcopy_bandwidth_bytes_per_s) = (true, Some(1 << 30))).contains("after")
        );
        assert!(refused(|o| (o.mode, o.throttle_percent) = (Mode::Postcopy, Some(50))).contains("rounds"));
        assert!(refused(|o| o.skip_free = SkipFree::BalloonHints).contains("vmi"));
    }

    #[test]
    fn what_is_resolved_is_written_in() {
        let options =
            MigrateOptions { fake_dirty: FakeDirty::DtrackV2, delta: Delta::Xbzrle, ..MigrateOptions::default() };
        let resolved = options.resolved();
        assert_eq!(resolved.mode, Mode::Auto);
        assert_eq!(resolved.fake_dirty_delay_ms, Some(DEFAULT_FAKE_DIRTY_DELAY_MS));
        assert_eq!(resolved.delta_cache_bytes, Some(DEFAULT_DELTA_CACHE_BYTES));
        assert_eq!(resolved.check(), Ok(()));
        let stopped = MigrateOptions { mode: Mode::StopAndCopy, ..MigrateOptions::default() }.resolved();
        assert_eq!(stopped.fake_dirty, FakeDirty::Off);
        assert_eq!(MigrateOptions { no_postcopy: true, ..options }.resolved().mode, Mode::Precopy);
        let hybrid = MigrateOptions { mode: Mode::Hybrid, ..MigrateOptions::default() }.resolved();
        assert_eq!(hybrid.precopy_rounds, Some(DEFAULT_PRECOPY_ROUNDS));
    }

    #[test]
    fn who_may_and_who_must_run_before_all_pages_are_there() {
        let with = |mode, no_postcopy| MigrateOptions { mode, no_postcopy, ..MigrateOptions::default() };
        assert!(with(Mode::Auto, false).may_postcopy() && !with(Mode::Auto, false).must_postcopy());
        assert!(!with(Mode::Auto, true).may_postcopy());
        assert!(with(Mode::Hybrid, false).must_postcopy() && with(Mode::Postcopy, false).must_postcopy());
        assert!(!with(Mode::Precopy, false).may_postcopy() && !with(Mode::StopAndCopy, false).may_postcopy());
        let late =
            MigrateOptions { timeout_ms: Some(1.0), on_timeout: OnTimeout::Postcopy, ..with(Mode::Precopy, false) };
        assert!(late.must_postcopy() && late.check().is_ok());
    }
}
