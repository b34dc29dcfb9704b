//! The port other daemons call.

use std::net::TcpListener;
use std::sync::Arc;

use sterna_engine::destination::listen::serve;
use sterna_engine::host::DestinationHost;

use super::incoming::Destination;
use crate::vms::Daemon;

/// Takes calls on the configured address from now on, on threads of its own. Does nothing where none is configured.
///
/// # Errors
/// Where the address cannot be had.
pub fn listen(daemon: &Arc<Daemon>) -> std::io::Result<()> {
    let Some(address) = &daemon.config.listen else { return Ok(()) };
    let listener = TcpListener::bind(address)?;
    tracing::info!(address = %listener.local_addr()?, "listening for other daemons");
    let host: Arc<dyn DestinationHost> = Arc::new(Destination(Arc::clone(daemon)));
    std::thread::Builder::new().name("listener".into()).spawn(move || serve(&listener, &host))?;
    Ok(())
}
