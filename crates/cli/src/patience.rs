//! Long commands on one machine: waiting for the daemon's answer, and telling how it ended.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use sterna_api::{Problem, Status};
use tokio::signal::unix::{SignalKind, signal};

use crate::client::{Client, escape};
use crate::failure::{CANCELLED, FAILED, Failure, describe};
use crate::machines::write_json;

/// How often it is looked what is waited for.
const LOOK: Duration = Duration::from_secs(1);

/// Waits for the answer to a request on a machine. Ctrl-C cancels what was asked for, which `cancelling` tells people,
/// and this still waits for its end. Each second `look` may tell them more.
///
/// # Errors
/// That of the request.
pub async fn wait<T>(
    client: &Client,
    name: &str,
    asked: impl Future<Output = Result<T, Failure>>,
    cancelling: &str,
    mut look: impl AsyncFnMut(),
) -> Result<T, Failure> {
    let mut interrupts =
        signal(SignalKind::interrupt()).map_err(|error| Failure::host("cannot hear Ctrl-C", &error))?;
    let cancel = format!("/v1/vms/{}/cancel", escape(name));
    tokio::pin!(asked);
    loop {
        tokio::select! {
            done = &mut asked => return done,
            _ = interrupts.recv() => match client.command(Method::POST, &cancel).await {
                Ok(()) => eprintln!("{cancelling}"),
                Err(failure) => eprintln!("{}", failure.problem.message),
            },
            () = tokio::time::sleep(LOOK) => look().await,
        }
    }
}

/// How a long command ended.
pub struct End<'a> {
    /// The machine.
    pub vm: &'a str,
    /// How.
    pub status: Status,
    /// Why it failed.
    pub error: Option<&'a Problem>,
    /// The same in words.
    pub text: &'a str,
}

impl End<'_> {
    /// Tells people, and writes the report as JSON where it is asked for; there it stands alone on standard output.
    ///
    /// # Errors
    /// The report cannot be written.
    pub fn tell(&self, report: &impl Serialize, json: Option<&Path>) -> Result<ExitCode, Failure> {
        if json == Some(Path::new("-")) {
            eprint!("{}", self.text);
        } else {
            print!("{}", self.text);
        }
        if let Some(problem) = self.error {
            eprint!("{}", describe(self.vm, problem));
        }
        if let Some(path) = json {
            write_json(path, report)?;
        }
        Ok(ExitCode::from(match self.status {
            Status::Completed => 0,
            Status::Cancelled => CANCELLED,
            Status::Failed => FAILED,
        }))
    }
}
