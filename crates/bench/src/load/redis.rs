//! Clients of a Redis cluster whose nodes run in guests: `redis-benchmark` sets keys all over it. Throughput is
//! measured in intervals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Sample, now_us};
use crate::command::{PATIENCE, wait_for};
use crate::error::{Context, Error, Result};
use crate::lab::{Host, net};
use crate::tools;

/// The port of every node.
const PORT: u16 = 6379;
/// The slots of a cluster (the Redis cluster specification).
const SLOTS: usize = 16384;
/// What the clients do: 50 of them, 16 requests at once each, on keys of a range.
const CLIENTS: [&str; 8] = ["-c", "50", "-P", "16", "-d", "64", "-r", "100000"];
/// More requests than there is time for.
const FOR_EVER: &str = "2000000000";

/// What a guest's `redis-server` is told, to be a node of a cluster.
pub const NODE: &str = "redis-server:--cluster-enabled,yes,--cluster-config-file,/tmp/nodes.conf";

/// Clients at work; dropping it ends them.
pub struct RedisLoad {
    child: Child,
    samples: Arc<Mutex<Vec<Sample>>>,
    reader: Option<JoinHandle<()>>,
}

impl RedisLoad {
    /// Joins these nodes to a cluster, and starts clients on a host of the lab.
    ///
    /// # Errors
    /// A node does not answer or the cluster does not come up, or `redis-benchmark` is not installed.
    pub fn start(host: &Host, nodes: &[Ipv4Addr]) -> Result<Self> {
        join(host, nodes)?;
        let mut command = host.command(tools::redis_benchmark()?);
        let first = nodes.first().ok_or_else(|| Error::Usage("a cluster of no nodes".into()))?;
        command.args(["--cluster", "-h", &first.to_string(), "-p", &PORT.to_string(), "-t", "set", "-n", FOR_EVER]);
        command.args(CLIENTS).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context(|| "starting redis-benchmark".into())?;
        let output = child.stdout.take().ok_or_else(|| Error::Usage("redis-benchmark has no output".into()))?;
        let samples = Arc::new(Mutex::new(Vec::new()));
        let seen = samples.clone();
        let reader = std::thread::spawn(move || {
            for words in BufReader::new(output).split(b'\r').map_while(|words| words.ok()) {
                let rate = requests_per_s(&String::from_utf8_lossy(&words));
                let sample = rate.map(|per_s| Sample { at_us: now_us(), per_s });
                seen.lock().unwrap_or_else(PoisonError::into_inner).extend(sample);
            }
        });
        Ok(Self { child, samples, reader: Some(reader) })
    }

    /// The throughput of each interval so far, requests per second.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for RedisLoad {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.reader.take().into_iter().for_each(|reader| drop(reader.join()));
    }
}

/// Gives each node its part of the slots, introduces them to each other, and waits until they agree.
fn join(host: &Host, nodes: &[Ipv4Addr]) -> Result<()> {
    let first = nodes.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED);
    for (number, node) in nodes.iter().enumerate() {
        // A guest that has just started says so before its server listens.
        wait_for("a Redis node", PATIENCE, || Ok(ask(host, *node, "PING").ok()))?;
        let (from, to) = (number * SLOTS / nodes.len(), (number + 1) * SLOTS / nodes.len() - 1);
        ask(host, *node, &format!("CLUSTER ADDSLOTSRANGE {from} {to}"))?;
        ask(host, *node, &format!("CLUSTER MEET {first} {PORT}"))?;
    }
    let agree = |node: &Ipv4Addr| ask(host, *node, "CLUSTER INFO").is_ok_and(|info| info.contains("cluster_state:ok"));
    let known = |node: &Ipv4Addr| {
        let known = format!("cluster_known_nodes:{}\r", nodes.len());
        ask(host, *node, "CLUSTER INFO").is_ok_and(|info| info.contains(&known))
    };
    let all = || Ok(nodes.iter().all(|node| agree(node) && known(node)).then_some(()));
    wait_for("the Redis nodes to agree", PATIENCE, all)
}

/// What a node answers to a command.
fn ask(host: &Host, node: Ipv4Addr, command: &str) -> Result<String> {
    let asking = || format!("asking the Redis at {node}: {command}");
    let address = SocketAddr::from((node, PORT));
    let mut stream: TcpStream =
        net::inside(&host.namespace, || TcpStream::connect_timeout(&address, Duration::from_secs(2)).context(asking))?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).context(asking)?;
    stream.write_all(format!("{command}\r\n").as_bytes()).context(asking)?;
    let mut answer = vec![0; 4096];
    let length = stream.read(&mut answer).context(asking)?;
    let answer = String::from_utf8_lossy(answer.get(..length).unwrap_or_default()).into_owned();
    if answer.starts_with('-') || answer.is_empty() {
        return Err(Error::Usage(format!("{}: {}", asking(), answer.trim())));
    }
    Ok(answer)
}

/// The rate of the last interval in words such as `SET: rps=52000.0 (overall: 51000.0) avg_msec=1.2 (overall: 1.2)`.
fn requests_per_s(words: &str) -> Option<f64> {
    words.split_once("rps=")?.1.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_an_interval_is_read_and_no_other() {
        let words = "SET: rps=52124.5 (overall: 51000.0) avg_msec=1.216 (overall: 1.200)";
        assert_eq!(requests_per_s(words), Some(52124.5));
        for words in ["", "Cluster has 3 master nodes:", "SET: rps= (overall: 1)"] {
            assert_eq!(requests_per_s(words), None, "{words}");
        }
    }
}
