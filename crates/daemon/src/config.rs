//! The configuration: `/etc/sterna/sternad.toml`, which the command line overrides.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use serde::Deserialize;
use sterna_api::options::MIN_BANDWIDTH_BYTES_PER_S;
use sterna_api::units::{UnitError, parse_duration, parse_rate, parse_size};
use sterna_engine::transport::credentials::Files;

/// The longest path a unix socket can have on Linux, bytes (`sun_path` less its final zero).
pub const SOCKET_PATH_BYTES: usize = 107;

const DEFAULT_FILE: &str = "/etc/sterna/sternad.toml";

/// Sterna's daemon: runs virtual machines and moves them between hosts.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "sternad", version, about)]
pub struct Arguments {
    /// Configuration file [default: /etc/sterna/sternad.toml, where it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where machines, RAM files and records live [default: /var/lib/sterna]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The API's socket [default: unix:/run/sterna/sternad.sock]
    #[arg(long, value_name = "unix:PATH")]
    pub api: Option<String>,
    /// Where other daemons reach this one; without it no machine can be moved here
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// How much to log: error, warn, info, debug, trace, or a filter such as `sterna_engine=debug`
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// What all migrations away from this host may send together, such as 1Gbit or 100MB; they share it evenly
    /// [default: no limit]
    #[arg(long, value_name = "RATE")]
    pub bandwidth: Option<String>,
}

/// How long a memory host may be silent before a spare takes its place, where nothing is said of it: a host may be
/// restarted meanwhile.
const SPARE_AFTER: Duration = Duration::from_secs(5 * 60);

/// The configuration file as written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    state_dir: Option<PathBuf>,
    api: Option<String>,
    listen: Option<String>,
    log: Option<String>,
    agent: Option<PathBuf>,
    qemu: Option<PathBuf>,
    qemu_user: Option<String>,
    bandwidth: Option<String>,
    max_outgoing: Option<usize>,
    max_incoming: Option<usize>,
    ksm_group: Option<String>,
    unshare_reserve: Option<u8>,
    offer_pools: Option<bool>,
    keep_departed: Option<String>,
    memory_floor: Option<String>,
    pause_priority: Option<bool>,
    huge_pages: Option<bool>,
    lend_memory: Option<String>,
    #[serde(default)]
    spare_memory_hosts: Vec<String>,
    spare_after: Option<String>,
    tls: Option<Tls>,
    #[serde(default)]
    test_trust_first_look: bool,
}

/// The section `[tls]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    authority: PathBuf,
    #[serde(default)]
    peers: Vec<String>,
}

impl From<Tls> for Files {
    fn from(tls: Tls) -> Self {
        Self { certificate: tls.certificate, key: tls.key, authority: tls.authority, peers: tls.peers }
    }
}

/// The configuration in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where machines, RAM files and records live.
    pub state_dir: PathBuf,
    /// The path of the API's socket.
    pub api: PathBuf,
    /// Where other daemons reach this one.
    pub listen: Option<String>,
    /// The log filter.
    pub log: String,
    /// The library inside QEMU; looked for beside the daemon and in `/usr/lib/sterna` where absent.
    pub agent: Option<PathBuf>,
    /// The QEMU binary of machines that name none, and of every machine that comes here.
    pub qemu: Option<PathBuf>,
    /// The user QEMU runs as; the daemon's own where absent.
    pub qemu_user: Option<String>,
    /// What all migrations away from here may send together, bytes per second.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Migrations away from here at one time; more wait.
    pub max_outgoing: usize,
    /// Migrations to here at one time; the sources of more keep them in their queues.
    pub max_incoming: usize,
    /// The trust group whose machines' private memory the kernel may merge (KSM). It knows no groups itself, so a host
    /// has one at most.
    pub ksm_group: Option<String>,
    /// What is kept free for guests that write what they share: percent of all that machines of this host may have in
    /// common. No machine is accepted that would take it.
    pub unshare_reserve: u8,
    /// Whether machines that come may share with those of their trust group that are here already. Whoever may send a
    /// machine can find out by it which contents these have in their pools.
    pub offer_pools: bool,
    /// For how long what the memory of machines was is kept when they have left, so that less travels when they come
    /// back; 0 for not at all.
    pub keep_departed: Duration,
    /// The free memory, bytes, below which guests are stopped that write what they share; 0 for never.
    pub memory_floor_bytes: u64,
    /// Whether the threads that bring a guest on while it stands still go before all others of this host.
    pub pause_priority: bool,
    /// Whether guests' shared memory is in huge pages where nothing else is said of a machine.
    pub huge_pages: bool,
    /// The memory that guests of other hosts may have here, bytes; 0 for none.
    pub lend_memory_bytes: u64,
    /// Memory hosts that take the place of those that do not answer any more.
    pub spare_memory_hosts: Vec<String>,
    /// How long a memory host may be silent before one does.
    pub spare_after: Duration,
    /// The files that connections to other daemons are encrypted with; without them connections are plain.
    pub tls: Option<Files>,
    /// Whether free pages are looked for only once. It harms guests that are moved or whose memory is taken: only for
    /// tests that show why the second look matters.
    pub test_trust_first_look: bool,
}

