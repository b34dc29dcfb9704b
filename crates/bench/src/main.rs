//! `sterna-bench`: the lab, the experiments and the demo.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use sterna_bench::accelerator::{self, Choice};
use sterna_bench::{demo, experiments};

/// The subcommands of `lab`.
mod lab_command;

#[derive(Parser)]
#[command(name = "sterna-bench", version, about = "Sterna's lab, experiments and demo")]
struct Arguments {
    /// What runs guests' processors; auto boots a Linux guest under KVM once, to see whether it comes up
    #[arg(long, global = true, value_name = "WHICH", env = accelerator::VARIABLE, default_value = "auto")]
    accel: Choice,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hosts on this machine: namespaces joined by a switch, with link rate, memory limit and a daemon each
    #[command(subcommand)]
    Lab(lab_command::LabCommand),
    /// The experiments
    List,
    /// Say what runs guests' processors here: `tcg` or `kvm`, and on standard error why
    Accelerator,
    /// Run an experiment: result.json, runs.json, table.md and plots in DIR/ID
    Run {
        /// Which; `list` shows them
        id: String,
        /// Fewer and smaller set-ups: at most 10 minutes on two cores
        #[arg(long)]
        quick: bool,
        /// How often each set-up is tried
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        repeat: Option<u32>,
        /// Only rows whose mover, QEMU and workload contain this, or what another `--only` asks for; the others stay in the results as not tried
        #[arg(long, value_name = "WORDS")]
        only: Vec<String>,
        /// Where the results go
        #[arg(long)]
        out: PathBuf,
    },
    /// Move a busy guest between two hosts and show what happened
    Demo {
        /// Also write the report, as JSON
        #[arg(long)]
        json: Option<PathBuf>,
        /// Where the plots go
        #[arg(long, default_value = "build/demo")]
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    let Arguments { accel, command } = Arguments::parse();
    let result = match command {
        Command::Lab(command) => lab_command::run(command),
        Command::List => {
            experiments::ALL.iter().for_each(|experiment| println!("{:18} {}", experiment.id, experiment.about));
            Ok(ExitCode::SUCCESS)
        }
        Command::Accelerator => which(accel),
        Command::Run { id, quick, repeat, only, out } => {
            let options = experiments::Options { quick, repeat: repeat.map(|repeat| repeat as usize), only, out };
            accelerator::choose(accel).and_then(|_| experiments::run(&id, &options)).map(|()| ExitCode::SUCCESS)
        }
        Command::Demo { json, out } => {
            let good = accelerator::choose(accel).and_then(|_| demo::run(json.as_deref(), &out));
            good.map(|good| if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints which accelerator is used here, and why.
fn which(accel: Choice) -> sterna_bench::Result<ExitCode> {
    match accel {
        Choice::Auto => eprintln!("{}", accelerator::tried(&accelerator::cache())?.show()),
        Choice::Tcg | Choice::Kvm => eprintln!("{}: as was asked for", accelerator::choose(accel)?.name()),
    }
    println!("{}", accelerator::choose(accel)?.name());
    Ok(ExitCode::SUCCESS)
}
