//! Routes of templates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sterna_api::{Problem, TakeRequest, Taken, TemplateChange, TemplateState};

use super::answer::{Body, Failure, Path, blocking};
use crate::daemon::Daemon;

/// The templates of this host.
#[utoipa::path(get, path = "/v1/templates", responses((status = 200, body = Vec<TemplateState>)))]
pub async fn list(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<TemplateState>>, Failure> {
    blocking(move || Ok(daemon.warm.list())).await.map(Json)
}

/// One template.
#[utoipa::path(
    get,
    path = "/v1/templates/{name}",
    params(("name" = String, Path, description = "its name")),
    responses((status = 200, body = TemplateState), (status = 404, body = Problem))
)]
pub async fn show(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<Json<TemplateState>, Failure> {
    blocking(move || daemon.warm.show(&name)).await.map(Json)
}

/// Changes how many clones of a template are held ready; answers when it is so, or cannot be.
#[utoipa::path(
    put,
    path = "/v1/templates/{name}",
    params(("name" = String, Path, description = "its name")),
    request_body = TemplateChange,
    responses((status = 200, body = TemplateState), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn change(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(change): Body<TemplateChange>,
) -> Result<Json<TemplateState>, Failure> {
    blocking(move || daemon.warm.resize(&name, change.hold)).await.map(Json)
}

/// Removes a template, and the clones that are held ready of it. Those that were taken stay.
#[utoipa::path(
    delete,
    path = "/v1/templates/{name}",
    params(("name" = String, Path, description = "its name")),
    responses((status = 204, description = "it is gone"), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn remove(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    blocking(move || daemon.warm.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets a clone of a template run under a name of its own: one that is held ready, else one that is made now. Answers
/// when it runs.
#[utoipa::path(
    post,
    path = "/v1/templates/{name}/run",
    params(("name" = String, Path, description = "its name")),
    request_body = TakeRequest,
    responses((status = 201, body = Taken), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn take(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<TakeRequest>,
) -> Result<(StatusCode, Json<Taken>), Failure> {
    let taken = blocking(move || daemon.warm.take(&name, &request.name)).await?;
    Ok((StatusCode::CREATED, Json(taken)))
}
