//! The process from its start to its end. At its end the machines run on: the next daemon finds them.

use std::error::Error;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use crate::caller::Caller;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::disk_images;
use crate::http::router;
use crate::huge;
use crate::migration::listener::listen;
use crate::migration::sweep;
use crate::process::raise_file_limit;
use crate::shortage;
use crate::split::spares::{self, Spares};

/// The most connections to the API at a time; further callers wait until one has ended. Each may hold a descriptor, a
/// thread and some memory, all of which the machines' migrations need.
const CONNECTIONS: usize = 256;
/// How long a request's head may take, and how long a connection may be idle between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long no connection is accepted after the descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long waiting requests may take when the daemon ends.
const GRACE: Duration = Duration::from_secs(1);

/// How long the rollback of guests on their way may take when the daemon ends. The next daemon finishes the rest.
const GIVE_BACK: Duration = Duration::from_secs(10);

/// Runs the daemon until it is told to end.
///
/// # Errors
/// The failure of something that the daemon cannot do without, with its causes.
pub fn serve(config: Config) -> Result<(), Box<dyn Error + Send + Sync>> {
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let daemon = Arc::new(Daemon::new(config)?);
    for lack in sterna_sys::probe::missing() {
        tracing::warn!("no machine can be moved away from this host: {lack}");
    }
    daemon.recovery().recover()?;
    shortage::begin(Arc::clone(&daemon.machines), Arc::clone(&daemon.keeper), daemon.config.memory_floor_bytes);
    daemon.keeper.begin();
    daemon.loans.begin();
    let Config { spare_memory_hosts, spare_after, .. } = &daemon.config;
    spares::begin(&daemon.splits, Spares { peers: spare_memory_hosts.clone(), after: *spare_after });
    huge::begin(Arc::clone(&daemon.machines));
    let (machines, pools) = (Arc::clone(&daemon.machines), Arc::clone(&daemon.destination.pools));
    sweep::begin(machines, pools, Arc::clone(&daemon.images));
    daemon.warm.begin();
    disk_images::begin(Arc::clone(&daemon.machines));
    listen(daemon.config.listen.as_deref(), &daemon.destination).map_err(|error| {
        let address = daemon.config.listen.clone().unwrap_or_default();
        format!("cannot listen on {address}: {error}")
    })?;
    let result = runtime.block_on(serve_api(&daemon));
    runtime.shutdown_timeout(GRACE);
    daemon.jobs().cancel_all(GIVE_BACK);
    let _ = fs::remove_file(&daemon.config.api);
    let _ = daemon.images.forget_unused(&[], |_| false);
    daemon.state.unmount_if_empty();
    result
}

async fn serve_api(daemon: &Arc<Daemon>) -> Result<(), Box<dyn Error + Send + Sync>> {
    let socket = bind(&daemon.config.api)?;
    let router = router(Arc::clone(daemon));
    let mut terminate = signal(SignalKind::terminate())?;
    tracing::info!(api = %daemon.config.api.display(), state = %daemon.config.state_dir.display(), "ready");
    tokio::select! {
        () = serve_connections(&socket, &router) => {}
        _ = terminate.recv() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    tracing::info!("ending; the machines run on");
    Ok(())
}

/// Serves all callers, for ever. A caller that asks slowly, or never finishes, is given up: `axum::serve` would wait
/// for ever, and accept as many callers as there are descriptors.
async fn serve_connections(socket: &UnixListener, router: &Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let stream = match socket.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot take a call of the API");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let caller = Extension(ConnectInfo(Caller::of(&stream)));
        let service = TowerToHyperService::new(router.clone().layer(caller));
        tokio::spawn(async move {
            let mut protocol = http1::Builder::new();
            protocol.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
            // How a connection ends matters only to its caller.
            let _ = protocol.serve_connection(TokioIo::new(stream), service).await;
            drop(place);
        });
    }
}

/// Makes the API's socket, for root alone. One that a dead daemon left is replaced; a living one's is not.
fn bind(path: &Path) -> Result<UnixListener, Box<dyn Error + Send + Sync>> {
    let problem = |error: std::io::Error| format!("cannot make the API's socket {}: {error}", path.display());
    if UnixStream::connect(path).is_ok() {
        return Err(format!("another daemon serves {}: give this one another --api", path.display()).into());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(problem(error).into()),
        _ => {}
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(problem)?;
    }
    // The socket is made under a name that nobody knows, so that nobody connects before it is root's alone.
    let private = path.with_extension("new");
    let _ = fs::remove_file(&private);
    let listener = UnixListener::bind(&private).map_err(problem)?;
    fs::set_permissions(&private, fs::Permissions::from_mode(0o600)).map_err(problem)?;
    fs::rename(&private, path).map_err(problem)?;
    Ok(listener)
}
