//! The command line's arguments.

/// The options of a migration.
mod migrate;
/// The split of a machine, and its merge.
mod split;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use sterna_api::units::{parse_duration, parse_rate, parse_size};
use sterna_api::{MemoryMode, ReclaimMethod};

pub use self::migrate::Migrate;
pub use self::split::{Evacuate, Main, Merge, Split};

/// Runs virtual machines and moves them between hosts while they run.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, about, after_help = EXIT_CODES)]
pub struct Arguments {
    /// The daemon's socket
    #[arg(long, env = "STERNA_API", default_value = "unix:/run/sterna/sternad.sock", value_name = "unix:PATH")]
    pub api: String,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed and the VM runs on at the source, 2 usage, 3 cancelled and the VM runs on \
    at the source, 4 failed and the VM is lost or paused, or runs at the destination with memory that differs, 5 the \
    daemon cannot be reached.";

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a virtual machine with your own QEMU arguments
    Run(Run),
    /// Take over a running QEMU that has the agent loaded
    Adopt(Adopt),
    /// List the virtual machines of this host
    Ps {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one virtual machine
    Show {
        /// Its name
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Drop what this host keeps of the memory of virtual machines that have left (keep_departed)
    Forget,
    /// Show the memory that this host lends to guests of other hosts (lend_memory)
    Lent(Lent),
    /// Stop a virtual machine
    Stop {
        /// Its name
        name: String,
        /// End QEMU at once instead of asking the guest to switch itself off
        #[arg(long)]
        force: bool,
    },
    /// Move virtual machines to another host
    Migrate(Box<Migrate>),
    /// Estimate what a migration would take now, from a short look at the guest
    Estimate(Estimate),
    /// Make a guest give back the memory that it does not use
    Balloon(Balloon),
    /// Give the memory that a guest holds free back to this host
    Reclaim(Reclaim),
    /// Have another QEMU take virtual machines over on this host, while they run
    ///
    /// No memory is copied: both QEMUs have the same. The guest pauses for some milliseconds. This is how a new version
    /// of QEMU comes to guests that run already.
    Replace(Replace),
    /// Have a running guest go on as several: clones that share its memory until somebody writes
    Fork(Fork),
    /// Have a part of a running machine's memory leave for memory hosts, which lend it
    ///
    /// Its guest runs on. What it touches of the rest comes back when it does, so it is slower the less of what it uses
    /// is where it runs. Again with another size, it is changed how much of it is here.
    Split(Split),
    /// Bring all of a split machine's memory back to this host, or to another one
    Merge(Merge),
    /// Have virtual machines leave this host as fast as its uplink allows, however slow their new host is
    ///
    /// A part of their memory goes to memory hosts, which lend it, and their guests go with the rest. At their new host
    /// they come together by themselves.
    Evacuate(Evacuate),
    /// Let a guest run that is paused, or a clone that is held
    ///
    /// Where it has a guest agent (qemu-guest-agent at a channel org.qemu.guest_agent.0), its clock is set then.
    Continue {
        /// Its name
        name: String,
    },
    /// Bring the links of a machine's network cards up or down, or list the cards
    ///
    /// A clone's links are down, and its cards in taps of their own that are in no bridge. TWO GUESTS WITH ONE HARDWARE
    /// ADDRESS IN ONE NETWORK TAKE EACH OTHER'S PACKETS: give a clone another one first (--new-mac), or bring the other
    /// guest's link down. Its IP address, too, is the source's until somebody changes it inside.
    Link(Link),
    /// List templates and their clones that are held ready, or change one
    Template(Template),
    /// Cancel a virtual machine's migration, or another long command on it
    Cancel {
        /// Its name
        name: String,
    },
    /// Look at once for the destination that a machine which was handed over waits for, or where it is now
    Resume {
        /// Its name
        name: String,
        /// The destination daemon, where it is now [default: where it was]
        #[arg(long, value_name = "HOST:PORT")]
        to: Option<String>,
        /// Your word that the destination is off for good: run the machine here (dangerous)
        ///
        /// Only for a machine whose destination has been switched off, or restarted, before it could say whether the
        /// machine runs there. A host that cannot be reached is not off. If it still runs, TWO GUESTS WRITE THE SAME
        /// DISKS and destroy them. And if the machine ran there before that host went off, its disks are ahead of the
        /// memory here by all that it did there: file systems and databases may be damaged, and what others were told
        /// there is forgotten. The daemon logs who said so.
        #[arg(long, value_name = "HOST", conflicts_with = "to")]
        fenced: Option<String>,
    },
    /// Follow migrations live
    Watch {
        /// Only this virtual machine, until its migration has ended
        name: Option<String>,
        /// As lines of JSON
        #[arg(long)]
        json: bool,
    },
}

/// `replace`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true))]
pub struct Replace {
    /// The machine's name
    #[arg(group = "which")]
    pub name: Option<String>,
    /// Every machine of this host, one after the other, in the order of their names; stops at the first that fails
    #[arg(long, group = "which", conflicts_with = "arguments")]
    pub all: bool,
    /// The new QEMU's binary [default: the machine's own, as it is now]
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Compare all of the guest's memory before and after, in the pause
    #[arg(long)]
    pub verify: bool,
    /// Write the report there as JSON; '-' is standard output. With --all, a list of reports
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The new QEMU's arguments, without RAM [default: the machine's own]
    ///
    /// What the guest sees must stay as it is: QEMU refuses what its devices' state does not fit, and the guest runs on
    /// as before.
    #[arg(last = true, value_name = "QEMU-ARGUMENTS")]
    pub arguments: Vec<String>,
}

/// `fork`.
#[derive(Debug, Args)]
pub struct Fork {
    /// The machine's name
    pub name: String,
    /// The clones' names: one clone for each
    #[arg(required_unless_present = "hold", value_name = "NEW")]
    pub names: Vec<String>,
    /// Keep what the guest is now as a template, and hold so many clones of it ready
    ///
    /// 'sterna run NEW --from-template' takes one in milliseconds, and another is made ready in its place. A template
    /// outlives the machine and the daemon, and not the host.
    #[arg(long, value_name = "N")]
    pub hold: Option<u32>,
    /// The template's name [default: the machine's]
    #[arg(long, value_name = "TEMPLATE", requires = "hold")]
    pub template: Option<String>,
    /// Put the clones on other hosts; given several times, they go to these hosts in turn [default: the machine's own]
    ///
    /// A clone runs there before its memory is there: pages follow when it asks for them, and the others behind them.
    /// Until the last has gone this host shows the clone, too, and keeps what it may still need.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "hold")]
    pub to: Vec<String>,
    /// Hold the clones: they do not run until 'sterna continue' lets them
    #[arg(long)]
    pub paused: bool,
    /// Give the machine and each clone an overlay of each disk that can be written [in DIR, else beside the image]
    ///
    /// Nobody writes the image afterwards. The overlays are qcow2 files, and stay when their machines end. With --to
    /// they must be on storage that the other hosts have at the same path. With --hold each clone that is made later
    /// gets one, too, of the disk as it is now.
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    pub overlay_disks: Option<Option<PathBuf>>,
    /// Give each clone's network cards new hardware addresses, and links
    ///
    /// Each card is unplugged and another one plugged into its place, once the clone runs. Its guest has to let go of
    /// the former one, and configures the new one as its own programs do. Cards that cannot be unplugged are refused
    /// before anything is paused.
    #[arg(long, conflicts_with_all = ["paused", "hold"])]
    pub new_mac: bool,
    /// Write the report there as JSON; '-' is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The clones' QEMU arguments, without RAM [default: the machine's own]
    ///
    /// Without them a clone's network cards are connected to nothing and have no link ('sterna link' brings them up).
    /// '{name}' stands for the name of each clone.
    #[arg(last = true, value_name = "QEMU-ARGUMENTS")]
    pub arguments: Vec<String>,
}

/// `lent`.
#[derive(Debug, Args)]
pub struct Lent {
    /// Take back what is lent to this guest, by its number: without another copy of its pages it never runs on
    #[arg(long, value_name = "NUMBER")]
    pub take_back: Option<String>,
    /// As JSON
    #[arg(long, conflicts_with = "take_back")]
    pub json: bool,
}

/// `link`.
#[derive(Debug, Args)]
pub struct Link {
    /// The machine's name
    pub name: String,
    /// What the links are to be [default: lists the cards]
    #[arg(value_enum)]
    pub state: Option<LinkState>,
    /// Only the card of this name in QEMU: its id, where it has one
    #[arg(long, value_name = "CARD", requires = "state")]
    pub card: Option<String>,
    /// Put the cards' taps into this bridge of the host
    ///
    /// Not on record: wherever the machine is moved, its taps are in no bridge until they are put into one there.
    #[arg(long, value_name = "BRIDGE", requires = "state")]
    pub bridge: Option<String>,
    /// Give the cards new hardware addresses first: each is unplugged, and another one plugged into its place
    ///
    /// The guest has to run, and to let go of them.
    #[arg(long, requires = "state")]
    pub new_mac: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `template`.
#[derive(Debug, Args)]
pub struct Template {
    /// Its name [default: all are listed]
    pub name: Option<String>,
    /// Hold so many clones of it ready from now on
    #[arg(long, value_name = "N", requires = "name", conflicts_with = "remove")]
    pub hold: Option<u32>,
    /// Remove it, and the clones that are held ready; those that were taken stay
    #[arg(long, requires = "name", conflicts_with = "json")]
    pub remove: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// What a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    /// There is one
    Up,
    /// There is none
    Down,
}

/// `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// The machine's name, unique on its hosts
    pub name: String,
    /// RAM, such as 512M or 4G
    #[arg(long, value_name = "SIZE", value_parser = parse_size, required_unless_present = "from_template")]
    pub memory: Option<u64>,
    /// Take a clone of this template, which 'sterna fork --hold' made: one that is held ready, else one made now
    #[arg(long, value_name = "TEMPLATE", conflicts_with_all = ["memory", "memory_mode", "memory_template",
        "trust_group", "qemu", "balloon", "arguments"])]
    pub from_template: Option<String>,
    /// Where RAM is
    #[arg(long, value_enum, default_value_t = MemoryModeArgument::Shared)]
    pub memory_mode: MemoryModeArgument,
    /// A file that its private memory begins as: the RAM of a stopped guest, on tmpfs, exactly as large as --memory
    ///
    /// Machines that begin as the same file share what none of them has written. The file belongs to root, and nobody
    /// else may write it. NOBODY MAY CHANGE IT while a machine uses it. '-incoming' may stand among QEMU's arguments
    /// then, for the state of the devices that belongs to the file.
    #[arg(long, value_name = "FILE")]
    pub memory_template: Option<PathBuf>,
    /// Machines that it may share pages with: those of the same group, where the host's 'ksm_group' names it, too
    #[arg(long, value_name = "G")]
    pub trust_group: Option<String>,
    /// The QEMU binary [default: the daemon's]
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Add a balloon device (virtio-balloon with deflate-on-oom and free-page-reporting), which 'sterna balloon' needs
    #[arg(long)]
    pub balloon: bool,
    /// Whether its shared memory is in huge pages, as far as the host has them: faster, and memory comes and goes in
    /// pieces of 2 MiB. The daemon's configuration must allow it ('huge_pages') [default: as that says]
    #[arg(long, value_name = "on|off",
        value_parser = PossibleValuesParser::new(["on", "off"]).map(|word| word == "on"))]
    pub huge_pages: Option<bool>,
    /// Return once it runs, instead of following it until it ends
    #[arg(long)]
    pub detach: bool,
    /// QEMU's arguments, without RAM
    #[arg(last = true, value_name = "QEMU-ARGUMENTS")]
    pub arguments: Vec<String>,
}

