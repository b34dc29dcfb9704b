//! `sterna split` and `sterna merge` as the command line takes them.

use std::path::PathBuf;

use clap::Args;
use sterna_api::Mode;
use sterna_api::split::{MemoryHost, Redundancy, Unused};
use sterna_api::units::parse_size;

use super::migrate::named;

/// What `--main` says where the guest stays on this host.
const HERE: &str = "here";

/// `split`.
#[derive(Debug, Args)]
pub struct Split {
    /// The machine's name
    pub name: String,
    /// Where its guest runs then, and how much of its memory is there: here=SIZE, such as here=2G, or HOST:PORT=SIZE
    ///
    /// What the guest uses stays with it, as far as there is room; the rest leaves, and comes when it is touched. To
    /// another host the guest moves once the rest has left, and what has left stays where it is.
    #[arg(long, value_name = "here=SIZE|HOST:PORT=SIZE", value_parser = main_host)]
    pub main: Main,
    /// How the guest moves to another host: precopy, hybrid or postcopy [default: precopy, as long as that takes]
    ///
    /// With postcopy it runs there at once and its memory follows; what is too much there goes straight to the memory
    /// hosts. It is for a guest that writes so much that rounds never end. Otherwise what is too much leaves first.
    #[arg(long, value_name = "MODE", value_parser = named::<Mode>(["precopy", "hybrid", "postcopy"]))]
    pub mode: Option<Mode>,
    /// A host that lends memory (lend_memory), and how much; several times for several hosts
    ///
    /// It needs 4 KiB for each MiB beside the memory itself. Of a machine that is split already these are all that it
    /// is to have: others are emptied while its guest runs, and have their memory back then. Without it such a machine
    /// keeps those that it has, and only how much of it is here changes.
    #[arg(long, value_name = "HOST:PORT=SIZE", value_parser = memory_host)]
    pub memory: Vec<MemoryHost>,
    /// At how many memory hosts each page is: none (one), copies=2, or parity
    ///
    /// With copies=2 the first memory host that is named and the second have the same pages, the third and the fourth,
    /// and so on. With parity, which takes three or more that lend the same, each page is at one, and what is at it can
    /// be had from the others; a third of what they lend goes into that with three, a quarter with four, a fifth with
    /// more. Either way any one of them may go down for good, and the guest runs on. It can be changed while the guest
    /// runs; for a while memory hosts lend what both need then. Without this option: one, or as it is for a machine
    /// that is split already.
    #[arg(long, value_name = "none|copies=2|parity", value_parser = redundancy)]
    pub redundancy: Option<Redundancy>,
    /// Where pages belong that the guest does not use: track (nowhere), or ignore (where any other page would be)
    ///
    /// With track they take no memory and never travel, and the guest gets one of zeros at once when it uses it. With
    /// ignore each counts, leaves and comes back as any other page: it is there to compare with. Without this option:
    /// track, or as it is for a machine that is split already.
    #[arg(long, value_name = "track|ignore", value_parser = unused)]
    pub unused: Option<Unused>,
    /// Write the report there as JSON, '-' for standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Where a guest runs, and how much of its memory is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Main {
    /// The daemon of another host.
    pub peer: Option<String>,
    /// How much, bytes.
    pub bytes: u64,
}

/// `merge`.
#[derive(Debug, Args)]
pub struct Merge {
    /// The machine's name
    pub name: String,
    /// Move it there, where all of it comes together [default: it comes together here]
    #[arg(long, value_name = "HOST:PORT")]
    pub to: Option<String>,
    /// Write the report there as JSON, '-' for standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// `evacuate`.
#[derive(Debug, Args)]
pub struct Evacuate {
    /// The machines' names
    #[arg(required = true)]
    pub names: Vec<String>,
    /// The daemon of their new host
    #[arg(long, value_name = "HOST:PORT")]
    pub to: String,
    /// A host that lends memory meanwhile (lend_memory), and how much to all of them together; several times for
    /// several hosts
    ///
    /// A machine that is split already needs none.
    #[arg(long, value_name = "HOST:PORT=SIZE", value_parser = memory_host)]
    pub memory: Vec<MemoryHost>,
    /// Write the reports there as JSON, '-' for standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

fn main_host(text: &str) -> Result<Main, String> {
    let (place, size) = text
        .rsplit_once('=')
        .ok_or_else(|| format!("it is {HERE}=SIZE or HOST:PORT=SIZE, such as {HERE}=2G or b.example:4444=2G"))?;
    let bytes = parse_size(size).map_err(|error| error.to_string())?;
    match place {
        HERE => Ok(Main { peer: None, bytes }),
        peer if peer.contains(':') => Ok(Main { peer: Some(peer.into()), bytes }),
        _ => Err(format!("'{place}' is neither {HERE} nor of the form HOST:PORT")),
    }
}

fn redundancy(text: &str) -> Result<Redundancy, String> {
    match text {
        "none" => Ok(Redundancy::None),
        "copies=2" => Ok(Redundancy::Mirrored),
        "parity" => Ok(Redundancy::Parity),
        _ => Err("it is none, copies=2 or parity".into()),
    }
}

fn unused(text: &str) -> Result<Unused, String> {
    match text {
        "track" => Ok(Unused::Track),
        "ignore" => Ok(Unused::Ignore),
        _ => Err("it is track or ignore".into()),
    }
}

fn memory_host(text: &str) -> Result<MemoryHost, String> {
    let (peer, size) = text.rsplit_once('=').ok_or("it is HOST:PORT=SIZE, such as b.example:4444=4G")?;
    let bytes = parse_size(size).map_err(|error| error.to_string())?;
    Ok(MemoryHost { peer: peer.into(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_sizes_are_told_apart() {
        assert_eq!(main_host("here=2G"), Ok(Main { peer: None, bytes: 2 << 30 }));
        assert_eq!(main_host("b:1=2G"), Ok(Main { peer: Some("b:1".into()), bytes: 2 << 30 }));
        let host = MemoryHost { peer: "[::1]:4444".into(), bytes: 3 << 20 };
        assert_eq!(memory_host("[::1]:4444=3M"), Ok(host));
        for wrong in ["", "2G", "b=2G", "here", "here=", "here=x"] {
            assert!(main_host(wrong).is_err(), "{wrong}");
        }
        assert_eq!((redundancy("none"), redundancy("copies=2")), (Ok(Redundancy::None), Ok(Redundancy::Mirrored)));
        assert_eq!(redundancy("parity"), Ok(Redundancy::Parity));
        assert!(redundancy("copies=3").is_err() && redundancy("").is_err());
        assert_eq!((unused("track"), unused("ignore")), (Ok(Unused::Track), Ok(Unused::Ignore)));
        assert!(unused("tracked").is_err() && unused("").is_err());
        assert!(memory_host("b:1").is_err() && memory_host("b:1=").is_err());
    }
}
