//! The memory hosts of a machine that is split already: they are exchanged while its guest runs.
//!
//! ```text
//! record: newcomers, as if they were leaving ─▶ they grant ─▶ record: they lend, and who is not wanted is leaving
//!     ─▶ who is leaving is emptied ─▶ what it lent is owed ─▶ record: gone ─▶ given back
//! ```
//!
//! A memory host that is leaving and has nothing is not asked when a daemon comes back. So a newcomer that does not
//! grant what it is asked for, or does not answer, is in nobody's way, whenever this daemon dies; and the next one sees
//! off whoever is leaving. One that has gone keeps its number until another one is given that.

use std::sync::Arc;
use std::time::Duration;

use sterna_api::split::Redundancy;
use sterna_api::units::show_size;
use sterna_api::{Blame, Code, Problem};
use sterna_engine::error::MigrateError;
use sterna_engine::split::loans::borrow;
use sterna_engine::split::room::Room;
use sterna_engine::split::{Epochs, Lender, Split, SplitError};
use sterna_engine::store::client::StoreError;
use sterna_engine::vmm::VmmError;

use super::loans::Loans;
use crate::machines::borrowed::{Borrowed, Place};
use crate::machines::record::VmRecord;
use crate::machines::split::{EpochFile, SplitRecord};
use crate::machines::table::Machines;
use crate::problems::{host, invalid};

/// How long a memory host is left alone that was not reached.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// The memory hosts of one machine while they are exchanged.
pub(super) struct Exchange<'a> {
    pub machines: &'a Machines,
    pub loans: &'a Loans,
    pub split: &'a Arc<Split>,
    /// The machine, as it is on record.
    pub record: VmRecord,
}

