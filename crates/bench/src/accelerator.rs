//! The accelerator, which runs the processors of the lab's guests: QEMU's own translator (TCG), or the processor itself
//! (KVM).
//!
//! A `/dev/kvm` that can be opened proves little: where KVM is emulated, a Linux guest hangs or is very slow. So `auto`
//! boots the lab's guest once, within a time limit, and takes KVM if the guest comes up. The result is valid until the
//! host reboots, or its kernel, QEMU or the guest's image changes.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::command::wait_for;
use crate::error::{Context, Result};
use crate::tools;

/// The environment variable that names the accelerator; without it, as with `auto`, KVM is tried.
pub const VARIABLE: &str = "STERNA_ACCEL";
/// How long a guest may take to come up under KVM. Under TCG it takes some three seconds.
const BOOT_LIMIT: Duration = Duration::from_secs(30);
/// How long it may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// The line that the guest prints when it is up.
const UP: &str = "GUEST UP";

/// The accelerator of guests' processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    /// QEMU's translator: runs everywhere.
    Tcg,
    /// The processor itself.
    Kvm,
}

/// The choice of an accelerator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// KVM where a Linux guest boots under it
    #[default]
    Auto,
    /// QEMU's translator
    Tcg,
    /// The processor itself
    Kvm,
}

impl Accelerator {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }

    /// QEMU's word for it, behind `-accel`.
    #[must_use]
    pub fn argument(self) -> &'static str {
        match self {
            Self::Tcg => "tcg,thread=multi",
            Self::Kvm => "kvm",
        }
    }

    /// The processor with all that it offers. All hosts of a lab are one machine, so under KVM that is the host's.
    #[must_use]
    pub fn richest_cpu(self) -> &'static str {
        match self {
            Self::Tcg => "max",
            Self::Kvm => "host",
        }
    }
}

/// The result of trying KVM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    /// A Linux guest came up.
    Boots {
        /// The time until it was up, milliseconds.
        after_ms: u64,
    },
    /// It did not come up in time, and was ended.
    Hangs {
        /// The limit, seconds.
        limit_s: u64,
    },
    /// QEMU did not run it.
    Fails {
        /// The reason in its own words, or the kernel's.
        why: String,
    },
}

impl Verdict {
    /// The accelerator to use.
    #[must_use]
    pub fn accelerator(&self) -> Accelerator {
        if matches!(self, Self::Boots { .. }) { Accelerator::Kvm } else { Accelerator::Tcg }
    }

    /// The verdict for people, in one line.
    #[must_use]
    pub fn show(&self) -> String {
        match self {
            Self::Boots { after_ms } => format!("kvm: a Linux guest came up after {after_ms} ms"),
            Self::Hangs { limit_s } => {
                format!("tcg: under KVM a Linux guest had not come up after {limit_s} s, and was ended")
            }
            Self::Fails { why } => format!("tcg: KVM cannot be used here: {why}"),
        }
    }
}

static CHOSEN: OnceLock<Accelerator> = OnceLock::new();

/// Sets the accelerator that this process uses, before anybody asks for it.
///
/// # Errors
/// As [`tried`], for `auto`.
pub fn choose(choice: Choice) -> Result<Accelerator> {
    let accelerator = settle(choice)?;
    Ok(*CHOSEN.get_or_init(|| accelerator))
}

/// The accelerator that this process uses, where somebody has asked for it already.
#[must_use]
pub fn settled() -> Option<Accelerator> {
    CHOSEN.get().copied()
}

/// The accelerator that this process uses: the chosen one, or the environment's, or the result of trying KVM. Where a
/// try is impossible, it is TCG: the start of a guest then reports what is missing.
#[must_use]
pub fn chosen() -> Accelerator {
    *CHOSEN.get_or_init(|| {
        let named = std::env::var(VARIABLE).unwrap_or_default();
        let choice = Choice::from_str(&named, false).unwrap_or_else(|_| {
            if !named.is_empty() {
                eprintln!("{VARIABLE}={named} is none of auto, tcg and kvm: auto is taken");
            }
            Choice::Auto
        });
        settle(choice).unwrap_or(Accelerator::Tcg)
    })
}

