//! Connections to a guest's memory hosts: each thread has its own, and opens them as it needs them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use sterna_protocol::store::{Claim, Refusal};

use super::lender::{Lender, MEMBERS, Member, Parity};
use crate::error::MigrateError;
use crate::paging::whereabouts::Holder;
use crate::store::client::{ANSWER_TIMEOUT, MemoryHost, StoreError};

/// How long one of two memory hosts may say nothing: those behind who asks it wait meanwhile, and the other one may do.
const WITH_OTHER: Duration = Duration::from_secs(1);
/// The epochs of a guest's owner, which outlive its daemon.
pub trait Epochs: Send + Sync {
    /// An epoch higher than any before. It is written down before this returns.
    ///
    /// # Errors
    /// It cannot be written down.
    fn raise(&self) -> std::io::Result<u64>;
}

/// A guest's memory hosts, and in which epoch they are asked.
pub(super) struct Lenders {
    /// By their numbers in the map of missing pages.
    all: RwLock<Vec<Lender>>,
    /// Those that did not answer when they were last asked.
    silent: [AtomicBool; Member::MOST],
    /// Those that have answered again since.
    returned: [AtomicBool; Member::MOST],
    /// Of each number whether its memory hosts lend; held while one that has lost all is asked to lend anew.
    lends: [RwLock<bool>; Holder::MAX_HOSTS],
    guest: u128,
    key: u128,
    chunks: u32,
    epochs: RwLock<Box<dyn Epochs>>,
    epoch: AtomicU64,
}

impl Lenders {
    /// The memory hosts of a guest of so many chunks, in a new epoch.
    pub(super) fn new(
        all: Vec<Lender>,
        (guest, key): (u128, u128),
        chunks: u32,
        epochs: Box<dyn Epochs>,
    ) -> Result<Self, MigrateError> {
        let (all, epochs, epoch) = (RwLock::new(all), RwLock::new(epochs), AtomicU64::new(0));
        let [silent, returned] = [(); 2].map(|()| std::array::from_fn(|_| AtomicBool::new(false)));
        let lends = std::array::from_fn(|_| RwLock::new(true));
        let lenders = Self { all, silent, returned, lends, guest, key, chunks, epochs, epoch };
        lenders.raise()?;
        Ok(lenders)
    }

    /// How many numbers are in use, or have been.
    pub(super) fn count(&self) -> usize {
        self.all().len()
    }

    /// Where a memory host listens.
    pub(super) fn peer(&self, member: Member) -> String {
        self.all()[member.number].member(member.which).peer
    }

    /// Those that have the pages of a number; whoever answered when it was last asked comes before one that did not.
    pub(super) fn members(&self, number: usize) -> Vec<Member> {
        let count = self.all().get(number).map_or(0, Lender::count);
        let mut members: Vec<_> = (0..count).map(|which| Member { number, which }).collect();
        members.sort_by_key(|member| self.is_silent(*member));
        members
    }

    /// Whether a memory host did not answer when it was last asked.
    pub(super) fn is_silent(&self, member: Member) -> bool {
        self.silent[member.index()].load(Ordering::Acquire)
    }

    /// Notes whether a memory host has answered.
    fn heard(&self, member: Member, is_silent: bool) {
        // Before anybody takes it for one that answers.
        if !is_silent && self.is_silent(member) {
            self.note_return(member);
        }
        if self.silent[member.index()].swap(is_silent, Ordering::AcqRel) && !is_silent {
            self.note_return(member);
        }
        // Pages and parity are at one host there: nobody else is to wait until that says nothing.
        if is_silent && self.parity_at(member.number).is_some() {
            let other = Member { which: 1 - member.which, ..member };
            self.silent[other.index()].store(true, Ordering::Release);
        }
    }

    /// A memory host has answered again: it may have lost what it had.
    pub(super) fn note_return(&self, member: Member) {
        self.returned[member.index()].store(true, Ordering::Release);
    }

    /// Whether a memory host has answered again, and may have lost what it had.
    pub(super) fn is_to_be_asked(&self, member: Member) -> bool {
        self.returned[member.index()].load(Ordering::Acquire)
    }

    /// Whether a memory host has answered again since this was last asked.
    pub(super) fn has_returned(&self, member: Member) -> bool {
        self.returned[member.index()].swap(false, Ordering::AcqRel)
    }

    /// Whether what this memory host has can be had without it: from its mirror, or by parity.
    pub(super) fn has_other(&self, member: Member) -> bool {
        self.all().get(member.number).is_some_and(|lender| lender.count() > 1)
    }

    /// How the parity lies of what leaves, where there is some.
    pub(super) fn parity(&self) -> Option<Parity> {
        self.all().iter().find(|lender| !lender.leaving)?.parity
    }

