//! Takes memory of the kernel's, fills it, checks it and gives it back, for ever: files of many sizes, and processes that live for a moment.
//!
//! Every page says whose it is and when it was written. So a page that was lost, zeroed, or is that of an earlier owner shows when its owner
//! checks it, which is at least before it is given back. What is given back goes to the kernel's free lists: files are removed, and
//! processes end, so that no library keeps their memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::{Every, Pace};
use sterna_guest_programs::page::{PAGE_BYTES, Page};
use sterna_guest_programs::random::Random;
use sterna_guest_programs::report::Report;

const USAGE: &str = "churn [--mib AT-MOST] [--rate MIB-FILLED-PER-SECOND, 0 = no limit] [--processes N] [--directory PATH] \
    [--interval-ms BETWEEN-LINES]; its own processes: [--child-pages N] [--life-ms N] [--sequence N]";

/// Files there may be at once.
const SLOTS: usize = 256;
/// The largest file, pages; sizes are as often between 1 and 2 pages as between half of this and this.
const LARGEST: usize = 1024;
/// How long a process keeps its memory at least and at most, and how often it checks all of it meanwhile.
const LIFE_MS: (usize, usize) = (50, 600);
const CHECK: Duration = Duration::from_millis(50);
/// Wrong pages that are reported singly, each interval.
const REPORTED: u64 = 16;
/// What the processes that this program starts are told by.
const CHILD: &str = "child-pages";

/// A file that is there.
struct File {
    pages: usize,
    sequence: u64,
}

struct Churn {
    directory: PathBuf,
    slots: Vec<Option<File>>,
    children: Vec<Option<Child>>,
    /// Pages that files may take together, those they take, and what each process takes at most.
    most: usize,
    used: usize,
    child_pages: usize,
    sequence: u64,
    random: Random,
    report: Report,
    to_report: u64,
    bad: u64,
}

impl Churn {
    /// Makes or checks and removes a file; how many pages were filled.
    fn step(&mut self) -> usize {
        let slot = self.random.below(SLOTS);
        let path = self.directory.join(slot.to_string());
        if let Some(file) = self.slots[slot].take() {
            self.used -= file.pages;
            self.check(slot, &path, &file);
            if let Err(problem) = fs::remove_file(&path) {
                self.complain(format_args!("file={slot} problem={problem}"));
            }
            return 0;
        }
        let pages = self.size();
        if self.used + pages > self.most {
            return 0;
        }
        self.sequence += 1;
        let mut bytes = Vec::with_capacity(pages * PAGE_BYTES);
        let mut page = Page::zeroed(1).remove(0);
        for number in 0..pages {
            page.write(name(slot, number), self.sequence);
            page.append_to(&mut bytes);
        }
        if let Err(problem) = fs::write(&path, bytes) {
            self.complain(format_args!("file={slot} problem={problem}"));
            return 0;
        }
        self.used += pages;
        self.slots[slot] = Some(File { pages, sequence: self.sequence });
        pages
    }

    fn check(&mut self, slot: usize, path: &Path, file: &File) {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(problem) => return self.complain(format_args!("file={slot} problem={problem}")),
        };
        if bytes.len() != file.pages * PAGE_BYTES {
            self.complain(format_args!("file={slot} bytes={} expected={}", bytes.len(), file.pages * PAGE_BYTES));
        }
        let mut page = Page::zeroed(1).remove(0);
        for (number, bytes) in bytes.chunks(PAGE_BYTES).enumerate() {
            page.copy_from(bytes);
            if let Err(fault) = page.verify(name(slot, number), file.sequence) {
                self.complain(format_args!("file={slot} page={number} found={fault} expected={}", file.sequence));
            }
        }
    }

    /// Sees which processes have ended, and starts others in their place; how many pages those fill.
    fn replace_children(&mut self) -> usize {
        let mut filled = 0;
        for number in 0..self.children.len() {
            if let Some(child) = &mut self.children[number] {
                match child.try_wait() {
                    Ok(None) => continue,
                    Ok(Some(status)) if status.success() => {}
                    ended => self.complain(format_args!("child={number} ended={ended:?}")),
                }
            }
            let pages = 1 + self.random.below(self.child_pages);
            let life = LIFE_MS.0 + self.random.below(LIFE_MS.1 - LIFE_MS.0);
            self.sequence += 1;
            let words =
                [CHILD, &pages.to_string(), "life-ms", &life.to_string(), "sequence", &self.sequence.to_string()]
                    .map(str::to_owned);
            let words = words.chunks(2).flat_map(|pair| [format!("--{}", pair[0]), pair[1].clone()]);
            let child = Command::new("/proc/self/exe").args(words).stdin(Stdio::null()).spawn();
            self.children[number] = match child {
                Ok(child) => Some(child),
                Err(problem) => {
                    self.complain(format_args!("child={number} problem={problem}"));
                    None
                }
            };
            filled += pages;
        }
        filled
    }

    fn size(&mut self) -> usize {
        let up_to = 1 << (1 + self.random.below(LARGEST.ilog2() as usize));
        1 + self.random.below(up_to)
    }

    fn complain(&mut self, what: std::fmt::Arguments) {
        self.bad += 1;
        if self.to_report > 0 {
            self.to_report -= 1;
            self.report.line(format_args!("CHURN BAD {what}"));
        }
    }
}

