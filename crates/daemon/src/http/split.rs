//! Routes of split machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sterna_api::{Problem, SplitReport, SplitRequest};
use sterna_engine::monitor::Monitor;

use super::answer::{Body, Failure, Path, blocking};
use super::vms::Asked;
use crate::daemon::Daemon;
use crate::split::and_move;

/// Has a part of a virtual machine's memory leave for memory hosts while its guest runs on here; or, of one that is
/// split already, changes how much of it is here, and which memory hosts it has. Answers when no more of it is here
/// than may be, and nothing at a memory host that is not named; with `main` once the guest runs there. A caller that
/// goes away, or a cancel, ends the work: then all is as it was before, but for memory hosts that have come or left
/// meanwhile.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/split",
    params(("name" = String, Path, description = "its name")),
    request_body = SplitRequest,
    responses((status = 200, body = SplitReport), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn split(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<SplitRequest>,
) -> Result<Json<SplitReport>, Failure> {
    let asked = Asked(Arc::new(Monitor::new(&name)));
    let monitor = Arc::clone(&asked.0);
    let split = move || and_move::split(&daemon.splits, &daemon.departures, &name, &request, &monitor);
    blocking(split).await.map(Json)
}

/// Brings all of a split virtual machine's memory back to this host; answers when it is here. A caller that goes away,
/// or a cancel, ends the work: then the machine stays split.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/merge",
    params(("name" = String, Path, description = "its name")),
    responses((status = 200, body = SplitReport), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn merge(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<Json<SplitReport>, Failure> {
    let asked = Asked(Arc::new(Monitor::new(&name)));
    let monitor = Arc::clone(&asked.0);
    blocking(move || daemon.splits.merge(&name, &monitor)).await.map(Json)
}
