//! `sterna`: the command line, a client of the daemon's API.

use std::process::ExitCode;

use clap::Parser;

/// The command line's arguments.
mod arguments;
/// `balloon`.
mod balloon;
/// The API's client.
mod client;
/// `estimate`.
mod estimate;
/// `evacuate`.
mod evacuate;
/// Errors, as people see them, and exit codes.
mod failure;
/// `lent`.
mod lent;
/// `link`.
mod link;
/// The commands about machines.
mod machines;
/// `migrate` and `cancel`.
mod migrate;
/// Long commands on one machine.
mod patience;
/// Progress on a terminal and in plain lines.
mod progress;
/// `reclaim`.
mod reclaim;
/// `replace`.
mod replace;

/// `fork`.
mod fork;
/// `split` and `merge`.
mod split;
/// Reports as tables.
mod table;
/// `template`, and `run --from-template`.
mod template;
/// `watch`.
mod watch;

use arguments::{Arguments, Command};
use client::Client;
use failure::Failure;

fn main() -> ExitCode {
    failure::end_with_the_reader();
    let arguments = Arguments::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("sterna: cannot start: {error}");
            return ExitCode::from(failure::FAILED);
        }
    };
    match runtime.block_on(perform(arguments)) {
        Ok(code) => code,
        Err(failure) => failure.show(),
    }
}

async fn perform(arguments: Arguments) -> Result<ExitCode, Failure> {
    let client = Client::new(&arguments.api)?;
    match arguments.command {
        Command::Run(run) => machines::run(&client, run).await,
        Command::Adopt(adopt) => machines::adopt(&client, adopt).await,
        Command::Ps { json } => machines::ps(&client, json).await,
        Command::Show { name, json } => machines::show(&client, &name, json).await,
        Command::Forget => machines::forget(&client).await,
        Command::Lent(wanted) => lent::lent(&client, wanted).await,
        Command::Stop { name, force } => machines::stop(&client, &name, force).await,
        Command::Migrate(migrate) => migrate::migrate(&client, *migrate).await,
        Command::Balloon(wanted) => balloon::balloon(&client, &wanted).await,
        Command::Estimate(question) => estimate::estimate(&client, &question).await,
        Command::Reclaim(wanted) => reclaim::reclaim(&client, &wanted).await,
        Command::Replace(wanted) => replace::replace(&client, wanted).await,
        Command::Fork(wanted) => fork::fork(&client, wanted).await,
        Command::Split(wanted) => split::split(&client, wanted).await,
        Command::Merge(wanted) => split::merge(&client, wanted).await,
        Command::Evacuate(wanted) => evacuate::evacuate(&client, wanted).await,
        Command::Continue { name } => machines::go_on(&client, &name).await,
        Command::Link(wanted) => link::link(&client, wanted).await,
        Command::Template(wanted) => template::template(&client, wanted).await,
        Command::Cancel { name } => migrate::cancel(&client, &name).await,
        Command::Resume { name, to, fenced } => migrate::resume(&client, &name, to, fenced).await,
        Command::Watch { name, json } => watch::watch(&client, name.as_deref(), json).await,
    }
}
