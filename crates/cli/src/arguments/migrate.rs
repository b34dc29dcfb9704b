//! `sterna migrate`: the options of a migration as the command line takes them.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;
use sterna_api::options::{
    Compress, ContentHash, Delta, FakeDirty, HotPages, OnTimeout, Prepaging, PreserveSharing, SkipFree,
};
use sterna_api::units::{parse_duration, parse_rate, parse_size};
use sterna_api::{GangPauses, MigrateOptions, Mode};

/// `migrate`.
#[derive(Debug, Args)]
pub struct Migrate {
    /// Which machines; several are moved together
    #[arg(required_unless_present = "family", value_name = "NAME")]
    pub names: Vec<String>,
    /// In the place of names: all machines of this host that are related by forks to this one, or of this family
    #[arg(long, value_name = "NAME", conflicts_with = "names")]
    pub family: Option<String>,
    /// The destination daemon
    #[arg(long, value_name = "HOST:PORT")]
    pub to: String,
    /// How to move: pages before the guest starts there (precopy), after (postcopy), some rounds before and the rest
    /// after (hybrid), precopy while it pays and then the rest after (auto), or everything in the pause (stop-and-copy)
    #[arg(long, default_value = "auto",
        value_parser = named::<Mode>(["auto", "precopy", "postcopy", "hybrid", "stop-and-copy"]))]
    pub mode: Mode,
    /// Never let the guest run there before all its pages are there
    #[arg(long)]
    pub no_postcopy: bool,
    /// hybrid's rounds before the guest starts there [default: 1]
    #[arg(long, value_name = "N")]
    pub precopy_rounds: Option<u32>,
    /// In which order pages follow a guest that runs there already
    #[arg(long, default_value = "bubble", value_parser = named::<Prepaging>(["off", "linear", "bubble"]))]
    pub prepaging: Prepaging,
    /// How pages written again before their turn are found; they wait for the next round
    #[arg(long, value_name = "VARIANT", default_value = "exact",
        value_parser = named::<FakeDirty>(["off", "dtrack-v1", "dtrack-v2", "adaptive", "exact"]))]
    pub fake_dirty: FakeDirty,
    /// The delay between dtrack-v2's looks [default: 100ms]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub fake_dirty_delay: Option<Duration>,
    /// How pages are found whose writes changed nothing
    #[arg(long, value_name = "HASH", default_value = "xxh3",
        value_parser = named::<ContentHash>(["off", "sha1", "md5", "murmur3", "xxh3", "blake3"]))]
    pub content_hash: ContentHash,
    /// Whether pages written in each of the last rounds are held back
    #[arg(long, default_value = "hold", value_parser = named::<HotPages>(["hold", "send"]))]
    pub hot_pages: HotPages,
    /// How pages that the guest holds free are found; they do not travel
    #[arg(long, value_name = "WAY", default_value = "vmi",
        value_parser = named::<SkipFree>(["off", "vmi", "balloon-hints"]))]
    pub skip_free: SkipFree,
    /// Whether pages that the machines share go once, and stay shared at the destination; 'on' refuses machines that
    /// cannot [default: among private machines of one trust group]
    #[arg(long, value_name = "off|on", value_parser = named::<PreserveSharing>(["off", "on"]))]
    pub preserve_sharing: Option<PreserveSharing>,
    /// How the pauses of several machines lie: one after the other, or all at the same time, for guests that talk to
    /// each other
    #[arg(long, value_name = "staggered|together", default_value = "staggered",
        value_parser = named::<GangPauses>(["staggered", "together"]))]
    pub gang_pauses: GangPauses,
    /// Whether pages that were sent before travel as differences
    #[arg(long, default_value = "off", value_parser = named::<Delta>(["off", "xbzrle"]))]
    pub delta: Delta,
    /// The most memory for sent pages that differences are made against [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub delta_cache: Option<u64>,
    /// How pages are compressed
    #[arg(long, default_value = "off", value_parser = named::<Compress>(["off", "lz4", "zstd"]))]
    pub compress: Compress,
    /// zstd's level, -7 to 19 [default: as high as keeps the link busy]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub compress_level: Option<i32>,
    /// Threads that compress [default: by the processors]
    #[arg(long, value_name = "N")]
    pub compress_threads: Option<u32>,
    /// Limit on everything sent, such as 1Gbit or 100MB [default: none]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub bandwidth: Option<u64>,
    /// Limit on pages that follow a guest unasked [default: about nine tenths of the link]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub postcopy_bandwidth: Option<u64>,
    /// TCP connections that carry pages
    #[arg(long, value_name = "N", default_value_t = MigrateOptions::default().streams)]
    pub streams: u32,
    /// The longest pause that is accepted
    #[arg(long, value_name = "DURATION", default_value = "300ms", value_parser = parse_duration)]
    pub downtime_limit: Duration,
    /// Where rounds do not reach the limit, accept longer pauses step by step, up to this [default: no]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub downtime_ramp: Option<Duration>,
    /// Where rounds do not converge, take the guest's processor time away step by step, up to this many percent
    /// [default: no]
    #[arg(long, value_name = "PERCENT")]
    pub throttle: Option<u8>,
    /// When to give up converging [default: never]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// What to do then: give up, switch over however long the pause will be, or let the rest of the pages follow
    /// [default: cancel]
    #[arg(long, requires = "timeout", value_parser = named::<OnTimeout>(["cancel", "force", "postcopy"]))]
    pub on_timeout: Option<OnTimeout>,
    /// Compare the pages of both sides as they were when the guest stopped
    #[arg(long)]
    pub verify: bool,
    /// Return once it has begun
    #[arg(long, conflicts_with = "json")]
    pub detach: bool,
    /// Write the report as JSON to a file, or to standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

