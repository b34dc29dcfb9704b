//! The code that runs when the library is loaded.

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_char, c_int, c_void};
use sterna_agent_protocol::{MEMORY_VARIABLE, PROGRAM_VARIABLE, SOCKET_VARIABLE, TEMPLATE_VARIABLE};

use crate::{private, server, template};

/// Whether the library is meant for this process. Set once, before `main`.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether the hooks have anything to do.
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Decides whether the library is meant for this process, and keeps it out of the process's children.
extern "C" fn on_load() {
    let Some(socket) = variable(SOCKET_VARIABLE) else { return };
    if !is_meant() || !server::set_socket_path(socket) {
        return;
    }
    private::set_mode(value_of(MEMORY_VARIABLE));
    template::set(value_of(TEMPLATE_VARIABLE));
    leave_preload();
    // QEMU's helpers do not need to know the socket.
    unset(SOCKET_VARIABLE);
    unset(PROGRAM_VARIABLE);
    unset(MEMORY_VARIABLE);
    unset(TEMPLATE_VARIABLE);
    ACTIVE.store(true, Ordering::Release);
}

/// Whether this program is QEMU, or what [`PROGRAM_VARIABLE`] names.
fn is_meant() -> bool {
    let mut buffer = [0u8; libc::PATH_MAX as usize];
    // SAFETY: the kernel writes at most the length given.
    let length = unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let Some(path) = usize::try_from(length).ok().and_then(|length| buffer.get(..length)) else { return false };
    let name = file_name(path);
    match variable(PROGRAM_VARIABLE) {
        Some(meant) => name == meant,
        None => name.windows(4).any(|part| part == b"qemu"),
    }
}

/// Removes this library, and only it, from `LD_PRELOAD`.
fn leave_preload() {
    const NAME: &CStr = c"LD_PRELOAD";
    let Some(mine) = own_path() else { return unset("LD_PRELOAD") };
    // SAFETY: no other thread runs before main.
    let list = unsafe { libc::getenv(NAME.as_ptr()) };
    if list.is_null() {
        return;
    }
    // SAFETY: getenv's result is a string.
    let list = unsafe { CStr::from_ptr(list) }.to_bytes();
    let mut kept = [0u8; 4096];
    if without_entry(list, mine, &mut kept).is_some_and(|length| length > 0) {
        // SAFETY: `kept` ends with a zero; setenv copies it. No other thread runs before main.
        unsafe { libc::setenv(NAME.as_ptr(), kept.as_ptr().cast(), 1) };
    } else {
        unset("LD_PRELOAD");
    }
}

/// Copies the entries of an `LD_PRELOAD` list that do not name the library at `mine` into `kept`, with a zero at the
/// end. Returns their length; `None` where they do not fit.
fn without_entry(list: &[u8], mine: &[u8], kept: &mut [u8]) -> Option<usize> {
    let mut length = 0;
    for entry in list.split(|byte| matches!(byte, b' ' | b':')) {
        if entry.is_empty() || file_name(entry) == file_name(mine) {
            continue;
        }
        if length > 0 {
            *kept.get_mut(length)? = b':';
            length += 1;
        }
        kept.get_mut(length..length + entry.len())?.copy_from_slice(entry);
        length += entry.len();
    }
    *kept.get_mut(length)? = 0;
    Some(length)
}

/// The path by which this library was loaded.
fn own_path() -> Option<&'static [u8]> {
    // SAFETY: all-zero is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: the address lies in this library; dladdr writes `info` only.
    let found = unsafe { libc::dladdr(is_active as *const c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's string; this library is never unloaded.
    Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes())
}

/// The part of a path behind the last slash.
fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Runs `call` with a name as C wants it. Names are this project's own and short.
fn with_name<T>(name: &str, call: impl FnOnce(*const c_char) -> T) -> Option<T> {
    let mut buffer = [0u8; 64];
    // One byte stays zero.
    buffer.get_mut(..name.len()).filter(|part| part.len() < 64)?.copy_from_slice(name.as_bytes());
    Some(call(buffer.as_ptr().cast()))
}

/// An environment variable that is set and not empty. Before `main` only: it points into the environment.
fn variable(name: &str) -> Option<&'static [u8]> {
    value_of(name).filter(|value| !value.is_empty())
}

/// An environment variable that is set, to whatever. Before `main` only: it points into the environment.
fn value_of(name: &str) -> Option<&'static [u8]> {
    // SAFETY: the name ends with a zero; no other thread runs before main.
    let value = with_name(name, |name| unsafe { libc::getenv(name) })?;
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv's result is a string; it is used up before the variable is changed.
    Some(unsafe { CStr::from_ptr(value) }.to_bytes())
}

/// Removes an environment variable. Before `main` only.
fn unset(name: &str) {
    // SAFETY: the name ends with a zero; no other thread runs before main.
    let _: Option<c_int> = with_name(name, |name| unsafe { libc::unsetenv(name) });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(list: &str, mine: &str) -> Option<String> {
        let mut kept = [0u8; 32];
        let length = without_entry(list.as_bytes(), mine.as_bytes(), &mut kept)?;
        assert_eq!(kept[length], 0);
        Some(String::from_utf8(kept[..length].to_vec()).expect("what went in was text"))
    }

    #[test]
    fn other_preloaded_libraries_stay() {
        assert_eq!(without("/a/agent.so", "/a/agent.so").as_deref(), Some(""));
        assert_eq!(without("/x.so:/a/agent.so /y.so", "/a/agent.so").as_deref(), Some("/x.so:/y.so"));
        assert_eq!(without("agent.so", "/usr/lib/agent.so").as_deref(), Some(""));
        assert_eq!(without(" : ", "/a/agent.so").as_deref(), Some(""));
        assert_eq!(without("/a/very/long/path/that/does/not/fit.so", "/a/agent.so"), None);
    }

    #[test]
    fn a_file_name_is_what_follows_the_last_slash() {
        assert_eq!(file_name(b"/usr/bin/qemu"), b"qemu");
        assert_eq!(file_name(b"qemu"), b"qemu");
        assert_eq!(file_name(b""), b"");
    }
}
