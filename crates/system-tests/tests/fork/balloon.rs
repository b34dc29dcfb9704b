use sterna_api::Vm;
use sterna_system_tests::member::Member;
use sterna_system_tests::{Site, cli};

use super::{are_well, fork, forked, plan, with_origin};

const MIB: u64 = 1 << 20;

/// What is in a machine's balloon, MiB.
fn balloon(site: &Site, name: &str) -> u64 {
    let vm: Vm = Member::new(site, name).shown("a");
    vm.balloon.map_or(0, |balloon| balloon.size_bytes / MIB)
}

fn set(site: &Site, words: &[&str]) {
    cli::ask(site.host("a"), &[&["balloon", "origin"], words].concat()).expect(0, &[]);
}

/// The balloon of a guest that is forked grows, and later shrinks: what it gives away and takes back in that moment is
/// neither lost nor anybody else's, and the balloon of each goes on to where it was to go.
#[test]
fn a_guest_whose_balloon_is_moving_is_forked_and_each_goes_on_with_its_own() {
    with_origin("shared", |site| {
        let [whole, less] = [plan().memory_bytes / MIB, plan().memory_bytes / MIB / 4 * 3];
        let is_at = |name: &str, mib: u64| {
            site.eventually(&format!("the balloon of {name} is where it was to go"), || {
                balloon(site, name).abs_diff(whole - mib) <= 1
            });
        };
        let mut met = 0;
        // From shared memory, and from private; until one was forked while its balloon moved.
        for number in 0..12 {
            let (clone, mib) = (&*format!("c{number}"), if number % 2 == 0 { less } else { whole });
            set(site, &["--target", &format!("{mib}M")]);
            forked(&fork(site, "origin", &[clone]));
            met += u64::from(balloon(site, clone).abs_diff(whole - mib) > 1);
            are_well(site, &["origin", clone]);
            is_at("origin", mib);
            is_at(clone, mib);
            are_well(site, &["origin", clone]);
            if number >= 2 && met > 0 {
                break;
            }
            if number >= 2 {
                super::faults::stop(site, clone);
            }
        }
        println!("{met} clones began with a balloon that was moving");
        assert!(met > 0, "no guest was forked while its balloon moved");
        assert_eq!(["c0", "c1"].map(|name| balloon(site, name)), [whole - less, 0], "theirs are their own");
    });
}
