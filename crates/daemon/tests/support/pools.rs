//! Warm pools of a host.

use serde_json::{Value, json};

use super::Host;

pub fn fork(host: &Host, name: &str, request: &Value) -> Value {
    let (status, answer) = host.ask("POST", &format!("/v1/vms/{name}/fork"), Some(request));
    assert_eq!(status, 200, "{answer}");
    answer
}

pub fn take(host: &Host, template: &str, name: &str) -> Value {
    let (status, answer) = host.ask("POST", &format!("/v1/templates/{template}/run"), Some(&json!({ "name": name })));
    assert_eq!(status, 201, "{answer}");
    assert_eq!(host.state_of(name), "running");
    answer
}

pub fn hold(host: &Host, template: &str, hold: u32) -> Value {
    let (status, answer) = host.ask("PUT", &format!("/v1/templates/{template}"), Some(&json!({ "hold": hold })));
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The names and processes of those that are held ready.
pub fn held(host: &Host) -> Vec<(String, u32)> {
    let list = host.get("/v1/vms");
    let of_it = list.as_array().expect("a list").iter().filter(|vm| !vm["held_for"].is_null());
    of_it.map(|vm| (vm["name"].as_str().unwrap().into(), vm["pid"].as_u64().unwrap() as u32)).collect()
}

pub fn ready(host: &Host, template: &str) -> u64 {
    host.get(&format!("/v1/templates/{template}"))["ready"].as_u64().expect("a number")
}

pub fn remove(host: &Host, template: &str) {
    let (status, answer) = host.ask("DELETE", &format!("/v1/templates/{template}"), None);
    assert_eq!(status, 204, "{answer}");
}
