//! Tap devices: which a process has open, and new ones (kernel's `Documentation/networking/tuntap.rst`).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::ioctl::{Opcode, opcode};
use rustix::net::{AddressFamily, SocketType, socket};

use crate::abi;
use crate::error::{Error, Result};
use crate::process::Pidfd;

const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);
const TUNGETIFF: Opcode = opcode::read::<u32>(b'T', 210);
const _: () = assert!(TUNSETIFF == 0x4004_54CA && TUNGETIFF == 0x8004_54D2);

/// Requests about network devices, to any socket (`linux/sockios.h`).
const SIOCGIFFLAGS: Opcode = 0x8913;
const SIOCSIFFLAGS: Opcode = 0x8914;
const SIOCGIFINDEX: Opcode = 0x8933;
const SIOCBRADDIF: Opcode = 0x89A2;

/// What a tap is made with; other flags the kernel reports and does not take.
const SETTABLE: libc::c_int =
    libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE | libc::IFF_ONE_QUEUE;

/// A device's name, which ends with a zero.
type Name = [libc::c_char; libc::IFNAMSIZ];

/// The name of a new device: the kernel puts a number at its end.
const CHOSEN_BY_KERNEL: Name = {
    let (mut name, prefix) = ([0; libc::IFNAMSIZ], b"sterna%d");
    let mut at = 0;
    while at < prefix.len() {
        name[at] = prefix[at] as libc::c_char;
        at += 1;
    }
    name
};

/// A tap that a process has open: one descriptor for each of its queues.
#[derive(Debug)]
pub struct OpenTap {
    /// The device's name.
    pub name: String,
    /// Its queues, by the process's numbers, the lowest first.
    pub queues: Vec<OwnedFd>,
    /// The process's numbers of them.
    pub numbers: Vec<u32>,
}

/// The taps that a process has open, in the order in which it opened them.
///
/// # Errors
/// No such process, or this one may not trace it.
pub fn open_taps(process: &Pidfd, pid: u32) -> Result<Vec<OpenTap>> {
    let directory = format!("/proc/{pid}/fdinfo");
    let failed = |error| Error::new(format!("list {directory}"), error);
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(&directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(about) = std::fs::read_to_string(entry.path()) else { continue };
        let device = about.lines().find_map(|line| line.strip_prefix("iff:")).map(str::trim);
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let (Some(device), Some(number)) = (device.filter(|name| !name.is_empty()), number) {
            numbers.push((number, device.to_owned()));
        }
    }
    numbers.sort_unstable();
    let mut taps: Vec<OpenTap> = Vec::new();
    for (number, name) in numbers {
        let queue = process.duplicate(number)?;
        match taps.iter_mut().find(|tap| tap.name == name) {
            Some(tap) => {
                tap.queues.push(queue);
                tap.numbers.push(number.unsigned_abs());
            }
            None => taps.push(OpenTap { name, queues: vec![queue], numbers: vec![number.unsigned_abs()] }),
        }
    }
    Ok(taps)
}

/// A new tap of the same kind as another, with as many queues. It has a name of its own, is down and in no bridge, and
/// is gone once all its descriptors are closed.
///
/// # Errors
/// The kernel has no `/dev/net/tun`, or this process may not make network devices.
pub fn like(tap: &OpenTap) -> Result<Vec<OwnedFd>> {
    let first = tap.queues.first().ok_or_else(|| Error::malformed("look at a tap", "it has no queue"))?;
    let mut request = request_for(CHOSEN_BY_KERNEL);
    get(first.as_fd(), &mut request)?;
    // SAFETY: TUNGETIFF has filled in the flags.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags }) & SETTABLE;
    make(flags, tap.queues.len())
}

/// A new tap as QEMU makes one for itself, with so many queues; `headers`: with a header of virtio's before each
/// packet. Of it holds what is said of one that is [`like`] another.
///
/// # Errors
/// As [`like`].
pub fn new(queues: usize, headers: bool) -> Result<Vec<OwnedFd>> {
    let flags = [(headers, libc::IFF_VNET_HDR), (queues > 1, libc::IFF_MULTI_QUEUE)];
    let chosen = flags.iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, flag)| all | flag);
    make(libc::IFF_TAP | libc::IFF_NO_PI | chosen, queues)
}

fn make(flags: libc::c_int, count: usize) -> Result<Vec<OwnedFd>> {
    let mut name = CHOSEN_BY_KERNEL;
    let mut queues = Vec::with_capacity(count);
    for _ in 0..count {
        let file = File::options().read(true).write(true).open("/dev/net/tun");
        let queue: OwnedFd = file.map_err(|error| Error::new("open /dev/net/tun", error))?.into();
        let mut request = request_for(name);
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: TUNSETIFF takes and fills in an `ifreq`.
        unsafe { abi::ioctl(queue.as_fd(), TUNSETIFF, &mut request) }
            .map_err(|error| Error::new("make a tap", error))?;
        name = request.ifr_name;
        queues.push(queue);
    }
    Ok(queues)
}

