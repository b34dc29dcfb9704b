//! `template`, and what `run --from-template` asks for.

use std::process::ExitCode;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use hyper::Method;
use sterna_api::units::show_size;
use sterna_api::{TakeRequest, Taken, TemplateChange, TemplateState};

use crate::arguments::Template;
use crate::client::{Client, escape};
use crate::failure::Failure;
use crate::machines::print_json;
use crate::table::text_of;

/// Lists templates, or changes one.
///
/// # Errors
/// The daemon's problem.
pub async fn template(client: &Client, wanted: Template) -> Result<ExitCode, Failure> {
    let Some(name) = &wanted.name else {
        let all: Vec<TemplateState> = client.get("/v1/templates").await?;
        if wanted.json {
            return print_json(&all);
        }
        tell_all(&all);
        return Ok(ExitCode::SUCCESS);
    };
    let path = format!("/v1/templates/{}", escape(name));
    if wanted.remove {
        client.command(Method::DELETE, &path).await?;
        println!("template {name}: removed");
        return Ok(ExitCode::SUCCESS);
    }
    let template: TemplateState = match wanted.hold {
        Some(hold) => client.put(&path, &TemplateChange { hold }).await?,
        None => client.get(&path).await?,
    };
    if wanted.json {
        return print_json(&template);
    }
    println!("{}", line(&template));
    Ok(ExitCode::SUCCESS)
}

/// Lets a clone of a template run under this name.
///
/// # Errors
/// The daemon's problem.
pub async fn take(client: &Client, template: &str, name: &str) -> Result<Taken, Failure> {
    let request = TakeRequest { name: name.into() };
    client.post(&format!("/v1/templates/{}/run", escape(template)), &request).await
}

/// A template, in one line.
pub fn line(template: &TemplateState) -> String {
    let TemplateState { name, source, ready, hold, note, .. } = template;
    let sizes = format!("{} each, its files {}", show_size(template.memory_bytes), show_size(template.image_bytes));
    let note = note.as_ref().map_or(String::new(), |note| format!("; {note}"));
    format!("template {name}: of '{source}', {ready} of {hold} clones are ready ({sizes}){note}")
}

/// Templates as a table; nothing where there are none.
pub fn tell_all(templates: &[TemplateState]) {
    if templates.is_empty() {
        return;
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["TEMPLATE", "OF", "READY", "MEMORY", "FILES", "ALLOCATED", "SHARED", "FAMILY", "NOTE"]);
    for template in templates {
        table.add_row([
            template.name.clone(),
            template.source.clone(),
            format!("{} of {}", template.ready, template.hold),
            show_size(template.memory_bytes),
            show_size(template.image_bytes),
            show_size(template.allocated_bytes),
            show_size(template.shared_bytes),
            template.family.clone().unwrap_or_default(),
            template.note.clone().unwrap_or_default(),
        ]);
    }
    println!("{}", text_of(&table));
}
