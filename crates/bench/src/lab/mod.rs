//! Hosts on one machine: network namespaces joined by a switch, each with its link rate, memory limit and daemon.

/// Control groups.
pub mod cgroup;

/// One host.
pub mod host;

/// Namespaces, bridges, link rates.
pub mod net;

/// The record of a lab.
pub mod state;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Mutex;
use std::time::Duration;

use crate::error::{Context, Error, Result};
use crate::process::ProcessId;
pub use host::Host;
use state::State;

/// The host that makes load.
pub const CLIENT: &str = "client";
/// The host that measures from outside.
pub const METER: &str = "meter";
/// The prefix length of the lab's network.
pub const PREFIX: u8 = 16;

/// The configuration of a lab.
#[derive(Debug, Clone)]
pub struct LabConfig {
    /// Its name: small letters and digits.
    pub name: String,
    /// Hosts that have a daemon.
    pub hosts: Vec<String>,
    /// Rate of each host's link both ways, bytes per second; unlimited where absent. `client` and `meter` are not
    /// limited.
    pub rate_bytes_per_s: Option<u64>,
    /// Memory limit of each host with a daemon, bytes.
    pub memory_limit_bytes: Option<u64>,
    /// The QEMU of hosts whose daemon does not take the one on its PATH.
    pub qemu: BTreeMap<String, PathBuf>,
    /// Whether the hosts' daemons are started.
    pub daemons: bool,
    /// Whether the lab is taken down with this process; otherwise it stays until somebody takes it down.
    pub owned: bool,
}

impl LabConfig {
    /// Two hosts `a` and `b` at 1 Gbit with daemons, gone with this process.
    #[must_use]
    pub fn pair(name: &str) -> Self {
        Self {
            name: name.into(),
            hosts: vec!["a".into(), "b".into()],
            rate_bytes_per_s: Some(125_000_000),
            memory_limit_bytes: None,
            qemu: BTreeMap::new(),
            daemons: true,
            owned: true,
        }
    }
}

/// A lab that is up. Dropping it takes it down where it is owned by this process.
#[derive(Debug)]
pub struct Lab {
    state: State,
    hosts: Vec<Host>,
    /// Daemons that this process started, to be reaped.
    children: Mutex<Vec<Child>>,
    owned: bool,
}

impl Lab {
    /// Brings a lab up. Where that fails, nothing of it stays.
    ///
    /// # Errors
    /// Where the name is taken, or namespaces, control groups or daemons cannot be made; needs root.
    pub fn up(config: LabConfig) -> Result<Self> {
        check(&config)?;
        let directory = state::claim(&config.name)?;
        let hosts = hosts(&config.name, &config.hosts);
        let state = State {
            name: config.name.clone(),
            owner: if config.owned { ProcessId::own() } else { None },
            hosts: config.hosts.clone(),
            rate_bytes_per_s: config.rate_bytes_per_s,
            memory_limit_bytes: config.memory_limit_bytes,
            qemu: config.qemu,
            daemons: Vec::new(),
        };
        let mut lab = Self { state, hosts, children: Mutex::default(), owned: config.owned };
        match lab.build(&directory, config.daemons) {
            Ok(()) => Ok(lab),
            Err(error) => {
                // The first error is reported; remains of the lab show in `lab status`.
                let _ = lab.reap_after(|| down(&config.name));
                lab.owned = false;
                Err(error)
            }
        }
    }

