//! Problems as answers: the status code follows from code and blame.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use sterna_api::code::Kind;
use sterna_api::{Blame, Code, Problem};

use crate::problems::invalid;

/// A problem on its way to the caller.
#[derive(Debug)]
pub struct Failure(pub Problem);

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (status(&self.0), Json(self.0)).into_response()
    }
}

fn status(problem: &Problem) -> StatusCode {
    match problem.code.kind() {
        Kind::Absent => StatusCode::NOT_FOUND,
        Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
        Kind::Conflict => StatusCode::CONFLICT,
        Kind::Late => StatusCode::GATEWAY_TIMEOUT,
        Kind::ByBlame => by_blame(problem.blame),
    }
}

fn by_blame(blame: Blame) -> StatusCode {
    match blame {
        Blame::Request => StatusCode::BAD_REQUEST,
        Blame::Peer | Blame::Qemu | Blame::Guest => StatusCode::BAD_GATEWAY,
        Blame::Host | Blame::Ours => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// How long a request's body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// A JSON body; an invalid one is answered with a [`Problem`].
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        match tokio::time::timeout(BODY_TIMEOUT, Json::<T>::from_request(request, state)).await {
            Ok(Ok(Json(value))) => Ok(Self(value)),
            Ok(Err(rejection)) => Err(Failure(invalid(rejection.body_text()))),
            Err(_) => {
                let message = format!("the request's body did not come within {} s", BODY_TIMEOUT.as_secs());
                Err(Failure(invalid(message)))
            }
        }
    }
}

/// Path parameters; invalid ones are answered with a [`Problem`].
#[derive(Debug)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(Failure(invalid(rejection.body_text()))),
        }
    }
}

/// Query parameters; invalid ones are answered with a [`Problem`].
#[derive(Debug)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(Failure(invalid(rejection.body_text()))),
        }
    }
}

/// Runs work that blocks (QEMU, files, processes) on other threads than those that serve the socket.
///
/// # Errors
/// The work's error, or that it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Failure),
        Err(error) => {
            Err(Failure(Problem::new(Code::Internal, Blame::Ours, format!("the request broke off: {error}"))))
        }
    }
}
