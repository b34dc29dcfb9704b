//! Whoever looks into a split guest's memory: what is away comes first.

use sterna_api::Problem;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use super::fetch::Wanted;
use super::lines::Lines;
use super::{Split, lock};
use crate::error::MigrateError;
use crate::memory::elsewhere::PagesElsewhere;

impl PagesElsewhere for Split {
    fn away(&self) -> PageMap {
        self.pager.missing_pages()
    }

    fn presence(&self, chunk: ChunkIndex) -> (PageSet, u32) {
        self.pager.presence(chunk)
    }

    /// With those that follow the first of them where they are looked at one after another, as a kernel's account of
    /// its memory is.
    fn bring(&self, chunk: ChunkIndex, pages: &PageSet) -> Result<u64, Problem> {
        let _coming = self.still.coming();
        if self.still.is_on() {
            return Err(MigrateError::Request("a look into a guest that is being handed on").problem());
        }
        if !self.pager.to_come_in(chunk).and(pages).is_empty() {
            return Err(MigrateError::Request("a look into a guest whose pages follow it").problem());
        }
        let mut state = self.chunk(chunk);
        let away = self.pager.away_in(chunk);
        let first = pages.and(&away).iter().next();
        let Some(first) = first else { return Ok(0) };
        let ahead = lock(&self.ahead).wanted(PageIndex { chunk, page: first }, &away);
        let wanted = pages.and(&away).or(&ahead);
        self.clock.came(chunk);
        let brought = self.bring_chunk(&mut Lines::new(&self.lenders), chunk, &mut state, &mut Wanted::all(wanted));
        brought.map(|()| wanted.len() as u64).map_err(|error| error.problem())
    }
}
