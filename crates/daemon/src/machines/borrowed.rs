//! A guest's memory hosts, as its machine's record has them.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sterna_api::Problem;
use sterna_api::split::{MemoryHost, Redundancy, Unused};
use sterna_engine::paging::whereabouts::Holder;
use sterna_engine::split::room::Room;
use sterna_engine::split::{Lender, Parity, Part};
use sterna_engine::transport::credentials::Credentials;
use sterna_protocol::spec::{SplitHost, SplitParity, SplitSpec};
use sterna_protocol::store::{Claim, most_bytes};

use crate::problems::invalid;

/// A memory host, or two that have the same pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Where it listens.
    pub peer: String,
    /// What it lends, bytes; its mirror lends the same.
    pub bytes: u64,
    /// Where its mirror listens.
    #[serde(default)]
    pub mirror: Option<String>,
    /// Of it and of its mirror: who was the mirror of each when it was first asked, where that one has been replaced
    /// since.
    #[serde(default)]
    pub once: [Option<String>; 2],
    /// What it has of the parity of other memory hosts' pages.
    #[serde(default)]
    pub parity: Option<Parity>,
}

/// The most chunks of a stripe: of more than so many memory hosts one that has gone would be asked for at each of them.
const WIDEST: usize = 4;

/// Of how many chunks a stripe is made over so many memory hosts.
fn stripe_over(hosts: usize) -> u32 {
    hosts.saturating_sub(1).clamp(1, WIDEST) as u32
}

impl Place {
    /// These memory hosts: each alone, or the first and the second together, the third and the fourth, and so on.
    ///
    /// # Errors
    /// A [`Problem`]: one of them is alone, or lends another amount than its mirror.
    pub fn of(memory: &[MemoryHost], redundancy: Redundancy) -> Result<Vec<Self>, Problem> {
        if redundancy == Redundancy::Parity {
            return Self::with_parity(memory);
        }
        if redundancy == Redundancy::None {
            let alone = |host: &MemoryHost| Self {
                peer: host.peer.clone(),
                bytes: host.bytes,
                mirror: None,
                once: Default::default(),
                parity: None,
            };
            return Ok(memory.iter().map(alone).collect());
        }
        let pairs = memory.chunks(2).map(|pair| match pair {
            [one, other] if one.bytes == other.bytes => {
                let (peer, mirror, once) = (one.peer.clone(), Some(other.peer.clone()), Default::default());
                Ok(Self { peer, bytes: one.bytes, mirror, once, parity: None })
            }
            [one, other] => Err(invalid(format!(
                "memory hosts {} and {} are to have the same pages: they must lend the same",
                one.peer, other.peer
            ))),
            _ => Err(invalid("each page is to be at two memory hosts, which takes an even number of them")),
        });
        pairs.collect()
    }

    fn with_parity(memory: &[MemoryHost]) -> Result<Vec<Self>, Problem> {
        let hosts = memory.len();
        let [first, _, _, ..] = memory else {
            return Err(invalid(
                "parity takes three memory hosts at least: two with pages, and one with what both have",
            ));
        };
        if let Some(other) = memory.iter().find(|host| host.bytes != first.bytes) {
            return Err(invalid(format!(
                "memory hosts {} and {} are to have each other's parity: all must lend the same",
                first.peer, other.peer
            )));
        }
        let stripe = stripe_over(hosts);
        let of = |host: &MemoryHost| {
            // In whole chunks: of what is left over nobody could use anything.
            let chunks = host.bytes / most_bytes(1);
            let for_parity = chunks.div_ceil(u64::from(stripe) + 1);
            let parity = Some(Parity::new((stripe, hosts), for_parity * most_bytes(1)));
            let bytes = (chunks - for_parity) * most_bytes(1);
            Self { peer: host.peer.clone(), bytes, mirror: None, once: Default::default(), parity }
        };
        Ok(memory.iter().map(of).collect())
    }

    /// How much each of so many memory hosts lends where all have room for so many bytes of pages: in whole chunks,
    /// with what goes into parity or copies.
    #[must_use]
    pub fn bytes_of_each(hosts: usize, redundancy: Redundancy, pages: u64) -> u64 {
        let places = if redundancy == Redundancy::Mirrored { hosts / 2 } else { hosts };
        let chunks = pages.div_ceil(most_bytes(1)).div_ceil(places.max(1) as u64);
        let for_parity = match redundancy {
            Redundancy::Parity => chunks.div_ceil(u64::from(stripe_over(hosts))),
            _ => 0,
        };
        (chunks + for_parity) * most_bytes(1)
    }

