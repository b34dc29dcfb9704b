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
use sterna_api::{Blame, Code, Problem};
use sterna_engine::fork::Image;

use crate::machines::images::{Images, KeptImage};
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

    /// Reads what is on record. A template whose memory is gone, as after a restart of the host, goes, too.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn load(&self) -> io::Result<()> {
        remove_half_written(&self.dir);
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let read = read_record::<TemplateRecord>(&path).and_then(|record| match record {
                Some(record) if record.name == name => {
                    let image = record.image.open(&block_sizes(&record.source))?;
                    Ok((record, image))
                }
                _ => Err(io::Error::other("it is no record of this template")),
            });
            match read {
                Ok((record, image)) => {
                    self.images.know(&record.image);
                    tracing::info!(template = name, hold = record.hold, "found");
                    lock(&self.table).insert(name, Template::new(record, Arc::new(image)));
                }
                Err(error) => {
                    tracing::warn!(template = name, %error, "a template cannot be had any more: it is removed");
                    let _ = fs::remove_file(&path);
                }
            }
        }
        Ok(())
    }

    /// All of them, by name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Template>> {
        lock(&self.table).values().filter(|template| !template.is_gone()).cloned().collect()
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
        if let Err(error) = replace_record(&self.path(name), &record, Outlives::Daemon) {
            self.images.forget(&record.image);
            return Err(host("cannot write the template's record", &error));
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
        let mut record = lock(&template.record);
        if template.is_gone() {
            return Err(unknown(&record.name));
        }
        let changed = TemplateRecord { hold, ..record.clone() };
        replace_record(&self.path(&changed.name), &changed, Outlives::Daemon)
            .map_err(|error| host("cannot write the template's record", &error))?;
        *record = changed;
        Ok(())
    }

    /// Takes its record away: it is gone. Its memory and its name stay taken until [`release`](Self::release).
    ///
    /// # Errors
    /// A [`Problem`]: there is none of this name, or the file system refuses.
    pub fn remove(&self, name: &str) -> Result<Arc<Template>, Problem> {
        let template = self.get(name)?;
        {
            // Whoever changes the record now writes none after it is gone.
            let _record = lock(&template.record);
            fs::remove_file(self.path(name)).map_err(|error| host("cannot remove the template's record", &error))?;
            template.gone.store(true, Ordering::SeqCst);
        }
        Ok(template)
    }

    /// Nothing of it is held any more: neither its memory nor its name.
    pub fn release(&self, template: &Template) {
        let record = template.record();
        self.images.forget(&record.image);
        lock(&self.table).remove(&record.name);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }
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
