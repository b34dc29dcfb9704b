//! Problems as answers: the status code follows from code and blame.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
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

/// The status of a problem. What a code of its own does not decide follows from whose fault it is; a new code has to be put
/// into one of the two.
fn status(problem: &Problem) -> StatusCode {
    match &problem.code {
        Code::UnknownVm | Code::UnknownMigration | Code::NoSuchRoute => StatusCode::NOT_FOUND,
        Code::NoSuchMethod => StatusCode::METHOD_NOT_ALLOWED,
        Code::NameTaken
        | Code::VmBusy
        | Code::TooLate
        | Code::Arriving
        | Code::NotMigrating
        | Code::AlreadyKnown
        | Code::NotRunning
        | Code::StillArriving
        | Code::ServingPages
        | Code::RunsThere
        | Code::NotItsDestination
        | Code::GuestUnfit
        | Code::BalloonInUse
        | Code::BalloonSilent => StatusCode::CONFLICT,
        Code::GuestIgnoresPowerdown => StatusCode::GATEWAY_TIMEOUT,
        Code::InvalidRequest
        | Code::InvalidName
        | Code::Usage
        | Code::BadOptions
        | Code::ArgumentConflict
        | Code::RelativePath
        | Code::PathTooLong
        | Code::NoSuchProcess
        | Code::StillEnding
        | Code::Cancelled
        | Code::GivenUp
        | Code::PrivateMemory
        | Code::TooMuchMemory
        | Code::QemuTooOld
        | Code::NotQemu
        | Code::QemuNotFound
        | Code::AnonymousRam
        | Code::MemfdRam
        | Code::PrivateRam
        | Code::UnnamedRam
        | Code::DiskRam
        | Code::HugePages
        | Code::RamNotMapped
        | Code::RamOfAnother
        | Code::ImmovableRam
        | Code::HotpluggedMemory
        | Code::RamLayout
        | Code::ForeignWriters
        | Code::QemuBlocks
        | Code::MachineType
        | Code::QemuVersion
        | Code::CpuModel
        | Code::FileMissing
        | Code::OutOfMemory
        | Code::Balloon
        | Code::NoBalloon
        | Code::QemuGone
        | Code::QemuError
        | Code::QemuFailed
        | Code::QmpUnreachable
        | Code::GuestOff
        | Code::GuestGone
        | Code::AgentMissing
        | Code::AgentNotFound
        | Code::AgentForeign
        | Code::AgentRam
        | Code::AgentFailed
        | Code::HostError
        | Code::HostFailed
        | Code::RamCutShort
        | Code::RamFull
        | Code::CannotThrottle
        | Code::NoPostcopy
        | Code::Internal
        | Code::PeerUnreachable
        | Code::LinkFailed
        | Code::NotSterna
        | Code::PeerVersion
        | Code::PeerProtocol
        | Code::Damaged
        | Code::AnotherDaemon
        | Code::TooManyIncoming
        | Code::StaleMigration
        | Code::NotYours
        | Code::NotKnownHere
        | Code::NotConverging
        | Code::WrittenWhileSaving
        | Code::VerifyMismatch
        | Code::Paged
        | Code::NotYet
        | Code::PagingLost
        | Code::PagesMissing
        | Code::TlsFiles
        | Code::TlsKeyExposed
        | Code::TlsUntrusted
        | Code::TlsDate
        | Code::TlsName
        | Code::TlsCertificate
        | Code::TlsNotAllowed
        | Code::TlsRefused
        | Code::TlsMixed
        | Code::TlsNotYours
        | Code::TlsFailed
        | Code::DaemonUnreachable
        | Code::DaemonAnswer
        | Code::Other(_) => by_blame(problem.blame),
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

/// A JSON body; what is wrong with one is told as a [`Problem`].
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

/// Path parameters; what is wrong with them is told as a [`Problem`].
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

/// Query parameters; what is wrong with them is told as a [`Problem`].
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

/// Runs what blocks (QEMU, files, processes) off the threads that serve the socket.
///
/// # Errors
/// What the work gave, or that it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Failure),
        Err(error) => {
            Err(Failure(Problem::new(Code::Internal, Blame::Ours, format!("the request came to nothing: {error}"))))
        }
    }
}
