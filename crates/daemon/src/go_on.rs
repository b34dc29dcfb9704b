//! Letting a guest run that its user has paused, or that is a clone which was held.

use sterna_api::{Blame, Code, Problem};

use crate::guest_agent;
use crate::machines::claim::Claimed;
use crate::machines::control::Control;
use crate::machines::hold::{Hold, InPlace};
use crate::machines::table::Machines;

/// Lets a machine's guest run. Its clock is set then, beside everything else, where it has a guest agent. Nothing is
/// done where it runs.
///
/// # Errors
/// A [`Problem`]: the machine is unknown or busy, its guest stands still for another reason, or QEMU refuses.
pub fn go_on(machines: &Machines, name: &str) -> Result<(), Problem> {
    let doing = InPlace::beside_memory("it is let go on");
    let claimed = Claimed::new(machines, name, Hold::shared(&doing))?;
    let mut control = Control::connect(&claimed.record.qmp)?;
    match control.status()?.as_str() {
        "running" => return Ok(()),
        "paused" | "prelaunch" if !claimed.record.waits_for_room => {}
        "paused" => {
            let message = format!("'{name}' waits for this host to have memory again");
            return Err(Problem::new(Code::OutOfMemory, Blame::Host, message).hint("it goes on by itself then"));
        }
        other => {
            let message = format!("the guest of '{name}' is not paused: its state is '{other}'");
            return Err(Problem::new(Code::NotRunning, Blame::Request, message));
        }
    }
    doing.found(false);
    control.send("cont")?;
    guest_agent::set_clock_later(&claimed.record);
    Ok(())
}
