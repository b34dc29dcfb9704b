//! A machine or a name that is claimed for a while: given back when what stands for the claim is dropped.

use std::io;
use std::sync::Arc;

use sterna_api::Problem;

use super::hold::Hold;
use super::record::VmRecord;
use super::table::{Entry, Machines, Table};
use crate::problems::{host, name_taken};

/// A machine that is claimed: given back, whatever the end, when this is dropped.
#[derive(Debug)]
pub struct Claimed<'a> {
    /// What is known of it.
    pub record: VmRecord,
    machines: &'a Machines,
}

impl<'a> Claimed<'a> {
    /// Claims a machine that nobody else is busy with.
    ///
    /// # Errors
    /// As [`Machines::claim`].
    pub fn new(machines: &'a Machines, name: &str, hold: Hold) -> Result<Self, Problem> {
        Ok(Self { record: machines.claim(name, hold)?, machines })
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        self.machines.give_back(&self.record);
    }
}

/// A reserved name: given back when dropped, unless kept.
#[derive(Debug)]
pub struct Reservation {
    machines: Arc<Machines>,
    name: String,
    kept: bool,
}

impl Reservation {
    /// Reserves a name, where `check` finds nothing in the table that speaks against it.
    ///
    /// # Errors
    /// What `check` found, or a [`Problem`] where the name is taken.
    pub fn new(
        machines: &Arc<Machines>,
        name: &str,
        hold: Hold,
        check: impl FnOnce(&Table) -> Result<(), Problem>,
    ) -> Result<Self, Problem> {
        let mut table = machines.table();
        check(&table)?;
        if table.contains_key(name) {
            return Err(name_taken(name));
        }
        table.insert(name.into(), Entry::new(None, hold));
        Ok(Self { machines: Arc::clone(machines), name: name.into(), kept: false })
    }

    /// Reserves the name of a machine that is being started or taken over.
    ///
    /// # Errors
    /// A [`Problem`] where it is taken.
    pub fn starting(machines: &Arc<Machines>, name: &str) -> Result<Self, Problem> {
        Self::new(machines, name, Hold::Starting, |_| Ok(()))
    }

    /// Writes what a daemon is to know that finds the machine before it is [kept](Self::keep).
    ///
    /// # Errors
    /// Where the record cannot be written.
    pub fn note(&self, record: &VmRecord) -> Result<(), Problem> {
        self.machines.store_started(record).map_err(|error| unwritten(&error))
    }

    /// The machine is there: its record is written, and the name stays.
    ///
    /// # Errors
    /// Where the record cannot be written; the name is given back.
    pub fn keep(mut self, record: &VmRecord, hold: Hold) -> Result<(), Problem> {
        self.machines.store(record).map_err(|error| unwritten(&error))?;
        self.machines.hold(&self.name, hold);
        self.kept = true;
        Ok(())
    }
}

impl Reservation {
    /// The machine of this former name has the reserved one from now on, as in this record.
    pub fn becomes(mut self, former: &str, record: &VmRecord) {
        let mut table = self.machines.table();
        if let Some(mut entry) = table.remove(former) {
            entry.record = Some(record.clone());
            table.insert(self.name.clone(), entry);
            self.kept = true;
        }
    }
}

fn unwritten(error: &io::Error) -> Problem {
    host("cannot write the machine's record", error)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.machines.table().remove(&self.name);
        }
    }
}
