//! `sterna-bench lab up|down|exec|status`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitCode;

use clap::Subcommand;
use sterna_api::units::{parse_rate, parse_size, show_rate, show_size};
use sterna_bench::error::{Context, Error, Result};
use sterna_bench::lab::{self, Lab, LabConfig, state};

/// The subcommands for labs.
#[derive(Subcommand)]
pub enum LabCommand {
    /// Bring a lab up; it stays up until `down`
    Up {
        /// The lab's name: small letters and digits
        #[arg(long, default_value = "lab")]
        name: String,
        /// Hosts with a daemon, separated by commas
        #[arg(long, default_value = "a,b", value_delimiter = ',')]
        hosts: Vec<String>,
        /// Rate of each host's link in both directions, such as 1Gbit; `unlimited` for no limit
        #[arg(long, default_value = "1Gbit")]
        rate: String,
        /// Memory limit of each host, such as 4G; none by default
        #[arg(long)]
        memory_limit: Option<String>,
        /// Start no daemons
        #[arg(long)]
        no_daemons: bool,
    },
    /// Take a lab down with everything in it; succeeds where the lab is down already
    Down {
        /// The lab's name
        #[arg(long, default_value = "lab", conflicts_with = "all")]
        name: String,
        /// Take down every lab that no living process owns
        #[arg(long)]
        all: bool,
    },
    /// Run a command on a host of the lab
    Exec {
        /// The lab's name
        #[arg(long, default_value = "lab")]
        name: String,
        /// The host: a, b, …, client, meter
        host: String,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Show the labs that are up
    Status,
}

/// Carries out the command.
///
/// # Errors
/// What went wrong, for people.
pub fn run(command: LabCommand) -> Result<ExitCode> {
    match command {
        LabCommand::Up { name, hosts, rate, memory_limit, no_daemons } => {
            let usage = |error: sterna_api::units::UnitError| Error::Usage(error.to_string());
            let rate_bytes_per_s = if rate == "unlimited" { None } else { Some(parse_rate(&rate).map_err(usage)?) };
            let memory_limit_bytes = memory_limit.as_deref().map(parse_size).transpose().map_err(usage)?;
            let lab = Lab::up(LabConfig {
                name,
                hosts,
                rate_bytes_per_s,
                memory_limit_bytes,
                qemu: BTreeMap::new(),
                daemons: !no_daemons,
                owned: false,
            })?;
            show(&lab);
        }
        LabCommand::Down { all: true, .. } => lab::down_all()?.iter().for_each(|name| println!("lab {name} is down")),
        LabCommand::Down { name, .. } => lab::down(&name)?,
        LabCommand::Exec { name, host, command } => return exec(&name, &host, &command),
        LabCommand::Status => {
            for name in state::names() {
                match Lab::open(&name) {
                    Ok(lab) => show(&lab),
                    Err(_) => println!(
                        "lab {name} is incomplete; `sterna-bench lab down --name {name}` removes what is there"
                    ),
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn exec(name: &str, host: &str, command: &[OsString]) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().ok_or_else(|| Error::Usage("no command".into()))?;
    let lab = Lab::open(name)?;
    let mut command = lab.host(host)?.command(program);
    let status = command.args(arguments).status().context(|| format!("starting {}", program.display()))?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

fn show(lab: &Lab) {
    let state = lab.state();
    let rate = state.rate_bytes_per_s.map_or_else(|| "unlimited".into(), show_rate);
    let owner = match (state.owner, state.is_orphan()) {
        (None, _) => "stays until it is taken down".into(),
        (Some(owner), false) => format!("owned by process {}", owner.pid),
        (Some(owner), true) => format!("left behind by process {}", owner.pid),
    };
    println!("lab {}: link rate {rate}, {owner}", state.name);
    for host in lab.hosts() {
        let processes = host.group.processes().len();
        let memory = host.group.memory_bytes().map_or_else(|_| "?".into(), show_size);
        let daemon = state
            .daemons
            .iter()
            .find(|(name, _)| *name == host.name)
            .map(|(_, id)| if id.is_alive() { "up" } else { "gone" });
        let daemon = daemon
            .map(|is| format!(", daemon {is}: sterna --api {}, --to {}", host.api(), host.listen()))
            .unwrap_or_default();
        println!("  {:7} {:12} {processes} processes, {memory}{daemon}", host.name, host.address.to_string());
    }
}
