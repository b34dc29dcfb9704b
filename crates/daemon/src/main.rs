//! `sternad`: Sterna's daemon, one per host.

use std::error::Error;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use sterna_daemon::config::{Arguments, Config};
use sterna_daemon::serve::serve;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    match start(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sternad: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: &Arguments) -> Result<(), Box<dyn Error + Send + Sync>> {
    let config = Config::load(arguments)?;
    let filter = EnvFilter::try_new(&config.log).map_err(|error| format!("--log {}: {error}", config.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    if config.test_trust_first_look {
        tracing::warn!(
            "test_trust_first_look is set: guests that are moved from here, or whose memory is taken, are harmed"
        );
    }
    serve(config)
}
