//! Silent writes: pages that are written and hold what they held before, or zeros. They need no body.

use sterna_protocol::frame::Digester;
use sterna_protocol::layout::{PAGE_BYTES, PageIndex};
use sterna_protocol::pages::PageMap;

use super::sample::{choose, pages_of};
use crate::error::MigrateError;
use crate::memory::{Memory, is_zero};

/// How many written pages have their content compared: a share of one half is then known to within 0.03.
const COMPARED_PAGES: usize = 1024;
/// The value in place of a digest for zeros or a hole.
const ZEROS: u64 = 0;

/// What some of the written pages held right after they were collected.
#[derive(Debug)]
pub struct Held(Vec<(PageIndex, u64)>);

impl Held {
    /// What some of these pages hold. They are watched again already: a change from now on makes them written.
    ///
    /// # Errors
    /// The RAM cannot be read.
    pub fn of(ram: &dyn Memory, written: &PageMap) -> Result<Self, MigrateError> {
        let chosen = choose(ram.layout(), written, COMPARED_PAGES, 1);
        chosen.iter().flat_map(pages_of).map(|page| Ok((page, digest(ram, page)?))).collect::<Result<_, _>>().map(Self)
    }

    /// The number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The share of those that were written `again` which hold what they held, or zeros; `None` where none was.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn silent_share(&self, ram: &dyn Memory, again: &PageMap) -> Result<Option<f64>, MigrateError> {
        let (mut compared, mut silent) = (0_u32, 0_u32);
        for &(page, before) in self.0.iter().filter(|(page, _)| again.chunk(page.chunk).contains(page.page)) {
            let now = digest(ram, page)?;
            compared += 1;
            silent += u32::from(now == before || now == ZEROS);
        }
        Ok((compared > 0).then(|| f64::from(silent) / f64::from(compared)))
    }
}

/// A page's digest. A discarded page is not touched: reading a hole would fill it.
fn digest(ram: &dyn Memory, page: PageIndex) -> Result<u64, MigrateError> {
    let allocated = ram.allocated_in(page.chunk).map_err(MigrateError::host("looking for holes in the guest's RAM"))?;
    if !allocated.contains(page.page) {
        return Ok(ZEROS);
    }
    let mut body = [0; PAGE_BYTES];
    ram.read(page.chunk, &[page.page].into_iter().collect(), &mut body)
        .map_err(MigrateError::host("reading the guest's RAM"))?;
    Ok(if is_zero(&body) { ZEROS } else { Digester::UNSEEDED.page(&body) })
}
