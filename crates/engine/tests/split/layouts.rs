//! Memory hosts are exchanged for others with another redundancy, under a running guest: whatever becomes of one of
//! them meanwhile, it finds what it wrote.

use sterna_engine::error::MigrateError;
use sterna_engine::split::Parity;
use sterna_engine::split::loans::give_back;

use super::mirror::{loses_all, pair};
use super::parity::is_whole;
use super::*;

const HOSTS: usize = 5;

/// At which hosts each page is to be, and how.
#[derive(Debug, Clone, Copy)]
enum Over<'a> {
    /// At one of these.
    Each(&'a [usize]),
    /// At both.
    Two(usize, usize),
    /// At one of these, with parity over them.
    Parity(&'a [usize]),
}

/// What becomes of a host while pages leave it, or another one.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    /// The daemon dies, and the next one goes on.
    DaemonDies,
    /// This host does not answer; it is back afterwards.
    Silent(usize),
    /// Nor has it what it had.
    Gone(usize),
}

/// A guest, and its memory hosts as its daemon has them on record.
struct Machine<'a> {
    guest: &'a Guest,
    hosts: &'a [LendingHost],
    lenders: Vec<Lender>,
    split: Arc<Split>,
    turn: u32,
}

impl Machine<'_> {
    /// Numbers of memory hosts that have gone, and the next ones.
    fn numbers(&self, count: usize) -> Vec<usize> {
        let free = self.lenders.iter().enumerate().filter(|(_, lender)| lender.leaving).map(|(number, _)| number);
        free.chain(self.lenders.len()..).take(count).collect()
    }

    /// The memory hosts of this kind, at these numbers.
    fn lenders_of(&self, over: Over, numbers: &[usize]) -> Vec<Lender> {
        let bits = numbers.iter().fold(0, |bits, number| bits | 1 << number);
        let hosts = |which: &[usize]| which.iter().map(|which| self.hosts[*which].lender()).collect::<Vec<_>>();
        let bytes = most_bytes(CHUNKS);
        let mut lenders = match over {
            Over::Each(which) => hosts(which),
            Over::Two(one, other) => vec![pair([&self.hosts[one], &self.hosts[other]])],
            Over::Parity(which) => {
                let parity = Parity::new((which.len() as u32 - 1, which.len()), bytes);
                let parity = Some(Parity { over: bits, turn: self.turn, ..parity });
                hosts(which).into_iter().map(|lender| Lender { parity, ..lender }).collect()
            }
        };
        lenders.iter_mut().for_each(|lender| lender.bytes = bytes);
        lenders
    }

    fn has_gone(&self, fault: Fault) -> bool {
        match fault {
            Fault::Silent(which) => self.hosts[which].relay.cut(),
            Fault::Gone(which) => {
                loses_all(&self.hosts[which]);
                self.hosts[which].relay.cut();
            }
            Fault::DaemonDies => return true,
            Fault::Nothing => {}
        }
        false
    }

    fn exchange(&mut self, over: Over, fault: Fault, checking: &Checking) {
        self.turn += 1;
        let count = match over {
            Over::Each(which) | Over::Parity(which) => which.len(),
            Over::Two(..) => 1,
        };
        let numbers = self.numbers(count);
        let former: Vec<usize> = (0..self.lenders.len()).filter(|number| !self.lenders[*number].leaving).collect();
        let (guest, key) = GUEST;
        let claim = |epochs: &Counter| Claim { guest, key, epoch: epochs.raise().unwrap() };
        for (number, lender) in numbers.iter().zip(self.lenders_of(over, &numbers)) {
            lender.members().iter().for_each(|lender| borrow(lender, claim(&self.guest.epochs), CHUNKS).unwrap());
            let lender = Lender { leaving: true, ..lender };
            self.split.add(*number, lender.clone()).unwrap();
            match self.lenders.get_mut(*number) {
                Some(known) => *known = lender,
                None => self.lenders.push(lender),
            }
        }
        let is_leaving = |number: usize| !numbers.contains(&number);
        (0..self.lenders.len()).for_each(|number| self.lenders[number].leaving = is_leaving(number));
        self.split.leave_for(is_leaving);
        checking.goes_on(20);
        let dies = self.has_gone(fault);
        checking.goes_on(20);
        for (done, number) in former.iter().enumerate() {
            let asked = AtomicU64::new(0);
            // Somewhere amidst what it has, once.
            let until = |asked: &AtomicU64| match dies && done == 0 && asked.fetch_add(1, Ordering::Relaxed) > 3 {
                true => Err(MigrateError::Cancelled),
                false => Ok(()),
            };
            match self.split.empty(*number, &|| until(&asked)) {
                Ok(()) => {}
                Err(SplitError::Here(MigrateError::Cancelled)) => {
                    dies_and_goes_on(self);
                    self.split.empty(*number, &|| Ok(())).unwrap();
                }
                Err(other) => panic!("{over:?}, {fault:?}: {other}"),
            }
            checking.goes_on(5);
        }
        assert!(former.iter().all(|number| !self.split.has_pages(*number)), "{over:?}");
        let epoch = claim(&self.guest.epochs);
        for number in former {
            self.split.see_off(number);
            // Of one that does not answer it is owed.
            self.lenders[number].members().iter().for_each(|lender| drop(give_back(lender, epoch, CHUNKS)));
        }
        checking.goes_on(20);
    }
}

