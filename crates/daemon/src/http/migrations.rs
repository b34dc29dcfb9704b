//! Migrations away from this host.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sterna_api::{MigrateRequest, Migration, Problem};

use super::answer::{Body, Failure, Path, blocking};
use crate::daemon::Daemon;
use crate::migration::gang::migrate;

/// Moves virtual machines to another host; answers at once.
#[utoipa::path(
    post,
    path = "/v1/migrations",
    request_body = MigrateRequest,
    responses((status = 202, body = Migration), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn begin(
    State(daemon): State<Arc<Daemon>>,
    Body(request): Body<MigrateRequest>,
) -> Result<(StatusCode, Json<Migration>), Failure> {
    let job = blocking(move || migrate(&daemon.departures, &request)).await?;
    Ok((StatusCode::ACCEPTED, Json(job.show())))
}

/// The migrations under way, and the last that ended.
#[utoipa::path(get, path = "/v1/migrations", responses((status = 200, body = Vec<Migration>)))]
pub async fn list(State(daemon): State<Arc<Daemon>>) -> Json<Vec<Migration>> {
    Json(daemon.jobs().list().iter().map(|job| job.show()).collect())
}

/// One migration.
#[utoipa::path(
    get,
    path = "/v1/migrations/{id}",
    params(("id" = u64, Path, description = "its number")),
    responses((status = 200, body = Migration), (status = 404, body = Problem))
)]
pub async fn show(State(daemon): State<Arc<Daemon>>, Path(id): Path<u64>) -> Result<Json<Migration>, Failure> {
    Ok(Json(daemon.jobs().get(id)?.show()))
}
