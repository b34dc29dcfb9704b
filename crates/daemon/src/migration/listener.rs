//! The port other daemons call.

use std::net::TcpListener;
use std::sync::Arc;

use sterna_engine::destination::listen::serve;
use sterna_engine::host::DestinationHost;

use super::incoming::Destination;

/// Takes calls on `address` from now on, on threads of its own. Does nothing where there is none.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(address: Option<&str>, destination: &Destination) -> std::io::Result<()> {
    let Some(address) = address else { return Ok(()) };
    let listener = TcpListener::bind(address)?;
    let address = listener.local_addr()?;
    let encrypted = destination.credentials.is_some();
    tracing::info!(%address, encrypted, "listening for other daemons");
    if !encrypted && !address.ip().is_loopback() {
        tracing::warn!(
            %address,
            "whoever reaches this address can start QEMU here and read and change the guests that move: \
             set [tls] in sternad.toml, or let only hosts reach it"
        );
    }
    let host: Arc<dyn DestinationHost> = Arc::new(destination.clone());
    std::thread::Builder::new().name("listener".into()).spawn(move || serve(&listener, &host))?;
    Ok(())
}