    /// How the parity lies of what memory hosts of this number have, where there is some.
    pub(super) fn parity_at(&self, number: usize) -> Option<Parity> {
        self.all().get(number)?.parity
    }

    /// Whether there is parity anywhere.
    pub(super) fn has_parity(&self) -> bool {
        self.all().iter().any(|lender| lender.parity.is_some())
    }

    /// Whether a memory host is leaving, or has left.
    pub(super) fn is_leaving(&self, number: usize) -> bool {
        self.all().get(number).is_none_or(|lender| lender.leaving)
    }

    /// Gives a number to a memory host: the next one, or that of a host which has left. Connections to that one are not
    /// taken for any to this: the epoch is another.
    pub(super) fn put(&self, number: usize, lender: Lender) -> Result<(), MigrateError> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if number > all.len() {
            return Err(MigrateError::Bug("a memory host with a number that is not the next one"));
        }
        match all.get_mut(number) {
            Some(known) => *known = lender,
            None => all.push(lender),
        }
        drop(all);
        self.set_lends(number, true);
        (0..MEMBERS).for_each(|which| self.silent[Member { number, which }.index()].store(false, Ordering::Release));
        self.raise()
    }

    /// Gives places of a number to another memory host, which has nothing of the guest. `lender` is the number's memory
    /// hosts as they are from then on.
    pub(super) fn take_place(&self, members: &[Member], number: usize, lender: Lender) -> Result<(), MigrateError> {
        // Nobody calls it in an epoch before this one.
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all[number] = lender;
        for member in members {
            // As one that is back and has lost all that it had.
            self.note_return(*member);
            self.silent[member.index()].store(false, Ordering::Release);
        }
        self.raise()
    }

    /// Says that a memory host is leaving, or is not, and lends.
    pub(super) fn set_leaving(&self, number: usize, leaving: bool) {
        if !leaving {
            self.set_lends(number, true);
        }
        if let Some(lender) = self.all.write().unwrap_or_else(PoisonError::into_inner).get_mut(number) {
            lender.leaving = leaving;
        }
    }

    /// The memory hosts of a number have nothing of the guest any more, and are about to be given back what they lent:
    /// nobody borrows from them when this returns, nor later.
    pub(super) fn see_off(&self, number: usize) {
        self.set_lends(number, false);
    }

    fn set_lends(&self, number: usize, lends: bool) {
        *self.lends[number].write().unwrap_or_else(PoisonError::into_inner) = lends;
    }

    /// Whether the memory hosts of a number lend: not once they were [seen off](Self::see_off).
    pub(super) fn lends(&self, number: usize) -> bool {
        *self.lends_held(number)
    }

    fn lends_held(&self, number: usize) -> RwLockReadGuard<'_, bool> {
        self.lends[number].read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new epoch: once a memory host has heard of it, nothing that was sent before arrives there.
    pub(super) fn raise(&self) -> Result<(), MigrateError> {
        let epoch = self.epochs.read().unwrap_or_else(PoisonError::into_inner).raise();
        let epoch = epoch.map_err(MigrateError::host("writing down the epoch of a guest's owner"))?;
        // Two that raise at once: the higher one counts.
        self.epoch.fetch_max(epoch, Ordering::AcqRel);
        Ok(())
    }

    /// The same, by these epochs from now on.
    pub(super) fn raise_by(&self, epochs: Box<dyn Epochs>) -> Result<(), MigrateError> {
        *self.epochs.write().unwrap_or_else(PoisonError::into_inner) = epochs;
        self.raise()
    }

    /// The epoch in which memory hosts are asked.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Calls a memory host that lends. One that has lost all that it had, and what it lent with it, lends anew.
    fn open(&self, member: Member, epoch: u64) -> Result<MemoryHost, StoreError> {
        match self.reach(member, epoch) {
            Err(StoreError::Refused(Refusal::Closed)) => {}
            reached => return reached,
        }
        let (lender, claim) = self.call(member, epoch);
        let lends = self.lends_held(member.number);
        if !*lends {
            return Err(Refusal::LendsNothing.into());
        }
        // Nobody relies on what it had.
        self.note_return(member);
        lender.borrow(claim, self.chunks)
    }

    /// The same, and nothing is borrowed.
    fn reach(&self, member: Member, epoch: u64) -> Result<MemoryHost, StoreError> {
        if !self.lends(member.number) {
            return Err(Refusal::LendsNothing.into());
        }
        let (lender, claim) = self.call(member, epoch);
        lender.reach(claim, self.chunks)
    }

    /// Calls a memory host for the guest's owner, which this host was.
    pub(super) fn reach_for_owner(&self, number: usize, epoch: u64) -> Result<MemoryHost, StoreError> {
        let member = Member { number, which: 0 };
        let is_known = self.all().get(number).is_some_and(|lender| !lender.leaving);
        if !is_known {
            return Err(MigrateError::Reply("pages for a memory host that was not named").into());
        }
        let (lender, claim) = self.call(member, epoch);
        lender.reach(claim, self.chunks)
    }

    /// Whom to call, and as whom.
    fn call(&self, member: Member, epoch: u64) -> (Lender, Claim) {
        let lender = self.all()[member.number].member(member.which);
        (lender, Claim { guest: self.guest, key: self.key, epoch })
    }

    fn all(&self) -> RwLockReadGuard<'_, Vec<Lender>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connections of one thread.
