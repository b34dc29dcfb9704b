//! The API: HTTP/1.1 with JSON on a unix socket. Every handler is a few lines; the work is
//! [`Daemon`](crate::daemon::Daemon)'s.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::routing::{delete, get, post, put};
use sterna_api::{Blame, Code, Problem};

use crate::daemon::Daemon;

/// Problems as answers.
pub mod answer;

/// Machines.
pub mod vms;

/// Balloons.
pub mod balloon;

/// Network cards.
pub mod link;

/// Templates.
pub mod templates;

/// Split machines.
pub mod split;

/// Migrations.
pub mod migrations;

/// Live progress.
pub mod watch;

/// Settings of the host.
pub mod host;

/// The daemon itself: version and metrics.
pub mod about;

/// The API's description.
pub mod document;

use answer::Failure;

/// The routes.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/vms", get(vms::list).post(vms::run))
        .route("/v1/vms/adopt", post(vms::adopt))
        .route("/v1/vms/{name}", get(vms::show).delete(vms::stop))
        .route("/v1/vms/{name}/cancel", post(vms::cancel))
        .route("/v1/vms/{name}/estimate", get(vms::estimate))
        .route("/v1/vms/{name}/reclaim", post(vms::reclaim))
        .route("/v1/vms/{name}/replace", post(vms::replace))
        .route("/v1/vms/{name}/fork", post(vms::fork))
        .route("/v1/vms/{name}/split", post(split::split))
        .route("/v1/vms/{name}/merge", post(split::merge))
        .route("/v1/vms/{name}/continue", post(vms::go_on))
        .route("/v1/vms/{name}/balloon", put(balloon::set))
        .route("/v1/vms/{name}/link", get(link::show).put(link::set))
        .route("/v1/vms/{name}/resume", post(vms::resume))
        .route("/v1/templates", get(templates::list))
        .route("/v1/templates/{name}", get(templates::show).put(templates::change).delete(templates::remove))
        .route("/v1/templates/{name}/run", post(templates::take))
        .route("/v1/migrations", get(migrations::list).post(migrations::begin))
        .route("/v1/migrations/{id}", get(migrations::show))
        .route("/v1/watch", get(watch::watch))
        .route("/v1/host/bandwidth", get(host::bandwidth).put(host::set_bandwidth))
        .route("/v1/host/kept", get(host::kept).delete(host::drop_kept))
        .route("/v1/host/lent", get(host::lent))
        .route("/v1/host/lent/{guest}", delete(host::take_back))
        .route("/v1/version", get(about::version))
        .route("/metrics", get(about::metrics))
        .route("/openapi.json", get(document::openapi))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(daemon)
}

async fn no_route(uri: Uri) -> Failure {
    Failure(
        Problem::new(Code::NoSuchRoute, Blame::Request, format!("there is no {}", uri.path()))
            .hint("see /openapi.json"),
    )
}

async fn no_method(method: Method, uri: Uri) -> Failure {
    let what = format!("{} has no {method}", uri.path());
    Failure(Problem::new(Code::NoSuchMethod, Blame::Request, what).hint("see /openapi.json"))
}
