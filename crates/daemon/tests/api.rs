//! The API's forms: routes, their description, errors, metrics.

mod support;

use std::os::unix::fs::PermissionsExt;

use serde_json::json;
use support::{Host, cannot_run};

const ROUTES: [(&str, &str); 35] = [
    ("get", "/v1/vms"),
    ("post", "/v1/vms"),
    ("post", "/v1/vms/adopt"),
    ("get", "/v1/vms/{name}"),
    ("delete", "/v1/vms/{name}"),
    ("post", "/v1/vms/{name}/cancel"),
    ("get", "/v1/vms/{name}/estimate"),
    ("put", "/v1/vms/{name}/balloon"),
    ("post", "/v1/vms/{name}/reclaim"),
    ("post", "/v1/vms/{name}/replace"),
    ("post", "/v1/vms/{name}/fork"),
    ("post", "/v1/vms/{name}/split"),
    ("post", "/v1/vms/{name}/merge"),
    ("post", "/v1/vms/{name}/resume"),
    ("post", "/v1/vms/{name}/continue"),
    ("get", "/v1/vms/{name}/link"),
    ("put", "/v1/vms/{name}/link"),
    ("get", "/v1/templates"),
    ("get", "/v1/templates/{name}"),
    ("put", "/v1/templates/{name}"),
    ("delete", "/v1/templates/{name}"),
    ("post", "/v1/templates/{name}/run"),
    ("get", "/v1/host/kept"),
    ("delete", "/v1/host/kept"),
    ("get", "/v1/host/lent"),
    ("delete", "/v1/host/lent/{guest}"),
    ("get", "/v1/migrations"),
    ("post", "/v1/migrations"),
    ("get", "/v1/migrations/{id}"),
    ("get", "/v1/watch"),
    ("get", "/v1/host/bandwidth"),
    ("put", "/v1/host/bandwidth"),
    ("get", "/v1/version"),
    ("get", "/metrics"),
    ("get", "/openapi.json"),
];

#[test]
fn the_description_lists_every_route_and_every_route_is_served() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let document = host.get("/openapi.json");
    let mut described: Vec<(String, String)> = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        described.extend(methods.as_object().unwrap().keys().map(|method| (method.clone(), path.clone())));
    }
    described.sort();
    let mut expected: Vec<(String, String)> = ROUTES.iter().map(|(m, p)| ((*m).into(), (*p).into())).collect();
    expected.sort();
    assert_eq!(described, expected);
    for (method, path) in ROUTES.iter().filter(|(_, path)| *path != "/v1/watch") {
        let path = path.replace("{name}", "nobody").replace("{id}", "77").replace("{guest}", "77");
        let (_, answer) = host.ask(&method.to_uppercase(), &path, Some(&json!({})));
        let code = answer["code"].as_str().unwrap_or_default();
        assert!(!code.starts_with("no-such-route") && !code.starts_with("no-such-method"), "{method} {path}: {answer}");
    }
    for schema in [
        "Vm",
        "Balloon",
        "BalloonSetting",
        "RunRequest",
        "MigrateRequest",
        "Migration",
        "Report",
        "Progress",
        "Problem",
    ] {
        assert!(document["components"]["schemas"][schema].is_object(), "{schema} is not described");
    }
}

#[test]
fn every_error_is_a_problem_with_a_fitting_status() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    let cases = [
        (404, "unknown-vm", "GET", "/v1/vms/nobody", ""),
        (404, "unknown-vm", "DELETE", "/v1/vms/nobody", ""),
        (404, "unknown-vm", "POST", "/v1/vms/nobody/cancel", ""),
        (404, "unknown-vm", "GET", "/v1/watch?vm=nobody", ""),
        (404, "unknown-migration", "GET", "/v1/migrations/9", ""),
        (400, "invalid-request", "GET", "/v1/migrations/nine", ""),
        (404, "no-such-route", "GET", "/v2/vms", ""),
        (405, "no-such-method", "PUT", "/v1/vms", ""),
        (400, "invalid-request", "POST", "/v1/vms", "{"),
        (400, "invalid-request", "POST", "/v1/vms", r#"{"name":"a"}"#),
        (400, "invalid-request", "POST", "/v1/vms", r#"{"name":"a","memory_bytes":1048576,"arguments":[],"colour":1}"#),
        (400, "invalid-request", "POST", "/v1/vms", r#"{"name":"a","memory_bytes":1048577,"arguments":[]}"#),
        (400, "invalid-name", "POST", "/v1/vms", r#"{"name":"../a","memory_bytes":1048576,"arguments":[]}"#),
        (400, "invalid-request", "DELETE", "/v1/vms/a?force=perhaps", ""),
        (404, "unknown-vm", "POST", "/v1/migrations", r#"{"vms":["nobody"],"to":"h:1"}"#),
        (400, "invalid-request", "POST", "/v1/migrations", r#"{"vms":[],"to":"h:1"}"#),
        (400, "invalid-request", "POST", "/v1/migrations", r#"{"vms":["a","a"],"to":"h:1"}"#),
        (400, "invalid-request", "POST", "/v1/migrations", r#"{"vms":["a"],"to":"h"}"#),
        (400, "invalid-request", "POST", "/v1/migrations", r#"{"vms":["a"],"to":"h:1","options":{"streams":99}}"#),
        (400, "invalid-request", "POST", "/v1/migrations", r#"{"vms":["a"],"to":"h:1","options":{"mode":"teleport"}}"#),
        (400, "no-such-process", "POST", "/v1/vms/adopt", r#"{"name":"a","pid":4194304,"qmp":"/x"}"#),
    ];
    for (status, code, method, path, body) in cases {
        let (found, problem) = host.ask_raw(method, path, body);
        assert_eq!((found, problem["code"].as_str()), (status, Some(code)), "{method} {path} {body}: {problem}");
        assert!(problem["message"].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
        assert!(problem["blame"].is_string(), "{problem}");
    }
    assert!(host.names().is_empty(), "nothing came of any of them");
}

#[test]
fn metrics_count_machines_by_state() {
    if cannot_run() {
        return;
    }
    let host = Host::start();
    host.run("a");
    let metrics = host.get("/metrics");
    let text = metrics.as_str().unwrap();
    assert!(text.contains("sterna_vms{state=\"running\"} 1"), "{text}");
    assert!(text.contains("sterna_vm_memory_bytes 67108864"), "{text}");
}

#[test]
fn the_socket_is_roots_alone_and_goes_with_the_daemon() {
    if cannot_run() {
        return;
    }
    let mut host = Host::start();
    let mode = std::fs::metadata(host.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(host.get("/v1/version")["listen"], host.address());
    assert!(host.stop_daemon().success());
    assert!(!host.socket().exists());
    assert!(std::fs::read_dir(host.state().join("ram")).unwrap().next().is_none());
}
