//! Dependencies between the crates point one way: the diagram of `ARCHITECTURE.md` says which, and nothing else is
//! there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Who depends on whom, by the crates' names without their common beginning.
type Edges = BTreeSet<(String, String)>;

/// What a crate may use from outside the workspace, where that is narrow: it keeps out of them what they must not do.
const NARROW: &[(&str, &[&str])] = &[
    // No socket, clock, thread or system call: plain data and arithmetic.
    ("sterna-protocol", &["serde", "lz4_flex", "postcard", "thiserror", "twox-hash", "zerocopy"]),
    ("sterna-api", &["serde", "serde_json", "thiserror", "utoipa"]),
    // What it reads is the guest's: little to be fooled with.
    ("sterna-introspect", &["thiserror"]),
    // Inside QEMU: nothing that allocates, and nothing to be audited anew with each release.
    ("sterna-agent", &["libc", "zerocopy"]),
    ("sterna-agent-protocol", &["zerocopy"]),
];

#[test]
fn crates_depend_on_each_other_as_the_diagram_says_and_in_no_other_way() {
    let drawn = drawn();
    let built: Edges = dependencies()
        .into_iter()
        .filter(|dependency| dependency.name.starts_with("sterna-"))
        .map(|dependency| (short(&dependency.of), short(&dependency.name)))
        .collect();
    let missing: Vec<_> = built.difference(&drawn).collect();
    let stale: Vec<_> = drawn.difference(&built).collect();
    assert!(missing.is_empty(), "not in ARCHITECTURE.md's diagram, so not allowed: {missing:?}");
    assert!(stale.is_empty(), "in ARCHITECTURE.md's diagram and not there: {stale:?}");
}

#[test]
fn no_crate_depends_on_itself_by_way_of_others() {
    let mut edges = drawn();
    assert!(edges.len() > 5, "the diagram was not found");
    // Takes away whatever nobody depends on, again and again: what stays is a circle.
    loop {
        let used: BTreeSet<String> = edges.iter().map(|(_, to)| to.clone()).collect();
        let before = edges.len();
        edges.retain(|(from, _)| used.contains(from));
        if edges.len() == before {
            break;
        }
    }
    assert!(edges.is_empty(), "a circle: {edges:?}");
}

#[test]
fn crates_that_must_stay_narrow_use_nothing_else() {
    for dependency in dependencies().iter().filter(|dependency| !dependency.for_tests) {
        let Some((_, allowed)) = NARROW.iter().find(|(name, _)| *name == dependency.of) else { continue };
        let known = allowed.contains(&dependency.name.as_str()) || dependency.name.starts_with("sterna-");
        assert!(known, "{} must not depend on {}", dependency.of, dependency.name);
    }
}

/// Whatever is compared with Sterna is measured from outside. A bare request is a memory host's client.
#[test]
fn only_a_bare_request_uses_the_engine_in_the_experiments() {
    let sources = root().join("crates/bench/src");
    let mut users = Vec::new();
    find_users(&sources, &mut users);
    assert_eq!(users, [sources.join("bare.rs")]);
}

/// The files below a directory that use the engine or its rules.
fn find_users(directory: &Path, users: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory of the crate").flatten() {
        let path = entry.path();
        if path.is_dir() {
            find_users(&path, users);
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a file that was just listed");
        if ["sterna_engine", "sterna_protocol"].iter().any(|name| text.contains(name)) {
            users.push(path);
        }
    }
}

struct Dependency {
    of: String,
    name: String,
    for_tests: bool,
}

/// Every dependency that a crate of the workspace names.
fn dependencies() -> Vec<Dependency> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 5, "the workspace was not found");
    let of = |package: &Value| {
        let name = text(&package["name"]);
        let dependencies = package["dependencies"].as_array().expect("dependencies").iter();
        let dependency = move |found: &Value| Dependency {
            of: name.clone(),
            name: text(&found["name"]),
            for_tests: found["kind"] == "dev",
        };
        dependencies.map(dependency).collect::<Vec<_>>()
    };
    packages.iter().flat_map(of).collect()
}

/// The edges of the diagram: lines `from --> to`.
fn drawn() -> Edges {
    let document = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there");
    let edge = |line: &str| line.split_once(" --> ").map(|(from, to)| (from.trim().to_owned(), to.trim().to_owned()));
    document.lines().filter_map(edge).collect()
}

fn short(name: &str) -> String {
    name.trim_start_matches("sterna-").to_owned()
}

fn text(value: &Value) -> String {
    value.as_str().expect("a name").to_owned()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
