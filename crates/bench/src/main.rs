//! `sterna-bench`: the lab, the experiments and the demos.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use sterna_bench::accelerator::{self, Choice};
use sterna_bench::{campaign, demo, experiments, pages, steps};

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
    /// Measure for hours: each row of every experiment once, then all again. The least measured come first, and the
    /// next campaign goes on where this one ends. Rows are kept with commit, machine and date
    Campaign {
        /// Hours in which new rows are begun
        #[arg(long, value_parser = hours)]
        hours: Duration,
        /// Measure only these experiments; `list` shows all names
        ids: Vec<String>,
        /// Measure only rows whose words contain one of these, once each
        #[arg(long, value_name = "WORDS")]
        only: Vec<String>,
        /// Directory for what is kept [default: docs/experiments/results of the repository]
        #[arg(long)]
        results: Option<PathBuf>,
        /// Directory for the last results of each experiment
        #[arg(long, default_value = "build/campaign")]
        out: PathBuf,
    },
    /// Make the tables and plots of docs/experiments from what campaigns have kept
    Pages {
        /// Change nothing; fail where a page would be changed
        #[arg(long)]
        check: bool,
    },
    /// Move guests between two hosts and print the steps of their pauses, in milliseconds, on one clock
    Pause {
        /// Number of guests, which move together
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
        guests: u8,
        /// Memory of each guest, MiB
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(192..=65536))]
        memory_mib: u64,
        /// Let KSM merge six tenths of their pages first; then all of them rest
        #[arg(long)]
        merged: bool,
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
        Command::Campaign { hours, ids, only, results, out } => {
            let results = results.unwrap_or_else(campaign::results);
            let options = campaign::Options { length: hours, ids, only, results, out };
            accelerator::choose(accel).and_then(|_| campaign::run(&options)).map(|()| ExitCode::SUCCESS)
        }
        Command::Pages { check } => make_pages(check),
        Command::Pause { guests, memory_mib, merged, options, set } => {
            let gang = steps::Gang { guests, memory_mib, merged };
            accelerator::choose(accel).and_then(|_| steps::run(gang, &options, &set)).map(|()| ExitCode::SUCCESS)
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

/// A length of time in hours, as `1.5`.
fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 = text.parse().map_err(|_| format!("{text} is no number of hours"))?;
    if !(hours > 0.0 && hours <= 1000.0) {
        return Err("hours are more than 0 and at most 1000".into());
    }
    Ok(Duration::from_secs_f64(hours * 3600.0))
}

/// Makes the pages, or says which are not as they should be.
fn make_pages(check: bool) -> sterna_bench::Result<ExitCode> {
    let different = pages::make(&pages::directory(), check)?;
    let verb = if check { "is not made from the results that are kept" } else { "was made anew" };
    different.iter().for_each(|file| println!("{} {verb}", file.display()));
    Ok(if check && !different.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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
