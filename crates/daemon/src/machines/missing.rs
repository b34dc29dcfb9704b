//! Pages of a machine that are still to come, or to be compared: it runs here, and another host has the rest of its
//! memory, or what its memory was.

use std::fmt;
use std::sync::Arc;

use sterna_api::{Blame, Code, Problem};
use sterna_engine::paging::Pager;

use super::record::Paging;

/// What brings the pages of a guest that runs here before all of them are here.
#[derive(Clone)]
pub struct Bringer(pub Arc<Pager>);

impl fmt::Debug for Bringer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages are missing", self.0.to_come())
    }
}

/// A request that has to wait until all pages of a machine are here.
#[must_use]
pub fn still_arriving(name: &str, paging: &Paging, bringer: Option<&Bringer>) -> Problem {
    let missing = bringer.map(|bringer| bringer.0.to_come());
    let message = format!("'{name}' cannot do that now: {}", whereabouts(missing, &paging.from));
    let hint =
        format!("wait until that is over; 'sterna show {name}' says how many pages are missing, and what it waits for");
    Problem::new(Code::StillArriving, Blame::Request, message).hint(hint)
}

/// Where so many missing pages are, where their number is known.
#[must_use]
pub fn whereabouts(missing: Option<u64>, from: &str) -> String {
    match missing {
        Some(0) => format!("it runs here, and its pages are being compared with those at {from}"),
        Some(missing) => format!("it runs here, {} still at {from}", count(missing)),
        None => format!("it runs here, pages of it are still at {from}"),
    }
}

/// So many pages, as the beginning of a sentence.
fn count(pages: u64) -> String {
    if pages == 1 { "1 page of it is".into() } else { format!("{pages} pages of it are") }
}
