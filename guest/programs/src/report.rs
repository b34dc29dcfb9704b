use std::fmt::Display;
use std::io::{Error, ErrorKind, Result, Write};
use std::net::{SocketAddr, UdpSocket};

/// Sends a program's lines to the console and, where there is one, to the meter.
#[derive(Debug)]
pub struct Report {
    meter: Option<UdpSocket>,
}

impl Report {
    /// To the meter that the variable `STERNA_METER` names (`IP:PORT`), if it is set. Heartbeats go to that port; lines
    /// go to the next one, so that neither has to be told from the other.
    #[must_use]
    pub fn from_environment() -> Self {
        let meter = std::env::var("STERNA_METER").ok().and_then(|meter| connect(&meter, 1).ok());
        Self { meter }
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

/// A UDP socket that never blocks, towards `meter` (`IP:PORT`), `ports_on` ports further.
///
/// # Errors
/// A malformed address, and those of the system calls.
pub fn connect(meter: &str, ports_on: u16) -> Result<UdpSocket> {
    let mut address: SocketAddr = meter.parse().map_err(|problem| Error::new(ErrorKind::InvalidInput, problem))?;
    address.set_port(address.port().saturating_add(ports_on));
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_to_the_port_after_the_heartbeats() {
        let socket = connect("127.0.0.1:9099", 1).expect("a well-formed address");
        assert_eq!(socket.peer_addr().expect("connected").port(), 9100);
    }

    #[test]
    fn a_malformed_meter_is_refused() {
        assert!(connect("meter", 0).is_err());
    }
}
