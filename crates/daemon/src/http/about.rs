//! The daemon itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use sterna_api::vm::Version;
use sterna_sys::host;

use super::answer::{Failure, blocking};
use super::host::lends;
use crate::daemon::Daemon;
use crate::show;

/// The version and the name of the daemon that answers.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version)))]
pub async fn version(State(daemon): State<Arc<Daemon>>) -> Json<Version> {
    Json(Version { sterna: env!("CARGO_PKG_VERSION").into(), host: host::name(), listen: daemon.config.listen.clone() })
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn metrics(State(daemon): State<Arc<Daemon>>) -> Result<impl IntoResponse, Failure> {
    let text = blocking(move || Ok(text(&daemon))).await?;
    Ok(([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text))
}

fn text(daemon: &Daemon) -> String {
    let traffic = show::traffic(&daemon.machines, &daemon.jobs().queue);
    let machines = show::list(&daemon.machines, &daemon.balloons);
    daemon.metrics.text(&machines, traffic, &daemon.keeper.show(), &lends(&daemon.lent))
}
