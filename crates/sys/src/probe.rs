//! Features of this kernel, found out once.

use std::ops::Range;
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;

use crate::PAGE_BYTES;
use crate::error::Result;
use crate::map::{Access, SharedMapping};
use crate::pagemap::{Categories, Pagemap, Scan};
use crate::userfaultfd::{self, Features, Modes, Stopped, Userfaultfd};

/// This kernel, and what it lets this process do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its version, as `uname -r` prints it.
    pub release: String,
    /// Size of a page, bytes.
    pub page_bytes: u64,
    /// Whether `/dev/userfaultfd` can be opened, or the reason why not.
    pub userfaultfd_device: std::result::Result<(), String>,
    /// The features of a userfaultfd; none where no userfaultfd can be made.
    pub userfaultfd: Features,
    /// Whether `PAGEMAP_SCAN` works, or the reason why not.
    pub pagemap_scan: std::result::Result<(), String>,
    /// Whether writes to shared memory are tracked to the page, as a trial shows, or the reason why not.
    pub write_tracking: std::result::Result<(), String>,
    /// Whether pages of shared memory are held back until they are known to be current, as a trial shows, or the reason
    /// why not.
    pub paging: std::result::Result<(), String>,
}

/// The features of this kernel. The first call finds them out (in less than a millisecond), and later calls remember
/// them.
pub fn kernel() -> &'static Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(probe)
}

/// The features that pre-copy in shared memory mode needs and this host lacks. Each is a sentence that says what to do.
pub fn missing() -> Vec<String> {
    missing_of(kernel())
}

/// The features that a guest needs at its destination to run before all its pages are there, and that this host lacks.
/// Each is a sentence that says what to do.
pub fn missing_for_postcopy() -> Vec<String> {
    missing_for_postcopy_of(kernel())
}

fn missing_for_postcopy_of(kernel: &Kernel) -> Vec<String> {
    let release = &kernel.release;
    if let Err(why) = &kernel.userfaultfd_device {
        return vec![no_device(why, release)];
    }
    let features = Features::PAGING.difference(kernel.userfaultfd);
    match &kernel.paging {
        _ if !features.is_empty() => vec![format!(
            "userfaultfd lacks {}: Linux 5.14 or later with CONFIG_HAVE_ARCH_USERFAULTFD_MINOR is needed (this is {release}).",
            names(features, "PAGING")
        )],
        Err(why) => vec![format!("Holding pages of shared memory back does not work: {why} (this is {release}).")],
        Ok(()) => Vec::new(),
    }
}

fn no_device(why: &str, release: &str) -> String {
    format!(
        "{}: run the daemon as root, on Linux 6.1 or later with CONFIG_USERFAULTFD (this is {release}).",
        sentence(why)
    )
}

/// The features one by one, without the name of the whole set.
fn names(features: Features, set: &str) -> String {
    let names: Vec<&str> = features.iter_names().map(|(name, _)| name).filter(|&name| name != set).collect();
    names.join(" and ")
}

fn missing_of(kernel: &Kernel) -> Vec<String> {
    let mut missing = Vec::new();
    let release = &kernel.release;
    if kernel.page_bytes != PAGE_BYTES {
        missing.push(format!("The kernel's pages have {} bytes; only {PAGE_BYTES} are supported.", kernel.page_bytes));
    }
    if let Err(why) = &kernel.userfaultfd_device {
        missing.push(no_device(why, release));
        // Everything below would fail for this same reason.
        return missing;
    }
    let features = Features::TRACKING.difference(kernel.userfaultfd);
    if !features.is_empty() {
        missing.push(format!(
            "userfaultfd lacks {}: Linux 6.7 or later with CONFIG_PTE_MARKER_UFFD_WP is needed (this is {release}).",
            names(features, "TRACKING")
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
        // A userfaultfd that is asked for no features says what it offers.
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
        paging: try_paging().map_err(reason).and_then(|held_back| {
            held_back.then_some(()).ok_or_else(|| "a page in the file was mapped before it was let in".to_owned())
        }),
    }
}

fn try_scan() -> Result<()> {
    let pagemap = Pagemap::of_this_process()?;
    let here = std::ptr::from_ref(&pagemap) as u64 / PAGE_BYTES * PAGE_BYTES;
    pagemap.scan(here..here + PAGE_BYTES, Scan::of(Categories::PRESENT), &mut Vec::new())
}

/// Arms four pages of shared memory, writes to one, and checks that exactly this page is found.
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

/// Registers two pages of shared memory for missing and minor faults, one in the file and one not, and maps both. If a
/// page were mapped before that, a guest would have seen it while it was stale.
fn try_paging() -> Result<bool> {
    let failed = |error: rustix::io::Errno| crate::Error::new("make a memory file", error);
    let file = rustix::fs::memfd_create("probe", MemfdFlags::CLOEXEC).map_err(failed)?;
    rustix::fs::ftruncate(&file, 2 * PAGE_BYTES).map_err(failed)?;
    rustix::io::pwrite(&file, &[1; 16], 0).map_err(failed)?;
    let mapping = SharedMapping::new(&file, 2 * PAGE_BYTES, Access::ReadWrite)?;
    let uffd = Userfaultfd::create(userfaultfd::open_device()?)?;
    uffd.enable(Features::PAGING)?;
    let Range { start, end } = mapping.addresses();
    uffd.register(start..end, Modes::MISSING | Modes::MINOR)?;
    let there = uffd.continue_(start..start + PAGE_BYTES)?;
    let again = uffd.continue_(start..start + PAGE_BYTES)?;
    let hole = uffd.zeropage(start + PAGE_BYTES..end)?;
    Ok(there.stopped.is_none() && again.stopped == Some(Stopped::AlreadyThere) && hole.stopped.is_none())
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
            paging: Ok(()),
        }
    }

    #[test]
    fn a_kernel_that_can_do_all_misses_nothing() {
        assert_eq!(missing_of(&able()), [""; 0]);
        assert_eq!(missing_for_postcopy_of(&able()), [""; 0]);
    }

    #[test]
    fn what_a_guest_without_all_its_pages_lacks_is_said() {
        let old = Kernel { userfaultfd: Features::all().difference(Features::MINOR_SHMEM), ..able() };
        let said = missing_for_postcopy_of(&old);
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("lacks MINOR_SHMEM:") && said[0].contains("5.14"), "{said:?}");
        assert_eq!(missing_of(&old), [""; 0], "such a host can be left all the same");
        let broken = Kernel { paging: Err("it was mapped".to_owned()), ..able() };
        assert!(missing_for_postcopy_of(&broken)[0].contains("it was mapped"));
        let none = Kernel { userfaultfd_device: Err("cannot open it".to_owned()), ..able() };
        assert!(missing_for_postcopy_of(&none)[0].starts_with("Cannot open it"));
    }

    #[test]
    fn what_the_kernel_offers_works_when_it_is_tried() {
        let kernel = kernel();
        if kernel.userfaultfd_device.is_ok() && kernel.userfaultfd.contains(Features::PAGING) {
            assert_eq!(kernel.paging, Ok(()));
        } else {
            println!("skipped: no userfaultfd with missing and minor faults here");
        }
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
