//! A proxy between two daemons that knows their protocol. It holds one chosen message back for as long as a test likes,
//! so that a fault hits the moment that the test means; it cuts every connection, also in the middle of a message, and
//! lets new ones pass or not; it falls silent; it damages devices' state.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use sterna_bench::error::Context;
use sterna_bench::lab::{Host, net};
use sterna_protocol::hello::{HELLO_BYTES, Hello, Role};
use sterna_protocol::message::{PREFIX_BYTES, Request, decode, decode_prefix};

use crate::PATIENCE;

// The gate: what passes, and how much.
mod gate;
// A peer that is no daemon.
mod stranger;

pub use gate::Kind;
use gate::{Gate, Pass, State};
pub use stranger::{Babble, Stranger};

/// A message on the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The source's request of this name, before the destination has it.
    Request(&'static str),
    /// The destination's reply to the request of this name, before the source has it.
    Reply(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Trap {
    Open,
    /// For the next message there, of this machine where one is named.
    Set(Point, Option<String>),
    Holding,
    Cut,
}

/// What a session has said so far.
#[derive(Debug, Default)]
struct Said {
    /// The name of the last request.
    request: &'static str,
    /// The machine that was proposed; empty before.
    machine: String,
}

struct Shared {
    trap: Mutex<Trap>,
    changed: Condvar,
    wires: Mutex<Vec<TcpStream>>,
    stop: AtomicBool,
    damage_devices: AtomicBool,
    gate: Gate,
}

/// A proxy at work on a host; dropping it cuts everything.
pub struct Proxy {
    /// The address that the source must call, as `--to` takes it.
    pub address: String,
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    /// Listens on `from` and passes every connection on to the daemon of `to`.
    ///
    /// # Panics
    /// Where the host has no port left.
    #[must_use]
    pub fn start(from: &Host, to: &Host) -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").context(|| "binding a proxy".into());
        let listener = net::inside(&from.namespace, bind).expect("a port");
        listener.set_nonblocking(true).expect("a setting");
        // Segments have a network's size, not the loopback's 64 KiB: the push is paced by what comes through.
        setsockopt(&listener, sockopt::TcpMaxSeg, &1448).expect("a setting");
        let address = listener.local_addr().expect("an address").to_string();
        let shared = Arc::new(Shared::new());
        let (for_thread, namespace) = (Arc::clone(&shared), from.namespace.clone());
        let target: SocketAddr = to.listen().parse().expect("an address");
        let acceptor = std::thread::spawn(move || {
            while !for_thread.stop.load(Ordering::Acquire) {
                let Ok((near, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                let far = net::inside(&namespace, || {
                    TcpStream::connect_timeout(&target, Duration::from_secs(2)).context(|| "calling".into())
                });
                // Nobody is there, or the link is down: the caller sees its connection end.
                if let Ok(far) = far
                    && !for_thread.gate.is_down()
                {
                    join(&for_thread, near, far);
                }
            }
        });
        Self { address, shared, acceptor: Some(acceptor) }
    }

    /// Holds back the next message at `point`.
    pub fn hold(&self, point: Point) {
        *lock(&self.shared.trap) = Trap::Set(point, None);
    }

    /// Holds back the next message at `point` of the migration of this machine. Before a machine is proposed it has no
    /// name.
    pub fn hold_of(&self, machine: &str, point: Point) {
        *lock(&self.shared.trap) = Trap::Set(point, Some(machine.into()));
    }

    /// Waits until the message is here.
    ///
    /// # Panics
    /// Where it never comes.
    pub fn wait_until_held(&self) {
        let trap = lock(&self.shared.trap);
        let wait = self.shared.changed.wait_timeout_while(trap, PATIENCE, |trap| *trap != Trap::Holding);
        let (trap, _) = wait.unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*trap, Trap::Holding, "the message never came by");
    }

    /// Whether the message is here.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        *lock(&self.shared.trap) == Trap::Holding
    }

    /// Lets the held message go on its way.
    pub fn release(&self) {
        self.shared.set(Trap::Open);
    }

    /// Ends every connection; a held message is lost. New connections are passed on as before.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// Ends every connection; new ones end at once, until it is [`up`](Self::up) again.
    pub fn down(&self) {
        self.shared.gate.set(State::Down);
        self.shared.cut();
    }

    /// Stops all bytes without ending a connection, until it is [`up`](Self::up) again.
    pub fn stall(&self) {
        self.shared.gate.set(State::Stalled);
    }

    /// Makes the link as it was.
    pub fn up(&self) {
        self.shared.gate.set(State::Open);
    }

    /// Makes the link go [`down`](Self::down) by itself once this many more bytes have passed on connections of this
    /// kind, at any place in a message.
    pub fn down_after(&self, kind: Kind, bytes: u64) {
        self.shared.gate.limit(kind, bytes);
    }

    /// Waits until that has happened.
    ///
    /// # Panics
    /// Where it never does.
    pub fn wait_until_down(&self) {
        assert!(self.shared.gate.wait_until_down(PATIENCE), "so much never came by");
    }

    /// Bytes that have passed on connections of this kind, both ways together.
    #[must_use]
    pub fn passed(&self, kind: Kind) -> u64 {
        self.shared.gate.passed(kind)
    }

    /// Damages devices' state from now on: it arrives changed.
    pub fn damage_devices(&self) {
        self.shared.damage_devices.store(true, Ordering::Release);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Threads that wait at a shut gate end, too.
        self.down();
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    /// Everything passes.
    fn new() -> Self {
        Self {
            trap: Mutex::new(Trap::Open),
            changed: Condvar::new(),
            wires: Mutex::default(),
            stop: AtomicBool::new(false),
            damage_devices: AtomicBool::new(false),
            gate: Gate::new(),
        }
    }

    fn set(&self, trap: Trap) {
        *lock(&self.trap) = trap;
        self.changed.notify_all();
    }

    /// Ends every connection; a held message is lost.
    fn cut(&self) {
        self.set(Trap::Cut);
        for wire in lock(&self.wires).drain(..) {
            let _ = wire.shutdown(Shutdown::Both);
        }
    }

    /// Passes bytes on as far as the gate lets them; `false` where the link has gone down.
    fn forward(&self, kind: Kind, bytes: &[u8], mut to: &TcpStream) -> std::io::Result<bool> {
        match self.gate.pass(kind, bytes.len()) {
            Pass::All => to.write_all(bytes).map(|()| true),
            Pass::Last(count) => {
                let _ = to.write_all(&bytes[..count]);
                self.cut();
                Ok(false)
            }
            Pass::None => Ok(false),
        }
    }

    /// Lets a message of this machine's pass: waits where it must be held back; `false` where it must be lost.
    fn pass(&self, here: Point, machine: &str) -> bool {
        let mut trap = lock(&self.trap);
        let is_meant = |of: &Option<String>| of.as_deref().is_none_or(|name| name == machine);
        if !matches!(&*trap, Trap::Set(point, of) if *point == here && is_meant(of)) {
            return true;
        }
        *trap = Trap::Holding;
        self.changed.notify_all();
        let wait = self.changed.wait_timeout_while(trap, 2 * PATIENCE, |trap| *trap == Trap::Holding);
        let (trap, _) = wait.unwrap_or_else(PoisonError::into_inner);
        *trap == Trap::Open
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes on what both sides say, on threads of its own.
fn join(shared: &Arc<Shared>, mut near: TcpStream, far: TcpStream) {
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        let mut hello = [0; HELLO_BYTES];
        let (Ok(near_again), Ok(far_again)) = (near.try_clone(), far.try_clone()) else { return };
        for wire in [&near, &far] {
            lock(&shared.wires).extend(wire.try_clone());
        }
        let _ = near.set_nonblocking(false);
        let hello = near.read_exact(&mut hello).and_then(|()| (&far).write_all(&hello)).map(|()| Hello::decode(&hello));
        let Ok(Ok(hello)) = hello else {
            // A daemon that was just killed may have accepted: whoever calls must not wait for its answer.
            let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
            return;
        };
        let devices = hello.role == Role::Devices;
        if hello.role == Role::Control {
            let said = Arc::new(Mutex::new(Said::default()));
            let (back_shared, back_said, key) = (Arc::clone(&shared), Arc::clone(&said), hello.key);
            std::thread::spawn(move || {
                let _ = replies(&back_shared, far_again, near_again, &back_said);
            });
            let _ = requests(&shared, near, far, &said, key);
        } else {
            let (kind, back) = (Kind::from(hello.role), Arc::clone(&shared));
            std::thread::spawn(move || copy(&back, kind, far_again, near_again, || false));
            copy(&shared, kind, near, far, || devices && shared.damage_devices.load(Ordering::Acquire));
        }
    });
}

/// The prefix and the body of the next message.
fn message(from: &mut TcpStream) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let mut prefix = [0; PREFIX_BYTES];
    from.read_exact(&mut prefix)?;
    let (length, _) = decode_prefix(prefix).map_err(std::io::Error::other)?;
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok((prefix.to_vec(), body))
}

fn requests(shared: &Shared, mut from: TcpStream, to: TcpStream, said: &Mutex<Said>, key: u64) -> std::io::Result<()> {
    let _hang_up = HangUp(to.try_clone()?);
    loop {
        let (prefix, body) = message(&mut from)?;
        let checksum = decode_prefix(prefix[..].try_into().map_err(std::io::Error::other)?).map_or(0, |(_, sum)| sum);
        let request = decode::<Request>(&body, checksum, key).ok();
        let name = request.as_ref().map_or("nonsense", Request::name);
        let machine = {
            let mut said = lock(said);
            said.request = name;
            if let Some(Request::Propose { spec, .. }) = &request {
                said.machine.clone_from(&spec.name);
            }
            said.machine.clone()
        };
        if !shared.pass(Point::Request(name), &machine) {
            return Ok(());
        }
        if !shared.forward(Kind::Control, &[prefix, body].concat(), &to)? {
            return Ok(());
        }
    }
}

fn replies(shared: &Shared, mut from: TcpStream, to: TcpStream, said: &Mutex<Said>) -> std::io::Result<()> {
    let _hang_up = HangUp(to.try_clone()?);
    let mut hello = [0; HELLO_BYTES];
    from.read_exact(&mut hello)?;
    (&to).write_all(&hello)?;
    loop {
        let (prefix, body) = message(&mut from)?;
        let (name, machine) = {
            let said = lock(said);
            (said.request, said.machine.clone())
        };
        if !shared.pass(Point::Reply(name), &machine) {
            return Ok(());
        }
        if !shared.forward(Kind::Control, &[prefix, body].concat(), &to)? {
            return Ok(());
        }
    }
}

/// Copies bytes to their end, and ends the other side's stream then. Where `damage` returns `true`, they arrive
/// changed.
fn copy(shared: &Shared, kind: Kind, mut from: TcpStream, to: TcpStream, damage: impl Fn() -> bool) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if damage() {
            buffer[..read].iter_mut().for_each(|byte| *byte ^= 0x5a);
        }
        if !matches!(shared.forward(kind, &buffer[..read], &to), Ok(true)) {
            // Nobody listens any more: the sender is told, as without a proxy.
            let _ = from.shutdown(Shutdown::Both);
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

struct HangUp(TcpStream);

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::hello::{Features, VERSION};

    use super::*;

    /// A daemon that is killed when it has just been called. Seen to fail, the caller waiting for its answer until it
    /// gave up: in a whole run, then here.
    #[test]
    fn who_calls_a_daemon_that_ends_is_hung_up_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || {
            let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (caller, listener.accept().unwrap().0)
        };
        let ((mut caller, near), (far, killed)) = (connect(), connect());
        setsockopt(&killed, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
        drop(killed);
        let shared = Arc::new(Shared::new());
        join(&shared, near, far);
        let hello = Hello {
            version: VERSION,
            role: Role::Control,
            features: Features::NONE,
            needed: Features::NONE,
            session: 1,
            key: 2,
        };
        caller.write_all(&hello.encode()).unwrap();
        caller.set_read_timeout(Some(PATIENCE)).unwrap();
        let ended = caller.read(&mut [0]);
        assert!(!matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{ended:?}");
    }
}