impl Migrate {
    /// The options as the API takes them.
    pub fn options(&self) -> MigrateOptions {
        let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
        MigrateOptions {
            mode: self.mode,
            no_postcopy: self.no_postcopy,
            precopy_rounds: self.precopy_rounds,
            prepaging: self.prepaging,
            postcopy_bandwidth_bytes_per_s: self.postcopy_bandwidth,
            fake_dirty: self.fake_dirty,
            fake_dirty_delay_ms: self.fake_dirty_delay.map(milliseconds),
            content_hash: self.content_hash,
            hot_pages: self.hot_pages,
            skip_free: self.skip_free,
            preserve_sharing: self.preserve_sharing,
            gang_pauses: self.gang_pauses,
            delta: self.delta,
            delta_cache_bytes: self.delta_cache,
            compress: self.compress,
            compress_level: self.compress_level,
            compress_threads: self.compress_threads,
            bandwidth_bytes_per_s: self.bandwidth,
            streams: self.streams,
            downtime_limit_ms: milliseconds(self.downtime_limit),
            downtime_ramp_ms: self.downtime_ramp.map(milliseconds),
            throttle_percent: self.throttle,
            timeout_ms: self.timeout.map(milliseconds),
            on_timeout: self.on_timeout.unwrap_or_default(),
            verify: self.verify,
        }
    }
}

/// A parser for a value of the API by its name there; the names are the possible values in the help.
pub(super) fn named<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    names: impl IntoIterator<Item = &'static str>,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names)
        .try_map(|name| serde_json::from_value(serde_json::Value::String(name)).map_err(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Arguments, Command};
    use super::*;

    fn parse(line: &str) -> Migrate {
        match Arguments::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Migrate(migrate) => *migrate,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_migration_without_options_has_the_contracts_defaults() {
        let migrate = parse("sterna migrate a b --to c:1");
        assert_eq!(migrate.names, ["a", "b"]);
        assert_eq!(migrate.options(), MigrateOptions::default());
    }

    #[test]
    fn units_are_the_contracts() {
        let line = "sterna migrate a --to c:1 --bandwidth 1Gbit --downtime-limit 50ms --timeout 5s --on-timeout force";
        let options = parse(line).options();
        assert_eq!(options.bandwidth_bytes_per_s, Some(125_000_000));
        assert_eq!(options.downtime_limit_ms, 50.0);
        assert_eq!((options.timeout_ms, options.on_timeout), (Some(5000.0), OnTimeout::Force));
    }

    #[test]
    fn every_name_of_the_contract_is_understood() {
        for variant in ["off", "dtrack-v1", "dtrack-v2", "adaptive", "exact"] {
            parse(&format!("sterna migrate a --to b:1 --fake-dirty {variant}"));
        }
        for mode in ["auto", "precopy", "postcopy", "hybrid", "stop-and-copy"] {
            parse(&format!("sterna migrate a --to b:1 --mode {mode}"));
        }
        let line =
            "sterna migrate a --to b:1 --mode hybrid --precopy-rounds 3 --prepaging linear --postcopy-bandwidth 1Gbit";
        let options = parse(line).options();
        assert_eq!((options.precopy_rounds, options.prepaging), (Some(3), Prepaging::Linear));
        assert_eq!(options.postcopy_bandwidth_bytes_per_s, Some(125_000_000));
        for hash in ["off", "sha1", "md5", "murmur3", "xxh3", "blake3"] {
            parse(&format!("sterna migrate a --to b:1 --content-hash {hash}"));
        }
        for way in ["off", "vmi", "balloon-hints"] {
            parse(&format!("sterna migrate a --to b:1 --skip-free {way}"));
        }
        let line = "sterna migrate a --to b:1 --fake-dirty dtrack-v2 --fake-dirty-delay 50ms --delta xbzrle --delta-cache 32M \
            --compress zstd --compress-level -5 --compress-threads 2 --hot-pages send --throttle 80 --downtime-ramp 2s"
            .replace('\\', "");
        let options = parse(&line).options();
        assert_eq!((options.fake_dirty, options.fake_dirty_delay_ms), (FakeDirty::DtrackV2, Some(50.0)));
        assert_eq!((options.delta, options.delta_cache_bytes), (Delta::Xbzrle, Some(32 << 20)));
        assert_eq!((options.compress, options.compress_level), (Compress::Zstd, Some(-5)));
        assert_eq!((options.compress_threads, options.hot_pages), (Some(2), HotPages::Send));
        assert_eq!((options.throttle_percent, options.downtime_ramp_ms), (Some(80), Some(2000.0)));
        assert_eq!(options.check(), Ok(()));
    }
}
