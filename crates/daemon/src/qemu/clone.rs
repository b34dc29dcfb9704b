//! The arguments of a clone: those of the machine that it was forked from, with what only one QEMU can have replaced.
//!
//! * **network cards** are connected to nothing: a tap of the source's becomes one of the clone's own that is in no
//!   bridge, and QEMU's own network forwards no ports
//! * **files that a character device writes** go on at their end
//! * **unix sockets that QEMU makes** are the source's, unless their path has `{name}` in it: a second QEMU would take
//!   the path away. So are ports that QEMU listens at, and pipes that it reads

use sterna_api::{Blame, Code, Problem};

use super::arguments::{Item, NAME, join_pairs, unparse};
use super::endpoints::{self, Place};
use super::{own_tap, successor};

/// The arguments of a clone, where the machine that is forked has these and nobody gave others.
///
/// # Errors
/// A [`Problem`]: what cannot be had twice.
pub fn of(items: &[Item]) -> Result<Vec<Item>, Problem> {
    let mut clone = successor::beside(items);
    clone.iter_mut().try_for_each(disconnect)?;
    Ok(clone)
}

/// Checks that a clone with these arguments takes nothing from the machine that it is forked from, which has those.
///
/// # Errors
/// A [`Problem`]: what it would take.
pub fn check(items: &[Item], source: &[Item]) -> Result<(), Problem> {
    let own: Vec<Place> = source.iter().flat_map(endpoints::of).collect();
    let taken = |item: &Item| {
        let its = if has_name(item) { Vec::new() } else { endpoints::of(item) };
        its.into_iter().find(|place| own.contains(place))
    };
    let Some((item, place)) = items.iter().find_map(|item| Some((item, taken(item)?))) else { return Ok(()) };
    let (why, hint) = match place {
        Place::Socket(_) => (
            "the clone would take the source's socket",
            format!("give its path with {NAME} in it at 'run': it becomes each machine's own name"),
        ),
        Place::Pipe(_) => (
            "the clone would read what is written for the source",
            format!("give its path with {NAME} in it at 'run': it becomes each machine's own name"),
        ),
        Place::Port(_) => (
            "the source listens at that port, and no second QEMU can",
            format!("use a unix socket with {NAME} in its path, or give the clones' arguments behind '--'"),
        ),
    };
    Err(refused(item, why).hint(hint))
}

/// A network back end that is connected to nothing in the place of the source's.
fn disconnect(item: &mut Item) -> Result<(), Problem> {
    if !matches!(item.option.as_str(), "netdev" | "nic" | "net") {
        return Ok(());
    }
    let mut pairs = item.pairs();
    let json = item.value.as_deref().is_some_and(|value| value.trim_start().starts_with('{'));
    let kind = item.get("").or_else(|| item.get("type")).unwrap_or_default();
    match kind.as_str() {
        _ if json => return Err(not_known(item)),
        "none" => return Ok(()),
        "nic" if item.option == "net" => return Ok(()),
        "user" => pairs.retain(|(key, _)| !matches!(key.as_str(), "hostfwd" | "guestfwd" | "smb" | "smbserver")),
        "tap" | "bridge" => {
            pairs.retain(|(key, _)| {
                !matches!(
                    key.as_str(),
                    "" | "type"
                        | "ifname"
                        | "script"
                        | "downscript"
                        | "helper"
                        | "br"
                        | "fd"
                        | "fds"
                        | "vhostfd"
                        | "vhostfds"
                )
            });
            pairs.insert(0, (String::new(), "tap".into()));
            let own = [("ifname", own_tap::NAME), ("script", "no"), ("downscript", "no")];
            pairs.extend(own.map(|(key, value)| (key.into(), value.into())));
        }
        _ => return Err(not_known(item)),
    }
    item.value = Some(join_pairs(&pairs));
    Ok(())
}

fn not_known(item: &Item) -> Problem {
    refused(item, "what a clone may have in its place is not known")
        .hint("give the clones' arguments behind '--', with network cards of their own")
}

fn has_name(item: &Item) -> bool {
    item.value.as_deref().is_some_and(|value| value.contains(NAME))
}

/// The problem of what a clone cannot have.
pub fn refused(item: &Item, why: &str) -> Problem {
    let shown = unparse(std::slice::from_ref(item)).join(" ");
    Problem::new(Code::CannotFork, Blame::Request, format!("it cannot be forked with '{shown}': {why}"))
}

#[cfg(test)]
mod tests {
    use super::super::arguments::parse;
    use super::*;

    fn items(line: &str) -> Vec<Item> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_clone_s_network_cards_are_connected_to_nothing() {
        let clone = of(&items(
            "-netdev tap,id=a,ifname=tap1,vhost=on,queues=2 -device virtio-net-pci,netdev=a -nic bridge,br=br0,model=e1000 \
             -netdev user,id=u,hostfwd=tcp::22-:22,net=10.0.0.0/24 -nic none -serial file:/log",
        ));
        assert_eq!(
            unparse(&clone.unwrap()).join(" "),
            "-netdev tap,id=a,vhost=on,queues=2,ifname=sterna%d,script=no,downscript=no -device virtio-net-pci,netdev=a \
             -nic tap,model=e1000,ifname=sterna%d,script=no,downscript=no -netdev user,id=u,net=10.0.0.0/24 -nic none \
             -chardev file,id=sterna-serial-5,path=/log,append=on -serial chardev:sterna-serial-5"
        );
        for unknown in ["-netdev socket,id=s,listen=:1", "-netdev {\"type\":\"tap\",\"id\":\"c\"}"] {
            assert_eq!(of(&items(unknown)).unwrap_err().code, Code::CannotFork, "{unknown}");
        }
    }

    #[test]
    fn a_socket_of_the_source_is_not_taken_and_one_of_its_own_name_is_a_clone_s() {
        let check = |line: &str| check(&items(line), &items(line)).map_err(|problem| problem.message);
        for taken in [
            "-serial unix:/run/a.sock,server=on,wait=off",
            "-vnc unix:/run/a.sock",
            "-chardev socket,id=c,path=/run/a.sock,server=on",
            "-chardev socket,id=c,path=/run/a.sock,server=on,logfile=/l",
        ] {
            assert!(check(taken).unwrap_err().contains("take the source's socket"), "{taken}");
            let clone = of(&items(taken)).unwrap();
            assert!(super::check(&clone, &items(taken)).is_err(), "{taken}, as a clone's");
        }
        let other_words = ["-serial unix:/run/a.sock,server,nowait", "-monitor unix:/run/a.sock,server=on"];
        for words in other_words {
            assert!(super::check(&items(words), &items("-vnc unix:/run/a.sock")).is_err(), "{words}");
        }
        for port in ["-vnc :5", "-s", "-chardev socket,id=c,host=h,port=1,server=on"] {
            assert!(check(port).unwrap_err().contains("listens at that port"), "{port}");
        }
        assert!(check("-serial pipe:/run/p").unwrap_err().contains("for the source"));
        for fine in [
            "-serial unix:/run/{name}.sock,server=on",
            "-chardev socket,id=c,path=/run/other.sock",
            "-chardev socket,id=c,host=h,port=1",
            "-vnc :5,to=99",
            "-serial file:/log",
        ] {
            assert_eq!(check(fine), Ok(()), "{fine}");
        }
    }
}
