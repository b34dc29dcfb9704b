//! The thread that serves the socket.
//!
//! It starts when the first guest RAM is mapped, not when the library is loaded: `-daemonize` forks in between, and a
//! thread does not survive that. It takes no lock that QEMU's threads take, and sleeps until a daemon speaks.

use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use libc::{c_int, c_void, pollfd, sockaddr_un, socklen_t};
use sterna_agent_protocol::MAX_MESSAGE_BYTES;
use sterna_agent_protocol::message::ReplyHeader;
use zerocopy::IntoBytes;

use crate::discards;
use crate::packet;
use crate::raw::{self, Fd, errno};
use crate::requests::Requests;

/// Longest path of a socket, without the zero at its end.
const PATH_BYTES: usize = 107;

/// The most connections at one time. A further one replaces the oldest, so that a daemon that hangs does not keep the
/// next one out.
const CONNECTIONS: usize = 4;

/// The thread's stack: room for two messages, their handling, and what libc keeps there.
const STACK_BYTES: usize = 512 * 1024;

static SOCKET_PATH: [AtomicU8; PATH_BYTES] = [const { AtomicU8::new(0) }; PATH_BYTES];

/// The process in which the thread was started; a forked child that maps RAM needs its own.
static STARTED_IN: AtomicI32 = AtomicI32::new(0);

/// The server's thread, for the panic handler.
static THREAD: AtomicI32 = AtomicI32::new(0);

/// Keeps the path to listen at, and says whether it is short enough.
pub fn set_socket_path(path: &[u8]) -> bool {
    if path.len() > PATH_BYTES {
        raw::complain("the socket's path is too long", libc::ENAMETOOLONG);
        return false;
    }
    for (byte, shared) in path.iter().zip(&SOCKET_PATH) {
        shared.store(*byte, Ordering::Relaxed);
    }
    true
}

/// Whether the calling thread is the server's.
pub fn is_this_thread() -> bool {
    THREAD.load(Ordering::Relaxed) == raw::thread_id()
}