fn settle(choice: Choice) -> Result<Accelerator> {
    match choice {
        Choice::Tcg => Ok(Accelerator::Tcg),
        Choice::Kvm => Ok(Accelerator::Kvm),
        Choice::Auto => Ok(tried(&cache())?.accelerator()),
    }
}

/// The path of the cached verdict.
#[must_use]
pub fn cache() -> PathBuf {
    tools::repository("build/accelerator.json")
}

/// A verdict, and the machine state it was found on.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    on: Vec<String>,
    #[serde(flatten)]
    verdict: Verdict,
}

/// The verdict on KVM on this host: from `cache` where it is known, otherwise from a guest that is booted for it. Of
/// several processes that ask at once, one tries and the others wait.
///
/// # Errors
/// Where QEMU or the guest's image is absent, or the cache cannot be written.
pub fn tried(cache: &Path) -> Result<Verdict> {
    let guest = Guest { qemu: tools::qemu_7_2()?, kernel: tools::kernel()?, initrd: tools::initrd()? };
    let on = found_on(&guest)?;
    let known = || {
        let kept: Kept = serde_json::from_slice(&fs::read(cache).ok()?).ok()?;
        (kept.on == on).then_some(kept.verdict)
    };
    if let Some(verdict) = known() {
        return Ok(verdict);
    }
    let writing = || format!("writing {}", cache.display());
    fs::create_dir_all(cache.parent().unwrap_or(Path::new("."))).context(writing)?;
    let lock = File::create(cache.with_extension("lock")).context(writing)?;
    lock.lock().context(writing)?;
    if let Some(verdict) = known() {
        return Ok(verdict);
    }
    let verdict = match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => guest.boot(&cache.with_extension("console"), BOOT_LIMIT)?,
        Err(error) => Verdict::Fails { why: format!("/dev/kvm: {error}") },
    };
    let kept = Kept { on: on.clone(), verdict };
    let new = cache.with_extension("new");
    let text = serde_json::to_vec_pretty(&kept).map_err(std::io::Error::other).context(writing)?;
    fs::write(&new, text).and_then(|()| fs::rename(&new, cache)).context(writing)?;
    Ok(kept.verdict)
}

/// The state for which a verdict is valid: this boot of this kernel, this QEMU and this guest.
fn found_on(guest: &Guest) -> Result<Vec<String>> {
    let kernel = |file: &str| {
        let path = format!("/proc/sys/kernel/{file}");
        fs::read_to_string(&path).context(|| format!("reading {path}")).map(|text| text.trim().to_owned())
    };
    let mut on = vec![kernel("osrelease")?, kernel("random/boot_id")?];
    for path in [&guest.qemu, &guest.kernel, &guest.initrd] {
        let about = fs::metadata(path).context(|| format!("looking at {}", path.display()))?;
        on.push(format!("{} {} {}", path.display(), about.len(), about.mtime()));
    }
    Ok(on)
}

/// A guest that is booted to see whether it comes up.
struct Guest {
    qemu: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

/// A QEMU that does not outlive this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        // The wait has a limit, because the kernel may not let the process go.
        let _ = wait_for("the end of QEMU", END_LIMIT, || self.0.try_wait().context(|| "waiting for QEMU".into()));
    }
}

impl Guest {
    /// Boots the guest under KVM, and ends it again. Its console is the file `console`, which is removed afterwards.
    ///
    /// # Errors
    /// Where QEMU cannot be started.
    fn boot(&self, console: &Path, limit: Duration) -> Result<Verdict> {
        let _ = fs::remove_file(console);
        let verdict = self.boot_at(console, limit);
        let _ = fs::remove_file(console);
        verdict
    }

    fn boot_at(&self, console: &Path, limit: Duration) -> Result<Verdict> {
        let trying = || format!("trying KVM with {}", self.qemu.display());
        let begun = Instant::now();
        let child = Command::new(&self.qemu)
            .args(["-accel", Accelerator::Kvm.argument(), "-cpu", Accelerator::Kvm.richest_cpu()])
            .args(["-machine", "pc-q35-7.2", "-m", "256M", "-nodefaults", "-display", "none", "-no-user-config"])
            .args(["-no-reboot", "-append", "console=ttyS0 quiet panic=-1"])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.initrd)
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context(trying)?;
        let mut qemu = Running(child);
        let ended = wait_for(UP, limit, || {
            if fs::read(console).is_ok_and(|text| String::from_utf8_lossy(&text).contains(UP)) {
                return Ok(Some(Verdict::Boots { after_ms: begun.elapsed().as_millis() as u64 }));
            }
            let ended = qemu.0.try_wait().context(trying)?;
            Ok(ended.map(|status| Verdict::Fails { why: last_words(&mut qemu.0, &status.to_string()) }))
        });
        match ended {
            Err(crate::Error::Timeout { .. }) => Ok(Verdict::Hangs { limit_s: limit.as_secs() }),
            other => other,
        }
    }
}

