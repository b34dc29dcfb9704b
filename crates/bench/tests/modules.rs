//! Modules inside a crate depend on each other one way, as crates do: a circle of modules is one module in several
//! files.
//!
//! What counts:
//!
//! - a module is a file; what stands in `mod.rs` is the module of its directory, what stands in `lib.rs` is the crate
//!   itself;
//! - a file depends on another where a path of it leads there: in `use`, `pub use` and within the code, from `crate::`,
//!   `super::` or `self::` on, or from the name of a module below it. The path's longest beginning that is a module is
//!   where it leads: what is taken from a parent is taken from the parent's file alone, whatever lies below that, and
//!   what a file re-exports is that file's;
//! - `mod` and what stands in comments and texts do not count, nor does what is compiled for tests alone.
//!
//! Methods are called without a path. So in the daemon a type's methods stand in the type's file: else a file could
//! call upwards unseen.

// The text of a file, in words.
#[path = "modules/words.rs"]
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use words::Word;

#[test]
fn the_daemons_modules_depend_on_each_other_in_no_circle() {
    check("daemon");
}

#[test]
fn the_engines_modules_depend_on_each_other_in_no_circle() {
    check("engine");
}

#[test]
fn a_type_of_the_daemon_has_its_methods_in_its_own_file() {
    let strangers: Vec<String> = Crate::read("daemon").files.iter().flat_map(File::impls_of_strangers).collect();
    assert!(strangers.is_empty(), "methods of a type that another file declares:\n{}", strangers.join("\n"));
}

/// Fails where there is a circle.
fn check(name: &str) {
    let all = Crate::read(name).edges();
    assert!(all.len() > 20, "the modules of {name} were not found");
    let circular = in_circles(&all);
    let lines: Vec<String> =
        circular.iter().map(|edge| format!("{} -> {} ({})", edge.from, edge.to, edge.line)).collect();
    assert!(lines.is_empty(), "{name}: modules depend on each other in a circle:\n{}", lines.join("\n"));
}

/// That a module depends on another, and the line that says so.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    from: String,
    to: String,
    line: usize,
}

/// The edges from which a way leads back to where they begin.
fn in_circles(edges: &[Edge]) -> Vec<Edge> {
    let mut targets: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for edge in edges {
        targets.entry(&edge.from).or_default().insert(&edge.to);
    }
    let reaches = |from: &str, to: &str| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
        while let Some(module) = left.pop() {
            if module == to {
                return true;
            }
            if seen.insert(module) {
                left.extend(targets.get(module).into_iter().flatten());
            }
        }
        false
    };
    edges.iter().filter(|edge| reaches(&edge.to, &edge.from)).cloned().collect()
}

/// A crate's files.
struct Crate {
    modules: BTreeSet<Vec<String>>,
    files: Vec<File>,
}

struct File {
    module: Vec<String>,
    words: Vec<Word>,
}

impl Crate {
    fn read(name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
        let mut paths = Vec::new();
        list(&source, &mut paths);
        let file = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).expect("a file that was just listed");
            let module = module_of(path.strip_prefix(&source).expect("below it"));
            File { module, words: words::without_tests(words::words(&text)) }
        };
        let files: Vec<File> = paths.iter().filter(|path| counts(path)).map(file).collect();
        Self { modules: files.iter().map(|file| file.module.clone()).collect(), files }
    }

    fn edges(&self) -> Vec<Edge> {
        let mut edges: BTreeMap<(String, String), usize> = BTreeMap::new();
        for file in &self.files {
            for (path, line) in file.paths() {
                let Some(target) = self.resolve(&file.module, &path) else { continue };
                if target != file.module {
                    edges.entry((shown(&file.module), shown(&target))).or_insert(line);
                }
            }
        }
        edges.into_iter().map(|((from, to), line)| Edge { from, to, line }).collect()
    }

    /// The module that a path leads to from a file; nothing where it leads out of the crate, or to a name of the file
    /// itself.
    fn resolve(&self, from: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut base = from.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {}
            _ if self.modules.contains(&[from, &path[..1]].concat()) => {}
            _ => return None,
        }
        while rest.first().is_some_and(|word| word == "super") {
            base.pop();
            rest = &rest[1..];
        }
        for word in rest {
            base.push(word.clone());
            if !self.modules.contains(&base) {
                base.pop();
                break;
            }
        }
        Some(base)
    }
}