/// `--memory-mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryModeArgument {
    /// In a file, from which pages are sent without a copy
    Shared,
    /// In QEMU's own memory, where the kernel can merge equal pages of one trust group
    Private,
}

impl From<MemoryModeArgument> for MemoryMode {
    fn from(mode: MemoryModeArgument) -> Self {
        match mode {
            MemoryModeArgument::Shared => Self::Shared,
            MemoryModeArgument::Private => Self::Private,
        }
    }
}

/// `balloon`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("how").required(true).args(["auto", "off", "target"])))]
pub struct Balloon {
    /// The machine
    pub name: String,
    /// Follow the guest's free memory: take 95 % of it, give back at once what the guest needs
    #[arg(long)]
    pub auto: bool,
    /// Give the guest all of its memory back, and leave its balloon alone from now on
    #[arg(long)]
    pub off: bool,
    /// Leave the guest this much memory, such as 512M or 4G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub target: Option<u64>,
    /// With --auto: how often the balloon is adjusted
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration, conflicts_with_all = ["off", "target"])]
    pub interval: Duration,
}

/// `reclaim`.
#[derive(Debug, Args)]
pub struct Reclaim {
    /// The machine; it runs on
    pub name: String,
    /// How the guest's free memory is found
    #[arg(long, value_enum, default_value_t = ReclaimMethodArgument::Vmi)]
    pub method: ReclaimMethodArgument,
    /// Write the report there as JSON, '-' for standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// `--method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReclaimMethodArgument {
    /// By looking into its kernel from outside: for any Linux guest
    Vmi,
    /// By inflating and deflating its balloon
    Balloon,
}

