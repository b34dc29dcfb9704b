//! Connections to QEMU that are lent: QEMU serves one client at a time, and a balloon's thread needs a connection now
//! and then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_engine::vmm::qemu::SharedQmp;

/// Connections on which their owners let the balloon's thread take turns, by the machine's name.
#[derive(Debug, Default)]
pub struct Lending {
    lent: Mutex<HashMap<String, SharedQmp>>,
}

/// A connection that is lent, until this is dropped.
#[derive(Debug)]
pub struct Lent<'a> {
    lending: &'a Lending,
    name: &'a str,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.lending.lock().remove(self.name);
    }
}

impl Lending {
    /// Lets the balloon's thread use a machine's connection.
    pub fn lend<'a>(&'a self, name: &'a str, qmp: SharedQmp) -> Lent<'a> {
        self.lock().insert(name.into(), qmp);
        Lent { lending: self, name }
    }

    /// The connection of this machine, where it is lent now.
    #[must_use]
    pub fn of(&self, name: &str) -> Option<SharedQmp> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, SharedQmp>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
