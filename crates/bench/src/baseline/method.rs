//! The ways in which QEMU moves a guest by itself: its migration capabilities and parameters.

use serde::Serialize;
use serde_json::{Value, json};

use super::qmp::Qmp;
use crate::error::Result;

/// "No limit": far above every link here, and what every version accepts.
const UNLIMITED_BYTES_PER_S: u64 = 100_000_000_000;

/// The longest downtime limit that QEMU takes, milliseconds: the guest is stopped as soon as there is a guess at the
/// link's rate.
const LONGEST_DOWNTIME_MS: u64 = 2_000_000;

/// The way in which QEMU moves a guest. All settings not named here are QEMU's defaults: a downtime limit of 300 ms,
/// compression of level 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Pre-copy over one connection.
    Vanilla,
    /// Pre-copy over this number of connections.
    Multifd(u8),
    /// Pre-copy over this number of connections, compressed by zstd.
    MultifdZstd(u8),
    /// Pre-copy that sends differences, with a cache of this size in MiB.
    Xbzrle(u16),
    /// Pre-copy compressed by zlib, with this number of threads; QEMU had it up to 9.0.
    Compress(u8),
    /// Pre-copy that takes the processor away from a guest that writes too fast.
    AutoConverge,
    /// Pre-copy that may stop the guest for as long as it likes.
    StopAndCopy,
    /// Pre-copy for one pass, then post-copy.
    Postcopy,
    /// Pre-copy for one pass, then post-copy, with a connection of their own for pages that the guest waits for.
    PostcopyPreempt,
    /// Post-copy from the first page on.
    PurePostcopy,
    /// Post-copy from the first page on, with a connection of their own for pages that the guest waits for.
    PurePostcopyPreempt,
}

impl Method {
    /// Its name in a table.
    #[must_use]
    pub fn label(self) -> String {
        match self {
            Self::Vanilla => "precopy".into(),
            Self::Multifd(streams) => format!("precopy, multifd {streams}"),
            Self::MultifdZstd(streams) => format!("precopy, multifd {streams} zstd"),
            Self::Xbzrle(cache_mib) => format!("precopy, xbzrle {cache_mib} MiB"),
            Self::Compress(threads) => format!("precopy, compress {threads}"),
            Self::AutoConverge => "precopy, auto-converge".into(),
            Self::StopAndCopy => "stop-and-copy".into(),
            Self::Postcopy => "postcopy".into(),
            Self::PostcopyPreempt => "postcopy, preempt".into(),
            Self::PurePostcopy => "postcopy at once".into(),
            Self::PurePostcopyPreempt => "postcopy at once, preempt".into(),
        }
    }

    /// The migration capabilities it needs beside `events`.
    #[must_use]
    pub fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Vanilla | Self::StopAndCopy => &[],
            Self::Multifd(_) | Self::MultifdZstd(_) => &["multifd"],
            Self::Xbzrle(_) => &["xbzrle"],
            Self::Compress(_) => &["compress"],
            Self::AutoConverge => &["auto-converge"],
            // The destination then reports how long its processors waited.
            Self::Postcopy | Self::PurePostcopy => &["postcopy-ram", "postcopy-blocktime"],
            Self::PostcopyPreempt | Self::PurePostcopyPreempt => {
                &["postcopy-ram", "postcopy-blocktime", "postcopy-preempt"]
            }
        }
    }

    /// Whether the guest is switched over while pages are missing, and if so, whether that comes after the first pass.
    #[must_use]
    pub fn postcopy_after_pass(self) -> Option<bool> {
        match self {
            Self::Postcopy | Self::PostcopyPreempt => Some(true),
            Self::PurePostcopy | Self::PurePostcopyPreempt => Some(false),
            _ => None,
        }
    }

    fn parameters(self) -> Value {
        let mut parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S });
        match self {
            Self::Multifd(streams) => parameters["multifd-channels"] = json!(streams),
            Self::MultifdZstd(streams) => {
                parameters["multifd-channels"] = json!(streams);
                parameters["multifd-compression"] = json!("zstd");
            }
            Self::Xbzrle(cache_mib) => parameters["xbzrle-cache-size"] = json!(u64::from(cache_mib) << 20),
            Self::Compress(threads) => {
                parameters["compress-threads"] = json!(threads);
                parameters["decompress-threads"] = json!(threads);
            }
            Self::StopAndCopy => parameters["downtime-limit"] = json!(LONGEST_DOWNTIME_MS),
            Self::Vanilla | Self::AutoConverge => {}
            Self::Postcopy | Self::PostcopyPreempt | Self::PurePostcopy | Self::PurePostcopyPreempt => {}
        }
        parameters
    }

    /// Sets capabilities and parameters; the same must be done at both ends.
    pub(super) fn prepare(self, qmp: &mut Qmp) -> Result<()> {
        let names = self.capabilities().iter().chain(&["events"]);
        let capabilities: Vec<Value> = names.map(|name| json!({ "capability": name, "state": true })).collect();
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        qmp.execute("migrate-set-parameters", self.parameters())?;
        Ok(())
    }
}
