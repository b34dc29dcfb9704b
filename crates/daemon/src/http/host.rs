//! Routes of the host's settings.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sterna_api::Problem;
use sterna_api::options::MIN_BANDWIDTH_BYTES_PER_S;
use sterna_api::vm::{HostBandwidth, HostKept};

use super::answer::{Body, Failure, blocking};
use crate::daemon::Daemon;
use crate::problems::invalid;

/// What all migrations away from this host may send together.
#[utoipa::path(get, path = "/v1/host/bandwidth", responses((status = 200, body = HostBandwidth)))]
pub async fn bandwidth(State(daemon): State<Arc<Daemon>>) -> Json<HostBandwidth> {
    Json(HostBandwidth { bandwidth_bytes_per_s: daemon.departures.bandwidth.rate() })
}

/// Changes what all migrations away from this host may send together, for migrations under way too. After a restart of
/// the daemon the configuration is in force again.
#[utoipa::path(
    put,
    path = "/v1/host/bandwidth",
    request_body = HostBandwidth,
    responses((status = 200, body = HostBandwidth), (status = "4XX", body = Problem))
)]
pub async fn set_bandwidth(
    State(daemon): State<Arc<Daemon>>,
    Body(wanted): Body<HostBandwidth>,
) -> Result<Json<HostBandwidth>, Failure> {
    if let Some(rate) = wanted.bandwidth_bytes_per_s
        && rate < MIN_BANDWIDTH_BYTES_PER_S
    {
        return Err(Failure(invalid(format!("bandwidth is {rate} bytes/s: below 64 KiB/s no migration ends"))));
    }
    daemon.departures.bandwidth.set_rate(wanted.bandwidth_bytes_per_s);
    tracing::info!(bytes_per_s = wanted.bandwidth_bytes_per_s, "the host's bandwidth was changed");
    Ok(Json(wanted))
}

/// What this host keeps of machines that have left.
#[utoipa::path(get, path = "/v1/host/kept", responses((status = 200, body = HostKept)))]
pub async fn kept(State(daemon): State<Arc<Daemon>>) -> Result<Json<HostKept>, Failure> {
    blocking(move || Ok(daemon.keeper.show())).await.map(Json)
}

/// Drops all that this host keeps of machines that have left. Returns what that was.
#[utoipa::path(delete, path = "/v1/host/kept", responses((status = 200, body = HostKept)))]
pub async fn drop_kept(State(daemon): State<Arc<Daemon>>) -> Result<Json<HostKept>, Failure> {
    let dropped = move || {
        let kept = daemon.keeper.show();
        daemon.keeper.drop_all();
        Ok(kept)
    };
    blocking(dropped).await.map(Json)
}
