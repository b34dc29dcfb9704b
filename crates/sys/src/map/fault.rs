//! The handler for mapped files that another process cuts short.
//!
//! Whoever has a RAM file open for writing may cut it short, and an access behind the end then kills the process with
//! `SIGBUS`. So does an access to a hole where the file system has no memory left to fill it. One guest must not end
//! the process that moves all others. So the handler here knows the mappings of this crate, notes which one lacks a
//! page, and puts a page of zeros in its place, so that the access goes on. Whoever reads asks the mapping afterwards
//! ([`Slot::broken`]): if it is broken, the bytes that were read are useless.
//!
//! Every other signal is passed on: the standard library has a handler that finds overflows of the stack, and the
//! default ends the process.
//!
//! **In a signal handler** nothing may wait or allocate. The mappings are in a table of fixed size; each row has a
//! version, which is odd while the row changes. The row of the mapping that is being accessed does not change, because
//! the thread that accesses it borrows it. A row that changes meanwhile belongs to another mapping, and is passed over.
//! System calls that the handler makes do not touch `errno`.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};

/// The most mappings at one time. Each migration has one for each RAM block.
const SLOTS: usize = 4096;

static TABLE: [Slot; SLOTS] = [const { Slot::free() }; SLOTS];

/// The handler that was there before. It gets every signal that is not ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A row of the table.
#[derive(Debug)]
pub(super) struct Slot {
    taken: AtomicBool,
    /// Odd while the others change.
    version: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    broken: AtomicBool,
}

impl Slot {
    const fn free() -> Self {
        Self {
            taken: AtomicBool::new(false),
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    /// Notes a mapping of a file with pages of that size.
    ///
    /// # Errors
    /// The handler cannot be installed, or there are too many mappings.
    pub(super) fn take(base: NonNull<u8>, bytes: usize, page_bytes: usize) -> io::Result<&'static Self> {
        install()?;
        let free = |slot: &&Self| {
            let taken = slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        let slot = TABLE.iter().find(free).ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        slot.broken.store(false, Ordering::Relaxed);
        let start = base.as_ptr() as usize;
        slot.change(start..start + bytes, page_bytes);
        Ok(slot)
    }

    /// Forgets the mapping. This comes before the unmapping, because another mapping may then get the same addresses.
    pub(super) fn give_back(&self) {
        self.change(0..0, 0);
        self.taken.store(false, Ordering::Release);
    }

    /// Whether a page of the mapping was ever without content or memory.
    pub(super) fn broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Changes the row; only for the owner of the row.
    fn change(&self, range: Range<usize>, page_bytes: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.page_bytes.store(page_bytes, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The page of this mapping that the address is in; `None` where it is in another, or in none.
    fn page_at(&self, address: usize) -> Option<Range<usize>> {
        let version = self.version.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let settled = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        let page = address.checked_div(page_bytes)? * page_bytes;
        (settled && (start..end).contains(&address)).then_some(page..page + page_bytes)
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: all zero is a valid `struct sigaction`: the default, no flags, an empty mask.
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        ours.sa_sigaction = handle as extern "C" fn(_, _, _) as usize;
        // On the stack that the standard library gives each thread for signals: its own handler needs it.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: this call only reads the current action.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // Before ours can run.
        BEFORE.get_or_init(|| before);
        // SAFETY: `handle` does what a signal handler may do, and keeps the handler that was there.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    };
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler with SA_SIGINFO. A signal that a process sent has
    // another code, and no address.
    let fault = unsafe { ((*info).si_code == BUS_ADRERR).then(|| (*info).si_addr() as usize) };
    let mended = fault.is_some_and(|address| {
        let found = TABLE.iter().find_map(|slot| slot.page_at(address).map(|page| (slot, page)));
        found.is_some_and(|(slot, page)| {
            // The mark comes before the zeros, so that nobody reads zeros without it.
            slot.broken.store(true, Ordering::SeqCst);
            put_zeros(page)
        })
    });
    if !mended {
        hand_on(signal, info, context);
    }
}

/// The code of `SIGBUS` for an address behind the file's end, or without memory.
const BUS_ADRERR: i32 = 2;

/// Maps memory of our own over a page of a mapping of this crate.
fn put_zeros(page: Range<usize>) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let bytes = page.end - page.start;
    // SAFETY: a whole page of a mapping of this crate, which nobody has references into, is replaced; a thread that
    // accesses it goes on with zeros.
    unsafe { rustix::mm::mmap_anonymous(page.start as *mut libc::c_void, bytes, protection, flags) }.is_ok()
}

/// Passes the signal on to the handler that was there before.
fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get();
    let handler = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    if handler == libc::SIG_IGN || handler == libc::SIG_DFL {
        // SAFETY: all zero is the default action. After the return the access is tried again, and ends the process. (A
        // signal that was sent by a process is lost, as the standard library's handler loses it; the next one ends the
        // process.)
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &raw const default, std::ptr::null_mut());
        }
    } else if before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: it was installed with SA_SIGINFO, so it is a function of these three.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: it was installed without SA_SIGINFO, so it is a function of the signal's number.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
