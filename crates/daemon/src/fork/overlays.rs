//! The overlays of a machine that is forked: one of each disk for itself and for each clone, so that nobody writes the
//! image that all began as.
//!
//! They are on record before they are made, with the machine that is forked, until it is known who uses them. Who that
//! is, the arguments on record say: of the machine itself, once QEMU has been asked whether its disks are on theirs.
//! Those that nobody uses are removed. One that a guest has written to never is.
//!
//! A template has one of each disk that nobody writes: clones that are made later have copies of it.
//!
//! A clone on another host has its overlays there, by the same names on storage that both hosts share. From the pause
//! on nobody here knows whether it uses them, so nothing removes them but the word that it never ran.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use sterna_api::{Blame, Code, ForkRequest, Problem};
use sterna_engine::error::MigrateError;
use sterna_engine::vmm::qemu::{Disk, SharedQmp, close_node, format_overlay, lock, open_overlay, writable_disks};
use sterna_engine::vmm::qmp::Qmp;

use super::templates::template_name;
use crate::machines::base::{self, Base};
use crate::machines::control::{self, Control};
use crate::machines::overlay::{Overlay, TEMPLATE};
use crate::machines::record::VmRecord;
use crate::machines::table::Machines;
use crate::problems::{host, invalid};
use crate::qemu::arguments::{Item, parse, unparse};
use crate::qemu::disks::{self, Replacement};

/// The most images that a disk may be made of: each one is looked into for what those above it do not have.
const MOST_IMAGES: u64 = 16;

/// The overlays that one fork makes.
#[derive(Debug, Default)]
pub struct Overlays {
    disks: Vec<Disk>,
    /// Of each disk in turn: the machine's own, its clones' and its template's.
    pub all: Vec<Overlay>,
    /// Those of the fork that made the template, where they are a clone's that is made later.
    former: Vec<Overlay>,
}

impl Overlays {
    /// Overlays of these disks of a machine, for it and for the clones of the request. Nothing is made yet.
    ///
    /// # Errors
    /// A [`Problem`]: a disk that cannot have one, and why.
    pub fn plan(record: &VmRecord, disks: Vec<Disk>, request: &ForkRequest) -> Result<Self, Problem> {
        let directory = request.overlay_directory.as_ref().map(PathBuf::from);
        if let Some(path) = directory.as_ref().filter(|path| !path.is_absolute() || !path.is_dir()) {
            return Err(invalid(format!("'{}' is no directory's whole path on this host", path.display())));
        }
        let mut all = Vec::new();
        let own = std::iter::once(&record.name).chain(&request.names).map(|name| (name.as_str(), name.as_str()));
        let template = request.hold.map(|_| (TEMPLATE, template_name(request, &record.name)));
        let each: Vec<(&str, &str)> = own.chain(template).collect();
        for disk in &disks {
            let base = check(record, disk, !request.to.is_empty())?;
            let directory = directory.as_deref().or_else(|| base.parent()).unwrap_or(Path::new("/"));
            for (of, named) in &each {
                let elsewhere = *of != record.name && !request.to.is_empty();
                all.push(Overlay { elsewhere, ..Overlay::plan(of, &base, directory, named) });
            }
        }
        let overlays = Self { disks, all, former: Vec::new() };
        overlays.onto(&parse(&record.arguments), &record.name, &record.name)?;
        Ok(overlays)
    }

    /// Overlays for the clone `of` of a template; `fork` are those of the fork that made it. Nothing is made yet.
    #[must_use]
    pub fn like(fork: &[Overlay], of: &str) -> Self {
        let all = fork.iter().filter(|overlay| overlay.is_of_a_template()).map(|overlay| overlay.another(of)).collect();
        Self { disks: Vec::new(), all, former: fork.to_vec() }
    }

    /// The arguments `items` of the machine of the name `named` in them, with the disks of `of` on its overlays.
    ///
    /// # Errors
    /// A [`Problem`]: a disk that cannot be told in them.
    pub fn onto(&self, items: &[Item], named: &str, of: &str) -> Result<Vec<Item>, Problem> {
        if self.all.is_empty() { Ok(items.to_vec()) } else { disks::onto(items, named, &pairs(&self.all, of)) }
    }

    /// Those of one machine.
    pub fn of(&self, name: &str) -> Vec<Overlay> {
        self.all.iter().filter(|overlay| overlay.of == name).cloned().collect()
    }

    /// The images under the disks of the clone `of`, whose source is this.
    #[must_use]
    pub fn bases(&self, source: &VmRecord, of: &str) -> Vec<Base> {
        base::of_a_clone(&[source.bases.clone(), bases(&self.all, &self.former, of)].concat())
    }

