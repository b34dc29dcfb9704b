//! Pages of a machine that are still to come: it runs here, and another host has the rest of its memory.

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
        write!(f, "{} pages are missing", self.0.missing())
    }
}

/// A request that has to wait until all pages of a machine are here.
#[must_use]
pub fn still_arriving(name: &str, paging: &Paging, bringer: Option<&Bringer>) -> Problem {
    let pages = bringer.map_or("pages of it are".into(), |bringer| count(bringer.0.missing()));
    let message = format!("'{name}' cannot do that now: it runs here, {pages} still at {}", paging.from);
    let hint =
        format!("wait until they are here; 'sterna show {name}' says how many are missing, and what it waits for");
    Problem::new(Code::StillArriving, Blame::Request, message).hint(hint)
}

/// So many pages, as the beginning of a sentence.
#[must_use]
pub fn count(pages: u64) -> String {
    if pages == 1 { "1 page of it is".into() } else { format!("{pages} pages of it are") }
}
