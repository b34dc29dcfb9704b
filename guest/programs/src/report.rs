use std::fmt::Display;
use std::io::Write;
use std::net::UdpSocket;

/// Sends a program's lines to the console and, where there is one, to the meter.
#[derive(Debug)]
pub struct Report {
    meter: Option<UdpSocket>,
}

impl Report {
    /// To the meter at the address in the variable `STERNA_METER` (`IP:PORT`), if it is set.
    #[must_use]
    pub fn from_environment() -> Self {
        Self { meter: std::env::var("STERNA_METER").ok().and_then(|meter| connect(&meter).ok()) }
    }

    /// Says `line`. A network that is down, or a console nobody reads, stops no workload.
    pub fn line(&self, line: impl Display) {
        let line = format!("{line}\n");
        let _ = std::io::stdout().lock().write_all(line.as_bytes());
        if let Some(meter) = &self.meter {
            let _ = meter.send(line.trim_end().as_bytes());
        }
    }
}

/// A UDP socket towards `meter` (`IP:PORT`) that never blocks.
///
/// # Errors
/// Those of the system calls, among them a malformed address.
pub fn connect(meter: &str) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(meter)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
