//! The user QEMU runs as, where the configuration names one.

use std::io;
use std::process::Command;

/// A user with its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Main group.
    pub gid: u32,
    /// All groups, including the one that may use `/dev/kvm`.
    pub groups: Vec<u32>,
}

impl User {
    /// Looks the user up.
    ///
    /// # Errors
    /// There is no such user.
    pub fn find(name: &str) -> io::Result<Self> {
        // `id` asks the host's user database, of any kind.
        let ask = |what: &str| -> io::Result<Vec<u32>> {
            let output = Command::new("id").args([what, "--", name]).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let numbers: Vec<u32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if !output.status.success() || numbers.is_empty() {
                return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no user '{name}'")));
            }
            Ok(numbers)
        };
        Ok(Self { uid: ask("-u")?[0], gid: ask("-g")?[0], groups: ask("-G")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name() {
        assert_eq!(User::find("root").unwrap().uid, 0);
        assert!(User::find("no-such-user").is_err());
        assert!(User::find("-u").is_err());
    }
}
