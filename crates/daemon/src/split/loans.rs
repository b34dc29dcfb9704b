//! What memory hosts have lent to machines that are not split any more, or are not there any more: it is given back, in
//! the background, over restarts of this daemon, until each has been told.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sterna_engine::split::loans::give_back;
use sterna_engine::split::{Epochs, Lender};
use sterna_engine::transport::credentials::Credentials;
use sterna_sys::host::random_u128;

use crate::machines::borrowed::{Borrowed, Place};
use crate::machines::record::VmRecord;
use crate::machines::split::EpochFile;
use crate::state::{read_record, remove_half_written, write_record};

/// How long memory hosts are left alone that could not be told.
const RETRY: Duration = Duration::from_secs(5);

/// How long who would borrow again waits for a memory host to be told that it has its memory back.
const TOLD: Duration = Duration::from_secs(5);

/// How far beyond its owner's epoch a debt's is: threads that still look for pages of a guest which has ended may raise
/// that a few times more, and nobody owns the guest after this.
const BEYOND: u64 = 1 << 32;

/// What was lent to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Debt {
    /// The machine, for people.
    vm: String,
    /// As whom it is given back: an epoch above any in which pages were sent.
    epoch: u64,
    /// The memory hosts that have not been told yet.
    borrowed: Borrowed,
    /// People have been told that not all could be.
    #[serde(skip)]
    warned: bool,
    /// Where this is written down.
    #[serde(skip)]
    path: PathBuf,
}

/// What is owed to memory hosts.
#[derive(Debug)]
pub struct Loans {
    dir: PathBuf,
    credentials: Option<Arc<Credentials>>,
    owed: Mutex<Owed>,
    called: Condvar,
    /// Somebody has been told.
    told: Condvar,
}

#[derive(Debug, Default)]
struct Owed {
    debts: Vec<Debt>,
    /// Somebody has called for them to be paid since they were last.
    due: bool,
}

impl Owed {
    /// Whether one of this place has memory of a guest that it was not told is its own again, whatever for: it may have
    /// none left to lend until then.
    fn owes(&self, guest: u128, place: &Place) -> bool {
        let of_guest = self.debts.iter().filter(|debt| debt.borrowed.guest == guest);
        of_guest.flat_map(|debt| &debt.borrowed.hosts).any(|host| place.members().any(|one| one.peer == host.peer))
    }
}

impl Loans {
    /// Nothing is owed yet; debts are written down in this directory.
    #[must_use]
    pub fn new(dir: PathBuf, credentials: Option<Arc<Credentials>>) -> Self {
        remove_half_written(&dir);
        Self { dir, credentials, owed: Mutex::default(), called: Condvar::new(), told: Condvar::new() }
    }