impl File {
    /// The paths that stand in a file, each from its first word on, with their lines; a group in braces as its members.
    fn paths(&self) -> Vec<(Vec<String>, usize)> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.words.len() {
            let is_path = self.words[at].is_name() && self.words.get(at + 1).is_some_and(|next| next.text == "::");
            let begins = at == 0 || !matches!(self.words[at - 1].text.as_str(), "::" | ".");
            if is_path && begins {
                at = words::path(&self.words, at, &mut Vec::new(), &mut found);
            } else {
                // `use module;` of a module below this file.
                if at > 0 && self.words[at - 1].text == "use" && self.words[at].is_name() {
                    found.push((vec![self.words[at].text.clone()], self.words[at].line));
                }
                at += 1;
            }
        }
        found
    }

    /// `impl`s without a trait, of types that this file does not declare.
    fn impls_of_strangers(&self) -> Vec<String> {
        let declares = |name: &str| {
            self.words.windows(2).any(|pair| {
                matches!(pair[0].text.as_str(), "struct" | "enum" | "union" | "type" | "trait") && pair[1].text == name
            })
        };
        let of = words::inherent_impls(&self.words);
        let strangers = of.into_iter().filter(|(name, _)| !declares(name));
        strangers.map(|(name, line)| format!("{name} in {} (line {line})", shown(&self.module))).collect()
    }
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a directory of the crate").flatten() {
        let path = entry.path();
        if path.is_dir() {
            list(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// Whether a file is compiled into the crate's library, and not for its tests.
fn counts(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let of_tests = name == "tests.rs" || name.ends_with("_tests.rs") || path.iter().any(|part| part == "tests");
    name.ends_with(".rs") && name != "main.rs" && !of_tests
}

fn module_of(path: &Path) -> Vec<String> {
    let mut module: Vec<String> =
        path.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
        module.pop();
    }
    module
}

fn shown(module: &[String]) -> String {
    if module.is_empty() { "crate".into() } else { module.join("::") }
}

#[test]
fn a_circle_is_found_and_what_leads_to_it_is_not_part_of_it() {
    let edge = |from: &str, to: &str| Edge { from: from.into(), to: to.into(), line: 1 };
    let edges = [edge("a", "b"), edge("b", "c"), edge("c", "b"), edge("c", "d")];
    assert_eq!(in_circles(&edges), [edge("b", "c"), edge("c", "b")]);
    assert!(in_circles(&edges[..2]).is_empty());
}

#[test]
fn paths_lead_to_the_module_that_they_name() {
    let module =
        |path: &str| -> Vec<String> { path.split("::").filter(|part| !part.is_empty()).map(String::from).collect() };
    let text = r#"
        //! use crate::comment::Nothing;
        use crate::x::{self, y::{Deep, z}, Item as Other};
        use super::b;
        pub use below::Thing;
        mod below;
        fn f() -> crate::w::W { let text = "crate::text::Nothing"; self::below::g(); other::h(); 'a'; x.super_::y() }
        #[cfg(test)]
        mod tests { use crate::of_tests::Nothing; }
    "#;
    let names = ["", "a", "a::below", "a::b", "b", "x", "x::y", "x::y::z", "w", "text", "comment", "of_tests"];
    let file = File { module: module("a"), words: words::without_tests(words::words(text)) };
    let modules = names.iter().map(|name| module(name)).collect();
    let found = Crate { modules, files: vec![file] }.edges();
    let to: Vec<&str> = found.iter().map(|edge| edge.to.as_str()).collect();
    assert_eq!(to, ["a::below", "b", "w", "x", "x::y", "x::y::z"]);
}
