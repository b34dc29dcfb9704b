//! The gate of a wire: it lets everything pass, or nothing for a while, or a number of bytes and then nothing.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use sterna_protocol::hello::Role;

use super::lock;

/// What a connection is for; page connections are one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Requests and replies.
    Control,
    /// Pages of rounds and of the push.
    Pages,
    /// The devices' state.
    Devices,
    /// Page requests.
    Faults,
    /// The requested pages.
    Urgent,
    /// Requests to a memory host, and its pages.
    Store,
}

impl From<Role> for Kind {
    fn from(role: Role) -> Self {
        match role {
            Role::Control => Self::Control,
            Role::Pages(_) => Self::Pages,
            Role::Devices => Self::Devices,
            Role::Faults => Self::Faults,
            Role::Urgent => Self::Urgent,
            Role::Store => Self::Store,
        }
    }
}

/// How many bytes may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// All bytes.
    All,
    /// Only this many bytes: the link goes down after them.
    Last(usize),
    /// No bytes: the link is down.
    None,
}

/// The state of a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Bytes pass.
    Open,
    /// Nothing passes, and nobody is told.
    Stalled,
    /// There is no connection, and none can be made.
    Down,
}

#[derive(Debug)]
struct Flow {
    state: State,
    passed: BTreeMap<Kind, u64>,
    /// How many more bytes may pass on connections of this kind before the link goes down.
    limit: Option<(Kind, u64)>,
}

/// The gate of all wires of a proxy.
#[derive(Debug)]
pub struct Gate {
    flow: Mutex<Flow>,
    changed: Condvar,
}

impl Gate {
    /// A gate that is open and has no limit.
    pub fn new() -> Self {
        let flow = Flow { state: State::Open, passed: BTreeMap::new(), limit: None };
        Self { flow: Mutex::new(flow), changed: Condvar::new() }
    }

    /// Sets the state, and removes a limit.
    pub fn set(&self, state: State) {
        let mut flow = lock(&self.flow);
        (flow.state, flow.limit) = (state, None);
        self.changed.notify_all();
    }

    /// Makes the link go down after this many more bytes on connections of this kind.
    pub fn limit(&self, kind: Kind, bytes: u64) {
        lock(&self.flow).limit = Some((kind, bytes));
    }

    /// Whether nothing passes because the link is down.
    pub fn is_down(&self) -> bool {
        lock(&self.flow).state == State::Down
    }

    /// Waits until the link is down, at most for `patience`. Returns whether it is.
    pub fn wait_until_down(&self, patience: Duration) -> bool {
        let flow = lock(&self.flow);
        let waited = self.changed.wait_timeout_while(flow, patience, |flow| flow.state != State::Down);
        waited.unwrap_or_else(PoisonError::into_inner).0.state == State::Down
    }

    /// Bytes that have passed on connections of that kind, both ways together.
    pub fn passed(&self, kind: Kind) -> u64 {
        lock(&self.flow).passed.get(&kind).copied().unwrap_or(0)
    }

    /// Asks for this many bytes to pass. Waits while nothing passes.
    pub fn pass(&self, kind: Kind, bytes: usize) -> Pass {
        let flow = lock(&self.flow);
        let waited = self.changed.wait_while(flow, |flow| flow.state == State::Stalled);
        let mut flow = waited.unwrap_or_else(PoisonError::into_inner);
        if flow.state == State::Down {
            return Pass::None;
        }
        let mut allowed = bytes;
        if let Some((_, left)) = flow.limit.as_mut().filter(|(limited, _)| *limited == kind) {
            allowed = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes);
            *left -= allowed as u64;
        }
        *flow.passed.entry(kind).or_default() += allowed as u64;
        if allowed == bytes {
            return Pass::All;
        }
        (flow.state, flow.limit) = (State::Down, None);
        self.changed.notify_all();
        Pass::Last(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_goes_down_in_the_middle_of_what_is_too_much() {
        let gate = Gate::new();
        gate.limit(Kind::Urgent, 10);
        assert_eq!([gate.pass(Kind::Pages, 100), gate.pass(Kind::Urgent, 7)], [Pass::All; 2]);
        assert!(!gate.is_down());
        assert_eq!(gate.pass(Kind::Urgent, 4), Pass::Last(3));
        assert!(gate.is_down() && gate.wait_until_down(Duration::ZERO));
        assert_eq!(gate.pass(Kind::Pages, 100), Pass::None);
        assert_eq!((gate.passed(Kind::Pages), gate.passed(Kind::Urgent)), (100, 10));
        gate.set(State::Open);
        assert_eq!(gate.pass(Kind::Urgent, 100), Pass::All);
    }

    #[test]
    fn a_stalled_link_lets_things_pass_when_it_is_open_again() {
        let gate = Gate::new();
        gate.set(State::Stalled);
        std::thread::scope(|scope| {
            let passes = scope.spawn(|| gate.pass(Kind::Control, 5));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!passes.is_finished());
            gate.set(State::Open);
            assert_eq!(passes.join().expect("it passes"), Pass::All);
        });
    }
}
