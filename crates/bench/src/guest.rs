//! Guests of the lab, with the same QEMU arguments for every mover.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::accelerator::{self, Accelerator};
use crate::command::wait_for;
use crate::error::{Error, Result};
use crate::lab::{METER, PREFIX, guest_address};
use crate::meter;
use crate::{Lab, tools};

/// The balloon of a guest before the guest is moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Balloon {
    /// It has none.
    #[default]
    Absent,
    /// It has one whose size nobody changes.
    Idle,
    /// Sterna takes what the guest holds free (`sterna balloon --auto`) until there is no more.
    Settled,
}

/// A disk to which a guest swaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swap {
    /// The disk, as QEMU's `-drive file=` takes it.
    pub file: String,
    /// How many pages go and come together: 2 to the power of that.
    pub page_cluster: u32,
    /// So much of its jobs' memory may be in RAM, bytes.
    pub limit_bytes: u64,
}

/// A guest to be started.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Its name.
    pub name: String,
    /// Its number in the lab, which gives it its addresses and its tap: 1 to 250.
    pub number: u8,
    /// RAM, bytes.
    pub memory_bytes: u64,
    /// Virtual processors.
    pub cpus: u32,
    /// The accelerator that runs them.
    pub accelerator: Accelerator,
    /// Their model, such as `max` or `host`.
    pub cpu: String,
    /// Machine type, such as `q35` or `pc-q35-7.2`.
    pub machine: String,
    /// Its jobs for the image's init, separated by `;`, their arguments by `,`.
    pub jobs: String,
    /// The time between two of its heartbeats: under TCG eight guests that beat every millisecond keep two processors
    /// busy.
    pub beat: Duration,
    /// Its balloon.
    pub balloon: Balloon,
    /// Where it swaps, if it does.
    pub swap: Option<Swap>,
    /// Whether it has a tap; without one it reaches nobody.
    pub wired: bool,
    /// The file of its console.
    pub console: PathBuf,
    /// Whether one can type at its console; each clone has one of its own then, too.
    pub typed_at: bool,
}

impl Guest {
    /// A guest of 1 GiB with one processor in `lab`; its console is kept with the lab.
    #[must_use]
    pub fn new(lab: &Lab, name: &str, number: u8, jobs: &str) -> Self {
        let console = crate::lab::state::directory(lab.name()).join(format!("{name}.console"));
        let accelerator = accelerator::chosen();
        Self {
            name: name.into(),
            number,
            memory_bytes: 1 << 30,
            cpus: 1,
            accelerator,
            cpu: accelerator.richest_cpu().into(),
            machine: "pc-q35-7.2".into(),
            jobs: jobs.into(),
            beat: Duration::from_millis(1),
            balloon: Balloon::Absent,
            swap: None,
            wired: true,
            console,
            typed_at: false,
        }
    }

    /// A clone of it.
    #[must_use]
    pub fn clone_of_name(&self, name: &str) -> Self {
        Self { name: name.into(), console: self.console.with_file_name(format!("{name}.console")), ..self.clone() }
    }

    /// The socket at which one can [type](Self::typed_at).
    #[must_use]
    pub fn console_socket(&self) -> PathBuf {
        self.console.with_extension("socket")
    }

    /// The back end of its console, as QEMU's `-chardev` takes it.
    fn console_argument(&self) -> String {
        let place = |file: &Path| path_argument(file).replace(',', ",,");
        // A destination that writes to the same file must not cut off what the source wrote.
        if !self.typed_at {
            return format!("file,id=console,path={},append=on", place(&self.console));
        }
        // Sterna puts each machine's name there.
        let any = self.clone_of_name("{name}");
        let (socket, log) = (place(&any.console_socket()), place(&any.console));
        format!("socket,id=console,path={socket},server=on,wait=off,logfile={log},logappend=on")
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        guest_address(self.number)
    }

    /// Its tap, the same on every host.
    #[must_use]
    pub fn tap(&self) -> String {
        format!("tap{}", self.number)
    }

    /// What the kernel must be told of its clock. A microvm has the processor's alone, and its kernel measures how fast
    /// that is: where the host lets a translated processor wait meanwhile, it gives up, and waits for its first tick
    /// for ever. A translated processor has the host's clock.
    fn clock_words(&self) -> String {
        let alone = self.machine.starts_with("microvm") && self.accelerator == Accelerator::Tcg;
        let khz = host_clock_khz().filter(|_| alone);
        khz.map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default()
    }

    /// What its image must be told of its swap.
    fn swap_words(&self) -> String {
        let words = |swap: &Swap| format!(" sterna.swap={} sterna.limit={}", swap.page_cluster, swap.limit_bytes);
        self.swap.as_ref().map(words).unwrap_or_default()
    }

