//! A machine a part of whose memory is at memory hosts: what is on record of it, and what brings its pages.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sterna_api::split::{self as api, Unused};
use sterna_api::units::milliseconds;
use sterna_api::{Blame, Code, Problem};
use sterna_engine::paging::Pager;
use sterna_engine::split::room::Room;
use sterna_engine::split::{Account, Epochs, Split};

use super::borrowed::{Borrowed, Place};
use crate::state::{read_record, write_record};

/// A thread of QEMU that waits for so long waits for a memory host that has something the matter.
const LONG: Duration = Duration::from_secs(1);

/// The record of a machine a part of whose memory is, or may be, at memory hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitRecord {
    /// Its memory hosts.
    pub borrowed: Borrowed,
    /// The most of its memory that may be here, bytes.
    pub here_bytes: u64,
    /// Where pages belong that the guest does not use.
    #[serde(default)]
    pub unused: Unused,
    /// Which pages are where: a file in memory, so that a daemon started anew goes on. Empty until the first may leave.
    pub map: PathBuf,
    /// All of it is being brought here.
    #[serde(default)]
    pub merging: bool,
}

impl SplitRecord {
    /// How much of the machine may be here.
    #[must_use]
    pub fn room(&self) -> Room {
        Room::of(self.here_bytes).with(self.unused)
    }
}

/// The epochs of a machine's owner: a file in the machine's directory, which outlives this host as memory hosts do. It
/// stays where the machine is merged, so that no epoch of it comes twice.
#[derive(Debug)]
pub struct EpochFile {
    path: PathBuf,
}

/// How far the epochs of one owner are from those of the next: no owner raises its own as often, nor those that follow
/// its own when it gives back what was lent.
const OWNERS: u64 = 1 << 40;

/// Held while an epoch is raised: who exchanges a machine's memory hosts raises that of its owner, and so do the
/// threads that ask them.
static RAISING: Mutex<()> = Mutex::new(());

impl EpochFile {
    /// That of the machine with this directory.
    #[must_use]
    pub fn of(dir: &Path) -> Self {
        Self { path: dir.join("epoch.json") }
    }

    /// The last one that was raised, and the one that those of the guest's next owner follow. Where it never gets the
    /// guest, another one may be the next.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn with_next_owners(&self) -> io::Result<(u64, u64)> {
        let now = read_record::<u64>(&self.path)?.unwrap_or(0);
        Ok((now, (now / OWNERS + 1).saturating_mul(OWNERS)))
    }

    /// This host's own follow this one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn follow(&self, epoch: u64) -> io::Result<()> {
        write_record(&self.path, &epoch)
    }

    /// The guest is this host's, whoever may have been its next owner: that one's are older from now on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn pass_over(&self) -> io::Result<()> {
        let _alone = RAISING.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, next) = self.with_next_owners()?;
        self.follow(next.saturating_add(OWNERS))
    }
}

impl Epochs for EpochFile {
    fn raise(&self) -> io::Result<u64> {
        let _alone = RAISING.lock().unwrap_or_else(PoisonError::into_inner);
        let next = read_record::<u64>(&self.path)?.unwrap_or(0) + 1;
        write_record(&self.path, &next)?;
        Ok(next)
    }
}

/// What brings a machine's pages back and sends others. It is in the machine's entry from the moment that a page may be
/// away.
pub struct Remote {
    /// Its faults, its RAM, and which pages are away.
    pub pager: Arc<Pager>,
    /// Its memory hosts, once they all have answered a daemon that found the machine split.
    split: OnceLock<Arc<Split>>,
    /// Why they have not.
    unanswered: Mutex<Option<Problem>>,
    /// The guest may be another host's by now: nothing is asked of them until that is known.
    held: AtomicBool,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages are away", self.pager.away())
    }
}

impl Remote {
    /// Of a machine that begins to be split.
    #[must_use]
    pub fn begun(split: Arc<Split>) -> Arc<Self> {
        let remote = Self::found(Arc::clone(split.pager()));
        let _ = remote.split.set(split);
        remote
    }

    /// Of a machine that was found split: its memory hosts have not been asked yet.
    #[must_use]
    pub fn found(pager: Arc<Pager>) -> Arc<Self> {
        Arc::new(Self { pager, split: OnceLock::new(), unanswered: Mutex::default(), held: AtomicBool::new(false) })
    }

    /// Its memory hosts have all answered.
    pub fn answered(&self, split: Arc<Split>) {
        let _ = self.split.set(split);
        *self.unanswered() = None;
    }

    /// They have not, and why.
    pub fn not_answered(&self, why: Problem) {
        *self.unanswered() = Some(why);
    }

    /// Its guest may be another host's: nothing is asked of its memory hosts until it [goes on](Self::goes_on) here.
    pub fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Whether its guest may be another host's.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Its guest is this host's, and goes on here: it may need its pages at once.
    pub fn goes_on(&self) {
        if let Some(split) = self.split.get() {
            split.go_on();
        }
        self.held.store(false, Ordering::Release);
    }