    /// What is borrowed of it: of one with parity that for pages and that for parity, else as
    /// [`members`](Self::members).
    pub fn loans(&self) -> impl Iterator<Item = Self> {
        let shares = self.parity.filter(|parity| parity.part == Part::Both).map(|parity| {
            let part = |part, bytes| Self { bytes, parity: Some(Parity { part, ..parity }), ..self.clone() };
            [part(Part::Pages, self.bytes), part(Part::Parity, parity.bytes)]
        });
        let whole = if shares.is_some() { None } else { Some(self.members()) };
        shares.into_iter().flatten().chain(whole.into_iter().flatten())
    }

    /// The memory hosts that this is, one by one: of each its mirror is the other.
    pub fn members(&self) -> impl Iterator<Item = Self> {
        let turned = |mirror: &String| {
            let [first, second] = self.once.clone();
            Self { peer: mirror.clone(), mirror: Some(self.peer.clone()), once: [second, first], ..self.clone() }
        };
        std::iter::once(self.clone()).chain(self.mirror.as_ref().map(turned))
    }

    /// Whether it is the same, however its two are named.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let names = |place: &Self| place.members().map(|member| member.peer).collect::<BTreeSet<_>>();
        names(self) == names(other) && self.parity.is_some() == other.parity.is_some()
    }

    /// The same two, but for another one in the place of one: the first (0) or the second (1). Of one with parity the
    /// same for another. `None` where it is neither.
    #[must_use]
    pub fn with(&self, which: usize, other: &str) -> Option<Self> {
        if self.parity.is_some() {
            return (which == 0).then(|| Self { peer: other.to_owned(), ..self.clone() });
        }
        let mirror = self.mirror.clone()?;
        let (mut names, mut once) = ([self.peer.clone(), mirror], self.once.clone());
        let gone = std::mem::replace(names.get_mut(which)?, other.to_owned());
        once[which] = None;
        // The one that stays has the guest under the name of the one that has gone, or of an earlier one.
        once[1 - which].get_or_insert(gone);
        let [peer, mirror] = names;
        Some(Self { peer, mirror: Some(mirror), once, ..self.clone() })
    }

    /// As it is called.
    fn lender(&self, credentials: Option<&Arc<Credentials>>, leaving: bool) -> Lender {
        Lender {
            peer: self.peer.clone(),
            mirror: self.mirror.clone(),
            once: self.once.clone(),
            parity: self.parity,
            credentials: credentials.cloned(),
            bytes: self.bytes,
            leaving,
        }
    }

    /// What tells a guest's number there from its numbers elsewhere.
    fn number_there(&self) -> u128 {
        self.lender(None, false).number(0)
    }

    /// Whether one of it is this memory host, not its mirror, and has the guest under the same number.
    #[must_use]
    pub fn has(&self, one: &Self) -> bool {
        self.loans().any(|mine| mine.number_there() == one.number_there())
    }

    /// As the API shows it.
    pub fn hosts(&self) -> impl Iterator<Item = MemoryHost> {
        self.members().map(|member| MemoryHost { bytes: member.all_bytes(), peer: member.peer })
    }

    /// What it lends in all, bytes.
    #[must_use]
    pub fn all_bytes(&self) -> u64 {
        self.bytes + self.parity.filter(|parity| parity.part == Part::Both).map_or(0, |parity| parity.bytes)
    }

    /// Which of the guest's parities it has, one after the other, where it has some.
    fn turn(&self) -> Option<u32> {
        self.parity.map(|parity| parity.turn)
    }

    /// Its name, for people.
    #[must_use]
    pub fn name(&self) -> String {
        self.members().map(|member| member.peer).collect::<Vec<_>>().join(" and ")
    }
}

/// A guest's memory hosts, and who it is to them: what its machine's record says, and that of a debt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowed {
    /// The guest's number there.
    pub guest: u128,
    /// What its owners alone know.
    pub key: u128,
    /// How many chunks its memory has.
    pub chunks: u32,
    /// The memory hosts, by the numbers that the map of missing pages has for them.
    pub hosts: Vec<Place>,
    /// The numbers of those that are given nothing more, and are being emptied.
    #[serde(default)]
    pub leaving: BTreeSet<usize>,
    /// The numbers of those that have nothing any more, and have been told so or are to be. Another may have the
    /// number.
    #[serde(default)]
    pub gone: BTreeSet<usize>,
    /// How many parities there have been, one after the other.
    #[serde(default)]
    pub parities: u32,
}

