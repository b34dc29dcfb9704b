//! `watch`: live progress as a stream of lines.

use std::io::Write;
use std::process::ExitCode;

use sterna_api::Progress;

use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::progress::line;

/// Prints progress until Ctrl-C, or until the machine's migration has ended.
///
/// # Errors
/// The daemon's problem.
pub async fn watch(client: &Client, name: Option<&str>, json: bool) -> Result<ExitCode, Failure> {
    let path = match name {
        Some(name) => format!("/v1/watch?vm={}", escape(name)),
        None => "/v1/watch".into(),
    };
    let mut lines = client.lines(&path).await?;
    let mut ctrl_c = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        let text = tokio::select! {
            _ = &mut ctrl_c => break,
            text = lines.next() => text,
        };
        let Some(text) = text else { break };
        let shown = match serde_json::from_str::<Progress>(&text) {
            Ok(progress) if !json => line(&progress),
            _ => text,
        };
        // Nobody reads the output any more: this ends as Ctrl-C does.
        if writeln!(std::io::stdout(), "{shown}").is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}
