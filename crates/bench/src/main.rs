//! `sterna-bench`: the lab, the experiments and the demos.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use sterna_bench::accelerator::{self, Choice};
use sterna_bench::{demo, experiments, steps};

/// The subcommands of `lab`.
mod lab_command;

#[derive(Parser)]
#[command(name = "sterna-bench", version, about = "Sterna's lab, experiments and demos")]
struct Arguments {
    /// The accelerator of guests' processors; auto boots a Linux guest under KVM once, to see whether it comes up
    #[arg(long, global = true, value_name = "WHICH", env = accelerator::VARIABLE, default_value = "auto")]
    accel: Choice,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Manage labs of hosts on this machine: namespaces joined by a switch, each with a link rate, a memory limit and a
    /// daemon
    #[command(subcommand)]
    Lab(lab_command::LabCommand),
    /// List the experiments
    List,
    /// Say what runs guests' processors here: `tcg` or `kvm`, and on standard error why
    Accelerator,
    /// Run an experiment: result.json, runs.json, table.md and plots in DIR/ID
    Run {
        /// The experiment's name; `list` shows all names
        id: String,
        /// Try fewer and smaller set-ups: at most 10 minutes on two cores
        #[arg(long)]
        quick: bool,
        /// Number of tries of each set-up
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        repeat: Option<u32>,
        /// Try only rows whose mover, QEMU and workload contain WORDS; may be given several times. The results list the
        /// other rows as not tried
        #[arg(long, value_name = "WORDS")]
        only: Vec<String>,
        /// Directory for the results
        #[arg(long)]
        out: PathBuf,
    },
    /// Move guests between two hosts and print the steps of their pauses, in milliseconds, on one clock
    Pause {
        /// Number of guests, which move together
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
        guests: u8,
        /// Options of `sterna migrate`
        #[arg(long, default_value = "", allow_hyphen_values = true)]
        options: String,
        /// A line more for both daemons' configuration, such as `pause_priority = false`
        #[arg(long, default_value = "")]
        set: String,
    },
    /// Show on a page what happens to a guest: it moves, or goes on as several
    Demo {
        /// What happens to it
        #[arg(value_enum, default_value_t = Demo::Migrate)]
        which: Demo,
        /// Also write the report to this file, as JSON
        #[arg(long)]
        json: Option<PathBuf>,
        /// Directory for the plots, where there are some
        #[arg(long, default_value = "build/demo")]
        out: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Demo {
    /// A busy guest moves between two hosts
    Migrate,
    /// A guest that has computed something for a while goes on as eleven
    Fork,
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
        Command::Pause { guests, options, set } => {
            accelerator::choose(accel).and_then(|_| steps::run(guests, &options, &set)).map(|()| ExitCode::SUCCESS)
        }
        Command::Demo { which, json, out } => {
            let good = accelerator::choose(accel).and_then(|_| match which {
                Demo::Migrate => demo::migrate::run(json.as_deref(), &out),
                Demo::Fork => demo::fork::run(json.as_deref()),
            });
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