/// How parity lies over a guest's memory hosts, as its former owner says it.
#[must_use]
pub fn parity_of(said: SplitParity) -> Parity {
    let SplitParity { stripe, hosts, over, turn, bytes } = said;
    Parity { over, turn, ..Parity::new((stripe, hosts as usize), bytes) }
}

impl Borrowed {
    /// The guest's claim in this epoch.
    #[must_use]
    pub fn claim(&self, epoch: u64) -> Claim {
        Claim { guest: self.guest, key: self.key, epoch }
    }

    /// Those that have something of the guest, or may have, with their numbers.
    pub fn lent(&self) -> impl Iterator<Item = (usize, &Place)> {
        self.hosts.iter().enumerate().filter(|(number, _)| !self.gone.contains(number))
    }

    /// Those that are given pages.
    #[must_use]
    pub fn lending(&self) -> Vec<MemoryHost> {
        let lending = self.lent().filter(|(number, _)| !self.leaving.contains(number));
        lending.flat_map(|(_, place)| place.hosts()).collect()
    }

    /// At how many of those each page is.
    #[must_use]
    pub fn redundancy(&self) -> Redundancy {
        let mut lending = self.lent().filter(|(number, _)| !self.leaving.contains(number)).map(|(_, place)| place);
        let redundant = lending.find_map(|place| match (&place.mirror, place.parity) {
            (None, None) => None,
            (Some(_), _) => Some(Redundancy::Mirrored),
            (None, Some(_)) => Some(Redundancy::Parity),
        });
        redundant.unwrap_or_default()
    }

    /// The number of a memory host, or of two.
    #[must_use]
    pub fn number_of(&self, place: &Place) -> Option<usize> {
        self.lent().find(|(_, known)| known.is(place)).map(|(number, _)| number)
    }

    /// Whether this memory host, not its mirror, has something of the guest.
    #[must_use]
    pub fn has(&self, one: &Place) -> bool {
        self.lent().any(|(_, place)| place.has(one))
    }

    /// Whether one that has something of the guest has it under the same number as this one would.
    #[must_use]
    pub fn clashes(&self, place: &Place) -> bool {
        place.loans().any(|one| self.has(&one))
    }

    /// Of two that have the same pages the one that is called so: their number, and whether it is the first (0) or the
    /// second (1). So, too, one that can be done without because of parity: it is the first.
    #[must_use]
    pub fn one_of_two(&self, peer: &str) -> Option<(usize, usize)> {
        let is_redundant = |place: &Place| place.mirror.is_some() || place.parity.is_some();
        let mut two = self.lent().filter(|(number, place)| is_redundant(place) && !self.leaving.contains(number));
        two.find_map(|(number, place)| Some((number, place.members().position(|member| member.peer == peer)?)))
    }

    /// The numbers of those that have what is at all of `wanted`, and nothing else: of those that are given pages, or
    /// were before others were named.
    #[must_use]
    pub fn numbers_of(&self, wanted: &[Place]) -> Option<BTreeSet<usize>> {
        let turns: BTreeSet<_> = self.lent().map(|(_, place)| place.turn()).collect();
        turns.into_iter().find_map(|turn| {
            let of_it: Vec<_> = self.lent().filter(|(_, place)| place.turn() == turn).collect();
            let is = |place: &Place, wanted: &Place| place.is(wanted) && place.all_bytes() == wanted.all_bytes();
            let number = |wanted| of_it.iter().find(|(_, place)| is(place, wanted)).map(|(number, _)| *number);
            let numbers = wanted.iter().map(number).collect::<Option<BTreeSet<_>>>()?;
            let all = turn.is_none() || numbers.len() == of_it.len();
            (all && !numbers.is_empty()).then_some(numbers)
        })
    }

    /// The same, but that these are given pages and all others are leaving.
    #[must_use]
    pub fn giving_to(&self, numbers: &BTreeSet<usize>) -> Self {
        let leaving = self.lent().map(|(number, _)| number).filter(|number| !numbers.contains(number)).collect();
        Self { leaving, ..self.clone() }
    }