    /// QEMU's arguments without RAM.
    ///
    /// # Errors
    /// Where the guest's image is absent or the lab has no meter.
    pub fn arguments(&self, lab: &Lab) -> Result<Vec<String>> {
        let meter = lab.host(METER)?.address;
        // Without these two words the guest's console would cost it more than its work. Where its host is busy enough,
        // the kernel's test of its timer fails, and with it the boot.
        let command_line = format!(
            "console=ttyS0 quiet panic=-1 no_timer_check{}{} sterna.ip={}/{PREFIX} sterna.meter={meter}:{} sterna.beat={} \
             sterna.run={}",
            self.clock_words(),
            self.swap_words(),
            self.address(),
            meter::PORT,
            self.beat.as_micros(),
            self.jobs
        );
        let mac = format!("52:54:00:53:54:{:02x}", self.number);
        let kernel = path_argument(&tools::kernel()?);
        let initrd = path_argument(&tools::initrd()?);
        let mut arguments: Vec<String> =
            ["-nodefaults", "-display", "none", "-no-user-config"].map(str::to_owned).to_vec();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("-accel", self.accelerator.argument().into());
        add("-cpu", self.cpu.clone());
        add("-machine", self.machine.clone());
        add("-smp", self.cpus.to_string());
        add("-kernel", kernel);
        add("-initrd", initrd);
        add("-append", command_line);
        add("-chardev", self.console_argument());
        add("-serial", "chardev:console".into());
        let tap = format!("tap,id=net0,ifname={},script=no,downscript=no", self.tap());
        add("-netdev", if self.wired { tap } else { "user,id=net0,restrict=on".into() });
        add("-device", format!("virtio-net-pci,netdev=net0,mac={mac}"));
        if let Some(swap) = &self.swap {
            add("-drive", format!("file={},if=virtio,format=raw,cache=none", swap.file));
        }
        if self.balloon != Balloon::Absent {
            // Free-page reporting is off: only the balloon takes memory.
            add("-device", "virtio-balloon-pci,deflate-on-oom=on".into());
        }
        Ok(arguments)
    }

    /// What it has written to its console.
    #[must_use]
    pub fn console_text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Waits until it says that its jobs are started.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the end of its console.
    pub fn wait_until_up(&self, limit: Duration) -> Result<()> {
        self.wait_until_says("GUEST UP", limit)
    }

    /// Waits until these words are on its console.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the end of its console.
    pub fn wait_until_says(&self, words: &str, limit: Duration) -> Result<()> {
        let said = wait_for(&format!("{words} on the console"), limit, || {
            Ok(self.console_text().contains(words).then_some(()))
        });
        said.map_err(|_| {
            let text = self.console_text();
            let tail: String = text.chars().rev().take(400).collect::<Vec<_>>().into_iter().rev().collect();
            Error::Timeout {
                what: format!("{words} of {}", self.name),
                limit,
                detail: format!("; its console ends: {tail}"),
            }
        })
    }

    /// Waits until its checker says twice more that all of its pages are as it wrote them.
    ///
    /// # Errors
    /// [`Error::Form`] with what the checker has found, now or before, or [`Error::Timeout`] where it says nothing.
    pub fn wait_until_well(&self, limit: Duration) -> Result<()> {
        let from = self.console_text().len();
        let said = wait_for(&format!("the word of {}'s checker", self.name), limit, || {
            let text = self.console_text();
            let bad = text.lines().find(|line| line.contains("CHECKER BAD")).map(str::to_owned);
            let new = text.get(from..).unwrap_or_default().lines().filter(|line| line.contains("CHECKER ok"));
            // The first line, perhaps cut off, may be of a time before.
            Ok(bad.map(Err).or_else(|| (new.count() > 2).then_some(Ok(()))))
        })?;
        said.map_err(|reason| Error::Form { what: format!("the memory of {}", self.name), reason })
    }
}

/// Calls `run` while the network devices of these guests are in place on every host. Devices and consoles are removed
/// afterwards: the next guest of the same name must not find old text.
///
/// # Errors
/// The error of `run`, or else of a device.
pub fn plugged<T>(lab: &Lab, guests: &[Guest], run: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut made = Vec::new();
    let mut plug = |guest: &'_ Guest| {
        lab.create_tap(&guest.tap())?;
        made.push(guest.tap());
        Ok(())
    };
    let result = guests.iter().try_for_each(&mut plug).and_then(|()| run());
    let removed = made.iter().map(|tap| lab.delete_tap(tap)).fold(Ok(()), Result::and);
    guests.iter().for_each(|guest| drop(std::fs::remove_file(&guest.console)));
    let value = result?;
    removed.map(|()| value)
}

fn path_argument(path: &Path) -> String {
    path.display().to_string()
}

/// The speed of the processors' clock on this host, kHz, where it says so.
fn host_clock_khz() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let mhz = text.lines().find_map(|line| line.strip_prefix("cpu MHz"))?;
    let mhz: f64 = mhz.trim_start_matches(['\t', ' ', ':']).trim().parse().ok()?;
    Some((mhz * 1e3) as u64).filter(|khz| *khz > 0)
}
