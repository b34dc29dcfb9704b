//! This host: its name, and the numbers its kernel draws.

use rustix::rand::{GetRandomFlags, getrandom};

/// This host's name, as its kernel has it.
#[must_use]
pub fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A random number that no other host draws.
#[must_use]
pub fn random_u128() -> u128 {
    let mut bytes = [0u8; 16];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => u128::from_le_bytes(bytes),
        // Requests of up to 256 bytes are never cut short, and every kernel Sterna runs on has the call.
        other => unreachable!("the kernel gives no random numbers: {other:?}"),
    }
}