impl Exchange<'_> {
    /// From now on pages leave for these memory hosts and for no other. Those that are new have granted what they were
    /// asked for; the others are leaving, and have what they had.
    ///
    /// # Errors
    /// A [`Problem`]: one does not grant what it is asked for, or is there with another amount; too many. All is as it
    /// was then.
    pub fn begin(&mut self, wanted: &[Place]) -> Result<(), Problem> {
        let has_parity = self.borrowed()?.redundancy() == Redundancy::Parity;
        if has_parity || wanted.iter().any(|host| host.parity.is_some()) {
            return self.begin_with_parity(wanted);
        }
        for host in wanted {
            if let Some((number, which, peer)) = self.instead_of_a_silent_one(host)? {
                self.take_place((number, which), &peer)?;
            }
        }
        let mut borrowed = self.borrowed()?;
        let mut newcomers = Vec::new();
        for host in wanted {
            match borrowed.number_of(host) {
                Some(number) => self.check_amount(&borrowed.hosts[number], host)?,
                None => newcomers.push(self.number_for(&mut borrowed, host)?),
            }
        }
        self.store(borrowed.clone())?;
        let mut asked = Vec::new();
        if let Err(problem) = self.ask(&borrowed, &newcomers, &mut asked) {
            self.gone(&newcomers, asked)?;
            return Err(problem);
        }
        let stays = |host: &Place| wanted.iter().any(|other| other.is(host));
        borrowed.leaving = borrowed.lent().filter(|(_, host)| !stays(host)).map(|(number, _)| number).collect();
        self.agree(borrowed)
    }

    /// The same where there is parity, before or afterwards: which of them has what follows from all of them. So all
    /// that are wanted lend beside those that are there, until these are empty; unless they are there already, or one
    /// takes the place of one that does not answer.
    fn begin_with_parity(&mut self, wanted: &[Place]) -> Result<(), Problem> {
        let former = self.borrowed()?;
        if let Some(numbers) = former.numbers_of(wanted) {
            return self.agree(former.giving_to(&numbers));
        }
        if let Some((number, peer)) = self.instead_of_a_silent_one_of_all(&former, wanted) {
            return self.take_place((number, 0), &peer);
        }
        let mut borrowed = former.clone();
        let numbers = borrowed.welcome_all(wanted).ok_or_else(too_many)?;
        numbers.iter().try_for_each(|number| self.check_newcomer(&former, &borrowed.hosts[*number]))?;
        self.store(borrowed.clone())?;
        let mut asked = Vec::new();
        if let Err(problem) = self.ask(&borrowed, &numbers, &mut asked) {
            self.gone(&numbers, asked)?;
            return Err(problem);
        }
        self.agree(borrowed.giving_to(&numbers.into_iter().collect()))
    }

    /// Whether those that are wanted are those that are given pages, but for one that does not answer: its number, and
    /// who is in its place.
    fn instead_of_a_silent_one_of_all(&self, borrowed: &Borrowed, wanted: &[Place]) -> Option<(usize, String)> {
        let newcomers: Vec<_> = wanted.iter().filter(|host| borrowed.number_of(host).is_none()).collect();
        let lending = || borrowed.lent().filter(|(number, _)| !borrowed.leaving.contains(number));
        let goes: Vec<_> = lending().filter(|(_, place)| !wanted.iter().any(|host| host.is(place))).collect();
        let ([newcomer], [(number, place)]) = (newcomers.as_slice(), goes.as_slice()) else { return None };
        let alike = lending().count() == wanted.len()
            && lending().all(|(_, one)| one.parity.is_some())
            && wanted.iter().all(|host| host.parity.is_some() && host.all_bytes() == place.all_bytes());
        if !alike {
            return None;
        }
        self.split.ask_whether_there(*number);
        self.split.silent().contains(&place.peer).then(|| (*number, newcomer.peer.clone()))
    }

    /// Has another memory host take the place of one of two that have the same pages, which does not answer. It is
    /// given what its mirror has in the background; what the other one had lent is owed.
    ///
    /// # Errors
    /// A [`Problem`]: it does not grant what it is asked for; the one that does not answer alone has pages. All is as
    /// it was then.
    pub fn take_place(&mut self, (number, which): (usize, usize), peer: &str) -> Result<(), Problem> {
        let mut borrowed = self.borrowed()?;
        let none = || Problem::new(Code::Internal, Blame::Ours, "a memory host without a mirror is to be replaced");
        let former = borrowed.hosts.get(number).cloned().ok_or_else(none)?;
        let next = former.with(which, peer).ok_or_else(none)?;
        let [gone, newcomer] = [&former, &next].map(|two| two.members().nth(which));
        let (gone, newcomer) = gone.zip(newcomer).ok_or_else(none)?;
        // As any newcomer, it is on record before it is asked, and as one that has no mirror: should this daemon end
        // now, the next one gives back what it has granted, and nothing of the one that stays.
        let newcomer = Place { mirror: None, once: [newcomer.mirror, None], ..newcomer };
        let mut granted: Vec<_> = newcomer.loans().collect();
        // Of two the one that stays has what it lent still.
        let gone = if gone.mirror.is_some() { vec![gone] } else { gone.loans().collect() };
        let for_now = self.number_for(&mut borrowed, &newcomer)?;
        self.store(borrowed.clone())?;
        for (number, lender) in borrowed.lenders(self.loans.credentials())[for_now].members().iter().enumerate() {
            if let Err(problem) = self.borrow(&borrowed, lender) {
                granted.truncate(number + usize::from(problem.code != Code::PeerUnreachable));
                self.gone(&[for_now], granted)?;
                return Err(problem);
            }
        }
        borrowed.hosts[number] = next.clone();
        borrowed.see_off(for_now);
        let (split, lender) = (self.split, borrowed.lenders(self.loans.credentials())[number].clone());
        let taken = split.take_place((number, which), lender, || {
            self.loans.owe_hosts(&self.record, &self.machines.dir(&self.record.name), gone);
            self.store(borrowed)
        });
        if taken.is_err() && self.borrowed()?.hosts[number] != next {
            self.gone(&[for_now], granted)?;
        }
        self.loans.pay();
        taken
    }

    /// Whether this place is one of two that have the same pages with another one in the place of one that does not
    /// answer; which it is then.
    fn instead_of_a_silent_one(&self, wanted: &Place) -> Result<Option<(usize, usize, String)>, Problem> {
        let borrowed = self.borrowed()?;
        let known = |member: &Place| borrowed.one_of_two(&member.peer);
        let [Some(one), Some(other)] = [0, 1].map(|which| wanted.members().nth(which)) else { return Ok(None) };
        let ((number, stays), newcomer) = match (known(&one), known(&other)) {
            (Some(found), None) => (found, other),
            (None, Some(found)) => (found, one),
            _ => return Ok(None),
        };
        let (two, which) = (&borrowed.hosts[number], 1 - stays);
        self.split.ask_whether_there(number);
        let silent = self.split.silent();
        let is_silent = |which: usize| two.members().nth(which).is_some_and(|member| silent.contains(&member.peer));
        let fits = two.bytes == wanted.bytes && is_silent(which) && !is_silent(stays);
        Ok(fits.then_some((number, which, newcomer.peer)))
    }

    /// Empties the memory hosts that are leaving, one after the other; each is told that it has its memory back once it
    /// is empty, and of those that have each other's parity all are. `check` is asked again and again whether to go on.
    ///
    /// # Errors
    /// A [`Problem`]: what `check` said, or the others do not take what leaves. Those that were not emptied yet are
    /// leaving still.
    pub fn see_off(&mut self, check: &dyn Fn() -> Result<(), MigrateError>) -> Result<(), Problem> {
        loop {
            let borrowed = self.borrowed()?;
            let Some(first) = borrowed.leaving.first() else { return Ok(()) };
            let numbers: Vec<_> = borrowed.together(*first).into_iter().collect();
            let taken = || if refused(self.split).is_some() { Err(MigrateError::Cancelled) } else { check() };
            for number in &numbers {
                let emptied = until_reached(check, &|| self.split.empty(*number, &taken));
                emptied.map_err(|problem| refused(self.split).unwrap_or(problem))?;
            }
            let owed = numbers.iter().flat_map(|number| borrowed.hosts[*number].loans()).collect();
            self.gone(&numbers, owed)?;
        }
    }

    /// All that have something lend again: nobody is leaving any more. Not where there is parity: pages leave for one
    /// kind of memory hosts alone, and go on leaving for those that were named last.
    ///
    /// # Errors
    /// A [`Problem`]: the record cannot be written; others are leaving still, and what helps.
    pub fn call_off(&mut self) -> Result<(), Problem> {
        let mut borrowed = self.borrowed()?;
        if !borrowed.leaving.is_empty() && borrowed.lent().any(|(_, place)| place.parity.is_some()) {
            let message = "what its former memory hosts have stays with them for now, and comes as it is used";
            let hint = format!(
                "'sterna split {}' goes on with it; with the former memory hosts and redundancy it goes back",
                self.record.name
            );
            return Err(Problem::new(Code::Split, Blame::Request, message).hint(hint));
        }
        borrowed.leaving.clear();
        self.agree(borrowed)
    }

    /// Writes down how much of the machine may be here, and that it stays split.
    ///
    /// # Errors
    /// A [`Problem`]: the record cannot be written.
    pub fn keep_here(&mut self, room: Room) -> Result<(), Problem> {
        self.write(|split| (split.here_bytes, split.unused, split.merging) = (room.most(), room.unused(), false))
    }

    /// Has the record and who sends pages agree on who is leaving: the record first, where somebody lends.
    fn agree(&mut self, borrowed: Borrowed) -> Result<(), Problem> {
        self.store(borrowed.clone())?;
        self.split.leave_for(|number| borrowed.leaving.contains(&number) || borrowed.gone.contains(&number));
        Ok(())
    }

    fn check_amount(&self, known: &Place, wanted: &Place) -> Result<(), Problem> {
        if known.all_bytes() == wanted.all_bytes() {
            return Ok(());
        }
        let (peer, lends, asked) = (known.name(), show_size(known.all_bytes()), show_size(wanted.all_bytes()));
        let message = format!("memory host {peer} lends {lends} to '{}', not {asked}", self.record.name);
        Err(Problem::new(Code::Split, Blame::Request, message)
            .hint("name it with what it lends; what a memory host lends to a guest is not changed"))
    }

    fn number_for(&self, borrowed: &mut Borrowed, host: &Place) -> Result<usize, Problem> {
        self.check_newcomer(borrowed, host)?;
        borrowed.welcome(host).ok_or_else(too_many)
    }

    /// Whether a memory host can be asked to lend beside those that do.
    fn check_newcomer(&self, borrowed: &Borrowed, host: &Place) -> Result<(), Problem> {
        if !self.loans.has_back(borrowed.guest, host) {
            let message = format!("memory host {} has not been told yet that it has its memory back", host.name());
            return Err(Problem::new(Code::PeerUnreachable, Blame::Peer, message)
                .hint("it is told as soon as it answers; ask again then"));
        }
        if borrowed.clashes(host) {
            let message =
                format!("memory host {} has pages of the guest under the number that it would get", host.name());
            return Err(invalid(message).hint("have the two that it is one of replaced by two others first"));
        }
        Ok(())
    }

    /// Asks newcomers for what they are to lend; `asked` are those that may have granted it.
    fn ask(&self, borrowed: &Borrowed, newcomers: &[usize], asked: &mut Vec<Place>) -> Result<(), Problem> {
        let lenders = borrowed.lenders(self.loans.credentials());
        for number in newcomers {
            let lender = &lenders[*number];
            for (member, place) in lender.members().iter().zip(borrowed.hosts[*number].loans()) {
                let granted = self.borrow(borrowed, member);
                // Its answer may have been lost; but where nobody was reached, nothing was granted.
                if granted.as_ref().err().is_none_or(|problem| problem.code != Code::PeerUnreachable) {
                    asked.push(place);
                }
                granted?;
            }
            self.split.add(*number, lender.clone()).map_err(|error| error.problem())?;
        }
        Ok(())
    }

    fn borrow(&self, borrowed: &Borrowed, lender: &Lender) -> Result<(), Problem> {
        let epoch = EpochFile::of(&self.machines.dir(&self.record.name)).raise();
        let epoch = epoch.map_err(|error| host("cannot write the epoch of the guest's owner", &error))?;
        borrow(lender, borrowed.claim(epoch), borrowed.chunks).map_err(|error| error.problem())
    }

    /// Some have nothing of the guest any more, and their numbers are free. What is `owed` is given back.
    fn gone(&mut self, numbers: &[usize], owed: Vec<Place>) -> Result<(), Problem> {
        let mut borrowed = self.borrowed()?;
        numbers.iter().for_each(|number| self.split.see_off(*number));
        // A daemon that finds it owed by a machine that has it still knows that it must not be paid yet.
        self.loans.owe_hosts(&self.record, &self.machines.dir(&self.record.name), owed);
        numbers.iter().for_each(|number| borrowed.see_off(*number));
        self.store(borrowed)?;
        self.loans.pay();
        Ok(())
    }

    fn borrowed(&self) -> Result<Borrowed, Problem> {
        let split = self.record.split.as_ref();
        let none = || Problem::new(Code::Internal, Blame::Ours, "a machine without memory hosts");
        split.map(|split| split.borrowed.clone()).ok_or_else(none)
    }

    fn store(&mut self, borrowed: Borrowed) -> Result<(), Problem> {
        self.write(|split| split.borrowed = borrowed)
    }

    fn write(&mut self, change: impl FnOnce(&mut SplitRecord)) -> Result<(), Problem> {
        let Some(mut split) = self.record.split.clone() else { return Ok(()) };
        change(&mut split);
        let record = with(&self.record, split);
        self.machines.store(&record).map_err(|error| host("cannot write the machine's record", &error))?;
        self.record = record;
        Ok(())
    }
}

