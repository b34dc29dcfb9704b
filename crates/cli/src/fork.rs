//! `fork`.

use std::path::Path;
use std::process::ExitCode;

use sterna_api::{ForkRequest, Forked};

use crate::arguments::Fork;
use crate::client::{Client, escape};
use crate::failure::{Failure, describe};
use crate::machines::write_json;
use crate::template;

/// Has a guest go on as several. Fails where one clone is not there, or not ready.
///
/// # Errors
/// The daemon's problem.
pub async fn fork(client: &Client, wanted: Fork) -> Result<ExitCode, Failure> {
    let request = ForkRequest {
        names: wanted.names,
        to: wanted.to,
        paused: wanted.paused,
        new_mac: wanted.new_mac,
        overlay_disks: wanted.overlay_disks.is_some(),
        overlay_directory: wanted.overlay_disks.flatten().map(|path| path.display().to_string()),
        hold: wanted.hold,
        template: wanted.template,
        arguments: (!wanted.arguments.is_empty()).then_some(wanted.arguments),
    };
    let answer = client.post(&format!("/v1/vms/{}/fork", escape(&wanted.name)), &request).await;
    let forked: Forked = answer.map_err(Failure::with_whereabouts)?;
    // The report alone stands on standard output where it is asked for there.
    if wanted.json.as_deref() != Some(Path::new("-")) {
        tell(&forked, wanted.paused);
    }
    if let Some(path) = &wanted.json {
        write_json(path, &forked)?;
    }
    for failed in &forked.failed {
        eprint!("{}", describe(&format!("sterna: '{}' did not come to run", failed.vm), &failed.problem));
    }
    let lacking = forked.clones.iter().filter_map(|clone| Some((&clone.vm, clone.lacks.as_ref()?)));
    let mut whole = forked.failed.is_empty();
    for (vm, problem) in lacking {
        eprintln!("sterna: '{vm}' runs, and is not yet what was asked for: {}", problem.with_causes());
        whole = false;
    }
    let all_ready = forked.template.as_ref().is_none_or(|template| template.ready >= template.hold);
    if !all_ready {
        eprintln!("sterna: fewer clones are ready than were asked for: the daemon tries again");
    }
    Ok(if whole && all_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell(forked: &Forked, held: bool) {
    let does = if held { "is held" } else { "runs" };
    for clone in &forked.clones {
        let place = match &clone.host {
            Some(host) => format!("at {host}"),
            None => format!("(process {})", clone.pid),
        };
        println!("{}: {does} {place} after {:.0} ms", clone.vm, clone.ms);
    }
    if let Some(template) = &forked.template {
        println!("{}", template::line(template));
    }
    println!("{}: paused {:.1} ms, {:.0} ms in all", forked.vm, forked.pause_ms, forked.ms);
}
