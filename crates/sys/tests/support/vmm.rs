//! A process that plays the VMM: it maps guest RAM, makes the userfaultfd as the agent does, and writes on command.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use sterna_sys::PAGE_BYTES;
use sterna_sys::process::Pidfd;
use sterna_sys::socket::{receive_with_descriptors, send_with_descriptors};
use sterna_sys::userfaultfd::{Modes, Userfaultfd, open_device};

use super::Ram;

/// The process, ended when dropped.
pub struct Vmm {
    pub pid: u32,
    pub pidfd: Pidfd,
    /// Where it maps its RAM.
    pub addresses: Range<u64>,
    commands: UnixStream,
}

impl Vmm {
    /// Starts it with the mapping that `map` makes in it. Its userfaultfd has had no handshake and nothing is
    /// registered.
    pub fn start(map: impl FnOnce() -> Ram) -> (Self, Userfaultfd) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        // SAFETY: the child uses nothing that another thread could hold locked but the allocator, which the C library
        // keeps usable over a fork, and leaves by `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "a new process");
        if pid == 0 {
            let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(map, theirs)));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(played.is_err())) }
        }
        drop(theirs);
        let pid = pid as u32;
        let mut address = [0; 16];
        let (received, descriptors) = receive_with_descriptors(&ours, &mut address).expect("the VMM's descriptor");
        assert_eq!(received, 16, "the VMM has started");
        let word = |at: usize| u64::from_le_bytes(address[at..at + 8].try_into().expect("8 bytes"));
        let uffd = Userfaultfd::from(descriptors.into_iter().next().expect("a descriptor"));
        let pidfd = Pidfd::open(pid).expect("a process");
        (Self { pid, pidfd, addresses: word(0)..word(0) + word(8) * PAGE_BYTES, commands: ours }, uffd)
    }

    /// Lets it write `value` to word 0 of `page`, and waits until it has.
    pub fn poke(&mut self, page: u64, value: u64) {
        self.ask(page, value);
    }

    /// Reads word 0 of `page` as it sees it.
    pub fn peek(&mut self, page: u64) -> u64 {
        self.ask(page | READ, 0)
    }

    fn ask(&mut self, page: u64, value: u64) -> u64 {
        let mut command = [0; 16];
        command[..8].copy_from_slice(&page.to_le_bytes());
        command[8..].copy_from_slice(&value.to_le_bytes());
        self.commands.write_all(&command).expect("a command");
        let mut answer = [0; 8];
        self.commands.read_exact(&mut answer).expect("an answer");
        u64::from_le_bytes(answer)
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.pidfd.kill().expect("killed");
        let mut status = 0;
        // SAFETY: collects this process's own child.
        unsafe { libc::waitpid(self.pid as i32, &raw mut status, 0) };
    }
}

const READ: u64 = 1 << 63;

fn play(map: impl FnOnce() -> Ram, mut commands: UnixStream) {
    let ram = map();
    let uffd = Userfaultfd::create(open_device().expect("the device")).expect("a userfaultfd");
    let mut address = [0; 16];
    address[..8].copy_from_slice(&ram.addresses().start.to_le_bytes());
    address[8..].copy_from_slice(&ram.pages.to_le_bytes());
    send_with_descriptors(&commands, &address, &[uffd.as_fd()]).expect("sent");
    let mut command = [0; 16];
    while commands.read_exact(&mut command).is_ok() {
        let word = |at: usize| u64::from_le_bytes(command[at..at + 8].try_into().expect("8 bytes"));
        let (page, value) = (word(0), word(8));
        if page & READ == 0 {
            ram.poke(page, 0, value);
        }
        let answer = ram.peek(page & !READ, 0);
        commands.write_all(&answer.to_le_bytes()).expect("an answer");
    }
}

/// Registers its RAM for write tracking.
pub fn track(uffd: &Userfaultfd, vmm: &Vmm) {
    uffd.enable(sterna_sys::userfaultfd::Features::TRACKING).expect("its features");
    uffd.register(vmm.addresses.clone(), Modes::WP).expect("registered");
}