    fn build(&mut self, directory: &std::path::Path, daemons: bool) -> Result<()> {
        self.state.save()?;
        net::create_switch(&self.state.name)?;
        for (index, host) in self.hosts.iter().enumerate() {
            let has_daemon = self.state.hosts.contains(&host.name);
            std::fs::create_dir(&host.directory)
                .context(|| format!("making {}", directory.join(&host.name).display()))?;
            host.group.create(self.state.memory_limit_bytes.filter(|_| has_daemon))?;
            net::create_host(&net::Port {
                lab: &self.state.name,
                host: &host.name,
                address: &format!("{}/{PREFIX}", host.address),
                mac: &format!("02:53:54:00:00:{:02x}", index + 1),
                rate_bytes_per_s: self.state.rate_bytes_per_s.filter(|_| has_daemon),
            })?;
        }
        if daemons {
            self.state.hosts.clone().iter().try_for_each(|host| self.start_daemon(host))?;
        }
        Ok(())
    }

    /// A lab that another process brought up.
    ///
    /// # Errors
    /// Where there is none of that name.
    pub fn open(name: &str) -> Result<Self> {
        let state = State::load(name)?
            .ok_or_else(|| Error::Usage(format!("there is no lab {name}: `sterna-bench lab status` lists them")))?;
        Ok(Self { hosts: hosts(name, &state.hosts), state, children: Mutex::default(), owned: false })
    }

    /// Starts the daemon of a host, which must not have one running.
    ///
    /// # Errors
    /// Where it does not come up.
    pub fn start_daemon(&mut self, host: &str) -> Result<()> {
        let child = self.host(host)?.start_daemon(self.state.qemu.get(host).map(PathBuf::as_path))?;
        let id = ProcessId::of(child.id())
            .ok_or_else(|| Error::Usage(format!("the daemon of host {host} ended at once")))?;
        self.children.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(child);
        self.state.daemons.retain(|(name, _)| name != host);
        self.state.daemons.push((host.into(), id));
        self.state.save()
    }