/// A configuration that is invalid or unreadable.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file's content is invalid.
    #[error("the configuration file {path} is wrong", path = .path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The place and the cause.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// An address of the API that is not a unix socket.
    #[error("the API's address '{0}' is not of the form unix:PATH")]
    Api(String),
    /// A listen address without a port.
    #[error("the listen address '{0}' is not of the form HOST:PORT")]
    Listen(String),
    /// A path that a unix socket cannot have.
    #[error("{what} {path} is {length} bytes long: a unix socket's path has at most {SOCKET_PATH_BYTES}", path = .path.display(), length = .path.as_os_str().len())]
    SocketPath {
        /// What the path is for.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// A bandwidth that is no rate.
    #[error("the bandwidth cannot be used")]
    Bandwidth(#[from] UnitError),
    /// A bandwidth that is too low.
    #[error("a bandwidth of {0} bytes/s is too little: below {MIN_BANDWIDTH_BYTES_PER_S} no migration ends")]
    TooSlow(u64),
    /// A floor that is no size.
    #[error("memory_floor cannot be used")]
    Floor(#[source] UnitError),
    /// A budget that is no size.
    #[error("lend_memory cannot be used")]
    Lend(#[source] UnitError),
    /// A time that is no duration.
    #[error("keep_departed cannot be used")]
    Keep(#[source] UnitError),
    /// The address of a spare without a port.
    #[error("spare_memory_hosts has '{0}', which is not of the form HOST:PORT")]
    Spare(String),
    /// A time that is no duration.
    #[error("spare_after cannot be used")]
    SpareAfter(#[source] UnitError),
    /// A part of more than all.
    #[error("unshare_reserve is {0}: it is a percentage, at most 100")]
    Percent(u8),
    /// A limit of 0.
    #[error("{0} is 0: at least 1 is needed")]
    Zero(&'static str),
}

impl Config {
    /// Reads the file and lets the command line override it.
    ///
    /// # Errors
    /// [`ConfigError`]. The default file may be absent, a file that was named may not.
    pub fn load(arguments: &Arguments) -> Result<Self, ConfigError> {
        let named = arguments.config.as_deref();
        let path = named.unwrap_or(Path::new(DEFAULT_FILE));
        let file = match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|source| ConfigError::Parse { path: path.into(), source: Box::new(source) })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => File::default(),
            Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
        };
        Self::merge(arguments, file)
    }

    fn merge(arguments: &Arguments, file: File) -> Result<Self, ConfigError> {
        let api = arguments.api.clone().or(file.api).unwrap_or_else(|| "unix:/run/sterna/sternad.sock".into());
        let Some(api) = api.strip_prefix("unix:").filter(|path| !path.is_empty()) else {
            return Err(ConfigError::Api(api));
        };
        let listen = arguments.listen.clone().or(file.listen);
        if let Some(address) = &listen
            && !has_port(address)
        {
            return Err(ConfigError::Listen(address.clone()));
        }
        let bandwidth = arguments.bandwidth.as_ref().or(file.bandwidth.as_ref());
        let bandwidth_bytes_per_s = bandwidth.map(|rate| parse_rate(rate)).transpose()?;
        let config = Self {
            state_dir: absolute(
                arguments.state_dir.clone().or(file.state_dir).unwrap_or_else(|| "/var/lib/sterna".into()),
            ),
            api: absolute(PathBuf::from(api)),
            listen,
            log: arguments.log.clone().or(file.log).unwrap_or_else(|| "info".into()),
            agent: file.agent,
            qemu: file.qemu,
            qemu_user: file.qemu_user,
            bandwidth_bytes_per_s,
            max_outgoing: file.max_outgoing.unwrap_or(2),
            max_incoming: file.max_incoming.unwrap_or(4),
            ksm_group: file.ksm_group,
            unshare_reserve: file.unshare_reserve.unwrap_or(10),
            offer_pools: file.offer_pools.unwrap_or(false),
            keep_departed: file.keep_departed.map_or(Ok(Duration::ZERO), |time| keep_time(&time))?,
            memory_floor_bytes: file
                .memory_floor
                .map_or(Ok(64 << 20), |floor| size_or_none(&floor, ConfigError::Floor))?,
            pause_priority: file.pause_priority.unwrap_or(true),
            huge_pages: file.huge_pages.unwrap_or(true),
            lend_memory_bytes: file.lend_memory.map_or(Ok(0), |size| size_or_none(&size, ConfigError::Lend))?,
            spare_memory_hosts: file.spare_memory_hosts,
            spare_after: file.spare_after.as_deref().map_or(Ok(SPARE_AFTER), spare_after)?,
            tls: file.tls.map(Files::from),
            test_trust_first_look: file.test_trust_first_look,
        };
        if let Some(rate) = config.bandwidth_bytes_per_s
            && rate < MIN_BANDWIDTH_BYTES_PER_S
        {
            return Err(ConfigError::TooSlow(rate));
        }
        if let Some(wrong) = config.spare_memory_hosts.iter().find(|peer| !has_port(peer)) {
            return Err(ConfigError::Spare(wrong.clone()));
        }
        if config.max_outgoing == 0 {
            return Err(ConfigError::Zero("max_outgoing"));
        }
        if config.max_incoming == 0 {
            return Err(ConfigError::Zero("max_incoming"));
        }
        if config.unshare_reserve > 100 {
            return Err(ConfigError::Percent(config.unshare_reserve));
        }
        check_socket_path("the API's socket", &config.api)?;
        Ok(config)
    }
}

/// A size, which may be 0.
fn size_or_none(text: &str, wrong: fn(UnitError) -> ConfigError) -> Result<u64, ConfigError> {
    if text == "0" { Ok(0) } else { parse_size(text).map_err(wrong) }
}

/// A time for which something is kept, which may be 0.
fn keep_time(text: &str) -> Result<Duration, ConfigError> {
    if text == "0" { Ok(Duration::ZERO) } else { parse_duration(text).map_err(ConfigError::Keep) }
}

/// Whether an address has the form of a daemon's.
fn has_port(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// How long memory hosts may be silent.
fn spare_after(time: &str) -> Result<Duration, ConfigError> {
    parse_duration(time).map_err(ConfigError::SpareAfter)
}

/// Checks that a unix socket can have this path.
///
/// # Errors
/// [`ConfigError::SocketPath`] where it is too long.
pub fn check_socket_path(what: &'static str, path: &Path) -> Result<(), ConfigError> {
    if path.as_os_str().len() > SOCKET_PATH_BYTES {
        return Err(ConfigError::SocketPath { what, path: path.into() });
    }
    Ok(())
}

/// Makes a path absolute: QEMU and a restarted daemon may have other working directories than this process.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merge(arguments: &Arguments, text: &str) -> Result<Config, ConfigError> {
        Config::merge(arguments, toml::from_str(text).unwrap())
    }

    #[test]
    fn the_contracts_defaults_hold_where_nothing_is_said() {
        let config = merge(&Arguments::default(), "").unwrap();
        assert_eq!(config.state_dir, Path::new("/var/lib/sterna"));
        assert_eq!(config.api, Path::new("/run/sterna/sternad.sock"));
        assert_eq!(config.listen, None);
        assert_eq!((config.max_outgoing, config.max_incoming, config.unshare_reserve), (2, 4, 10));
        assert!(config.pause_priority, "a pause is as short as this host can make it");
        assert!(!merge(&Arguments::default(), "pause_priority = false").unwrap().pause_priority);
        assert!(config.huge_pages && !merge(&Arguments::default(), "huge_pages = false").unwrap().huge_pages);
        assert_eq!(config.lend_memory_bytes, 0, "memory is lent where that is asked for");
        assert!(!config.offer_pools, "sharing with those that are here is asked for");
        assert!(config.keep_departed.is_zero(), "what was a machine's is kept where that is asked for");
    }

    #[test]
    fn the_command_line_has_the_last_word() {
        let arguments = Arguments { listen: Some("[::1]:9".into()), ..Arguments::default() };
        let config = merge(&arguments, "listen = '0.0.0.0:7'\nlog = 'debug'\nbandwidth = '1Gbit'").unwrap();
        assert_eq!(config.bandwidth_bytes_per_s, Some(125_000_000));
        assert_eq!(config.listen.as_deref(), Some("[::1]:9"));
        assert_eq!(config.log, "debug");
    }

    #[test]
    fn wrong_addresses_are_refused_by_name() {
        assert!(merge(&Arguments::default(), "api = 'tcp:1'").unwrap_err().to_string().contains("tcp:1"));
        assert!(merge(&Arguments::default(), "listen = 'host'").unwrap_err().to_string().contains("HOST:PORT"));
        assert!(merge(&Arguments::default(), "max_incoming = 0").unwrap_err().to_string().contains("max_incoming"));
        assert!(merge(&Arguments::default(), "bandwidth = '1 mile'").is_err());
        assert!(merge(&Arguments::default(), "memory_floor = 'low'").is_err());
        assert!(merge(&Arguments::default(), "keep_departed = 'long'").is_err());
        assert!(merge(&Arguments::default(), "keep_departed = '0'").unwrap().keep_departed.is_zero());
        assert_eq!(merge(&Arguments::default(), "keep_departed = '90s'").unwrap().keep_departed.as_secs(), 90);
        assert_eq!(merge(&Arguments::default(), "memory_floor = '0'").unwrap().memory_floor_bytes, 0);
        let spares = merge(&Arguments::default(), "spare_memory_hosts = ['b:1']\nspare_after = '90s'").unwrap();
        assert_eq!((spares.spare_memory_hosts, spares.spare_after.as_secs()), (vec!["b:1".to_owned()], 90));
        for wrong in ["spare_memory_hosts = ['b']", "spare_after = 'soon'"] {
            assert!(merge(&Arguments::default(), wrong).unwrap_err().to_string().contains("spare_"), "{wrong}");
        }
        assert!(merge(&Arguments::default(), "lend_memory = 'all'").unwrap_err().to_string().contains("lend_memory"));
        assert_eq!(merge(&Arguments::default(), "lend_memory = '2G'").unwrap().lend_memory_bytes, 2 << 30);
        assert!(
            merge(&Arguments::default(), "unshare_reserve = 101").unwrap_err().to_string().contains("unshare_reserve")
        );
        assert!(merge(&Arguments::default(), "bandwidth = '8Kbit'").unwrap_err().to_string().contains("1000 bytes/s"));
        let long = format!("api = 'unix:/{}'", "x".repeat(107));
        assert!(merge(&Arguments::default(), &long).unwrap_err().to_string().contains("107"));
    }

    #[test]
    fn tls_needs_all_its_files() {
        let text = "[tls]\ncertificate = '/c'\nkey = '/k'\nauthority = '/a'\npeers = ['b.example']";
        let tls = merge(&Arguments::default(), text).unwrap().tls.unwrap();
        assert_eq!((tls.key.as_path(), tls.peers), (Path::new("/k"), vec!["b.example".to_string()]));
        let error = toml::from_str::<File>("[tls]\ncertificate = '/c'\nkey = '/k'").unwrap_err();
        assert!(error.to_string().contains("authority"), "{error}");
    }

    #[test]
    fn a_misspelt_field_is_named() {
        let error = toml::from_str::<File>("listne = 'a:1'").unwrap_err();
        assert!(error.to_string().contains("listne"), "{error}");
    }
}
