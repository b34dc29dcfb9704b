//! Templates: what guests were at the moment of a fork, on record, so that clones can be made of it later. A template
//! outlives its request, its source and the daemon; it does not outlive the host, for it is in memory.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use sterna_api::{Blame, Code, ForkRequest, Problem};
use sterna_engine::fork::Image;

use crate::machines::images::{Images, KeptImage};
use crate::machines::overlay::Overlay;
use crate::machines::record::VmRecord;
use crate::problems::host;
use crate::state::{Outlives, read_record, remove_half_written, replace_record};

/// A template, as it is on record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TemplateRecord {
    /// Its name.
    pub name: String,
    /// The machine that it was made of, as it was then.
    pub source: VmRecord,
    /// The exact machine type.
    pub machine: String,
    /// The clones' arguments, where their user gave them.
    pub arguments: Option<Vec<String>>,
    /// What in RAM had content, bytes.
    pub content_bytes: u64,
    /// RAM and devices.
    pub image: KeptImage,
    /// How many clones are held ready.
    pub hold: u32,
    /// The overlays of the fork that it was made in; its own are among them.
    #[serde(default)]
    pub overlays: Vec<Overlay>,
    /// Those that are being made for clones of it.
    #[serde(default)]
    pub making: Vec<Overlay>,
    /// It is being removed.
    #[serde(default)]
    pub removed: bool,
}

impl TemplateRecord {
    /// Its own overlays, which clones get copies of.
    pub fn own_overlays(&self) -> impl Iterator<Item = &Overlay> {
        self.overlays.iter().filter(|overlay| overlay.is_of_a_template())
    }
}

/// A template.
#[derive(Debug)]
pub struct Template {
    record: Mutex<TemplateRecord>,
    /// Its RAM.
    pub image: Arc<Image>,
    /// Held while clones are made ready, or ended.
    pub filling: Mutex<()>,
    gone: AtomicBool,
    trouble: Mutex<Option<(String, Instant)>>,
}

impl Template {
    fn new(record: TemplateRecord, image: Arc<Image>) -> Arc<Self> {
        Arc::new(Self {
            record: Mutex::new(record),
            image,
            filling: Mutex::default(),
            gone: AtomicBool::new(false),
            trouble: Mutex::default(),
        })
    }

    /// What is on record of it.
    #[must_use]
    pub fn record(&self) -> TemplateRecord {
        lock(&self.record).clone()
    }

    /// Whether it was removed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Why it has fewer clones ready than it should, and since when; `None` where nothing has failed.
    #[must_use]
    pub fn trouble(&self) -> Option<(String, Instant)> {
        lock(&self.trouble).clone()
    }

    /// Notes why a clone could not be made ready, or that all are.
    pub fn set_trouble(&self, why: Option<String>) {
        *lock(&self.trouble) = why.map(|why| (why, Instant::now()));
    }
}

/// The templates of this host.
#[derive(Debug)]
pub struct Templates {
    /// Where their records are: `NAME.json`.
    dir: PathBuf,
    images: Arc<Images>,
    table: Mutex<BTreeMap<String, Arc<Template>>>,
}

impl Templates {
    /// No templates yet; their records are in this directory.
    #[must_use]
    pub fn new(dir: PathBuf, images: Arc<Images>) -> Self {
        Self { dir, images, table: Mutex::default() }
    }

