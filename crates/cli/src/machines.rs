//! The commands about machines: `run`, `adopt`, `ps`, `show`, `stop`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use hyper::Method;
use sterna_api::units::show_size;
use sterna_api::vm::HostKept;
use sterna_api::{AdoptRequest, Code, MemoryMode, Phase, RunRequest, TemplateState, Vm, VmState};

use crate::arguments::{Adopt, Run};
use crate::balloon;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::lent;
use crate::progress::{brief, line};
use crate::table::text_of;
use crate::template;

/// The path of what the host keeps of machines that have left.
const KEPT: &str = "/v1/host/kept";

/// How often an attached `run` looks at its machine.
const LOOK: Duration = Duration::from_millis(500);

/// Starts a machine and, unless detached, follows it until it ends.
///
/// # Errors
/// The daemon's problem.
pub async fn run(client: &Client, run: Run) -> Result<ExitCode, Failure> {
    if let Some(template) = &run.from_template {
        let taken = template::take(client, template, &run.name).await?;
        let how = if taken.was_held { "it was held ready" } else { "it was made now" };
        println!("{}: runs (process {}) after {:.1} ms: {how}", taken.vm, taken.pid, taken.ms);
        if run.detach {
            return Ok(ExitCode::SUCCESS);
        }
        let vm = client.get(&format!("/v1/vms/{}", escape(&run.name))).await?;
        return follow(client, vm).await;
    }
    let request = RunRequest {
        name: run.name.clone(),
        memory_bytes: run.memory.unwrap_or_default(),
        memory_mode: run.memory_mode.into(),
        memory_template: run
            .memory_template
            .map(|path| std::path::absolute(&path).unwrap_or(path).display().to_string()),
        trust_group: run.trust_group,
        qemu: run.qemu.map(binary_path),
        balloon: run.balloon,
        huge_pages: run.huge_pages,
        arguments: run.arguments,
    };
    let vm: Vm = client.post("/v1/vms", &request).await?;
    println!("{}: {} (QEMU {}, process {})", vm.name, state(&vm), vm.qemu, vm.pid);
    if run.detach {
        return Ok(ExitCode::SUCCESS);
    }
    follow(client, vm).await
}

/// A QEMU binary as the daemon, which has another working directory, is to find it: a bare name is looked up on its
/// PATH.
pub fn binary_path(path: PathBuf) -> String {
    let relative = path.is_relative() && path.components().count() > 1;
    if relative { std::path::absolute(&path).unwrap_or(path) } else { path }.display().to_string()
}

async fn follow(client: &Client, mut vm: Vm) -> Result<ExitCode, Failure> {
    let path = format!("/v1/vms/{}", escape(&vm.name));
    let mut ctrl_c = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        tokio::select! {
            _ = &mut ctrl_c => {
                println!("{}: runs on; 'sterna stop {}' ends it", vm.name, vm.name);
                return Ok(ExitCode::SUCCESS);
            }
            () = tokio::time::sleep(LOOK) => {}
        }
        let now: Vm = match client.get(&path).await {
            Ok(now) => now,
            Err(failure) if failure.problem.code == Code::UnknownVm => {
                println!("{}: is not on this host any more", vm.name);
                return Ok(ExitCode::SUCCESS);
            }
            Err(failure) => return Err(failure),
        };
        if now.state != vm.state {
            println!("{}: {}", now.name, state(&now));
        }
        vm = now;
    }
}

/// Takes a running QEMU over.
///
/// # Errors
/// The daemon's problem.
pub async fn adopt(client: &Client, adopt: Adopt) -> Result<ExitCode, Failure> {
    let qmp = std::path::absolute(&adopt.qmp).unwrap_or(adopt.qmp).display().to_string();
    let vm: Vm = client.post("/v1/vms/adopt", &AdoptRequest { name: adopt.name, pid: adopt.pid, qmp }).await?;
    println!("{}: {} (QEMU {}, process {})", vm.name, state(&vm), vm.qemu, vm.pid);
    Ok(ExitCode::SUCCESS)
}