pub(super) struct Lines<'a> {
    lenders: &'a Lenders,
    lines: Vec<Option<(u64, MemoryHost)>>,
}

impl<'a> Lines<'a> {
    /// None yet.
    pub(super) fn new(lenders: &'a Lenders) -> Self {
        Self { lenders, lines: (0..Member::MOST).map(|_| None).collect() }
    }

    /// Connects to a memory host that will be asked, if it can be reached. It lends nothing for that: whoever comes
    /// late may find that it was given back all it had lent, here or by the guest's next host.
    pub(super) fn connect(&mut self, member: Member) {
        let epoch = self.lenders.epoch();
        let reached = self.lenders.reach(member, epoch);
        self.lenders.heard(member, matches!(&reached, Err(StoreError::Connection(_))));
        self.lines[member.index()] = reached.ok().map(|host| (epoch, host));
    }

    /// Asks a memory host, in the epoch that is in force here: once more where another thread has raised it meanwhile,
    /// since nothing was done then. A connection that fails, or that is of no use any more, is given up: the next call
    /// opens another one.
    pub(super) fn ask<T>(
        &mut self,
        member: Member,
        mut ask: impl FnMut(&mut MemoryHost) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        loop {
            let epoch = self.lenders.epoch();
            let answer = self.ask_in(epoch, member, &mut ask);
            self.lenders.heard(member, matches!(&answer, Err(StoreError::Connection(_))));
            let is_fenced = matches!(&answer, Err(StoreError::Refused(Refusal::Fenced { .. })));
            if !is_fenced || self.lenders.epoch() == epoch {
                return answer;
            }
        }
    }

    /// Asks a memory host that answers, and does not wait; returns whether it was asked. [`answer`](Self::answer) is to
    /// be called for it before it is asked anything else.
    pub(super) fn ask_ahead(
        &mut self,
        member: Member,
        ask: impl FnOnce(&mut MemoryHost) -> Result<(), StoreError>,
    ) -> bool {
        !self.lenders.is_silent(member) && self.ask_in(self.lenders.epoch(), member, ask).is_ok()
    }

    /// What a memory host says that was [asked ahead](Self::ask_ahead). Where there is no answer whoever needs it asks
    /// again.
    pub(super) fn answer<T>(
        &mut self,
        member: Member,
        answer: impl FnOnce(&mut MemoryHost) -> Result<T, StoreError>,
    ) -> Option<T> {
        // Over the connection that the question went over, whatever the epoch is now.
        let (asked_in, _) = self.lines[member.index()].as_ref()?;
        self.ask_in(*asked_in, member, answer).ok()
    }

