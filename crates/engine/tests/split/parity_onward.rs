//! A guest moves whose memory hosts have parity: any one of them may be away meanwhile, and whichever host has the
//! guest in the end, it finds what it wrote last.

use sterna_engine::source::Fate;

use super::mirror::loses_all;
use super::onward::{Here, IN_USE, Moving, Way, next, pages_go_and_come, room, run};
use super::pair::source::SourceVmm;
use super::parity::{is_whole, three, with_parity};
use super::*;

/// What happens to a memory host.
#[derive(Debug, Clone, Copy)]
enum Loss {
    /// It does not answer since before the move.
    Before,
    /// Since the guest has stopped.
    InThePause,
    /// It has lost what it had, and does not answer.
    OfAll,
    /// It has lost what it had, and answers, so it is being mended when the guest stops.
    Mended,
}

#[test]
fn a_guest_with_parity_moves_on_whatever_becomes_of_one_of_three() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let mut way = Way::over(&guest, with_parity(&hosts));
    let split = guest.split_over(way.lenders.clone());
    split.keep_to(room()).unwrap();
    let (mut here, mut checking) = (Here::of(&guest, &split), Checking::start_in(&guest, 3, IN_USE));
    let mut turn = 0;
    for loss in [Loss::Before, Loss::InThePause, Loss::OfAll, Loss::Mended] {
        for gone in 0..3 {
            turn += 1;
            pages_go_and_come(&here.split, &checking);
            is_whole(&here.split);
            let ((host, peer), moving) = (next(&way), Moving::new(checking));
            let (mut vmm, relay) = (moving.vmm(), Arc::clone(&hosts[gone].relay));
            match loss {
                Loss::Before => relay.cut(),
                Loss::InThePause => vmm.faults.while_saving = Some(Box::new(move || relay.cut())),
                Loss::OfAll => {
                    loses_all(&hosts[gone]);
                    relay.cut();
                }
                Loss::Mended => {
                    loses_all(&hosts[gone]);
                    here.split.ask_whether_there(gone);
                }
            }
            let (fate, report) = run(here.outgoing(vmm), &peer);
            assert_eq!(fate, Fate::There, "{loss:?} of {gone}: {:?}", report.error);
            checking = here.moved(&host, &moving, &mut way, turn);
            checking.goes_on(100);
            hosts[gone].relay.restore();
            // What it lacks is made anew where the guest is now; then any other may go.
            is_whole(&here.split);
            let other = &hosts[(gone + 1) % 3];
            loses_all(other);
            other.relay.cut();
            checking.goes_on(100);
            other.relay.restore();
        }
    }
    here.split.merge(&|| Ok(())).unwrap();
    checking.end();
    assert_eq!(here.split.pager().missing(), 0);
    here.split.end();
}

/// Two of three, and the guest is where it was.
#[test]
fn a_guest_with_parity_stays_where_two_of_three_do_not_answer_its_next_host() {
    if !tracking_works() {
        return;
    }
    let (guest, hosts) = (Guest::new(), three());
    let way = Way::over(&guest, with_parity(&hosts));
    let split = guest.split_over(way.lenders.clone());
    send_all(&split, 0);
    is_whole(&split);
    let (here, (_, peer)) = (Here::of(&guest, &split), next(&way));
    let mut vmm = SourceVmm::new(None);
    let relays = [0, 2].map(|which| Arc::clone(&hosts[which].relay));
    vmm.faults.while_saving = Some(Box::new(move || relays.iter().for_each(|relay| relay.cut())));
    let (fate, report) = run(here.outgoing(vmm), &peer);
    println!("{:?}", report.error.map(|problem| problem.with_causes()));
    assert_eq!(fate, Fate::Here);
    hosts.iter().for_each(|host| host.relay.restore());
    until("all has come", || split.bring_back().is_ok());
    guest.is_as_it_was();
    split.end();
}
