//! Care for machines that belong here: it watches for the end of their process, and keeps their balloon.

use std::sync::Arc;

use crate::balloon::Balloons;
use crate::machines::record::{Lifecycle, VmRecord};
use crate::machines::table::Machines;
use crate::machines::watch;

/// The part of the daemon that looks after machines.
#[derive(Debug, Clone)]
pub struct Care {
    /// The machines.
    pub machines: Arc<Machines>,
    /// Their balloons.
    pub balloons: Arc<Balloons>,
}

impl Care {
    /// Looks after a machine's process for as long as it lives, and after its balloon.
    pub fn watch(&self, record: &VmRecord) {
        watch::watch(&self.machines, record);
        self.balloons.keep(record);
    }

    /// Notes that the machine belongs here and that nobody is busy with it.
    pub fn settle(&self, record: &VmRecord) {
        let here = VmRecord { lifecycle: Lifecycle::Here, begins: false, succession: None, ..record.clone() };
        let known = self.machines.table().get(&record.name).and_then(|entry| entry.record.clone());
        if known.as_ref() != Some(&here) {
            self.machines.try_store(&here);
        }
        self.machines.release(&record.name);
        self.watch(&here);
    }
}
