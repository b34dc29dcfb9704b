//! Routes of machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, State};
use axum::http::StatusCode;
use serde::Deserialize;
use sterna_api::estimate::DEFAULT_DURATION_MS;
use sterna_api::{
    AdoptRequest, Estimate, ForkRequest, Forked, MigrateOptions, Problem, ReclaimRequest, Reclaimed, ReplaceRequest,
    Replaced, ResumeRequest, RunRequest, Vm,
};
use sterna_engine::monitor::Monitor;
use utoipa::IntoParams;

use super::answer::{Body, Failure, Path, Query, blocking};
use crate::caller::Caller;
use crate::daemon::Daemon;
use crate::migration::estimate::{self, Question};
use crate::migration::resume;
use crate::{go_on, run, show, stop};

/// The virtual machines of this host.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<Vm>)))]
pub async fn list(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<Vm>>, Failure> {
    blocking(move || Ok(show::list(&daemon.machines, &daemon.balloons))).await.map(Json)
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
    let vm = blocking(move || {
        let qemu = daemon.config.qemu.as_deref();
        run::run(&daemon.care, &daemon.launcher, &daemon.keeper, qemu, &request)?;
        show::show(&daemon.machines, &daemon.balloons, &request.name)
    })
    .await?;
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
    let vm = blocking(move || {
        daemon.adoptions.adopt(&request)?;
        show::show(&daemon.machines, &daemon.balloons, &request.name)
    })
    .await?;
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
    blocking(move || show::show(&daemon.machines, &daemon.balloons, &name)).await.map(Json)
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
    blocking(move || stop::stop(&daemon.machines, &name, query.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Cancels a virtual machine's migration; the migration then ends a little later. A migration whose guest runs at the
/// destination already goes on.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/cancel",
    params(("name" = String, Path, description = "its name")),
    responses((status = 202, description = "it will be cancelled"), (status = "4XX", body = Problem))
)]
pub async fn cancel(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    blocking(move || daemon.machines.cancel(&name)).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Goes on at once with a virtual machine that waits. If it was handed over, its destination is asked, at another
/// address where the body names one; where the body says that its destination is off for good, it runs here. If it
/// stays here after a migration and does not run yet, it is tried again.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/resume",
    params(("name" = String, Path, description = "its name")),
    request_body = ResumeRequest,
    responses((status = 202, description = "it is looked for"), (status = "4XX", body = Problem))
)]
pub async fn resume(
    State(daemon): State<Arc<Daemon>>,
    ConnectInfo(caller): ConnectInfo<Caller>,
    Path(name): Path<String>,
    Body(request): Body<ResumeRequest>,
) -> Result<StatusCode, Failure> {
    blocking(move || resume::resume(&daemon.departures, &name, &request, caller)).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Lets a virtual machine's guest run that is paused, or a clone that is held. Its clock is set then, where it has a
/// guest agent; nobody waits for that.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/continue",
    params(("name" = String, Path, description = "its name")),
    responses(
        (status = 204, description = "it runs"),
        (status = "4XX", body = Problem),
        (status = "5XX", body = Problem)
    )
)]
pub async fn go_on(State(daemon): State<Arc<Daemon>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    blocking(move || go_on::go_on(&daemon.machines, &name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The question to an estimate.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EstimateQuery {
    /// The migration's bandwidth, bytes per second.
    bandwidth_bytes_per_s: u64,
    /// How long the machine is observed, milliseconds.
    duration_ms: Option<u64>,
    /// The longest pause its users accept, milliseconds.
    downtime_limit_ms: Option<f64>,
    /// Whether clean pages of the guest's page cache are counted, too. Experimental.
    #[serde(default)]
    page_cache: bool,
}

/// Estimates a virtual machine's migration. The machine is observed for a while and runs on; meanwhile it cannot be
/// moved or stopped. A caller that goes away, or a cancel, ends the observation.
#[utoipa::path(
    get,
    path = "/v1/vms/{name}/estimate",
    params(("name" = String, Path, description = "its name"), EstimateQuery),
    responses((status = 200, body = Estimate), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn estimate(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Query(query): Query<EstimateQuery>,
) -> Result<Json<Estimate>, Failure> {
    let question = Question {
        bandwidth_bytes_per_s: query.bandwidth_bytes_per_s,
        duration_ms: query.duration_ms.unwrap_or(DEFAULT_DURATION_MS),
        downtime_limit_ms: query.downtime_limit_ms.unwrap_or_else(|| MigrateOptions::default().downtime_limit_ms),
        page_cache: query.page_cache,
    };
    let asked = Asked(Arc::new(Monitor::new(&name)));
    let monitor = Arc::clone(&asked.0);
    blocking(move || estimate::estimate(&daemon.machines, &name, question, &monitor)).await.map(Json)
}

/// Gives memory that a virtual machine's guest holds free back to this host; answers when it is done. The machine runs
/// on; meanwhile it cannot be moved or stopped. A caller that goes away, or a cancel, ends the work; memory that was
/// taken until then stays taken.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/reclaim",
    params(("name" = String, Path, description = "its name")),
    request_body = ReclaimRequest,
    responses((status = 200, body = Reclaimed), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn reclaim(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<ReclaimRequest>,
) -> Result<Json<Reclaimed>, Failure> {
    let asked = Asked(Arc::new(Monitor::new(&name)));
    let monitor = Arc::clone(&asked.0);
    blocking(move || daemon.reclaim().reclaim(&name, request.method, &monitor)).await.map(Json)
}

/// Has another QEMU take a virtual machine's guest over on this host; answers when the former one has ended. No page is
/// copied. The guest pauses for some milliseconds, as at the end of a migration.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/replace",
    params(("name" = String, Path, description = "its name")),
    request_body = ReplaceRequest,
    responses((status = 200, body = Replaced), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn replace(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<ReplaceRequest>,
) -> Result<Json<Replaced>, Failure> {
    blocking(move || daemon.replace().replace(&name, &request)).await.map(Json)
}

/// Has a virtual machine's guest go on as several, on this host; answers when the clones run. The guest pauses for some
/// milliseconds. The clones share its memory until somebody writes.
#[utoipa::path(
    post,
    path = "/v1/vms/{name}/fork",
    params(("name" = String, Path, description = "its name")),
    request_body = ForkRequest,
    responses((status = 200, body = Forked), (status = "4XX", body = Problem), (status = "5XX", body = Problem))
)]
pub async fn fork(
    State(daemon): State<Arc<Daemon>>,
    Path(name): Path<String>,
    Body(request): Body<ForkRequest>,
) -> Result<Json<Forked>, Failure> {
    blocking(move || daemon.fork().fork(&name, &request)).await.map(Json)
}

/// A caller that waits. It is dropped when the caller goes away.
pub(super) struct Asked(pub(super) Arc<Monitor>);

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
