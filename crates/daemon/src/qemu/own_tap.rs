//! Taps of a machine's own, which are in no bridge: what stands for the source's in a clone's arguments.
//!
//! QEMU would make one itself, where it may: one that is not root's must not. So this daemon makes it, and QEMU
//! inherits its descriptors. The arguments on record name it as before, so that each QEMU of the machine gets another
//! one. It is gone with the last descriptor.

use std::os::fd::{AsRawFd, OwnedFd};

use sterna_api::Problem;
use sterna_sys::tap;

use super::arguments::{Item, parse, unparse};
use super::successor;
use crate::problems::host;

/// What QEMU calls a tap that it makes, with a number of the kernel's.
pub const NAME: &str = "sterna%d";

/// Makes the taps of its own that a machine's arguments name; they name the descriptors afterwards.
///
/// # Errors
/// A [`Problem`]: the host makes no taps.
pub fn make(arguments: &mut Vec<String>) -> Result<Vec<OwnedFd>, Problem> {
    let mut items = parse(arguments);
    let own: Vec<_> = successor::taps(&items).into_iter().filter(|tap| is_own(&items[tap.index])).collect();
    if own.is_empty() {
        return Ok(Vec::new());
    }
    let (mut made, mut given) = (Vec::new(), Vec::new());
    for tap in own {
        let (queues, headers) = looks(&items[tap.index]);
        let queues = tap::new(queues, headers).map_err(|error| host("cannot make a tap for the machine", &error))?;
        given.push((tap, queues.iter().map(|queue| queue.as_raw_fd().unsigned_abs()).collect()));
        made.extend(queues);
    }
    successor::give_taps(&mut items, &given);
    *arguments = unparse(&items);
    Ok(made)
}

fn is_own(item: &Item) -> bool {
    item.get("ifname").as_deref() == Some(NAME)
}

/// How many queues it has, and whether with virtio's headers, as QEMU would make it.
fn looks(item: &Item) -> (usize, bool) {
    let queues = item.get("queues").and_then(|count| count.parse().ok()).unwrap_or(1);
    (queues, item.get("vnet_hdr").is_none_or(|word| word != "off"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn taps_of_others_stay_and_one_of_its_own_becomes_descriptors_with_its_queues() {
        let others = "-netdev tap,id=a,ifname=tap1,script=no -nic user -netdev tap,id=b,ifname=other%d";
        let mut arguments = words(others);
        assert!(make(&mut arguments).unwrap().is_empty());
        assert_eq!(arguments, words(others));
        let item = |line: &str| parse(&words(line)).remove(0);
        assert_eq!(looks(&item("-netdev tap,id=a,ifname=sterna%d")), (1, true));
        assert_eq!(looks(&item("-netdev tap,id=a,queues=2,vnet_hdr=off")), (2, false));
        let mut arguments = words("-netdev tap,id=a,vhost=on,queues=2,ifname=sterna%d,script=no,downscript=no");
        match make(&mut arguments) {
            Ok(made) => {
                let list: Vec<String> = made.iter().map(|queue| queue.as_raw_fd().to_string()).collect();
                assert_eq!(arguments[1], format!("tap,id=a,vhost=on,fds={}", list.join(":")));
            }
            Err(problem) => eprintln!("skipped: no tap can be made here ({})", problem.with_causes()),
        }
    }
}