    /// What asks its memory hosts.
    ///
    /// # Errors
    /// A [`Problem`]: one of them has not answered yet since this daemon began.
    pub fn split(&self) -> Result<&Arc<Split>, Problem> {
        self.split.get().ok_or_else(|| {
            let message = "not all of its memory hosts have answered since the daemon was started";
            let mut problem = Problem::new(Code::PeerUnreachable, Blame::Peer, message);
            problem.cause.extend(self.unanswered().as_ref().map(Problem::with_causes));
            problem.hint("it goes on as soon as they do; 'sterna show' says which it waits for")
        })
    }

    /// Nobody borrows from its memory hosts any more: all pages are here, and what was lent is about to be given back.
    pub fn see_off(&self) {
        self.split.get().into_iter().for_each(|split| split.see_off_all());
    }

    /// Ends it, where all pages are here or the guest has ended. It may have to wait for a memory host that is silent.
    pub fn end(&self) {
        match self.split.get() {
            Some(split) => split.end(),
            None => self.pager.end(),
        }
    }

    /// As the API shows it.
    #[must_use]
    pub fn show(&self, record: &SplitRecord) -> api::Split {
        let split = self.split.get();
        let hosts = &record.borrowed.hosts;
        let waits = self.pager.longest_waits().into_iter().filter(|(_, waited)| *waited >= LONG);
        let waiting = waits.filter_map(|(number, waited)| {
            let why = match split {
                Some(split) => split.failing(number),
                None => self.unanswered().clone(),
            };
            let (peer, why) = (hosts.get(number)?.name(), why.as_ref().map(Problem::with_causes));
            Some(api::Waiting { peer, ms: waited.as_secs_f64() * 1e3, why })
        });
        let Account { out_pages, unsent_pages, in_pages, paced, .. } =
            split.map(|split| split.account()).unwrap_or_default();
        api::Split {
            here_bytes: record.here_bytes,
            away_pages: self.pager.away(),
            memory: record.borrowed.lending(),
            redundancy: record.borrowed.redundancy(),
            unused: record.unused,
            silent: split.map(|split| split.silent()).unwrap_or_default(),
            alone_pages: split.map(|split| split.at_one_alone()).unwrap_or_default(),
            leaving: record
                .borrowed
                .leaving
                .iter()
                .filter_map(|number| hosts.get(*number))
                .flat_map(Place::hosts)
                .collect(),
            waiting: waiting.collect(),
            stuck: split.and_then(|split| split.stuck()).as_ref().map(Problem::with_causes),
            out_pages: out_pages + unsent_pages,
            in_pages,
            paced_pages: paced.pages,
            forced_pages: paced.forced,
            paced_longest_ms: milliseconds(paced.longest),
        }
    }