fn dies_and_goes_on(machine: &mut Machine) {
    dies(Arc::clone(&machine.split));
    machine.split = machine.guest.recover_over(machine.lenders.clone()).unwrap();
    machine.split.keep_to(room()).unwrap();
}

fn room() -> Room {
    Room::of(2 * CHUNK_BYTES as u64)
}

fn exchanges(steps: &[(Over, Fault)]) {
    let (guest, hosts) = (Guest::new(), [(); HOSTS].map(|()| LendingHost::to_guests_of(8 * CHUNKS)));
    let first: Vec<_> = hosts[..2].iter().map(|host| Lender { bytes: most_bytes(CHUNKS), ..host.lender() }).collect();
    let split = guest.split_over(first.clone());
    split.keep_to(room()).unwrap();
    let checking = Checking::start(&guest, 3);
    let mut machine = Machine { guest: &guest, hosts: &hosts, lenders: first, split, turn: 0 };
    while machine.split.pager().missing() == 0 {
        checking.goes_on(20);
    }
    for (over, fault) in steps {
        machine.exchange(*over, *fault, &checking);
        hosts.iter().for_each(|host| host.relay.restore());
        if !matches!(over, Over::Each(_)) {
            is_whole(&machine.split);
            // Any one of them may go.
            let one = match over {
                Over::Parity(which) => which[machine.turn as usize % which.len()],
                Over::Two(one, _) => *one,
                Over::Each(_) => unreachable!("it is none of these"),
            };
            loses_all(&hosts[one]);
            hosts[one].relay.cut();
            checking.goes_on(50);
            hosts[one].relay.restore();
            is_whole(&machine.split);
        }
        println!("{over:?}, {fault:?}: {:?}", machine.split.account());
    }
    machine.split.merge(&|| Ok(())).unwrap();
    checking.end();
    assert_eq!(machine.split.pager().missing(), 0);
    machine.split.end();
}

#[test]
fn each_redundancy_is_exchanged_for_each_other_under_a_guest_that_goes_on_writing() {
    if !tracking_works() {
        return;
    }
    exchanges(&[
        (Over::Parity(&[0, 1, 2]), Fault::Nothing),
        (Over::Two(0, 1), Fault::Nothing),
        (Over::Parity(&[0, 1, 2, 3]), Fault::Nothing),
        (Over::Parity(&[4, 1, 2]), Fault::Nothing),
        (Over::Each(&[1, 2]), Fault::Nothing),
    ]);
}

#[test]
fn memory_hosts_are_exchanged_for_fewer_while_one_of_them_is_gone_for_good() {
    if !tracking_works() {
        return;
    }
    exchanges(&[
        (Over::Parity(&[0, 1, 2, 3]), Fault::Nothing),
        (Over::Parity(&[0, 1, 2]), Fault::Gone(3)),
        (Over::Two(1, 2), Fault::Gone(0)),
        (Over::Parity(&[0, 1, 2]), Fault::Silent(1)),
        (Over::Each(&[1, 2]), Fault::Gone(0)),
    ]);
}

