//! Routes of balloons.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sterna_api::{BalloonSetting, Problem, Vm};

use super::answer::{Body, Failure, Path, blocking};
use crate::daemon::Daemon;
use crate::show::show;

/// Changes how a virtual machine's balloon is handled. It outlives the daemon and travels with the machine.
#[utoipa::path(
    put,
    path = "/v1/vms/{name}/balloon",
    params(("name" = String, Path, description = "its name")),
    request_body = BalloonSetting,
    responses((status = 200, body = Vm), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn set(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(setting): Body<BalloonSetting>,
) -> Result<Json<Vm>, Failure> {
    blocking(move || {
        daemon.balloons.set(&name, setting)?;
        show(&daemon.machines, &daemon.balloons, &name)
    })
    .await
    .map(Json)
}
