//! Taps that change hands: one is one process's alone, so a new QEMU begins with stand-ins.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use sterna_api::Problem;
use sterna_engine::agent::{Agent, AgentError};
use sterna_sys::process::Pidfd;
use sterna_sys::tap::{self, OpenTap};

use crate::problems::{host, invalid};
use crate::process::Identity;
use crate::qemu::arguments::Item;
use crate::qemu::successor::{self, NamedTap};

/// The taps of a machine's QEMU.
#[derive(Debug, Default)]
pub struct Taps {
    /// Each queue, and the number under which the new QEMU is to have it.
    queues: Vec<(u32, OwnedFd)>,
}

impl Taps {
    /// Those of this process that the arguments name; and others like them, which the arguments name then.
    ///
    /// # Errors
    /// A [`Problem`]: the process has not the taps that the arguments name, or the host refuses.
    pub fn of(process: Identity, items: &mut [Item]) -> Result<(Self, Vec<OwnedFd>), Problem> {
        let named = successor::taps(items);
        if named.is_empty() {
            return Ok(Default::default());
        }
        let failed = |error: sterna_sys::Error| host("cannot hand the machine's tap devices over", &error);
        let pidfd = Pidfd::open(process.pid).map_err(failed)?;
        let mut open = tap::open_taps(&pidfd, process.pid).map_err(failed)?;
        // What no argument names is in the order in which QEMU opened it, that of its arguments.
        let claimed: Vec<String> = named.iter().filter_map(|tap| tap.device.clone()).collect();
        let (mut taps, mut stand_ins, mut given) = (Self::default(), Vec::new(), Vec::new());
        for tap in named {
            let wanted = |other: &OpenTap| match &tap.device {
                Some(device) => other.name == *device,
                None => !claimed.contains(&other.name),
            };
            let index = open.iter().position(wanted).ok_or_else(|| not_open(&tap))?;
            let real = open.remove(index);
            let like = tap::like(&real).map_err(failed)?;
            let numbers: Vec<u32> = like.iter().map(|stand_in| stand_in.as_raw_fd().unsigned_abs()).collect();
            taps.queues.extend(numbers.iter().copied().zip(real.queues));
            given.push((tap, numbers));
            stand_ins.extend(like);
        }
        successor::give_taps(items, &given);
        Ok((taps, stand_ins))
    }

    /// Gives them to the new QEMU, in the stand-ins' place.
    ///
    /// # Errors
    /// The agent inside it does not do so.
    pub fn hand_over(&self, agent: &mut Agent) -> Result<(), AgentError> {
        self.queues.iter().try_for_each(|(number, queue)| agent.put_descriptor(*number, queue.as_fd()))
    }
}

fn not_open(tap: &NamedTap) -> Problem {
    let which = tap.device.as_ref().map_or("one of the tap devices".into(), |device| format!("the tap '{device}'"));
    invalid(format!("the machine's QEMU has not opened {which} that the arguments name"))
        .hint("where network cards were plugged in or out, give arguments that name those there are, behind '--'")
}