pub(super) fn too_many() -> Problem {
    invalid("that would be more memory hosts than a guest may have, those that are leaving among them")
}

/// Why pages that are too many here do not leave, where memory hosts refuse them: they do so again.
pub(super) fn refused(split: &Split) -> Option<Problem> {
    split.stuck().filter(|problem| problem.code == Code::LoanRefused)
}

/// Does what needs memory hosts. One that is not reached is asked again, as long as `check` agrees.
pub(super) fn until_reached(
    check: &dyn Fn() -> Result<(), MigrateError>,
    work: &dyn Fn() -> Result<(), SplitError>,
) -> Result<(), Problem> {
    loop {
        match work() {
            Err(SplitError::Host { source, .. }) if matches!(*source, StoreError::Connection(_)) => {
                check().map_err(|error| error.problem())?;
                std::thread::sleep(RETRY);
            }
            done => return done.map_err(|error| error.problem()),
        }
    }
}

/// Whether a machine's QEMU is there.
pub(super) fn alive(record: &VmRecord) -> Result<(), MigrateError> {
    if record.process.open().is_some() { Ok(()) } else { Err(VmmError::Gone { guest_off: false }.into()) }
}

/// The machine, split like this.
pub(super) fn with(record: &VmRecord, split: SplitRecord) -> VmRecord {
    VmRecord { split: Some(split), ..record.clone() }
}
