//! Routes of the host's settings.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sterna_api::options::MIN_BANDWIDTH_BYTES_PER_S;
use sterna_api::vm::{HostBandwidth, HostKept, HostLent, Loan};
use sterna_api::{Blame, Code, Problem};
use sterna_engine::store::{Store, loan};

use super::answer::{Body, Failure, Path, blocking};
use crate::daemon::Daemon;
use crate::problems::invalid;

/// What all migrations away from this host may send together.
#[utoipa::path(get, path = "/v1/host/bandwidth", responses((status = 200, body = HostBandwidth)))]
pub async fn bandwidth(State(daemon): State<Arc<Daemon>>) -> Json<HostBandwidth> {
    Json(HostBandwidth { bandwidth_bytes_per_s: daemon.departures.bandwidth.rate() })
}

/// Changes what all migrations away from this host may send together, for migrations under way too. After a restart of
/// the daemon the configuration is in force again.
#[utoipa::path(
    put,
    path = "/v1/host/bandwidth",
    request_body = HostBandwidth,
    responses((status = 200, body = HostBandwidth), (status = "4XX", body = Problem))
)]
pub async fn set_bandwidth(
    State(daemon): State<Arc<Daemon>>,
    Body(wanted): Body<HostBandwidth>,
) -> Result<Json<HostBandwidth>, Failure> {
    if let Some(rate) = wanted.bandwidth_bytes_per_s
        && rate < MIN_BANDWIDTH_BYTES_PER_S
    {
        return Err(Failure(invalid(format!("bandwidth is {rate} bytes/s: below 64 KiB/s no migration ends"))));
    }
    daemon.departures.bandwidth.set_rate(wanted.bandwidth_bytes_per_s);
    tracing::info!(bytes_per_s = wanted.bandwidth_bytes_per_s, "the host's bandwidth was changed");
    Ok(Json(wanted))
}

/// What this host keeps of machines that have left.
#[utoipa::path(get, path = "/v1/host/kept", responses((status = 200, body = HostKept)))]
pub async fn kept(State(daemon): State<Arc<Daemon>>) -> Result<Json<HostKept>, Failure> {
    blocking(move || Ok(daemon.keeper.show())).await.map(Json)
}

/// Drops all that this host keeps of machines that have left. Returns what that was.
#[utoipa::path(delete, path = "/v1/host/kept", responses((status = 200, body = HostKept)))]
pub async fn drop_kept(State(daemon): State<Arc<Daemon>>) -> Result<Json<HostKept>, Failure> {
    let dropped = move || {
        let kept = daemon.keeper.show();
        daemon.keeper.drop_all();
        Ok(kept)
    };
    blocking(dropped).await.map(Json)
}

/// What this host lends to guests that run on other hosts.
#[utoipa::path(get, path = "/v1/host/lent", responses((status = 200, body = HostLent)))]
pub async fn lent(State(daemon): State<Arc<Daemon>>) -> Result<Json<HostLent>, Failure> {
    blocking(move || Ok(lends(&daemon.lent))).await.map(Json)
}

/// Takes back what is lent to a guest, by its number. Its pages here are gone: without another copy of them it never
/// runs on. Returns what was lent.
#[utoipa::path(
    delete,
    path = "/v1/host/lent/{guest}",
    params(("guest" = String, Path, description = "the guest's number, as it is listed")),
    responses((status = 200, body = Loan), (status = "4XX", body = Problem))
)]
pub async fn take_back(State(daemon): State<Arc<Daemon>>, Path(guest): Path<String>) -> Result<Json<Loan>, Failure> {
    let taken = move || {
        let number = u128::from_str_radix(&guest, 16).ok();
        let taken = number.and_then(|number| daemon.lent.close(number, None).ok());
        taken.map(|loan| shown(&loan)).ok_or_else(|| {
            Problem::new(Code::UnknownLoan, Blame::Request, "nothing is lent to a guest of this number")
                .hint("`sterna lent` lists them")
        })
    };
    blocking(taken).await.map(Json)
}

/// All that a store lends, as the API shows it.
pub(super) fn lends(store: &Store) -> HostLent {
    let guests: Vec<Loan> = store.loans().iter().map(shown).collect();
    HostLent {
        budget_bytes: store.budget_bytes(),
        granted_bytes: guests.iter().map(|loan| loan.granted_bytes).sum(),
        used_bytes: guests.iter().map(|loan| loan.used_bytes).sum(),
        guests,
    }
}

fn shown(loan: &loan::Loan) -> Loan {
    let loan::Loan { guest, epoch, granted_bytes, used_bytes } = *loan;
    Loan { guest: loan::Number(guest).to_string(), epoch, granted_bytes, used_bytes }
}