#[test]
fn the_next_daemon_goes_on_with_an_exchange_that_it_finds() {
    if !tracking_works() {
        return;
    }
    exchanges(&[
        (Over::Parity(&[0, 1, 2]), Fault::DaemonDies),
        (Over::Parity(&[1, 2, 3, 4]), Fault::DaemonDies),
        (Over::Two(0, 1), Fault::DaemonDies),
        (Over::Parity(&[0, 1, 2]), Fault::DaemonDies),
        (Over::Each(&[0, 1]), Fault::DaemonDies),
    ]);
}

/// What the guest gives back of what is at memory hosts that are leaving is nowhere from then on, and their parity
/// brings all else, whichever of them is gone.
#[test]
fn what_a_guest_gives_back_while_its_memory_hosts_are_exchanged_is_zeros_and_nothing_else_is() {
    if !tracking_works() {
        return;
    }
    for gone in 0..3 {
        let (guest, hosts) = (Guest::new(), [(); HOSTS].map(|()| LendingHost::to_guests_of(4 * CHUNKS)));
        let split = guest.split_over(super::parity::with_parity(&hosts[..3]));
        send_all(&split, 0);
        is_whole(&split);
        let (key, epoch) = (GUEST.1, guest.epochs.raise().unwrap());
        let lender = Lender { leaving: true, ..hosts[3].lender() };
        borrow(&lender, Claim { guest: GUEST.0, key, epoch }, CHUNKS).unwrap();
        split.add(3, lender).unwrap();
        split.leave_for(|number| number < 3);
        // All that is away of the second chunk, and a page of the fourth.
        let given_back: Vec<u64> = (256..512).chain([1000]).collect();
        let (device, inode) = guest.ram().files().unwrap()[0];
        for page in &given_back {
            let discard = Discard { device, inode, offset: page * PAGE_BYTES as u64, length: PAGE_BYTES as u64 };
            guest.discards.lock().unwrap().push(discard);
        }
        split.keep_to(room()).unwrap();
        let left = || {
            split.pager().away_in(ChunkIndex(1)).len() + usize::from(split.pager().away_in(ChunkIndex(3)).contains(232))
        };
        until("it is nowhere", || left() == 0);
        loses_all(&hosts[gone]);
        hosts[gone].relay.cut();
        (0..3).for_each(|number| split.empty(number, &|| Ok(())).unwrap());
        split.merge(&|| Ok(())).unwrap();
        for page in 0..PAGES {
            let is = if given_back.contains(&page) { 0 } else { expected(page) };
            assert_eq!(word(&guest.ram.mapping, page), is, "page {page}");
        }
        split.end();
    }
}

/// Pages have left for others, and do so no more: what the former ones had of them counts no more, in their parity
/// neither, and any one of them may go again.
#[test]
fn an_exchange_that_is_taken_back_leaves_the_former_hosts_with_parity_of_what_they_have() {
    if !tracking_works() {
        return;
    }
    for gone in 0..3 {
        let (guest, hosts) = (Guest::new(), [(); HOSTS].map(|()| LendingHost::to_guests_of(4 * CHUNKS)));
        let split = guest.split_over(super::parity::with_parity(&hosts[..3]));
        split.keep_to(room()).unwrap();
        let checking = Checking::start(&guest, 3);
        let (key, epoch) = (GUEST.1, guest.epochs.raise().unwrap());
        let lender = Lender { leaving: true, ..hosts[3].lender() };
        borrow(&lender, Claim { guest: GUEST.0, key, epoch }, CHUNKS).unwrap();
        split.add(3, lender).unwrap();
        for _ in 0..3 {
            checking.goes_on(100);
            is_whole(&split);
            split.leave_for(|number| number < 3);
            // Until some of it has left for the other one.
            let some = || if split.has_pages(3) { Err(MigrateError::Cancelled) } else { Ok(()) };
            for number in 0..3 {
                let _ = split.empty(number, &some);
            }
            assert!(split.has_pages(3));
            split.leave_for(|number| number == 3);
            split.empty(3, &|| Ok(())).unwrap();
            while !(0..3).any(|number| split.has_pages(number)) {
                checking.goes_on(20);
            }
            is_whole(&split);
            loses_all(&hosts[gone]);
            hosts[gone].relay.cut();
            checking.goes_on(100);
            hosts[gone].relay.restore();
        }
        is_whole(&split);
        loses_all(&hosts[gone]);
        hosts[gone].relay.cut();
        split.merge(&|| Ok(())).unwrap();
        checking.end();
        split.end();
    }
}