    /// Reads what is on record. A template whose memory is gone, as after a restart of the host, goes, too. Returns the
    /// overlays that are nobody's, unless a machine has them; once they are gone, [`tidy`](Self::tidy) is to follow.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn load(&self) -> io::Result<Vec<Overlay>> {
        remove_half_written(&self.dir);
        let mut nobodys = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let read = read_record::<TemplateRecord>(&path).and_then(|record| match record {
                Some(record) if record.name == name => Ok(record),
                _ => Err(io::Error::other("it is no record of this template")),
            });
            let had = read.and_then(|record| {
                nobodys.extend(record.making.iter().cloned());
                match record.image.open(&block_sizes(&record.source)) {
                    Ok(image) if !record.removed => Ok((record, image)),
                    other => {
                        nobodys.extend(record.own_overlays().cloned());
                        Err(other.err().unwrap_or_else(|| io::Error::other("its removal had begun")))
                    }
                }
            });
            match had {
                Ok((record, image)) => {
                    self.images.know(&record.image);
                    tracing::info!(template = name, hold = record.hold, "found");
                    lock(&self.table).insert(name, Template::new(record, Arc::new(image)));
                }
                Err(error) => {
                    tracing::warn!(template = name, %error, "a template cannot be had any more: it is removed");
                }
            }
        }
        Ok(nobodys)
    }

    /// Removes the records of those that cannot be had any more.
    pub fn tidy(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if self.get(&name).is_err() {
                let _ = fs::remove_file(entry.path());
            }
        }
        for template in self.list().iter().filter(|template| !template.record().making.is_empty()) {
            if let Err(problem) = self.change(template, |record| record.making.clear()) {
                tracing::warn!("{}", problem.with_causes());
            }
        }
    }

    /// All of them, by name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Template>> {
        lock(&self.table).values().filter(|template| !template.is_gone()).cloned().collect()
    }

    /// The paths of their overlays.
    #[must_use]
    pub fn named(&self) -> Vec<String> {
        let own = |template: &Arc<Template>| -> Vec<String> {
            template.record().own_overlays().map(|overlay| overlay.path.display().to_string()).collect()
        };
        self.list().iter().flat_map(own).collect()
    }

    /// The template of this name.
    ///
    /// # Errors
    /// A [`Problem`] where there is none.
    pub fn get(&self, name: &str) -> Result<Arc<Template>, Problem> {
        let known = lock(&self.table).get(name).cloned();
        known.filter(|template| !template.is_gone()).ok_or_else(|| unknown(name))
    }

    /// Checks that no template has this name.
    ///
    /// # Errors
    /// A [`Problem`] where one has.
    pub fn check_free(&self, name: &str) -> Result<(), Problem> {
        if lock(&self.table).contains_key(name) {
            let message = format!("there already is a template '{name}' on this host");
            return Err(Problem::new(Code::NameTaken, Blame::Request, message)
                .hint(format!("choose another with --template, or 'sterna template {name} --remove'")));
        }
        Ok(())
    }

    /// Puts a template on record: RAM, and the state of the devices. `describe` makes the record.
    ///
    /// # Errors
    /// A [`Problem`]: the name is taken, or nothing can be kept. Nothing is left of it.
    pub fn add(
        &self,
        name: &str,
        image: Arc<Image>,
        devices: &[u8],
        describe: impl FnOnce(KeptImage) -> TemplateRecord,
    ) -> Result<Arc<Template>, Problem> {
        let mut table = lock(&self.table);
        if table.contains_key(name) {
            drop(table);
            return self.check_free(name).and_then(|()| self.get(name));
        }
        let kept =
            self.images.keep(&image, devices).map_err(|error| host("cannot keep the template's memory", &error))?;
        let record = describe(kept);
        // It is in memory, so its record need not outlive the host.
        if let Err(problem) = self.write(&record) {
            self.images.forget(&record.image);
            return Err(problem);
        }
        let template = Template::new(record, image);
        table.insert(name.into(), Arc::clone(&template));
        Ok(template)
    }

    /// Changes how many clones of it are held ready.
    ///
    /// # Errors
    /// A [`Problem`] where that cannot be written.
    pub fn set_hold(&self, template: &Template, hold: u32) -> Result<(), Problem> {
        self.change(template, |record| record.hold = hold)
    }

    /// Notes that these overlays are being made for a clone of it.
    ///
    /// # Errors
    /// A [`Problem`] where that cannot be written: then none may be made.
    pub fn begin_overlays(&self, template: &Template, overlays: &[Overlay]) -> Result<(), Problem> {
        if overlays.is_empty() {
            Ok(())
        } else {
            self.change(template, |record| record.making.extend_from_slice(overlays))
        }
    }

    /// Notes that they are a machine's by now, or gone.
    pub fn end_overlays(&self, template: &Template, overlays: &[Overlay]) {
        if !overlays.is_empty() {
            // Once it is removed it knows of none.
            let _ = self.change(template, |record| record.making.retain(|making| !overlays.contains(making)));
        }
    }

    fn change(&self, template: &Template, change: impl FnOnce(&mut TemplateRecord)) -> Result<(), Problem> {
        let mut record = lock(&template.record);
        if template.is_gone() {
            return Err(unknown(&record.name));
        }
        let mut changed = record.clone();
        change(&mut changed);
        self.write(&changed)?;
        *record = changed;
        Ok(())
    }

    fn write(&self, record: &TemplateRecord) -> Result<(), Problem> {
        let written = replace_record(&self.path(&record.name), record, Outlives::Daemon);
        written.map_err(|error| host("cannot write the template's record", &error))
    }

    /// Notes that it is gone, for a daemon started anew, too. Its memory and its name stay taken until
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// A [`Problem`]: there is none of this name, or the file system refuses.
    pub fn remove(&self, name: &str) -> Result<Arc<Template>, Problem> {
        let template = self.get(name)?;
        {
            // Whoever changes the record now writes none after that.
            let record = lock(&template.record);
            self.write(&TemplateRecord { removed: true, ..record.clone() })?;
            template.gone.store(true, Ordering::SeqCst);
        }
        Ok(template)
    }

    /// Nothing of it is held any more: neither its memory, nor its overlays, nor its name.
    pub fn release(&self, template: &Template) {
        let record = template.record();
        self.images.forget(&record.image);
        record.own_overlays().for_each(Overlay::remove);
        if let Err(error) = fs::remove_file(self.path(&record.name)) {
            tracing::warn!(template = record.name, %error, "the record of a template that was removed stays");
        }
        lock(&self.table).remove(&record.name);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }
}

/// The name of the template that a request is to make of the machine `source`.
#[must_use]
pub fn template_name<'a>(request: &'a ForkRequest, source: &'a str) -> &'a str {
    request.template.as_deref().unwrap_or(source)
}

/// The problem of a name that no template has.
#[must_use]
pub fn unknown(name: &str) -> Problem {
    Problem::new(Code::UnknownTemplate, Blame::Request, format!("there is no template '{name}' on this host"))
        .hint("'sterna template' lists them, 'sterna fork NAME --hold N' makes one")
}

fn block_sizes(record: &VmRecord) -> Vec<u64> {
    record.blocks.iter().map(|block| block.bytes).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