/// The last line that a QEMU said before it ended, or else how it ended.
fn last_words(qemu: &mut Child, status: &str) -> String {
    use std::io::Read;
    let mut text = String::new();
    let _ = qemu.stderr.take().map(|mut stderr| stderr.read_to_string(&mut text));
    text.lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .map_or_else(|| format!("QEMU ended ({status})"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell script in QEMU's place. The console's file is its last argument.
    fn qemu(dir: &Path, does: &str) -> Guest {
        let (source, path) = (dir.join("text"), dir.join("qemu"));
        let text = format!("#!/bin/sh\nfor last; do :; done\nconsole=${{last#file:}}\n{does}\n");
        fs::write(&source, text).unwrap();
        // By a process of its own: a child that another test starts meanwhile would have it open for writing, too, and
        // nobody can run it then.
        assert!(Command::new("install").args(["-m", "755"]).args([&source, &path]).status().unwrap().success());
        Guest { qemu: path, kernel: "/kernel".into(), initrd: "/initrd".into() }
    }

    #[test]
    fn a_guest_that_comes_up_speaks_for_kvm() {
        let dir = tempfile::tempdir().unwrap();
        let guest = qemu(dir.path(), "echo GUEST UP >$console; exec sleep 60");
        let verdict = guest.boot(&dir.path().join("console"), Duration::from_secs(20)).unwrap();
        assert!(matches!(verdict, Verdict::Boots { .. }), "{verdict:?}");
        assert_eq!(verdict.accelerator(), Accelerator::Kvm);
    }

    #[test]
    fn a_guest_that_hangs_is_ended_and_speaks_against_kvm() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let guest = qemu(dir.path(), &format!("echo booting >$console; echo $$ >{}; exec sleep 60", pid.display()));
        let verdict = guest.boot(&dir.path().join("console"), Duration::from_secs(1)).unwrap();
        assert_eq!(verdict, Verdict::Hangs { limit_s: 1 });
        assert_eq!(verdict.accelerator(), Accelerator::Tcg);
        assert!(verdict.show().contains("after 1 s"), "{}", verdict.show());
        let pid = fs::read_to_string(pid).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "it runs on");
    }

    #[test]
    fn a_qemu_that_does_not_run_it_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let guest = qemu(dir.path(), "echo 'Could not access KVM kernel module' >&2; exit 1");
        let verdict = guest.boot(&dir.path().join("console"), Duration::from_secs(20)).unwrap();
        assert_eq!(verdict, Verdict::Fails { why: "Could not access KVM kernel module".into() });
        let guest = qemu(dir.path(), "exit 3");
        let Verdict::Fails { why } = guest.boot(&dir.path().join("console"), Duration::from_secs(20)).unwrap() else {
            panic!("it does not boot")
        };
        assert!(why.contains('3'), "{why}");
    }

    #[test]
    fn what_is_known_is_kept_as_it_is() {
        let kept = Kept { on: vec!["a".into()], verdict: Verdict::Hangs { limit_s: 30 } };
        let text = serde_json::to_string(&kept).unwrap();
        assert_eq!(text, r#"{"on":["a"],"verdict":"hangs","limit_s":30}"#);
        let again: Kept = serde_json::from_str(&text).unwrap();
        assert_eq!((again.on, again.verdict), (kept.on, kept.verdict));
    }

    #[test]
    fn under_kvm_the_processor_is_the_hosts_and_under_tcg_it_is_qemus() {
        assert_eq!((Accelerator::Kvm.argument(), Accelerator::Kvm.richest_cpu()), ("kvm", "host"));
        assert_eq!((Accelerator::Tcg.argument(), Accelerator::Tcg.richest_cpu()), ("tcg,thread=multi", "max"));
    }
}
