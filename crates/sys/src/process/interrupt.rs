//! Waking a thread of this process out of a system call.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Once;
use std::thread::JoinHandle;

/// A signal that is ignored where it is not handled, and that nothing else here uses.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Interrupts the system call in which a thread waits, if it waits: the call returns `EINTR`. A call that is about to
/// begin is not interrupted, so the caller repeats this until the thread has reacted.
pub fn interrupt<T>(thread: &JoinHandle<T>) {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: all zero is a valid `struct sigaction`. It has no SA_RESTART, so that calls are not restarted. The
        // handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(_) as usize;
            libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut());
        }
    });
    // SAFETY: a thread that was neither joined nor detached is known to the library, also where it has ended.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_in_a_system_call_comes_out_of_it() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let thread = std::thread::spawn(move || rustix::io::read(&reader, &mut [0; 1]).unwrap_err());
        while !thread.is_finished() {
            interrupt(&thread);
            std::thread::yield_now();
        }
        assert_eq!(thread.join().unwrap(), rustix::io::Errno::INTR);
    }
}