    /// Takes up what an earlier daemon owed, but for what was lent to machines that are split still: that daemon died
    /// before it wrote that they are not.
    pub fn load(&self, machines: &[VmRecord]) {
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match read_record::<Debt>(&path) {
                Ok(Some(debt)) if lends_still(machines, &debt.borrowed) => remove(&path),
                Ok(Some(debt)) => self.lock().debts.push(Debt { path, ..debt }),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(
                        path = %path.display(), %error,
                        "what memory hosts have lent to a machine cannot be told: 'sterna lent' there shows it"
                    );
                }
            }
        }
        self.lock().due = true;
    }

    /// Begins to give back what is owed, on a thread of its own, for as long as this daemon runs.
    pub fn begin(self: &Arc<Self>) {
        let loans = Arc::clone(self);
        let pay = move || {
            loop {
                loans.wait();
                loans.pay_each();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("loans".into()).spawn(pay) {
            tracing::error!(%error, "cannot start the thread that gives back what memory hosts have lent");
        }
    }

    /// Notes what a machine was lent, where it was: its directory has the epoch of its owner. It is given back from the
    /// next [`pay`](Self::pay) on.
    pub fn owe(&self, record: &VmRecord, dir: &Path) {
        let Some(split) = &record.split else { return };
        self.owe_hosts(record, dir, split.borrowed.lent().flat_map(|(_, place)| place.loans()).collect());
    }

    /// The same of some of its memory hosts, without their mirrors.
    pub fn owe_hosts(&self, record: &VmRecord, dir: &Path, hosts: Vec<Place>) {
        let Some(split) = record.split.as_ref().filter(|_| !hosts.is_empty()) else { return };
        let epoch = EpochFile::of(dir).raise().map_or_else(
            |error| {
                tracing::warn!(vm = %record.name, %error, "cannot tell the epoch of the guest's owner");
                u64::MAX
            },
            |epoch| epoch.saturating_add(BEYOND),
        );
        let Borrowed { guest, key, chunks, .. } = split.borrowed;
        let borrowed = Borrowed { guest, key, chunks, hosts, ..Borrowed::default() };
        let path = self.dir.join(format!("{guest:032x}-{:016x}.json", random_u128() as u64));
        let debt = Debt { vm: record.name.clone(), epoch, borrowed, warned: false, path };
        if let Err(error) = write_record(&debt.path, &debt) {
            tracing::error!(
                vm = %record.name, %error,
                "cannot write down what memory hosts have lent to it: should this daemon end now, they keep it"
            );
        }
        self.lock().debts.push(debt);
    }

    /// Has a memory host, or both of two, be told that a guest has given back what it lent, and waits for that a
    /// moment: whether it was told.
    #[must_use]
    pub fn has_back(&self, guest: u128, place: &Place) -> bool {
        if !self.lock().owes(guest, place) {
            return true;
        }
        self.pay();
        let waited = self.told.wait_timeout_while(self.lock(), TOLD, |owed| owed.owes(guest, place));
        let (owed, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !owed.owes(guest, place)
    }

    /// As whom memory hosts are called.
    #[must_use]
    pub fn credentials(&self) -> Option<&Arc<Credentials>> {
        self.credentials.as_ref()
    }

    /// Has what is owed be given back now.
    pub fn pay(&self) {
        self.lock().due = true;
        self.called.notify_all();
    }

    /// Until somebody calls, or it is time to try again.
    fn wait(&self) {
        let mut owed = self.lock();
        while !owed.due {
            let waited = if owed.debts.is_empty() {
                self.called.wait(owed).unwrap_or_else(PoisonError::into_inner)
            } else {
                let (waited, time) = self.called.wait_timeout(owed, RETRY).unwrap_or_else(PoisonError::into_inner);
                let mut waited = waited;
                waited.due |= time.timed_out();
                waited
            };
            owed = waited;
        }
        owed.due = false;
    }

    fn pay_each(&self) {
        let debts = self.lock().debts.clone();
        for debt in debts {
            let left = self.pay_one(&debt);
            let mut owed = self.lock();
            let Some(place) = owed.debts.iter().position(|other| other.path == debt.path) else { continue };
            match left {
                Some(left) => owed.debts[place] = left,
                None => {
                    owed.debts.remove(place);
                    remove(&debt.path);
                }
            }
            self.told.notify_all();
        }
    }

    /// What is left of a debt; `None` where everybody has been told.
    fn pay_one(&self, debt: &Debt) -> Option<Debt> {
        let Debt { vm, epoch, borrowed, warned, .. } = debt;
        let is_left = |lender: &Lender| match give_back(lender, borrowed.claim(*epoch), borrowed.chunks) {
            Ok(()) => {
                tracing::info!(vm, peer = lender.peer, "what it lent is given back");
                false
            }
            Err(error) if *warned => {
                tracing::debug!(vm, peer = lender.peer, %error, "not told yet");
                true
            }
            Err(error) => {
                tracing::warn!(
                    vm, peer = lender.peer, %error,
                    "a memory host was not told that it has its memory back: it will be"
                );
                true
            }
        };
        // Each by itself: one with parity is owed twice, and may be back between the two.
        let lenders = borrowed.lenders(self.credentials.as_ref());
        let each = borrowed.hosts.iter().zip(&lenders);
        let hosts = each.filter(|(_, lender)| is_left(lender)).map(|(host, _)| host.clone()).collect();
        let left = Borrowed { hosts, ..borrowed.clone() };
        let left = Debt { borrowed: left, warned: true, ..debt.clone() };
        if left.borrowed != debt.borrowed
            && !left.borrowed.hosts.is_empty()
            && let Err(error) = write_record(&left.path, &left)
        {
            tracing::warn!(vm, %error, "cannot write down which memory hosts have been told: they are told again");
        }
        (!left.borrowed.hosts.is_empty()).then_some(left)
    }

    fn lock(&self) -> MutexGuard<'_, Owed> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one of these lends to the guest still: the daemon died that had written the debt down, before it wrote that
/// it does not.
fn lends_still(machines: &[VmRecord], borrowed: &Borrowed) -> bool {
    let splits = machines.iter().filter_map(|record| record.split.as_ref());
    let mut same = splits.filter(|split| split.borrowed.guest == borrowed.guest);
    same.any(|split| borrowed.hosts.iter().any(|host| split.borrowed.has(host)))
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the record of a debt that is paid");
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use sterna_api::split::{MemoryHost, Redundancy};
    use sterna_engine::split::Part;
    use sterna_engine::store::Store;
    use sterna_engine::store::serve::serve;
    use sterna_engine::transport::answer;
    use sterna_protocol::store::most_bytes;

    use super::*;

    /// A memory host with parity is owed for pages and for parity. It was back between the two, and kept the first for
    /// ever. (Seen so.)
    #[test]
    fn a_memory_host_that_is_back_between_its_two_parts_is_told_of_the_first_as_well() {
        let dir = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap().to_string();
        let store = Arc::new(Store::open(&dir.path().join("lent"), "lender".into(), most_bytes(8)).unwrap());
        std::thread::spawn(move || {
            // It is away for the first call.
            for call in listener.incoming().skip(1) {
                let (call, store) = (call.unwrap(), Arc::clone(&store));
                std::thread::spawn(move || {
                    let (connection, hello) = answer(call, None).unwrap();
                    let _ = serve(connection, hello.key, &store, || u64::MAX);
                });
            }
        });
        let memory = [peer, "c:1".into(), "d:1".into()].map(|peer| MemoryHost { peer, bytes: most_bytes(3) });
        let places = Place::of(&memory, Redundancy::Parity).unwrap();
        let borrowed =
            Borrowed { guest: 1, key: 2, chunks: 3, hosts: places[0].loans().collect(), ..Borrowed::default() };
        let path = dir.path().join("debt.json");
        let debt = Debt { vm: "m".into(), epoch: 1, borrowed, warned: false, path };
        let loans = Loans::new(dir.path().into(), None);
        let left = loans.pay_one(&debt).expect("it was away");
        let parts: Vec<_> =
            left.borrowed.hosts.iter().filter_map(|host| host.parity).map(|parity| parity.part).collect();
        assert_eq!(parts, [Part::Pages]);
        assert!(loans.pay_one(&left).is_none());
    }
}