    /// Ends the daemon of a host with SIGKILL; its machines run on.
    pub fn kill_daemon(&mut self, host: &str) {
        let (gone, kept) = self.state.daemons.drain(..).partition(|(name, _)| name == host);
        self.state.daemons = kept;
        let gone: Vec<(String, ProcessId)> = gone;
        for (_, id) in gone {
            id.kill();
            let mut children = self.children.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(at) = children.iter().position(|child| child.id() == id.pid) {
                let _ = children.swap_remove(at).wait();
            }
            // A daemon that another process started ends a moment after the signal.
            while id.is_alive() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// Its configuration.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Its hosts, `client` and `meter` last.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The host of that name.
    ///
    /// # Errors
    /// Where there is none.
    pub fn host(&self, name: &str) -> Result<&Host> {
        let known = || self.hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .ok_or_else(|| Error::Usage(format!("there is no host {name}; the hosts are {}", known())))
    }

    /// Makes the tap of a guest on every host with a daemon, under the same name: a guest's arguments are the same
    /// everywhere.
    ///
    /// # Errors
    /// Where a tap of that name exists.
    pub fn create_tap(&self, tap: &str) -> Result<()> {
        self.state.hosts.iter().try_for_each(|host| net::create_tap(&self.state.name, host, tap))
    }

    /// Removes the tap of a guest from every host.
    ///
    /// # Errors
    /// Where it is not there.
    pub fn delete_tap(&self, tap: &str) -> Result<()> {
        self.state.hosts.iter().try_for_each(|host| net::delete_tap(&self.state.name, host, tap))
    }

    /// Ends every process of the hosts with a daemon except the daemons: what a trial that failed may have left.
    pub fn end_machines(&self) {
        let is_daemon = |id: &ProcessId| self.state.daemons.iter().any(|(_, daemon)| daemon == id);
        let hosts = self.hosts.iter().filter(|host| self.state.hosts.contains(&host.name));
        let left = hosts.flat_map(|host| host.group.processes());
        left.filter(|id| !is_daemon(id)).for_each(|id| id.kill());
    }

    /// Takes the lab down now, and reports an error if there is one.
    ///
    /// # Errors
    /// Where something would not go.
    pub fn down(mut self) -> Result<()> {
        self.owned = false;
        let name = self.state.name.clone();
        self.reap_after(|| down(&name))
    }

    fn reap_after(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let result = work();
        for mut child in self.children.lock().unwrap_or_else(std::sync::PoisonError::into_inner).drain(..) {
            // The group's end has ended it; this only takes its exit status, so that it is no zombie.
            let _ = child.kill();
            let _ = child.wait();
        }
        result
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.owned {
            let name = self.state.name.clone();
            if let Err(error) = self.reap_after(|| down(&name)) {
                eprintln!("lab {name} was taken down only in part: {error}; run `sterna-bench lab down --name {name}`");
            }
        }
    }
}

/// Takes a lab down, whatever state it is in: its processes, mounts, namespaces, control groups and files. No lab of
/// that name is no error.
///
/// # Errors
/// The first part that could not be removed; a second attempt continues there.
pub fn down(name: &str) -> Result<()> {
    // The claim proves the name's form; a path from a name like `..` must never be erased.
    if !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()) || name.is_empty() {
        return Err(Error::Usage(format!("'{name}' is no valid name of a lab")));
    }
    cgroup::remove_all(name)?;
    net::delete_all(name)?;
    state::erase(name)
}

/// Takes down every lab whose owner died, and says which.
///
/// # Errors
/// As [`down`].
pub fn down_orphans() -> Result<Vec<String>> {
    down_where(|state| state.is_some_and(State::is_orphan))
}

/// Takes down labs whose owner died, and only says so where that fails: for programs that are about to make their own.
pub fn clear_orphans() {
    match down_orphans() {
        Ok(gone) => gone.iter().for_each(|name| eprintln!("took down lab {name}, whose owner had died")),
        Err(error) => eprintln!("a lab that was left behind would not go: {error}"),
    }
}

/// Takes down every lab that no living process owns, including those that were brought up to stay, and says which.
///
/// # Errors
/// As [`down`].
pub fn down_all() -> Result<Vec<String>> {
    down_where(|state| state.is_none_or(|state| state.owner.is_none() || state.is_orphan()))
}

fn down_where(chosen: impl Fn(Option<&State>) -> bool) -> Result<Vec<String>> {
    let mut gone = Vec::new();
    for name in state::names() {
        // A lab without a record is one that is just being made, or whose maker died in the first moments.
        let state = State::load(&name)?;
        let young = state.is_none() && state::age(&name) < Duration::from_secs(60);
        if !young && chosen(state.as_ref()) {
            down(&name)?;
            gone.push(name);
        }
    }
    Ok(gone)
}

/// The address of the guest with that number (0 to 255).
#[must_use]
pub fn guest_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 1, number)
}

fn hosts(lab: &str, names: &[String]) -> Vec<Host> {
    let directory: PathBuf = state::directory(lab);
    let daemons = names.iter().enumerate().map(|(index, name)| (name.as_str(), index as u8 + 1));
    let others = [(CLIENT, 100), (METER, 101)];
    daemons.chain(others).map(|(name, last)| Host::new(lab, name, Ipv4Addr::new(10, 77, 0, last), &directory)).collect()
}

fn check(config: &LabConfig) -> Result<()> {
    let good = |name: &str| {
        (1..=8).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    let reserved = [CLIENT, METER, "switch"];
    if config.hosts.is_empty() || config.hosts.len() > 32 {
        return Err(Error::Usage("a lab has 1 to 32 hosts".into()));
    }
    for (index, host) in config.hosts.iter().enumerate() {
        if !good(host) || reserved.contains(&host.as_str()) || config.hosts[..index].contains(host) {
            return Err(Error::Usage(format!(
                "'{host}' cannot name a host: use 1 to 8 small letters and digits, each name once, none of {}",
                reserved.join(", ")
            )));
        }
    }
    if !nix::unistd::Uid::effective().is_root() {
        return Err(Error::Usage("a lab needs root: it makes network namespaces and control groups".into()));
    }
    Ok(())
}