    fn unanswered(&self) -> MutexGuard<'_, Option<Problem>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same in words for people.
#[must_use]
pub fn describe(split: &api::Split) -> String {
    let pages = match split.away_pages {
        0 => "all of it is here now".into(),
        1 => "1 page of it is at memory hosts".into(),
        pages => format!("{pages} pages of it are at memory hosts"),
    };
    let waits = split.waiting.iter().map(|waiting| {
        let why = waiting.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        format!("; waiting for {} for {:.0} s{why}", waiting.peer, waiting.ms / 1e3)
    });
    let stuck = split.stuck.iter().map(|why| format!("; more of it is here than may be, and cannot leave: {why}"));
    let paced = (split.paced_pages > 0).then(|| {
        let (pages, longest, forced) = (split.paced_pages, split.paced_longest_ms, split.forced_pages);
        let waited = if pages == 1 { "1 page".into() } else { format!("{pages} pages") };
        format!("; {waited} waited for room, {longest:.0} ms at most, and {forced} came in without")
    });
    let unused = (split.unused == Unused::Ignore).then(|| "; memory that it does not use counts, too".into());
    let leaving = split.leaving.iter().map(|host| format!("; {} is being emptied", host.peer));
    let has_parity = split.redundancy == api::Redundancy::Parity;
    let instead = if has_parity { "what it has can be had from the others" } else { "another one has the same pages" };
    let silent = split.silent.iter().map(|peer| format!("; {peer} does not answer, but {instead}"));
    let alone = (split.alone_pages > 0).then(|| {
        let (pages, them) = match split.alone_pages {
            1 => ("1 page is".into(), "it"),
            pages => (format!("{pages} pages are"), "them"),
        };
        match has_parity {
            true => format!("; {pages} without parity, until that is made anew"),
            false => format!("; {pages} at one of two memory hosts alone, until the other one has been given {them}"),
        }
    });
    let more = unused.into_iter().chain(leaving).chain(silent).chain(alone).chain(waits).chain(stuck).chain(paced);
    more.fold(pages, |text, more: String| text + &more)
}

/// A request that needs all of a machine's memory here.
#[must_use]
pub fn is_split(name: &str) -> Problem {
    let message = format!("'{name}' cannot do that now: a part of its memory is at memory hosts");
    Problem::new(Code::Split, Blame::Request, message)
        .hint(format!("'sterna merge {name}' brings it here, where there is room"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_engine::split::Parity;

    #[test]
    fn no_epoch_comes_twice_whoever_asks_and_however_often_the_daemon_dies() {
        let dir = tempfile::tempdir().unwrap();
        let file = || EpochFile::of(dir.path());
        let mut epochs: Vec<u64> = std::thread::scope(|scope| {
            let askers: Vec<_> = (0..4).map(|_| scope.spawn(|| [(); 8].map(|()| file().raise().unwrap()))).collect();
            askers.into_iter().flat_map(|asker| asker.join().unwrap()).collect()
        });
        epochs.sort_unstable();
        assert_eq!(epochs, (1..=32).collect::<Vec<_>>());
        assert_eq!(EpochFile::of(dir.path()).raise().unwrap(), 33);
        // The next owner's come after any of this one's, and this one's after those where the guest stays here by a
        // person's word.
        let (now, next) = EpochFile::of(dir.path()).with_next_owners().unwrap();
        assert_eq!(now, 33);
        let there = tempfile::tempdir().unwrap();
        EpochFile::of(there.path()).follow(next).unwrap();
        assert_eq!(EpochFile::of(there.path()).raise().unwrap(), OWNERS + 1);
        assert_eq!(EpochFile::of(there.path()).with_next_owners().unwrap(), (OWNERS + 1, 2 * OWNERS));
        file().pass_over().unwrap();
        assert_eq!(file().raise().unwrap(), 2 * OWNERS + 1);
        // What cannot be read is no reason to begin anew: that epoch may have been used.
        std::fs::write(dir.path().join("epoch.json"), "?").unwrap();
        assert!(EpochFile::of(dir.path()).raise().is_err());
    }

    #[test]
    fn a_record_is_read_as_it_was_written_with_numbers_of_any_size() {
        let borrowed = Borrowed {
            guest: u128::MAX,
            key: u128::MAX - 7,
            chunks: 3,
            hosts: vec![Place {
                peer: "b:1".into(),
                bytes: 4,
                mirror: Some("c:1".into()),
                once: [None, Some("d:1".into())],
                parity: Some(Parity::new((2, 3), 4)),
            }],
            leaving: [0].into(),
            gone: [1].into(),
            parities: 1,
        };
        let record =
            SplitRecord { borrowed, here_bytes: 5, unused: Unused::Track, map: "/ram/x".into(), merging: true };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write_record(&path, &record).unwrap();
        assert_eq!(read_record(&path).unwrap(), Some(record));
    }

    #[test]
    fn words_say_what_is_away_and_who_is_waited_for() {
        let waiting = |why: Option<&str>| api::Waiting { peer: "b:1".into(), ms: 2400.0, why: why.map(Into::into) };
        let split = |away_pages, waiting, stuck: Option<&str>| api::Split {
            here_bytes: 1,
            away_pages,
            memory: Vec::new(),
            waiting,
            stuck: stuck.map(Into::into),
            ..api::Split::default()
        };
        assert_eq!(describe(&split(0, vec![], None)), "all of it is here now");
        let text = describe(&split(3, vec![waiting(Some("no answer"))], Some("b:1 is full")));
        let beginning = "3 pages of it are at memory hosts; waiting for b:1 for 2 s: no answer; more of it is here";
        assert!(text.starts_with(beginning) && text.ends_with("b:1 is full"), "{text}");
        let paced = api::Split { paced_pages: 9, forced_pages: 2, paced_longest_ms: 100.4, ..split(0, vec![], None) };
        assert!(
            describe(&paced).ends_with("; 9 pages waited for room, 100 ms at most, and 2 came in without"),
            "{paced:?}"
        );
        let alone = api::Split { silent: vec!["b:1".into()], alone_pages: 1, ..split(5, vec![], None) };
        let end = "b:1 does not answer, but another one has the same pages; \
                   1 page is at one of two memory hosts alone, until the other one has been given it";
        assert!(describe(&alone).ends_with(end), "{}", describe(&alone));
        let parity = api::Split { redundancy: api::Redundancy::Parity, ..alone.clone() };
        let end = "b:1 does not answer, but what it has can be had from the others; \
                   1 page is without parity, until that is made anew";
        assert!(describe(&parity).ends_with(end), "{}", describe(&parity));
        let more = describe(&api::Split { alone_pages: 2, ..alone });
        assert!(
            more.ends_with("; 2 pages are at one of two memory hosts alone, until the other one has been given them")
        );
        let one = api::Split { paced_pages: 1, forced_pages: 0, ..paced };
        assert!(describe(&one).contains("; 1 page waited for room"), "{one:?}");
    }
}