    /// Makes those of a template's clone.
    ///
    /// # Errors
    /// A [`Problem`]; none is left.
    pub fn make_like_templates(&self) -> Result<Made, Problem> {
        let mut made = Made::default();
        for overlay in &self.all {
            let template = self.former.iter().find(|former| former.is_of_a_template() && former.base == overlay.base);
            let template = template.ok_or_else(|| MigrateError::Bug("an overlay of no template").problem())?;
            let failed = |error| {
                let problem = host(format!("cannot make the overlay {}", overlay.path.display()), &error);
                problem.hint(format!(
                    "is there room, and is {} there, which it is a copy of? Without that, remove the template and fork \
                     anew",
                    template.path.display()
                ))
            };
            overlay.make_like(&template.path).map_err(failed)?;
            made.0.push(overlay.clone());
        }
        Ok(made)
    }

    /// Makes all of them; the machine of this name has its own open then.
    ///
    /// # Errors
    /// A [`Problem`]; none is left.
    pub fn make(&self, qmp: &SharedQmp, name: &str) -> Result<Opened, Problem> {
        let mut opened = Opened { qmp: SharedQmp::clone(qmp), nodes: Vec::new(), made: Made::default() };
        for overlay in &self.all {
            let disk = self.disks.iter().find(|disk| Path::new(&disk.file) == overlay.base);
            let disk = disk.ok_or_else(|| MigrateError::Bug("an overlay of no disk").problem())?;
            let path = overlay.path.display();
            overlay.make().map_err(|error| host(format!("cannot make the overlay {path}"), &error))?;
            opened.made.0.push(overlay.clone());
            let qmp = &mut lock(qmp);
            let refused = |error| control::refused(&format!("make the overlay {path}"), &error);
            format_overlay(qmp, &overlay.node, &overlay.path, disk).map_err(refused)?;
            if overlay.of == name {
                open_overlay(qmp, &overlay.node, &overlay.path, disk).map_err(refused)?;
                opened.nodes.push((disk.node.clone(), overlay.node.clone()));
            }
        }
        Ok(opened)
    }
}

/// Overlays that were made. Dropped, they are removed.
#[derive(Debug, Default)]
pub struct Made(Vec<Overlay>);

impl Made {
    /// They stay.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.0.iter().for_each(Overlay::remove);
    }
}

/// Overlays that were made, of which QEMU has those of its own machine open. Dropped, none is.
#[derive(Debug)]
pub struct Opened {
    qmp: SharedQmp,
    /// Block nodes of disks, and those of their overlays.
    pub nodes: Vec<(String, String)>,
    made: Made,
}

impl Opened {
    /// Takes those of a machine.
    pub fn take(&mut self, name: &str) -> Made {
        Made(self.made.0.extract_if(.., |overlay| overlay.of == name).collect())
    }

    /// The machine's own stay until QEMU was asked whether it uses them.
    pub fn leave(mut self, name: &str) {
        self.take(name).keep();
        self.nodes.clear();
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        for (_, node) in &self.nodes {
            // Without a file's name nobody finds it: where QEMU does not answer, it stays open and does no harm.
            let _ = close_node(&mut lock(&self.qmp), node);
        }
    }
}

/// The overlays that a machine's record answers for: once its pause may have been, not those of clones elsewhere.
pub fn answered_for(record: &VmRecord) -> impl Iterator<Item = &Overlay> {
    record.overlays.iter().filter(|overlay| record.forking.is_none() || !overlay.elsewhere)
}

/// A machine that was forked, as its disks are now: on its overlays, or as they were, and these are gone. Those of its
/// clones on other hosts are not on record with it any more.
///
/// # Errors
/// A [`Problem`]: QEMU does not say. Nothing may be done with the machine's disks then.
pub fn as_they_are(forking: &VmRecord, qmp: &mut Qmp) -> Result<VmRecord, Problem> {
    let own: Vec<&Overlay> = forking.overlays.iter().filter(|overlay| overlay.of == forking.name).collect();
    if own.is_empty() {
        return Ok(forking.clone());
    }
    let disks = writable_disks(qmp).map_err(|error| control::refused("tell its disks", &error))?;
    let mut now = forking.clone();
    now.overlays.retain(|overlay| overlay.of != forking.name && !overlay.elsewhere);
    if own.iter().any(|overlay| disks.iter().any(|disk| Path::new(&disk.file) == overlay.path)) {
        let items = disks::onto(&parse(&forking.arguments), &forking.name, &pairs(&forking.overlays, &forking.name))?;
        now.arguments = unparse(&items);
        now.bases.extend(bases(&forking.overlays, &[], &forking.name));
        return Ok(now);
    }
    for overlay in own {
        let _ = close_node(qmp, &overlay.node);
        overlay.remove();
    }
    Ok(now)
}

/// As [`as_they_are`], of a machine that an earlier daemon was forking.
///
/// # Errors
/// As [`as_they_are`].
pub fn recover(forking: &VmRecord) -> Result<VmRecord, Problem> {
    // An image is no machine's that runs here: its overlays are those of the clone that it is for.
    if forking.overlays.is_empty() || forking.image {
        return Ok(forking.clone());
    }
    as_they_are(forking, Control::connect(&forking.qmp)?.qmp())
}