/// Lists the machines.
///
/// # Errors
/// The daemon's problem.
pub async fn ps(client: &Client, json: bool) -> Result<ExitCode, Failure> {
    let vms: Vec<Vm> = client.get("/v1/vms").await?;
    if json {
        return print_json(&vms);
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    let family = vms.iter().any(|vm| vm.family.is_some()).then_some("FAMILY");
    let head = ["NAME", "STATE", "MEMORY", "ALLOCATED", "SHARED", "PID", "QEMU"].into_iter().chain(family);
    table.set_header(head.chain(["MIGRATION", "NOTE"]));
    // Those that are held ready are shown with their template.
    for vm in vms.iter().filter(|vm| vm.held_for.is_none()) {
        let own = [
            vm.name.clone(),
            state(vm),
            show_size(vm.memory_bytes),
            show_size(vm.allocated_bytes),
            if vm.memory_mode == MemoryMode::Private { show_size(vm.shared_bytes) } else { "-".into() },
            vm.pid.to_string(),
            vm.qemu.clone(),
        ];
        let its_family = family.map(|_| vm.family.clone().unwrap_or_default());
        let more = [vm.migration.as_ref().map(brief).unwrap_or_default(), vm.note.clone().unwrap_or_default()];
        table.add_row(own.into_iter().chain(its_family).chain(more));
    }
    println!("{}", text_of(&table));
    template::tell_all(&client.get::<Vec<TemplateState>>("/v1/templates").await?);
    let kept: HostKept = client.get(KEPT).await?;
    if !kept.machines.is_empty() {
        println!("{}", kept_line(&kept));
    }
    lent::tell(client).await?;
    Ok(ExitCode::SUCCESS)
}

/// Drops what the host keeps of machines that have left.
///
/// # Errors
/// The daemon's problem.
pub async fn forget(client: &Client) -> Result<ExitCode, Failure> {
    let kept: HostKept = client.delete(KEPT).await?;
    println!("{}", if kept.machines.is_empty() { "nothing was kept".into() } else { kept_line(&kept) + " (dropped)" });
    Ok(ExitCode::SUCCESS)
}

fn kept_line(kept: &HostKept) -> String {
    let (count, bytes, names) = (kept.machines.len(), show_size(kept.bytes), kept.machines.join(", "));
    format!("kept of {count} that left, until memory is needed: {bytes} ({names})")
}

/// Shows one machine.
///
/// # Errors
/// The daemon's problem.
pub async fn show(client: &Client, name: &str, json: bool) -> Result<ExitCode, Failure> {
    let vm: Vm = client.get(&format!("/v1/vms/{}", escape(name))).await?;
    if json {
        return print_json(&vm);
    }
    let memory = format!(
        "{} ({} allocated), {}",
        show_size(vm.memory_bytes),
        show_size(vm.allocated_bytes),
        word(&vm.memory_mode)
    );
    let rows = [
        ("name", Some(vm.name.clone())),
        ("state", Some(state(&vm))),
        ("memory", Some(memory)),
        ("huge pages", (vm.memory_mode == MemoryMode::Shared).then(|| format!("{} mapped", show_size(vm.huge_bytes)))),
        (
            "shared",
            (vm.shared_bytes > 0).then(|| format!("{} with others, until it writes them", show_size(vm.shared_bytes))),
        ),
        ("pages", Some(where_pages_are(&vm))),
        ("template", vm.memory_template.clone()),
        ("forked from", vm.forked_from.clone()),
        ("family", vm.family.clone()),
        ("held for", vm.held_for.clone()),
        ("trust group", vm.trust_group.clone()),
        ("process", Some(vm.pid.to_string())),
        ("qemu", Some(format!("{} ({})", vm.qemu, vm.qemu_path))),
        ("arguments", Some(vm.arguments.join(" "))),
        ("balloon", vm.balloon.as_ref().map(balloon::line)),
        ("migration", vm.migration.as_ref().map(line)),
        ("waiting for", waiting_for(&vm)),
        ("note", vm.note.clone()),
    ];
    for (what, value) in rows {
        if let Some(value) = value {
            println!("{what:<12} {value}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn where_pages_are(vm: &Vm) -> String {
    if let Some(arriving) = &vm.arriving {
        return format!("here, and {} still at {}", arriving.missing_pages, arriving.from);
    }
    if let Some(split) = &vm.split {
        let hosts: Vec<_> = split.memory.iter().chain(&split.leaving).map(|host| host.peer.as_str()).collect();
        let (here, away, hosts) = (show_size(split.here_bytes), split.away_pages, hosts.join(", "));
        return format!("here, {here} at most, and {away} at {hosts}");
    }
    let runs_there = vm.migration.as_ref().is_some_and(|progress| progress.phase == Phase::Postcopy);
    match vm.state {
        VmState::MigratingOut if runs_there => "at the destination, where it runs, and the rest here still",
        VmState::MigratingIn => "at the source still, coming here",
        VmState::MigratingOut => "here, going to the destination",
        VmState::WaitingForPeer => "here and at the destination: the guest's own are the destination's",
        VmState::Running | VmState::Paused | VmState::Resuming | VmState::Lost => "here",
    }
    .into()
}

/// What a machine with missing pages waits for, and how long; `None` where both hosts are there.
fn waiting_for(vm: &Vm) -> Option<String> {
    let since = |ms: f64| format!("since {:.0} s ago", ms / 1e3);
    if let Some((arriving, ms)) = vm.arriving.as_ref().and_then(|arriving| Some((arriving, arriving.waiting_ms?))) {
        return Some(format!("{}, {}", arriving.from, since(ms)));
    }
    if let Some(waiting) = vm.split.as_ref().and_then(|split| split.waiting.first()) {
        let why = waiting.why.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        return Some(format!("{}, {}{why}", waiting.peer, since(waiting.ms)));
    }
    let progress = vm.migration.as_ref()?;
    Some(format!("{}, {}", progress.waiting_for.as_ref()?, since(progress.waiting_ms?)))
}

/// Stops a machine.
///
/// # Errors
/// The daemon's problem.
pub async fn stop(client: &Client, name: &str, force: bool) -> Result<ExitCode, Failure> {
    let path = format!("/v1/vms/{}", escape(name));
    let vm: Option<Vm> = client.get(&path).await.ok();
    client.command(Method::DELETE, &format!("{path}?force={force}")).await?;
    println!("{name}: stopped");
    if let Some(arriving) = vm.as_ref().and_then(|vm| vm.arriving.as_ref()) {
        println!(
            "{name}: the pages that were still at {} are of no use any more: its daemon gives them up when it next asks here, \
             and its migration has failed",
            arriving.from
        );
    }
    if vm.is_some_and(|vm| vm.migration.is_some_and(|progress| progress.phase == Phase::Postcopy)) {
        println!(
            "{name}: its pages here are given up; the guest at the destination lacks them, and is to be stopped there"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets a guest run that is paused.
///
/// # Errors
/// The daemon's problem.
pub async fn go_on(client: &Client, name: &str) -> Result<ExitCode, Failure> {
    client.command(Method::POST, &format!("/v1/vms/{}/continue", escape(name))).await?;
    println!("{name}: runs");
    Ok(ExitCode::SUCCESS)
}

/// Prints a value as the API has it.
pub fn print_json(value: &impl serde::Serialize) -> Result<ExitCode, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::host("cannot write JSON", &error))?;
    println!("{text}");
    Ok(ExitCode::SUCCESS)
}

/// Writes a report there as JSON; '-' is standard output.
pub fn write_json(path: &Path, report: &impl serde::Serialize) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::host(format!("cannot write the report to {}", path.display()), &error);
    let mut text = serde_json::to_vec_pretty(report).map_err(|error| failed(error.into()))?;
    text.push(b'\n');
    if path == Path::new("-") {
        return std::io::stdout().write_all(&text).map_err(failed);
    }
    std::fs::write(path, text).map_err(failed)
}

fn state(vm: &Vm) -> String {
    word(&vm.state)
}

/// The API's word for a value, as in its JSON.
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(String::from)).unwrap_or_default()
}
