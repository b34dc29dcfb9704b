//! `migrate` and `cancel`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use hyper::Method;
use serde_json::json;
use sterna_api::{Blame, Code, MigrateOptions, MigrateRequest, Migration, Problem, ResumeRequest, Vm};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::arguments::Migrate;
use crate::client::{Client, escape};
use crate::failure::{Failure, code_of, worst};
use crate::machines::write_json;
use crate::progress::Display;
use crate::table;

/// How often the migration is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Moves machines and, unless detached, follows them to their end.
///
/// # Errors
/// The daemon's problem.
pub async fn migrate(client: &Client, migrate: Migrate) -> Result<ExitCode, Failure> {
    let options = migrate.options();
    options.check().map_err(Failure::usage)?;
    let (vms, family, to) = (migrate.names.clone(), migrate.family.clone(), migrate.to.clone());
    let request = MigrateRequest { vms, family, to, options, merge: false };
    go(client, &request, migrate.detach, migrate.json.as_deref()).await
}

/// Moves a machine that is split to a host where all of it comes together.
///
/// # Errors
/// The daemon's problem.
pub async fn together(client: &Client, name: String, to: String, json: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let vm: Vm = client.get(&format!("/v1/vms/{}", escape(&name))).await?;
    if vm.split.is_none() {
        return Err(Problem::new(Code::NotSplit, Blame::Request, format!("all of the memory of '{name}' is here"))
            .hint(format!("'sterna migrate {name} --to {to}' moves it"))
            .into());
    }
    let options = MigrateOptions::default();
    let request = MigrateRequest { vms: vec![name], family: None, to, options, merge: true };
    go(client, &request, false, json.as_deref()).await
}

/// Begins a migration and follows it to its end. Ctrl-C cancels it.
///
/// # Errors
/// The daemon's problem.
pub async fn to_its_end(client: &Client, request: &MigrateRequest) -> Result<Migration, Failure> {
    // Interrupts are heard from before the migration begins until after it has ended: a Ctrl-C that comes while the
    // daemon is asked must not be lost.
    let mut interrupts =
        signal(SignalKind::interrupt()).map_err(|error| Failure::host("cannot hear Ctrl-C", &error))?;
    let begun: Migration = client.post("/v1/migrations", request).await?;
    let names = names(&begun);
    follow(client, begun, &names, &mut interrupts).await
}

fn names(migration: &Migration) -> Vec<String> {
    migration.progress.iter().map(|progress| progress.vm.clone()).collect()
}

async fn go(client: &Client, request: &MigrateRequest, detach: bool, json: Option<&Path>) -> Result<ExitCode, Failure> {
    if detach {
        let begun: Migration = client.post("/v1/migrations", request).await?;
        println!("migration {}: {} to {}; 'sterna watch' follows it", begun.id, names(&begun).join(", "), begun.to);
        return Ok(ExitCode::SUCCESS);
    }
    let ended = to_its_end(client, request).await?;
    if !ended.ended {
        println!("migration {} goes on; 'sterna watch' follows it", ended.id);
    }
    let to_stdout = json == Some(Path::new("-"));
    for report in &ended.migrations {
        let text = table::show(report);
        // Standard output is then only for the report.
        if to_stdout {
            eprint!("{text}")
        } else {
            print!("{text}")
        }
        if let Some(failure) = table::failure(report) {
            eprint!("{failure}");
        }
    }
    if ended.migrations.len() > 1 {
        let text = table::together(&ended.totals);
        if to_stdout { eprintln!("{text}") } else { println!("{text}") }
    }
    if let Some(path) = json {
        let value = match &ended.migrations[..] {
            [report] => json!(report),
            gang => json!({ "migrations": gang, "totals": ended.totals }),
        };
        write_json(path, &value)?;
    }
    Ok(ExitCode::from(worst(ended.migrations.iter().map(code_of))))
}

/// Follows a migration to its end. Ctrl-C cancels it, and this still waits for the end. Where it is too late to cancel,
/// another Ctrl-C ends the waiting.
async fn follow(
    client: &Client,
    mut migration: Migration,
    names: &[String],
    interrupts: &mut Signal,
) -> Result<Migration, Failure> {
    let path = format!("/v1/migrations/{}", migration.id);
    let mut display = Display::new();
    let mut too_late = false;
    loop {
        migration.progress.iter().for_each(|progress| display.show(progress));
        if migration.ended {
            display.clear();
            return Ok(migration);
        }
        tokio::select! {
            _ = interrupts.recv() => {
                if too_late {
                    display.clear();
                    return Ok(migration);
                }
                let mut cancelled = false;
                for name in names {
                    match client.command(Method::POST, &format!("/v1/vms/{}/cancel", escape(name))).await {
                        Ok(()) => cancelled = true,
                        Err(failure) => display.say(&failure.problem.message),
                    }
                }
                if cancelled {
                    display.say("cancelling; the guest stays here");
                } else {
                    too_late = true;
                    display.say("it goes on; Ctrl-C again leaves it to the daemon");
                }
            }
            () = tokio::time::sleep(LOOK) => {}
        }
        migration = client.get(&path).await?;
    }
}

/// Cancels a machine's migration.
///
/// # Errors
/// The daemon's problem.
pub async fn cancel(client: &Client, name: &str) -> Result<ExitCode, Failure> {
    client.command(Method::POST, &format!("/v1/vms/{}/cancel", escape(name))).await?;
    println!("{name}: its migration is being cancelled");
    Ok(ExitCode::SUCCESS)
}

/// Makes the daemon ask at once for the destination that a machine waits for.
///
/// # Errors
/// The daemon's problem.
pub async fn resume(
    client: &Client,
    name: &str,
    to: Option<String>,
    fenced: Option<String>,
) -> Result<ExitCode, Failure> {
    let what = match (&to, &fenced) {
        (_, Some(host)) => format!("it is let run here, by your word that {host} is off for good"),
        (Some(to), None) => format!("its destination is looked for at {to}"),
        (None, None) => "what it waits for is tried at once".into(),
    };
    client.post_command(&format!("/v1/vms/{}/resume", escape(name)), &ResumeRequest { to, fenced }).await?;
    println!("{name}: {what}; 'sterna show {name}' says how far it is");
    Ok(ExitCode::SUCCESS)
}