/// Removes what earlier daemons made and nobody uses: `made` are the overlays that were on record, and machines that
/// are not here any more had these `arguments`, or they name what templates have.
pub fn forget_unused(machines: &Machines, made: &[Overlay], arguments: &[Vec<String>]) {
    let records: Vec<VmRecord> = machines.table().values().filter_map(|entry| entry.record.clone()).collect();
    let undecided: HashSet<&Path> = records
        .iter()
        .filter(|record| record.forking.is_some())
        .flat_map(|record| record.overlays.iter().map(|overlay| overlay.path.as_path()))
        .collect();
    let used = |overlay: &Overlay| {
        let path = overlay.path.display().to_string();
        let names = |words: &Vec<String>| words.iter().any(|word| word.contains(&path));
        undecided.contains(overlay.path.as_path())
            || records.iter().any(|record| names(&record.arguments))
            || arguments.iter().any(names)
    };
    made.iter().filter(|overlay| !used(overlay)).for_each(Overlay::remove);
    // Those of a clone that is held ready go with it.
    let keeps = |record: &VmRecord| record.forking.is_some() || record.image || record.held.is_some();
    let settled = |record: &&VmRecord| !keeps(record) && !record.overlays.is_empty();
    for record in records.iter().filter(settled) {
        machines.try_store(&VmRecord { overlays: Vec::new(), ..record.clone() });
    }
}

fn pairs<'a>(all: &'a [Overlay], of: &str) -> Vec<Replacement<'a>> {
    let of_it = all.iter().filter(|overlay| overlay.of == of);
    of_it.map(|overlay| Replacement { image: &overlay.base, by: &overlay.path, format: "qcow2" }).collect()
}

/// The images under these overlays, for the machine `of` that has its own of them. Others lie over them `besides`.
fn bases(all: &[Overlay], besides: &[Overlay], of: &str) -> Vec<Base> {
    let base = |own: &Overlay| {
        let others = all.iter().filter(|other| other.of != of).chain(besides).filter(|other| other.base == own.base);
        let template = others.clone().find(|other| other.is_of_a_template());
        Base {
            image: own.base.clone(),
            overlay: own.path.clone(),
            template: template.map(|overlay| overlay.path.clone()),
            others: others.map(|other| other.path.clone()).collect(),
            kept: false,
            committing: false,
        }
    };
    all.iter().filter(|overlay| overlay.of == of).map(base).collect()
}

/// The image of a disk that can have an overlay, `elsewhere` too.
fn check(record: &VmRecord, disk: &Disk, elsewhere: bool) -> Result<PathBuf, Problem> {
    let refuse = |why: &str, hint: &str| {
        let message = format!("'{}' cannot be forked with an overlay of its disk {}: {why}", record.name, disk.name);
        Err(Problem::new(Code::CannotFork, Blame::Request, message).hint(hint))
    };
    if !matches!(disk.format.as_str(), "raw" | "qcow2") || !disk.file.starts_with('/') {
        let why = format!("its image is '{}' ({})", disk.file, disk.format);
        return refuse(&why, "overlays are made of plain raw and qcow2 images in files");
    }
    if disk.depth + 1 >= MOST_IMAGES {
        let why = format!("it is made of {} images already", disk.depth + 1);
        return refuse(&why, "make them one: 'block-stream' at the machine's monitor");
    }
    if elsewhere && disk.no_flush {
        let why = "QEMU never flushes it (cache=unsafe), so other hosts would not find what was written to it";
        return refuse(why, "give it another cache=, or fork it on its own host");
    }
    let path = PathBuf::from(&disk.file);
    if !std::fs::metadata(&path).is_ok_and(|about| about.is_file()) {
        return refuse(&format!("its image '{}' is no file of this host", disk.file), "give it an image in a file");
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A machine with an overlay of its own, and one for each of two clones, of which one is on another host.
    fn record() -> VmRecord {
        let overlay = |of: &str, elsewhere: bool| json!({ "of": of, "path": format!("/{of}.qcow2"), "base": "/disk", "node": of, "elsewhere": elsewhere });
        let overlays = json!([overlay("m", false), overlay("here", false), overlay("there", true)]);
        VmRecord { overlays: serde_json::from_value(overlays).expect("overlays"), ..VmRecord::sample() }
    }

    /// Fails where a daemon that finds a fork's pause begun removes what a clone elsewhere may run with by then.
    #[test]
    fn once_a_pause_has_begun_nobody_here_answers_for_overlays_of_clones_elsewhere() {
        let of = |record: &VmRecord| answered_for(record).map(|overlay| overlay.of.clone()).collect::<Vec<_>>();
        let before = record();
        assert_eq!(of(&before), ["m", "here", "there"]);
        let forking = VmRecord { forking: Some(Vec::new()), ..before };
        assert_eq!(of(&forking), ["m", "here"]);
        // Who writes the image under them is told by all of them.
        assert_eq!(bases(&forking.overlays, &[], "m")[0].others, [Path::new("/here.qcow2"), Path::new("/there.qcow2")]);
    }
}
