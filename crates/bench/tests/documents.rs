//! What the documents point at is there: files, headings, tests.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The documents, by their places in the repository.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in ["", "docs", "docs/design", "guest"] {
        let entries = std::fs::read_dir(root().join(dir)).expect("a directory of documents");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        found.extend(paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    assert!(found.len() > 10, "only {} documents", found.len());
    found
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut broken = Vec::new();
    for document in documents() {
        let text = read(&document);
        for target in links(&text) {
            if target.contains("://") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { document.clone() } else { document.with_file_name("").join(file) };
            let there = path.exists() && (heading.is_empty() || headings(&read(&path)).contains(heading));
            if !there {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_test_that_a_document_names_exists() {
    let mut sources = String::new();
    gather(&root().join("crates"), &mut sources);
    let mut named = 0;
    for document in documents() {
        for word in read(&document).split('`').filter(|word| is_sentence(word)) {
            named += 1;
            assert!(sources.contains(&format!("fn {word}(")), "{}: there is no test {word}", document.display());
        }
    }
    assert!(named > 5, "only {named} tests were named");
}

/// The walks through the code are rows of a number, a file and functions: the functions are in the file.
#[test]
fn every_function_on_a_walk_through_the_code_is_where_the_walk_says() {
    for (document, most) in [("life-of-a-page.md", 12), ("life-of-a-fault.md", 10), ("life-of-a-request.md", 10)] {
        let path = root().join("docs").join(document);
        let text = read(&path);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
        let steps: Vec<_> = rows.iter().filter(|row| row.len() == 6 && row[1].parse::<u32>().is_ok()).collect();
        assert!((5..=most).contains(&steps.len()), "{document}: {} files", steps.len());
        for step in steps {
            let file = links(step[2]).next().expect("a link to a file");
            let source = read(&path.with_file_name("").join(file));
            for function in step[3].split('`').filter(|word| !word.trim_matches([',', ' ']).is_empty()) {
                let there = [format!("fn {function}("), format!("fn {function}<")];
                assert!(there.iter().any(|start| source.contains(start)), "{document}: no {function} in {file}");
            }
        }
    }
}

/// A file has one concern: one that grows beyond this has two.
#[test]
fn no_source_file_is_longer_than_500_lines() {
    let lines = |path: &PathBuf| read(path).lines().count();
    let counted = sources(&["crates", "fuzz/targets", "guest"]).into_iter().map(|path| (lines(&path), path));
    let long: Vec<String> =
        counted.filter(|(lines, _)| *lines > 500).map(|(lines, path)| format!("{}: {lines}", path.display())).collect();
    assert!(long.is_empty(), "{long:#?}");
}

/// A text in the code, a message above all, stays in one line, so that it can be searched for.
#[test]
fn no_line_of_code_is_wider_than_120_columns_but_for_its_texts() {
    let mut wide = Vec::new();
    for path in sources(&["crates", "fuzz/targets"]) {
        let text = read(&path);
        let lines = text.lines().enumerate().filter(|(_, line)| line.chars().count() > 120 && !line.contains('"'));
        wide.extend(lines.map(|(number, _)| format!("{}:{}", path.display(), number + 1)));
    }
    assert!(wide.is_empty(), "{wide:#?}");
}

/// Test names are sentences: that tells them from other words between backticks. Metrics are the exception.
fn is_sentence(word: &str) -> bool {
    let metric = word.starts_with("sterna_");
    !metric
        && word.matches('_').count() >= 4
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// The targets of `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

/// The anchors of a document's headings.
fn headings(text: &str) -> HashSet<String> {
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    text.lines().filter(|line| line.starts_with('#')).map(anchor).collect()
}

/// The code below these directories.
fn sources(dirs: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    dirs.iter().for_each(|dir| files(&root().join(dir), &mut found));
    assert!(found.len() > 300, "only {} files", found.len());
    found
}

fn gather(dir: &Path, sources: &mut String) {
    let mut paths = Vec::new();
    files(dir, &mut paths);
    paths.iter().for_each(|path| sources.push_str(&read(path)));
}

/// The sources below a directory.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