/// Puts a network device into a bridge, and lets packets through it. One that is in the bridge already stays.
///
/// # Errors
/// There is no such device or bridge, or the device is in another one.
pub fn connect(device: &str, bridge: &str) -> Result<()> {
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None);
    let any = any.map_err(|error| Error::new("make a socket", error))?;
    let ask = |request: Opcode, argument: &mut libc::ifreq, what: &str| {
        // SAFETY: each of the requests takes, and fills in, an `ifreq`.
        unsafe { abi::ioctl(any.as_fd(), request, argument) }
            .map(drop)
            .map_err(|error| Error::new(format!("{what} ({device}, {bridge})"), error))
    };
    let mut about = request_for(named(device)?);
    ask(SIOCGIFINDEX, &mut about, "find the network device")?;
    let mut joins = request_for(named(bridge)?);
    // SAFETY: SIOCGIFINDEX has filled in the index.
    joins.ifr_ifru.ifru_ifindex = unsafe { about.ifr_ifru.ifru_ifindex };
    if !std::path::Path::new(&format!("/sys/class/net/{bridge}/brif/{device}")).exists() {
        ask(SIOCBRADDIF, &mut joins, "put the network device into the bridge")?;
    }
    let mut up = request_for(named(device)?);
    ask(SIOCGIFFLAGS, &mut up, "look at the network device")?;
    // SAFETY: SIOCGIFFLAGS has filled in the flags.
    up.ifr_ifru.ifru_flags = unsafe { up.ifr_ifru.ifru_flags } | libc::IFF_UP as libc::c_short;
    ask(SIOCSIFFLAGS, &mut up, "let packets through the network device")
}

/// A device's name as the kernel takes it.
fn named(name: &str) -> Result<Name> {
    let plain = !name.is_empty() && name.len() < libc::IFNAMSIZ && !name.contains(['/', '\0']);
    if !plain {
        return Err(Error::malformed("find a network device", format!("'{name}' is no device's name")));
    }
    let mut kernels = [0; libc::IFNAMSIZ];
    kernels.iter_mut().zip(name.bytes()).for_each(|(slot, byte)| *slot = byte as libc::c_char);
    Ok(kernels)
}

fn get(queue: BorrowedFd<'_>, request: &mut libc::ifreq) -> Result<()> {
    // SAFETY: TUNGETIFF fills in an `ifreq`.
    unsafe { abi::ioctl(queue, TUNGETIFF, request) }.map(drop).map_err(|error| Error::new("look at a tap", error))
}

/// A request about the device of this name.
fn request_for(name: Name) -> libc::ifreq {
    // SAFETY: an `ifreq` is integers and byte arrays, for which zeros are valid.
    let request: libc::ifreq = unsafe { std::mem::zeroed() };
    libc::ifreq { ifr_name: name, ..request }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_s_taps_are_found_with_their_queues_and_one_like_it_is_another_of_the_same_kind() {
        let tun = File::options().read(true).write(true).open("/dev/net/tun");
        let Ok(tun) = tun else { return eprintln!("skipped: no /dev/net/tun here") };
        let first: OwnedFd = tun.into();
        let mut request = request_for(CHOSEN_BY_KERNEL);
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: TUNSETIFF takes and fills in an `ifreq`.
        if let Err(error) = unsafe { abi::ioctl(first.as_fd(), TUNSETIFF, &mut request) } {
            return eprintln!("skipped: no tap can be made here ({error})");
        }
        let made = like(&OpenTap {
            name: String::new(),
            queues: vec![first.try_clone().unwrap(), first],
            numbers: Vec::new(),
        })
        .unwrap();
        assert_eq!(made.len(), 2);
        let mut other = request_for(CHOSEN_BY_KERNEL);
        get(made[1].as_fd(), &mut other).unwrap();
        assert_ne!(other.ifr_name, request.ifr_name, "a device of its own");
        // SAFETY: TUNGETIFF has filled in the flags.
        assert_eq!(libc::c_int::from(unsafe { other.ifr_ifru.ifru_flags }) & SETTABLE, flags);
        let pid = std::process::id();
        let found = open_taps(&Pidfd::open(pid).unwrap(), pid).unwrap();
        let name: String =
            other.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect();
        assert!(found.iter().any(|tap| tap.name == name && tap.queues.len() == 2), "{found:?}");
    }
}