/// Starts the server, once in each process.
pub fn start() {
    let (process, before) = (raw::process_id(), STARTED_IN.load(Ordering::Acquire));
    let first =
        before != process && STARTED_IN.compare_exchange(before, process, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !first {
        return;
    }
    if let Err(errno) = spawn() {
        raw::complain("cannot start its thread", errno);
    }
}

/// Starts the thread with every signal blocked: QEMU's signals are for QEMU's threads.
fn spawn() -> Result<(), c_int> {
    let mut attributes = MaybeUninit::uninit();
    let mut signals = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    let mut thread = 0;
    // SAFETY: each value is initialised by the call before its use, and outlives the calls. The thread's function is
    // 'static.
    unsafe {
        check(libc::pthread_attr_init(attributes.as_mut_ptr()))?;
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::sigfillset(signals.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, signals.as_ptr(), before.as_mut_ptr());
        let created = libc::pthread_create(&mut thread, attributes.as_ptr(), run, ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        check(created)
    }
}

/// Turns the result of a pthread function, which returns its error, into a `Result`.
fn check(result: c_int) -> Result<(), c_int> {
    if result == 0 { Ok(()) } else { Err(result) }
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    THREAD.store(raw::thread_id(), Ordering::Relaxed);
    // SAFETY: names the calling thread.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"sterna-agent".as_ptr()) };
    let listener = discards::create_log().and_then(|()| listen());
    match listener {
        Ok(listener) => serve(&listener),
        Err(errno) => raw::complain("cannot listen on its socket", errno),
    }
    ptr::null_mut()
}

/// Listens on the socket, which only the owner of this process and root can reach.
fn listen() -> Result<Fd, c_int> {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut address: sockaddr_un = unsafe { core::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    for (byte, shared) in address.sun_path.iter_mut().zip(&SOCKET_PATH) {
        *byte = shared.load(Ordering::Relaxed) as _;
    }
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes values only.
    let socket = Fd::from_call(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }.into())?;
    remove_stale(&address);
    // SAFETY: `address` is a sockaddr_un whose path ends with a zero.
    // The mode of the socket before `bind` is the file's mode from its first moment; QEMU's umask stays unchanged.
    let listening = unsafe {
        libc::fchmod(socket.number(), 0o600) == 0
            && libc::bind(socket.number(), (&raw const address).cast(), size_of::<sockaddr_un>() as socklen_t) == 0
            && libc::listen(socket.number(), 16) == 0
    };
    if listening { Ok(socket) } else { Err(errno()) }
}

/// Removes the socket that an earlier process left, and no other file.
fn remove_stale(address: &sockaddr_un) {
    // SAFETY: all-zero is a valid stat; the path ends with a zero.
    unsafe {
        let mut status: libc::stat = core::mem::zeroed();
        if libc::lstat(address.sun_path.as_ptr(), &mut status) == 0 && status.st_mode & libc::S_IFMT == libc::S_IFSOCK {
            libc::unlink(address.sun_path.as_ptr());
        }
    }
}

/// A daemon's connection, and its place in the order of connections.
struct Connection {
    socket: Fd,
    order: u64,
}

/// Serves for ever.
fn serve(listener: &Fd) {
    let mut requests = Requests::default();
    let mut connections: [Option<Connection>; CONNECTIONS] = [const { None }; CONNECTIONS];
    let mut next_order = 0;
    loop {
        let mut polled = [const { pollfd { fd: -1, events: libc::POLLIN, revents: 0 } }; CONNECTIONS + 1];
        let numbers = connections.iter().map(|c| c.as_ref().map_or(-1, |c| c.socket.number()));
        for (entry, number) in polled.iter_mut().zip([listener.number()].into_iter().chain(numbers)) {
            entry.fd = number;
        }
        let patience = requests.patience_ms();
        // SAFETY: `polled` outlives the call; entries with -1 are skipped.
        match unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as _, patience) } {
            0 => {
                requests.finish();
                continue;
            }
            1.. => {}
            _ => {
                raw::sleep_ms(10);
                continue;
            }
        }
        let (new, old) = polled.split_at(1);
        for (connection, entry) in connections.iter_mut().zip(old) {
            if entry.revents != 0 && !connection.as_ref().is_some_and(|c| answer(&mut requests, &c.socket)) {
                *connection = None;
            }
        }
        if new.iter().any(|entry| entry.revents != 0)
            && let Some(socket) = accept(listener)
        {
            // An empty place, or the oldest connection's.
            if let Some(place) = connections.iter_mut().min_by_key(|c| c.as_ref().map_or(0, |c| c.order + 1)) {
                *place = Some(Connection { socket, order: next_order });
                next_order += 1;
            }
        }
    }
}

/// Accepts a connection of root or of this process's own user.
fn accept(listener: &Fd) -> Option<Fd> {
    // SAFETY: asks for no address.
    let accepted = unsafe {
        libc::accept4(listener.number(), ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
    };
    let Ok(socket) = Fd::from_call(accepted.into()) else {
        // For example, no descriptor is left: the connection stays in the queue, and trying again at once would waste
        // processor time.
        raw::sleep_ms(100);
        return None;
    };
    // SAFETY: all-zero is a valid ucred.
    let mut peer: libc::ucred = unsafe { core::mem::zeroed() };
    let mut length = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `peer`.
    let known = unsafe {
        libc::getsockopt(socket.number(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut length)
    };
    // SAFETY: always succeeds.
    let own = unsafe { libc::geteuid() };
    (known == 0 && (peer.uid == 0 || peer.uid == own)).then_some(socket)
}

/// Takes one request and answers it. Returns whether to keep the connection.
fn answer(requests: &mut Requests, socket: &Fd) -> bool {
    let mut packet = [0u8; MAX_MESSAGE_BYTES];
    let received = match packet::receive(socket, &mut packet) {
        Ok(received) => received,
        Err(error) => return error == libc::EAGAIN || error == libc::EINTR,
    };
    let Some(packet) = packet.get(..received.length).filter(|packet| !packet.is_empty() && !received.cut) else {
        return false;
    };
    let mut body = [0u8; MAX_MESSAGE_BYTES - size_of::<ReplyHeader>()];
    let Some((header, descriptor)) = requests.carry_out(packet, received.descriptor, &mut body) else { return false };
    let Some(body) = body.get(..header.length.get() as usize) else { return false };
    packet::send(socket, header.as_bytes(), body, descriptor).is_ok()
}
