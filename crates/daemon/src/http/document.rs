//! The API's description, of all its routes.

use axum::Json;
use sterna_api::Problem;
use utoipa::OpenApi;

use super::{about, balloon, host, link, migrations, split, templates, vms, watch};

/// The API's description.
#[derive(OpenApi)]
#[openapi(
    info(title = "Sterna", description = "Virtual machines of one host, and their live migration."),
    paths(
        vms::list,
        vms::run,
        vms::adopt,
        vms::show,
        vms::stop,
        vms::cancel,
        vms::estimate,
        balloon::set,
        link::show,
        link::set,
        vms::reclaim,
        vms::replace,
        vms::fork,
        split::split,
        split::merge,
        vms::resume,
        vms::go_on,
        templates::list,
        templates::show,
        templates::change,
        templates::remove,
        templates::take,
        migrations::begin,
        migrations::list,
        migrations::show,
        watch::watch,
        host::bandwidth,
        host::set_bandwidth,
        host::kept,
        host::drop_kept,
        host::lent,
        host::take_back,
        about::version,
        about::metrics,
        openapi,
    ),
    components(schemas(Problem))
)]
pub struct Document;

/// This API's description.
#[utoipa::path(get, path = "/openapi.json", tag = "about", responses((status = 200, body = serde_json::Value)))]
pub async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(Document::openapi())
}