/// What the page of a file is called by.
fn name(slot: usize, number: usize) -> u64 {
    (slot as u64) << 32 | number as u64
}

/// Keeps so many pages for so long, and checks them; whether they were right.
fn live(count: usize, life: Duration, sequence: u64) -> bool {
    let mut pages = Page::zeroed(count);
    for (number, page) in pages.iter_mut().enumerate() {
        page.write(number as u64, sequence);
    }
    let (born, report, mut bad) = (Instant::now(), Report::from_environment(), 0);
    loop {
        let last = born.elapsed() >= life;
        for (number, page) in pages.iter().enumerate() {
            if let Err(fault) = std::hint::black_box(page).verify(number as u64, sequence) {
                bad += 1;
                if bad <= REPORTED {
                    report.line(format_args!("CHURN BAD child page={number} found={fault} expected={sequence}"));
                }
            }
        }
        if last || bad > 0 {
            return bad == 0;
        }
        std::thread::sleep(CHECK);
    }
}

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let child_pages = arguments.get(CHILD, 0_usize);
    if child_pages > 0 {
        let life = Duration::from_millis(arguments.get("life-ms", 100));
        let well = live(child_pages, life, arguments.get("sequence", 1));
        std::process::exit(i32::from(!well));
    }
    let count = arguments.get("mib", 64_usize) << 8;
    let rate_mib = arguments.get("rate", 0.0_f64);
    let processes = arguments.get("processes", 4_usize);
    let directory: PathBuf = arguments.get("directory", "/tmp/churn".to_owned()).into();
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    // Half for the files, half for the processes.
    let (most, child_pages) = (count / 2, count / 2 / processes.max(1));
    if most < LARGEST || child_pages == 0 {
        arguments.reject("mib", "too little to churn");
    }
    if let Err(problem) = fs::create_dir_all(&directory) {
        arguments.reject("directory", &problem.to_string());
    }

    let mut churn = Churn {
        directory,
        slots: (0..SLOTS).map(|_| None).collect(),
        children: (0..processes).map(|_| None).collect(),
        most,
        used: 0,
        child_pages,
        sequence: 1,
        random: Random::new(5),
        report: Report::from_environment(),
        to_report: REPORTED,
        bad: 0,
    };
    churn.report.line(format_args!("CHURN ready pages={count}"));
    let mut pace = Pace::new(rate_mib * 256.0, Instant::now());
    let mut second = Every::new(interval, Instant::now());
    // Pages that were filled and are not due yet.
    let (mut ahead, mut filled) = (0, 0);
    loop {
        let now = Instant::now();
        ahead -= pace.due(now, ahead);
        let due = ahead == 0;
        if due {
            let pages = churn.step() + churn.replace_children();
            ahead += pages;
            filled += pages as u64;
        }
        if let Some(elapsed) = second.elapsed(now) {
            churn.report.line(format_args!(
                "CHURN ok pages_per_s={:.0} used={} bad={} sequence={}",
                filled as f64 / elapsed.as_secs_f64(),
                churn.used,
                churn.bad,
                churn.sequence
            ));
            filled = 0;
            churn.to_report = REPORTED;
        }
        if !due {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