impl From<ReclaimMethodArgument> for ReclaimMethod {
    fn from(method: ReclaimMethodArgument) -> Self {
        match method {
            ReclaimMethodArgument::Vmi => Self::Vmi,
            ReclaimMethodArgument::Balloon => Self::Balloon,
        }
    }
}

/// `estimate`.
#[derive(Debug, Args)]
pub struct Estimate {
    /// The machine; it runs on
    pub name: String,
    /// What the migration may send, such as 1Gbit or 100MB
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub bandwidth: u64,
    /// How long the guest is observed
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = parse_duration)]
    pub duration: Duration,
    /// The longest pause that is accepted
    #[arg(long, value_name = "DURATION", default_value = "300ms", value_parser = parse_duration)]
    pub downtime_limit: Duration,
    /// Count clean pages of the guest's page cache, too (experimental: they travel all the same)
    #[arg(long)]
    pub page_cache: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `adopt`.
#[derive(Debug, Args)]
pub struct Adopt {
    /// The name it gets
    pub name: String,
    /// QEMU's process
    #[arg(long)]
    pub pid: u32,
    /// Its QMP socket
    #[arg(long, value_name = "PATH")]
    pub qmp: PathBuf,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn what_later_versions_bring_is_unknown_today() {
        for line in ["sterna split a", "sterna drain --to b:1"] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn a_balloon_is_set_in_exactly_one_way_and_an_interval_goes_with_auto() {
        let Command::Balloon(balloon) = parse("sterna balloon a --auto --interval 500ms").unwrap().command else {
            panic!()
        };
        assert!(balloon.auto && balloon.interval == Duration::from_millis(500));
        for line in ["", "--auto --off", "--off --target 1G", "--target 1X", "--off --interval 1s"] {
            assert_eq!(parse(&format!("sterna balloon a {line}")).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn free_memory_is_taken_by_looking_into_the_guest_unless_its_balloon_is_asked_for() {
        let method = |line: &str| match parse(line).map(|parsed| parsed.command) {
            Ok(Command::Reclaim(wanted)) => Some(ReclaimMethod::from(wanted.method)),
            _ => None,
        };
        assert_eq!(method("sterna reclaim a"), Some(ReclaimMethod::Vmi));
        assert_eq!(method("sterna reclaim a --method balloon --json -"), Some(ReclaimMethod::Balloon));
        assert_eq!(method("sterna reclaim a --method swap"), None);
    }

    #[test]
    fn an_estimate_needs_a_bandwidth_and_has_defaults_for_the_rest() {
        let Command::Estimate(estimate) = parse("sterna estimate a --bandwidth 1Gbit").unwrap().command else {
            panic!()
        };
        assert_eq!((estimate.bandwidth, estimate.duration), (125_000_000, Duration::from_secs(3)));
        assert_eq!(estimate.downtime_limit, Duration::from_millis(300));
        assert_eq!(parse("sterna estimate a").unwrap_err().exit_code(), 2);
    }

    #[test]
    fn qemus_arguments_stand_behind_two_dashes() {
        let Command::Run(run) = parse("sterna run a --memory 1G --detach -- -M q35 -S").unwrap().command else {
            panic!()
        };
        assert_eq!((run.memory, run.detach), (Some(1 << 30), true));
        assert_eq!(run.arguments, ["-M", "q35", "-S"]);
        assert!(parse("sterna run a --memory 1G -M q35").is_err());
        assert!(parse("sterna run a -- -M q35").is_err(), "memory is required");
    }
}