    /// Numbers of which all are given up at once: those with the parity of each other's pages, or one by itself.
    #[must_use]
    pub fn together(&self, number: usize) -> BTreeSet<usize> {
        match self.hosts.get(number).and_then(Place::turn) {
            None => BTreeSet::from([number]),
            turn => self.lent().filter(|(_, place)| place.turn() == turn).map(|(number, _)| number).collect(),
        }
    }

    /// Gives numbers to these memory hosts, which are given no pages yet; parity lies over them. `None` where no more
    /// numbers are free.
    #[must_use]
    pub fn welcome_all(&mut self, places: &[Place]) -> Option<Vec<usize>> {
        let numbers: Option<Vec<_>> = places.iter().map(|place| self.welcome(place)).collect();
        let numbers = numbers?;
        if places.iter().any(|place| place.parity.is_some()) {
            self.parities += 1;
            let over = numbers.iter().fold(0, |over, number| over | 1 << number);
            for number in &numbers {
                let place = &mut self.hosts[*number];
                place.parity = place.parity.map(|parity| Parity { over, turn: self.parities, ..parity });
            }
        }
        Some(numbers)
    }

    /// Gives a number to another one: the first that is free. It is given no pages yet. `None` where no number is free.
    pub fn welcome(&mut self, host: &Place) -> Option<usize> {
        let number = self.gone.pop_first().unwrap_or(self.hosts.len());
        match self.hosts.get_mut(number) {
            Some(free) => *free = host.clone(),
            None if number < Holder::MAX_HOSTS => self.hosts.push(host.clone()),
            None => return None,
        }
        self.leaving.insert(number);
        Some(number)
    }

    /// One has nothing any more: its number is free.
    pub fn see_off(&mut self, number: usize) {
        self.leaving.remove(&number);
        self.gone.insert(number);
    }

    /// What its next owner is told, where so much may be on the host that runs it; the epochs are this owner's last
    /// one, and the one that the next owner's follow. With `merge` that one brings it together.
    #[must_use]
    pub fn spec(&self, room: Room, (epoch, own_epoch): (u64, u64), merge: bool) -> SplitSpec {
        let (here_bytes, unused_counts) = (room.most(), room.unused() == Unused::Ignore);
        let Self { guest, key, chunks, .. } = *self;
        let host = |(number, host): (usize, &Place)| SplitHost {
            peer: host.peer.clone(),
            bytes: host.bytes,
            mirror: host.mirror.clone(),
            once: host.once.clone(),
            gone: self.gone.contains(&number),
        };
        let hosts = self.hosts.iter().enumerate().map(host).collect();
        let parity = self.lent().find_map(|(_, host)| host.parity).map(|parity| {
            let Parity { stripe, hosts, over, turn, bytes, .. } = parity;
            SplitParity { stripe, hosts: hosts as u32, over, turn, bytes }
        });
        SplitSpec { guest, key, chunks, hosts, here_bytes, unused_counts, epoch, own_epoch, merge, parity }
    }

    /// The memory hosts of a machine that comes here.
    #[must_use]
    pub fn from_spec(spec: &SplitSpec) -> Self {
        let parity = spec.parity.map(parity_of);
        let host = |host: &SplitHost| Place {
            peer: host.peer.clone(),
            bytes: host.bytes,
            mirror: host.mirror.clone(),
            once: host.once.clone(),
            parity: parity.filter(|_| !host.gone),
        };
        let gone = spec.hosts.iter().enumerate().filter(|(_, host)| host.gone).map(|(number, _)| number).collect();
        let SplitSpec { guest, key, chunks, .. } = *spec;
        let hosts = spec.hosts.iter().map(host).collect();
        let parities = parity.map_or(0, |parity| parity.turn);
        Self { guest, key, chunks, hosts, leaving: BTreeSet::new(), gone, parities }
    }

