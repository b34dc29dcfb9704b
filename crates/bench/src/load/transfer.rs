//! One TCP transfer between two hosts of a lab: what a link really carries.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::lab::{Host, net};

/// Sends from one host to another for `duration` and returns what arrived, bytes per second.
///
/// # Errors
/// Where the connection cannot be made or breaks.
pub fn measure(from: &Host, to: &Host, duration: Duration) -> Result<f64> {
    let listener =
        net::inside(&to.namespace, || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context(|| "listening".into()))?;
    let port = listener.local_addr().context(|| "listening".into())?.port();
    let address = SocketAddr::from((to.address, port));
    let connect =
        || TcpStream::connect_timeout(&address, Duration::from_secs(5)).context(|| format!("connecting to {address}"));
    let sender = net::inside(&from.namespace, connect)?;
    let (receiver, _) = listener.accept().context(|| "accepting".into())?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || receive(receiver));
        send(sender, duration)?;
        receiving.join().unwrap_or_else(|_| Err(Error::Usage("the receiver panicked".into())))
    })
}

fn send(mut stream: TcpStream, duration: Duration) -> Result<()> {
    let block = vec![0x5a; 256 * 1024];
    let start = Instant::now();
    while start.elapsed() < duration {
        stream.write_all(&block).context(|| "sending".into())?;
    }
    Ok(())
}

/// The rate from the first byte on; what was already under way before it is not counted.
fn receive(mut stream: TcpStream) -> Result<f64> {
    let mut block = vec![0; 256 * 1024];
    let mut bytes = 0u64;
    let mut start = None;
    loop {
        let read = stream.read(&mut block).context(|| "receiving".into())?;
        match start {
            _ if read == 0 => break,
            None => start = Some(Instant::now()),
            Some(_) => bytes += read as u64,
        }
    }
    Ok(start.map_or(0.0, |start| bytes as f64 / start.elapsed().as_secs_f64()))
}
