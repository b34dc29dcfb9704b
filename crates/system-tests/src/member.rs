//! Guests of one family on one host: clones of one another.

use std::path::PathBuf;

use serde_json::json;
use sterna_api::Vm;
use sterna_bench::Guest;
use sterna_bench::baseline::qmp::Qmp;
use sterna_bench::command::wait_for;
use sterna_bench::lab::Host;

use crate::{PATIENCE, Plan, Site, cli};

/// A guest of a family: the same machine without a network, because clones have one address. It is heard of by its
/// console.
pub struct Member<'a> {
    /// Where it is.
    pub site: &'a Site,
    /// Itself.
    pub guest: Guest,
}

impl<'a> Member<'a> {
    /// The guest of this name.
    #[must_use]
    pub fn new(site: &'a Site, name: &str) -> Self {
        let console = site.guest.console.with_file_name(format!("{name}.console"));
        Self { site, guest: Guest { name: name.into(), console, ..site.guest.clone() } }
    }

    /// Starts it on host `a`, with more words for `run` and for its QEMU. Its console has its name where its arguments
    /// say `{name}`.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn run(&self, plan: &Plan, run: &[&str], qemu: &[&str]) {
        let words = self.guest.arguments(&self.site.lab).expect("the guest's image");
        let (console, of_any) = (format!("{}.console", self.guest.name), "{name}.console");
        let words: Vec<String> = words.iter().map(|word| word.replace(&console, of_any)).collect();
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        while let Some(at) = words.iter().position(|word| *word == "-netdev" || word.starts_with("virtio-net")) {
            let first = if words[at] == "-netdev" { at } else { at - 1 };
            words.drain(first..first + 2);
        }
        let memory = format!("{}K", plan.memory_bytes / 1024);
        let head = ["run", &self.guest.name, "--memory", &memory, "--balloon", "--detach"];
        let all = [&head[..], run, &["--"], &words, qemu].concat();
        cli::ask(self.site.host("a"), &all).expect(0, &[]);
    }

    /// Its checker says, after this moment, that all is as it wrote it.
    ///
    /// # Panics
    /// Where it says otherwise, or nothing.
    pub fn is_well(&self) {
        let from = self.guest.console_text().len();
        let said = || {
            let text = self.guest.console_text();
            assert!(!text.contains("CHECKER BAD") && !text.contains("Oops"), "{}: {text}", self.guest.name);
            // The first whole line may be of a time before.
            let words = text.get(from..).unwrap_or_default().lines().filter(|line| line.contains("CHECKER ok"));
            Ok(words.filter(|line| line.contains(" bad=0 ")).nth(2).map(str::to_owned))
        };
        wait_for("the checker's word", PATIENCE, said).unwrap_or_else(|error| panic!("{}: {error}", self.guest.name));
    }

    /// The machine as the daemon of this host shows it.
    ///
    /// # Panics
    /// Where that does not know it.
    #[must_use]
    pub fn shown(&self, host: &str) -> Vm {
        let answer = cli::ask(self.site.host(host), &["show", &self.guest.name, "--json"]);
        serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:#?}"))
    }

    /// Tells its QEMU something.
    ///
    /// # Panics
    /// Where QEMU does not do it.
    pub fn tell(&self, host: &Host, what: &str) {
        self.monitor(host).execute(what, json!({})).expect("QEMU does it");
    }

    /// Moves it from host `a` to host `b`.
    #[must_use]
    pub fn migrate(&self, options: &[&str]) -> cli::Answer {
        let (from, to) = (self.site.host("a"), self.site.host("b").listen());
        cli::ask(from, &[&["migrate", &self.guest.name, "--to", &to, "--json", "-"], options].concat())
    }

    /// Its QEMU on this host.
    ///
    /// # Panics
    /// Where that does not answer.
    #[must_use]
    pub fn monitor(&self, host: &Host) -> Qmp {
        let directory = host.directory.join(format!("state/vms/{}/run", self.guest.name));
        // That of a QEMU that has replaced another one has a tag in its name.
        let is_socket = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("qmp"));
        let mut files = std::fs::read_dir(&directory).expect("its directory").flatten().map(|entry| entry.path());
        Qmp::connect(&files.find(is_socket).expect("its QEMU's socket")).expect("its QEMU answers")
    }
}
