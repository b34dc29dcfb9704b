//! The lab's network: one namespace per host, and one for the switch that joins them.
//!
//! ```text
//!  namespace a                 namespace switch                namespace b
//!  guest tap ── br0 ── up0 ════ port-a ── sw0 ── port-b ════ up0 ── br0 ── guest tap
//!                 └ TBF: rate    └ TBF: rate
//! ```
//! The switch has a namespace of its own, so that labs with the same addresses never meet.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};

use crate::command::run;
use crate::error::{Context, Error, Result};

/// The bytes a shaper lets through at once: one TCP segment offload unit and some, so that the rate is met.
const BURST_BYTES: u64 = 256 * 1024;
/// The longest a packet waits in a shaper's queue before it is dropped.
const QUEUE_MS: u32 = 10;
/// Where named network namespaces live.
const NAMESPACES: &str = "/run/netns";

/// The name of a host's namespace, or of the switch's.
#[must_use]
pub fn namespace(lab: &str, host: &str) -> String {
    format!("sl-{lab}-{host}")
}

/// The file that stands for a namespace.
#[must_use]
pub fn path(namespace: &str) -> PathBuf {
    Path::new(NAMESPACES).join(namespace)
}

/// Makes the switch.
///
/// # Errors
/// What `ip` said.
pub fn create_switch(lab: &str) -> Result<()> {
    let switch = namespace(lab, "switch");
    run("ip", &format!("netns add {switch}"))?;
    run("ip", &format!("-n {switch} link add sw0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"))?;
    run("ip", &format!("-n {switch} link set sw0 up"))?;
    Ok(())
}

/// The port of a host at the switch.
#[derive(Debug, Clone)]
pub struct Port<'a> {
    /// The lab.
    pub lab: &'a str,
    /// The host.
    pub host: &'a str,
    /// Its address with prefix length.
    pub address: &'a str,
    /// Its hardware address.
    pub mac: &'a str,
    /// The link's rate both ways, bytes per second; unlimited where absent.
    pub rate_bytes_per_s: Option<u64>,
}

/// Makes a host's namespace and plugs it into the switch.
///
/// # Errors
/// What `ip` or `tc` said.
pub fn create_host(port: &Port) -> Result<()> {
    let (own, switch) = (namespace(port.lab, port.host), namespace(port.lab, "switch"));
    let Port { host, address, mac, .. } = port;
    run("ip", &format!("netns add {own}"))?;
    run("ip", &format!("-n {own} link set lo up"))?;
    run("ip", &format!("-n {own} link add up0 type veth peer name port-{host} netns {switch}"))?;
    // A bridge without an address of its own takes its lowest port's: a new tap would change it under open connections.
    run(
        "ip",
        &format!("-n {own} link add br0 address {mac} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
    )?;
    run("ip", &format!("-n {own} link set up0 master br0 up"))?;
    run("ip", &format!("-n {own} address add {address} dev br0"))?;
    run("ip", &format!("-n {own} link set br0 up"))?;
    run("ip", &format!("-n {switch} link set port-{host} master sw0 up"))?;
    if let Some(rate) = port.rate_bytes_per_s {
        shape(&own, "up0", rate)?;
        shape(&switch, &format!("port-{host}"), rate)?;
    }
    Ok(())
}

/// Makes a host's link slower, or faster, than the lab's others; it has a rate already.
///
/// # Errors
/// What `tc` said.
pub fn reshape(lab: &str, host: &str, rate_bytes_per_s: u64) -> Result<()> {
    for (namespace, device) in
        [(namespace(lab, host), "up0".into()), (namespace(lab, "switch"), format!("port-{host}"))]
    {
        run("tc", &format!("-n {namespace} qdisc del dev {device} root"))?;
        shape(&namespace, &device, rate_bytes_per_s)?;
    }
    Ok(())
}

/// Limits what leaves `device`.
fn shape(namespace: &str, device: &str, rate_bytes_per_s: u64) -> Result<()> {
    let bits = rate_bytes_per_s * 8;
    run(
        "tc",
        &format!(
            "-n {namespace} qdisc add dev {device} root tbf rate {bits}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
        ),
    )?;
    Ok(())
}

/// Makes a tap that stays until its namespace goes, plugged into the host's bridge.
///
/// # Errors
/// What `ip` said.
pub fn create_tap(lab: &str, host: &str, tap: &str) -> Result<()> {
    let own = namespace(lab, host);
    run("ip", &format!("-n {own} tuntap add dev {tap} mode tap"))?;
    run("ip", &format!("-n {own} link set {tap} master br0 up"))?;
    Ok(())
}

/// Removes a tap.
///
/// # Errors
/// What `ip` said.
pub fn delete_tap(lab: &str, host: &str, tap: &str) -> Result<()> {
    run("ip", &format!("-n {} link delete {tap}", namespace(lab, host))).map(drop)
}

/// The namespaces of a lab that exist, the switch's included.
///
/// # Errors
/// Where the list cannot be read.
pub fn existing(lab: &str) -> Result<Vec<String>> {
    let prefix = namespace(lab, "");
    let entries = match std::fs::read_dir(NAMESPACES) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).context(|| format!("listing {NAMESPACES}")),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| name.starts_with(&prefix)).collect())
}

/// Removes every namespace of a lab, with the devices in it.
///
/// # Errors
/// What `ip` said of the first that would not go.
pub fn delete_all(lab: &str) -> Result<()> {
    existing(lab)?.iter().try_for_each(|name| run("ip", &format!("netns delete {name}")).map(drop))
}

/// Runs `work` on a thread of its own inside a network namespace. Sockets it makes and returns stay in that namespace.
///
/// # Errors
/// Where the namespace cannot be entered, or what `work` returned.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let file = path(namespace);
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let handle = std::fs::File::open(&file).context(|| format!("opening namespace {}", file.display()))?;
            setns(handle.as_fd(), CloneFlags::CLONE_NEWNET).context(|| format!("entering {}", file.display()))?;
            work()
        });
        thread.join().unwrap_or_else(|_| Err(Error::Usage("a thread of the lab panicked".into())))
    })
}

/// Bytes that have left and entered a host through its link, from the kernel's counters: (sent, received).
///
/// # Errors
/// Where the counters cannot be read.
pub fn link_bytes(lab: &str, host: &str) -> Result<(u64, u64)> {
    let text = run("ip", &format!("-n {} -json -statistics link show up0", namespace(lab, host)))?;
    let form = |reason: &str| Error::Form { what: "ip -json link".into(), reason: reason.into() };
    let links: serde_json::Value = serde_json::from_str(&text).map_err(|error| form(&error.to_string()))?;
    let count = |way: &str| links[0]["stats64"][way]["bytes"].as_u64().ok_or_else(|| form("no byte counters"));
    Ok((count("tx")?, count("rx")?))
}
