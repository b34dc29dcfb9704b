//! A network between two daemons that can be cut.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_protocol::hello::Features;

/// Carries connections to a destination until it is cut.
pub struct Relay {
    pub address: String,
    shared: Arc<Shared>,
}

struct Shared {
    open: AtomicBool,
    /// Nothing is carried, and nobody is told.
    silent: AtomicBool,
    /// Nothing is carried for now, and nothing is lost.
    held: AtomicBool,
    /// Bytes, both ways, after which it cuts itself once.
    cut_after: AtomicU64,
    /// What both sides are told in place of what the other is.
    older: Older,
    carried: AtomicU64,
    sockets: Mutex<Vec<TcpStream>>,
}

/// What a daemon lacks that is older than it says.
#[derive(Clone, Copy, Default)]
struct Older {
    /// The minor version that it speaks.
    minor: Option<u16>,
    /// Features that it does not know.
    unknown: u64,
}

impl Relay {
    /// To this address; it cuts itself after so many bytes, and carries again at once.
    pub fn to(destination: &str, cut_after: u64) -> Self {
        Self::carrying(destination, cut_after, Older::default())
    }

    /// To this address, as if both sides spoke no more than this minor version.
    pub fn to_older(destination: &str, cut_after: u64, minor: u16) -> Self {
        Self::carrying(destination, cut_after, Older { minor: Some(minor), ..Older::default() })
    }

    /// To this address, as if neither side knew these features.
    pub fn without(destination: &str, features: Features) -> Self {
        Self::carrying(destination, u64::MAX, Older { unknown: features.0, ..Older::default() })
    }

    fn carrying(destination: &str, cut_after: u64, older: Older) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let shared = Arc::new(Shared {
            open: AtomicBool::new(true),
            silent: AtomicBool::new(false),
            held: AtomicBool::new(false),
            cut_after: AtomicU64::new(cut_after),
            older,
            carried: AtomicU64::new(0),
            sockets: Mutex::default(),
        });
        let (carrying, destination) = (Arc::clone(&shared), destination.to_string());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(&destination) else { continue };
                if !carrying.open.load(Ordering::Acquire) {
                    continue;
                }
                let pairs = [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))];
                for (from, to) in pairs {
                    let (from, to) = (from.expect("a descriptor"), to.expect("a descriptor"));
                    let _ = to.set_nodelay(true);
                    carrying.sockets.lock().unwrap().push(to.try_clone().expect("a descriptor"));
                    let carrying = Arc::clone(&carrying);
                    std::thread::spawn(move || carrying.carry(from, to));
                }
            }
        });
        Self { address, shared }
    }

    /// Cuts every connection, and takes no more until [`restore`](Self::restore).
    pub fn cut(&self) {
        self.shared.open.store(false, Ordering::Release);
        self.shared.cut();
    }

    /// Carries nothing more, as where a host has lost its power: what is sent is not answered, and nothing tells why.
    /// Until [`restore`](Self::restore), and for connections that carried something meanwhile for good.
    pub fn hush(&self) {
        self.shared.silent.store(true, Ordering::Release);
    }

    /// Carries nothing until [`restore`](Self::restore), and then all of it.
    pub fn hold(&self) {
        self.shared.held.store(true, Ordering::Release);
    }

    /// Carries again.
    pub fn restore(&self) {
        self.shared.held.store(false, Ordering::Release);
        self.shared.silent.store(false, Ordering::Release);
        self.shared.open.store(true, Ordering::Release);
    }

    /// Bytes carried so far.
    pub fn carried(&self) -> u64 {
        self.shared.carried.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn carry(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 16 << 10];
        // Every connection begins with a hello, both ways.
        let mut hello = [0; 64];
        if from.read_exact(&mut hello).is_ok() {
            if let Some(minor) = self.older.minor {
                hello[10..12].copy_from_slice(&minor.to_le_bytes());
            }
            let unknown = self.older.unknown.to_le_bytes();
            hello[16..24].iter_mut().zip(unknown).for_each(|(known, unknown)| *known &= !unknown);
            self.carried.fetch_add(hello.len() as u64, Ordering::Relaxed);
            let _ = to.write_all(&hello);
        }
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let before = self.carried.fetch_add(read as u64, Ordering::Relaxed);
            let cut_after = self.cut_after.load(Ordering::Acquire);
            if before + read as u64 >= cut_after
                && self.cut_after.compare_exchange(cut_after, u64::MAX, Ordering::AcqRel, Ordering::Acquire).is_ok()
            {
                // In the middle of whatever that is.
                let _ = to.write_all(&buffer[..cut_after.saturating_sub(before).min(read as u64) as usize]);
                self.cut();
                return;
            }
            if self.silent.load(Ordering::Acquire) {
                while self.silent.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                break;
            }
            while self.held.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    fn cut(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
