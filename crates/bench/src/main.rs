//! `sterna-bench`: the lab, the experiments and the demo.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The subcommands of `lab`.
mod lab_command;

#[derive(Parser)]
#[command(name = "sterna-bench", version, about = "Sterna's lab, experiments and demo")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hosts on this machine: namespaces joined by a switch, with link rate, memory limit and a daemon each
    #[command(subcommand)]
    Lab(lab_command::LabCommand),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Lab(command) => lab_command::run(command),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
