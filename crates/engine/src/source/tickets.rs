//! Tickets: what a machine takes along from hosts that may keep what its memory was, for the day when it comes back
//! (`docs/design/returns.md`).

use std::sync::Arc;

use sterna_protocol::spec::Ticket;

use super::gang::Gang;

/// The tickets of a machine that leaves.
#[derive(Debug, Clone, Default)]
pub struct Tickets {
    /// Those that it has been given on its way.
    pub had: Vec<Ticket>,
    /// This host's own, where this host may keep its memory.
    pub own: Option<Ticket>,
    /// Those that it can show: its own, and those of machines of the same gang.
    pub shown: Vec<Ticket>,
    /// The gang of one in which it comes where it shares with nobody and something was kept of it. It is the same in
    /// every attempt: the destination keeps a promise of memory for each gang.
    pub alone: Option<Arc<Gang>>,
}

impl Tickets {
    /// What a destination is told that is this daemon: the tickets that the machine takes along there, and the numbers
    /// that it shows.
    #[must_use]
    pub fn to(&self, daemon: u128) -> (Vec<Ticket>, Vec<u128>) {
        let of_its_own = self.shown.iter().filter(|ticket| ticket.host == daemon);
        (Ticket::along(&self.had, self.own, daemon), of_its_own.map(|ticket| ticket.number).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_shown_its_own_tickets_alone() {
        let ticket = |host, number| Ticket { host, number };
        let had = vec![ticket(1, 10), ticket(2, 20)];
        let shown = [had.clone(), vec![ticket(1, 11)]].concat();
        let tickets = Tickets { had, own: Some(ticket(3, 30)), shown, alone: None };
        assert_eq!(tickets.to(1), (vec![ticket(2, 20), ticket(3, 30)], vec![10, 11]));
        assert_eq!(tickets.to(4), (vec![ticket(1, 10), ticket(2, 20), ticket(3, 30)], vec![]));
    }
}
