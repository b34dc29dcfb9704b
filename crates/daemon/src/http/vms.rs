//! Machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use sterna_api::{AdoptRequest, Problem, RunRequest, Vm};
use utoipa::IntoParams;

use super::answer::{Body, Failure, Path, Query, blocking};
use crate::vms::Daemon;

/// The virtual machines of this host.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<Vm>)))]
pub async fn list(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<Vm>>, Failure> {
    blocking(move || Ok(daemon.list())).await.map(Json)
}

/// Starts a virtual machine.
#[utoipa::path(
    post,
    path = "/v1/vms",
    request_body = RunRequest,
    responses((status = 201, body = Vm), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn run(
    State(daemon): State<Arc<Daemon>>,
    Body(request): Body<RunRequest>,
) -> Result<(StatusCode, Json<Vm>), Failure> {
    let vm = blocking(move || daemon.run(&request)).await?;
    Ok((StatusCode::CREATED, Json(vm)))
}

/// Takes over a running QEMU.
#[utoipa::path(
    post,
    path = "/v1/vms/adopt",
    request_body = AdoptRequest,
    responses((status = 201, body = Vm), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn adopt(
    State(daemon): State<Arc<Daemon>>,
    Body(request): Body<AdoptRequest>,
) -> Result<(StatusCode, Json<Vm>), Failure> {
    let vm = blocking(move || daemon.adopt(&request)).await?;
    Ok((StatusCode::CREATED, Json(vm)))
}

/// One virtual machine.
#[utoipa::path(
    get,
    path = "/v1/vms/{name}",
    params(("name" = String, Path, description = "its name")),
    responses((status = 200, body = Vm), (status = 404, body = Problem))
)]
pub async fn show(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<Json<Vm>, Failure> {
    blocking(move || daemon.show(&name)).await.map(Json)
}

/// How to stop.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StopQuery {
    /// End QEMU at once instead of asking the guest.
    #[serde(default)]
    force: bool,
}

/// Stops a virtual machine; answers when it is gone.
#[utoipa::path(
    delete,
    path = "/v1/vms/{name}",
    params(("name" = String, Path, description = "its name"), StopQuery),
    responses((status = 204, description = "it is gone"), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn stop(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Query(query): Query<StopQuery>,
) -> Result<StatusCode, Failure> {
    blocking(move || daemon.stop(&name, query.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Cancels a virtual machine's migration; its end shows that of the migration.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/cancel",
    params(("name" = String, Path, description = "its name")),
    responses((status = 202, description = "it will be cancelled"), (status = "4XX", body = Problem))
)]
pub async fn cancel(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    blocking(move || daemon.cancel(&name)).await?;
    Ok(StatusCode::ACCEPTED)
}