    /// The memory hosts as they are called.
    #[must_use]
    pub fn lenders(&self, credentials: Option<&Arc<Credentials>>) -> Vec<Lender> {
        let leaving = |number: usize| self.leaving.contains(&number) || self.gone.contains(&number);
        self.hosts.iter().enumerate().map(|(number, host)| host.lender(credentials, leaving(number))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_memory_host_that_has_gone_is_given_to_the_next_one() {
        let host =
            |peer: &str| Place { peer: peer.into(), bytes: 4, mirror: None, once: Default::default(), parity: None };
        let mut borrowed = Borrowed { guest: 1, key: 2, chunks: 3, ..Borrowed::default() };
        for number in 0..Holder::MAX_HOSTS {
            assert_eq!(borrowed.welcome(&host(&format!("b:{number}"))), Some(number));
        }
        assert!(borrowed.welcome(&host("c:1")).is_none() && borrowed.lending().is_empty());
        borrowed.leaving.clear();
        borrowed.see_off(3);
        assert_eq!((borrowed.number_of(&host("b:3")), borrowed.lending().len()), (None, Holder::MAX_HOSTS - 1));
        assert_eq!(borrowed.welcome(&host("c:1")), Some(3));
        assert_eq!(Borrowed::from_spec(&borrowed.spec(Room::of(7), (1, 2), false)).lent().count(), Holder::MAX_HOSTS);
        let lender = &borrowed.lenders(None)[3];
        assert!(lender.peer == "c:1" && lender.leaving, "{lender:?}");
        borrowed.leaving.clear();
        assert_eq!((borrowed.number_of(&host("c:1")), borrowed.lending()[3].peer.as_str()), (Some(3), "c:1"));
    }

    #[test]
    fn whoever_stays_has_the_guest_under_its_number_however_often_the_other_one_is_replaced() {
        let first =
            Place { peer: "b:1".into(), bytes: 4, mirror: Some("c:1".into()), once: Default::default(), parity: None };
        let numbers = |place: &Place| {
            let borrowed = Borrowed { guest: 7, hosts: vec![place.clone()], ..Borrowed::default() };
            let members = borrowed.lenders(None)[0].members();
            members.into_iter().map(|member| (member.peer.clone(), member.number(7))).collect::<Vec<_>>()
        };
        let [b, c] = numbers(&first).try_into().unwrap();
        let second = first.with(1, "d:1").unwrap();
        let [same, d] = numbers(&second).try_into().unwrap();
        assert_eq!((second.name().as_str(), &same, d.0.as_str()), ("b:1 and d:1", &b, "d:1"));
        // Of d nothing changes where b goes; and c, which comes back, is another than it was.
        let third = second.with(0, "c:1").unwrap();
        let [c_again, same] = numbers(&third).try_into().unwrap();
        assert_eq!((third.name().as_str(), &same), ("c:1 and d:1", &d));
        assert_ne!(c_again, c);
        // While b is asked under its number, no other two may have it under that.
        let borrowed = Borrowed { hosts: vec![second.clone()], ..Borrowed::default() };
        let others =
            Place { peer: "b:1".into(), bytes: 4, mirror: Some("e:1".into()), once: Default::default(), parity: None };
        assert!([&first, &third].iter().all(|two| borrowed.clashes(two)) && !borrowed.clashes(&others));
        // What is owed to the one that has gone is owed to it alone.
        let [stays, gone] = [0, 1].map(|which| first.members().nth(which).unwrap());
        assert!(borrowed.has(&stays) && !borrowed.has(&gone));
        assert_eq!(borrowed.one_of_two("d:1"), Some((0, 1)));
        assert_eq!(
            (borrowed.one_of_two("c:1"), first.with(2, "d:1"), third.with(0, "b:1").unwrap().once[1].as_deref()),
            (None, None, Some("b:1"))
        );
    }

    #[test]
    fn two_that_have_the_same_pages_are_one_place_however_they_are_named() {
        let host = |peer: &str, bytes| MemoryHost { peer: peer.into(), bytes };
        let memory = [host("b:1", 4), host("c:1", 4), host("d:1", 5), host("e:1", 5)];
        let places = Place::of(&memory, Redundancy::Mirrored).unwrap();
        assert_eq!(places.iter().map(Place::name).collect::<Vec<_>>(), ["b:1 and c:1", "d:1 and e:1"]);
        assert_eq!(places.iter().flat_map(Place::hosts).collect::<Vec<_>>(), memory);
        let turned = Place::of(&[host("c:1", 4), host("b:1", 4)], Redundancy::Mirrored).unwrap();
        assert!(turned[0].is(&places[0]) && !turned[0].is(&places[1]));
        let alone = Place::of(&memory, Redundancy::None).unwrap();
        assert!(alone.len() == 4 && !alone[0].is(&places[0]));
        for wrong in [&memory[..3], &[host("b:1", 4), host("c:1", 5)]] {
            assert!(Place::of(wrong, Redundancy::Mirrored).is_err(), "{wrong:?}");
        }
        // What was on record before there were mirrors.
        let place: Place = serde_json::from_str(r#"{ "peer": "b:1", "bytes": 4 }"#).unwrap();
        assert!(place.is(&alone[0]));
    }
}
