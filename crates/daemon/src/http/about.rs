//! The daemon itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use sterna_api::vm::Version;
use utoipa::OpenApi;

use super::Document;
use super::answer::{Failure, blocking};
use crate::vms::Daemon;

/// Who answers here.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version)))]
pub async fn version(State(daemon): State<Arc<Daemon>>) -> Json<Version> {
    Json(Version {
        sterna: env!("CARGO_PKG_VERSION").into(),
        host: crate::migration::outgoing::host_name(),
        listen: daemon.config.listen.clone(),
    })
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "text/plain")))]
pub async fn metrics(State(daemon): State<Arc<Daemon>>) -> Result<impl IntoResponse, Failure> {
    let text = blocking(move || Ok(daemon.metrics.text(&daemon.list(), daemon.traffic()))).await?;
    Ok(([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text))
}

/// This API's description.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200, body = serde_json::Value)))]
pub async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(Document::openapi())
}
