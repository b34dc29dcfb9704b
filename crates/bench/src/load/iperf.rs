//! A server for the iperf3 of a guest, which sends as fast as it can. Throughput is measured in intervals.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{Sample, now_us};
use crate::error::{Context, Error, Result};
use crate::lab::Host;
use crate::tools;

/// The interval of measuring throughput, seconds.
const INTERVAL_S: f64 = 0.25;

/// A server at work; dropping it ends it.
pub struct IperfServer {
    child: Child,
    samples: Arc<Mutex<Vec<Sample>>>,
    reader: Option<JoinHandle<()>>,
}

impl IperfServer {
    /// Starts a server on a host of the lab. It serves one guest after another.
    ///
    /// # Errors
    /// Where iperf3 is not installed or does not start.
    pub fn start(host: &Host) -> Result<Self> {
        let mut command = host.command(tools::iperf3()?);
        // A client that vanishes would keep the server from the next one.
        command.args(["--server", "--forceflush", "--format", "k", "--idle-timeout", "3", "--rcv-timeout", "3000"]);
        command.args(["--interval", &INTERVAL_S.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context(|| "starting iperf3".into())?;
        let output = child.stdout.take().ok_or_else(|| Error::Usage("iperf3 has no output".into()))?;
        let samples = Arc::new(Mutex::new(Vec::new()));
        let seen = samples.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
                let sample = bytes_per_s(&line).map(|per_s| Sample { at_us: now_us(), per_s });
                seen.lock().unwrap_or_else(PoisonError::into_inner).extend(sample);
            }
        });
        Ok(Self { child, samples, reader: Some(reader) })
    }

    /// The throughput of each interval so far, bytes per second.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for IperfServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.reader.take().into_iter().for_each(|reader| drop(reader.join()));
    }
}

/// The rate of a line such as `[  5]   0.25-0.50   sec  1.25 MBytes  41943 Kbits/sec`; not of the sums at the end.
fn bytes_per_s(line: &str) -> Option<f64> {
    if line.contains("receiver") || line.contains("sender") {
        return None;
    }
    let (before, _) = line.split_once(" Kbits/sec")?;
    Some(before.split_ascii_whitespace().next_back()?.parse::<f64>().ok()? * 1000.0 / 8.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_an_interval_is_read_and_no_other() {
        assert_eq!(
            bytes_per_s("[  5]   0.25-0.50   sec  1.25 MBytes  41944 Kbits/sec                  "),
            Some(5_243_000.0)
        );
        for line in
            ["[  5]   0.00-9.00   sec  1.25 MBytes  41944 Kbits/sec    receiver", "Server listening on 5201", ""]
        {
            assert_eq!(bytes_per_s(line), None, "{line}");
        }
    }
}