    fn ask_in<T>(
        &mut self,
        epoch: u64,
        member: Member,
        ask: impl FnOnce(&mut MemoryHost) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let line = &mut self.lines[member.index()];
        if line.as_ref().is_none_or(|(of, _)| *of != epoch) {
            *line = Some((epoch, self.lenders.open(member, epoch)?));
        }
        let (_, host) = line.as_mut().expect("it was opened");
        host.wait_for(if self.lenders.has_other(member) { WITH_OTHER } else { ANSWER_TIMEOUT });
        let answer = ask(host);
        let is_over = match &answer {
            Err(StoreError::Refused(refusal)) => matches!(refusal, Refusal::Fenced { .. } | Refusal::Closed),
            Err(StoreError::Connection(_)) => true,
            Ok(_) => false,
        };
        if is_over {
            *line = None;
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;

    use sterna_protocol::layout::ChunkIndex;
    use sterna_protocol::store::most_bytes;

    use super::*;
    use crate::store::Store;
    use crate::store::serve::serve;
    use crate::transport::answer;

    const CHUNKS: u32 = 2;
    const FIRST: Member = Member { number: 0, which: 0 };

    struct Counter(AtomicU64);

    impl Epochs for Counter {
        fn raise(&self) -> std::io::Result<u64> {
            Ok(self.0.fetch_add(1, Ordering::AcqRel) + 1)
        }
    }

    /// Starts a host that lends; where it listens.
    fn lending(directory: &std::path::Path) -> String {
        let store = Store::open(directory, "lender".into(), most_bytes(CHUNKS)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap().to_string();
        let store = Arc::new(store);
        std::thread::spawn(move || {
            for call in listener.incoming() {
                let (call, store) = (call.unwrap(), Arc::clone(&store));
                std::thread::spawn(move || {
                    let (connection, hello) = answer(call, None).unwrap();
                    let _ = serve(connection, hello.key, &store, || u64::MAX);
                });
            }
        });
        peer
    }

    fn lender(directory: &std::path::Path) -> Lender {
        Lender {
            peer: lending(directory),
            mirror: None,
            parity: None,
            once: Default::default(),
            credentials: None,
            bytes: most_bytes(CHUNKS),
            leaving: false,
        }
    }

    #[test]
    fn who_was_seen_off_is_not_called_until_its_number_is_given_again() {
        let directory = tempfile::tempdir().unwrap();
        let lender = lender(directory.path());
        let lenders = Lenders::new(vec![lender.clone()], (7, 8), CHUNKS, Box::new(Counter(AtomicU64::new(0)))).unwrap();
        lenders.see_off(FIRST.number);
        let refused = Lines::new(&lenders).ask(FIRST, |_| Ok(()));
        assert!(matches!(refused, Err(StoreError::Refused(Refusal::LendsNothing))), "{refused:?}");
        assert!(!lenders.lends(FIRST.number) && !lenders.is_silent(FIRST));
        lenders.put(FIRST.number, lender).unwrap();
        assert!(Lines::new(&lenders).ask(FIRST, |_| Ok(())).is_ok());
    }

    #[test]
    fn a_host_that_does_not_answer_for_pages_does_not_for_parity_and_a_mirror_may() {
        let directory = tempfile::tempdir().unwrap();
        let nobody = |lender: Lender| Lender { peer: "127.0.0.1:1".into(), ..lender };
        let with_parity = Lender { parity: Some(Parity::new((2, 3), 1)), ..nobody(lender(directory.path())) };
        let with_mirror = Lender { mirror: Some("127.0.0.1:2".into()), ..with_parity.clone() };
        for (lender, is_one) in [(with_parity, true), (Lender { parity: None, ..with_mirror }, false)] {
            let counter = Box::new(Counter(AtomicU64::new(0)));
            let lenders = Lenders::new(vec![lender], (7, 8), CHUNKS, counter).unwrap();
            assert!(Lines::new(&lenders).ask(FIRST, |_| Ok(())).is_err());
            assert_eq!(lenders.is_silent(Member { which: 1, ..FIRST }), is_one);
        }
    }

    /// A thread that was late connected to one that had just been given back what it lent, by this host or by the
    /// guest's next one, and had it lend for ever. (Seen so.)
    #[test]
    fn who_connects_ahead_of_need_borrows_nothing_and_who_asks_one_that_has_lost_all_does() {
        let directory = tempfile::tempdir().unwrap();
        let lender = lender(directory.path());
        let lenders = Lenders::new(vec![lender.clone()], (7, 8), CHUNKS, Box::new(Counter(AtomicU64::new(0)))).unwrap();
        let is_lent = || {
            let claim = Claim { guest: 7, key: 8, epoch: lenders.epoch() };
            match lender.reach(claim, CHUNKS) {
                Ok(_) => true,
                Err(StoreError::Refused(Refusal::Closed)) => false,
                Err(error) => panic!("{error}"),
            }
        };
        let mut lines = Lines::new(&lenders);
        lines.connect(FIRST);
        assert!(!is_lent() && !lenders.is_silent(FIRST));
        lines.ask(FIRST, |host| host.held(ChunkIndex(0))).unwrap();
        assert!(is_lent());
    }

    #[test]
    fn who_is_fenced_by_another_thread_of_its_own_host_asks_once_more_and_who_is_by_another_host_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let lender = lender(directory.path());
        let owner =
            || Lenders::new(vec![lender.clone()], (7, 8), CHUNKS, Box::new(Counter(AtomicU64::new(0)))).unwrap();
        let (lenders, chunk) = (owner(), ChunkIndex(0));
        let (mut mine, mut others, mut asked) = (Lines::new(&lenders), Lines::new(&lenders), 0);
        let answer = mine.ask(FIRST, |host| {
            asked += 1;
            if asked == 1 {
                lenders.raise().unwrap();
                others.ask(FIRST, |host| host.held(chunk))?;
            }
            host.held(chunk)
        });
        assert!(answer.is_ok_and(|held| held.is_none()));
        assert_eq!(asked, 2);
        // Whoever has a lower epoch than the host has heard of is fenced for good.
        let late = owner();
        let fenced = Lines::new(&late).ask(FIRST, |host| host.held(chunk));
        assert!(matches!(fenced, Err(StoreError::Refused(Refusal::Fenced { current: 2 }))), "{fenced:?}");
    }
}
