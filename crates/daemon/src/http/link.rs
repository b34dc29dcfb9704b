//! Routes of network cards.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sterna_api::{LinkRequest, NetworkCard, Problem};

use super::answer::{Body, Failure, Path, blocking};
use crate::daemon::Daemon;
use crate::link;

/// A virtual machine's network cards.
#[utoipa::path(
    get,
    path = "/v1/vms/{name}/link",
    params(("name" = String, Path, description = "its name")),
    responses((status = 200, body = Vec<NetworkCard>), (status = "4XX", body = Problem))
)]
pub async fn show(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
) -> Result<Json<Vec<NetworkCard>>, Failure> {
    blocking(move || link::show(&daemon.machines, &name)).await.map(Json)
}

/// Changes the links of a virtual machine's network cards, as by a cable; answers with the cards that were changed. Two
/// guests with one hardware address in one network take each other's packets: that is what a clone's link is down for.
#[utoipa::path(
    put,
    path = "/v1/vms/{name}/link",
    params(("name" = String, Path, description = "its name")),
    request_body = LinkRequest,
    responses(
        (status = 200, body = Vec<NetworkCard>),
        (status = "4XX", body = Problem),
        (status = "5XX", body = Problem)
    )
)]
pub async fn set(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<LinkRequest>,
) -> Result<Json<Vec<NetworkCard>>, Failure> {
    blocking(move || link::set(&daemon.machines, &name, &request)).await.map(Json)
}
