//! What this kernel can do, found out once.

use std::sync::OnceLock;

use rustix::fs::MemfdFlags;

use crate::PAGE_BYTES;
use crate::error::Result;
use crate::map::{Access, SharedMapping};
use crate::pagemap::{Categories, Pagemap, Scan};
use crate::userfaultfd::{self, Features, Modes, Userfaultfd};

/// What this kernel, and what it lets this process do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its version, as `uname -r` prints it.
    pub release: String,
    /// Size of a page, bytes.
    pub page_bytes: u64,
    /// `/dev/userfaultfd` can be opened; else why not.
    pub userfaultfd_device: std::result::Result<(), String>,
    /// What a userfaultfd offers; nothing where none can be made.
    pub userfaultfd: Features,
    /// `PAGEMAP_SCAN` works; else why not.
    pub pagemap_scan: std::result::Result<(), String>,
    /// Writes to shared memory are tracked to the page, tried out; else why not.
    pub write_tracking: std::result::Result<(), String>,
}

/// What this kernel can do. The first call finds out (below a millisecond), later ones remember.
pub fn kernel() -> &'static Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(probe)
}

/// What pre-copy in shared memory mode needs and this host does not have, a sentence each that says what to do.
pub fn missing() -> Vec<String> {
    missing_of(kernel())
}

fn missing_of(kernel: &Kernel) -> Vec<String> {
    let mut missing = Vec::new();
    let release = &kernel.release;
    if kernel.page_bytes != PAGE_BYTES {
        missing.push(format!("The kernel's pages have {} bytes; only {PAGE_BYTES} are supported.", kernel.page_bytes));
    }
    if let Err(why) = &kernel.userfaultfd_device {
        missing.push(format!(
            "{}: run the daemon as root, on Linux 6.1 or later with CONFIG_USERFAULTFD (this is {release}).",
            sentence(why)
        ));
        // All that follows would have this one reason.
        return missing;
    }
    let features = Features::TRACKING.difference(kernel.userfaultfd);
    if !features.is_empty() {
        let names: Vec<&str> = features.iter_names().map(|(name, _)| name).filter(|&name| name != "TRACKING").collect();
        missing.push(format!(
            "userfaultfd lacks {}: Linux 6.7 or later with CONFIG_PTE_MARKER_UFFD_WP is needed (this is {release}).",
            names.join(" and ")
        ));
    }
    match (&kernel.pagemap_scan, &kernel.write_tracking) {
        (Err(why), _) => missing.push(format!(
            "{}: Linux 6.7 or later with CONFIG_PROC_PAGE_MONITOR is needed (this is {release}).",
            sentence(why)
        )),
        (Ok(()), Err(why)) if features.is_empty() => {
            missing.push(format!("Tracking writes to shared memory does not work: {why} (this is {release})."));
        }
        _ => {}
    }
    missing
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

fn probe() -> Kernel {
    let reason = |error: crate::Error| match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    let device = userfaultfd::open_device();
    let features = match &device {
        // A userfaultfd that is asked for nothing says what it offers.
        Ok(device) => Userfaultfd::create(device).and_then(|uffd| uffd.enable(Features::empty())),
        Err(_) => Ok(Features::empty()),
    };
    Kernel {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        page_bytes: rustix::param::page_size() as u64,
        userfaultfd: features.unwrap_or(Features::empty()),
        userfaultfd_device: device.map(drop).map_err(reason),
        pagemap_scan: try_scan().map_err(reason),
        write_tracking: try_tracking().map_err(reason).and_then(|exact| {
            exact.then_some(()).ok_or_else(|| "a scan did not return exactly the page that was written".to_owned())
        }),
    }
}

fn try_scan() -> Result<()> {
    let pagemap = Pagemap::of_this_process()?;
    let here = std::ptr::from_ref(&pagemap) as u64 / PAGE_BYTES * PAGE_BYTES;
    pagemap.scan(here..here + PAGE_BYTES, Scan::of(Categories::PRESENT), &mut Vec::new())
}

/// Arms four pages of shared memory, writes to one, and looks whether it is the one that is found.
fn try_tracking() -> Result<bool> {
    const PAGES: u64 = 4;
    let failed = |error: rustix::io::Errno| crate::Error::new("make a memory file", error);
    let file = rustix::fs::memfd_create("probe", MemfdFlags::CLOEXEC).map_err(failed)?;
    rustix::fs::ftruncate(&file, PAGES * PAGE_BYTES).map_err(failed)?;
    let mapping = SharedMapping::new(&file, PAGES * PAGE_BYTES, Access::ReadWrite)?;
    let uffd = Userfaultfd::create(userfaultfd::open_device()?)?;
    uffd.enable(Features::TRACKING)?;
    uffd.register(mapping.addresses(), Modes::WP)?;
    let pagemap = Pagemap::of_this_process()?;
    let mut regions = Vec::new();
    pagemap.written_and_arm(mapping.addresses(), &mut regions)?;
    mapping.copy_in(2 * PAGE_BYTES, &[1; 16])?;
    pagemap.written_and_arm(mapping.addresses(), &mut regions)?;
    let written = mapping.addresses().start + 2 * PAGE_BYTES;
    Ok(matches!(regions[..], [region] if region.range() == (written..written + PAGE_BYTES)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able() -> Kernel {
        Kernel {
            release: "6.18".to_owned(),
            page_bytes: PAGE_BYTES,
            userfaultfd_device: Ok(()),
            userfaultfd: Features::all(),
            pagemap_scan: Ok(()),
            write_tracking: Ok(()),
        }
    }

    #[test]
    fn a_kernel_that_can_do_all_misses_nothing() {
        assert_eq!(missing_of(&able()), [""; 0]);
    }

    #[test]
    fn each_lack_is_said_once_and_names_its_remedy() {
        let no_device = Kernel {
            userfaultfd_device: Err("cannot open /dev/userfaultfd: no such file".to_owned()),
            userfaultfd: Features::empty(),
            write_tracking: Err("the same".to_owned()),
            ..able()
        };
        let said = missing_of(&no_device);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("Cannot open /dev/userfaultfd") && said[0].contains("Linux 6.1"), "{said:?}");

        let old = Kernel {
            userfaultfd: Features::WP_HUGETLBFS_SHMEM,
            pagemap_scan: Err("cannot scan".to_owned()),
            write_tracking: Err("the same".to_owned()),
            ..able()
        };
        let said = missing_of(&old);
        assert_eq!(said.len(), 2);
        assert!(said[0].contains("WP_UNPOPULATED and WP_ASYNC") && said[0].contains("6.18"), "{said:?}");
        assert!(said[1].starts_with("Cannot scan"), "{said:?}");

        let large = Kernel { page_bytes: 65536, ..able() };
        assert!(missing_of(&large)[0].contains("65536"));
        let broken = Kernel { write_tracking: Err("it was inexact".to_owned()), ..able() };
        assert!(missing_of(&broken)[0].contains("it was inexact"));
    }
}
