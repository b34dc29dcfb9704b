//! Pages that leave before the commit, because the devices' loading asks for them: what they held then.
//!
//! The VMM may write such a page afterwards, while it still saves its devices; then the destination has an older body.
//! The kernel makes pages look written, too: KSM exchanges a page's frame for another of the same content. Whether it
//! was the one or the other, the content says, and not that the frame is merged: before Linux 6.11, KSM merges a page
//! at its first look at it where others have that content already, so that one that was just written may be merged.
//!
//! # Races
//! * **The page is written between the note and the reading of the body that goes**: it holds something else than the
//!   note says, and counts as written
//! * **Somebody asks while a page leaves**: it is taken and noted under one lock, so whoever finds it gone finds its
//!   note as well
//! * **The guest holds the page free**: zeros go, whatever is noted. The guest stands still, so nobody owns the page,
//!   and nobody relies on what it holds

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use sterna_protocol::layout::{ChunkIndex, PageIndex};
use sterna_protocol::pages::{PageMap, PageSet};

use crate::memory::{Memory, for_each_body};

/// What pages held when they left; nothing is noted but between [`begin`](Self::begin) and [`end`](Self::end).
#[derive(Debug, Default)]
pub struct Leaving(Mutex<Option<HashMap<PageIndex, Hash>>>);

impl Leaving {
    /// Notes from now on what leaves.
    pub fn begin(&self) {
        *self.lock() = Some(HashMap::new());
    }

    /// Forgets what was noted, and notes nothing more.
    pub fn end(&self) {
        *self.lock() = None;
    }

    /// Has pages of a chunk taken by `take`, before their bodies are read, and notes what they hold. Returns them.
    ///
    /// # Errors
    /// The RAM cannot be read.
    pub fn take(&self, ram: &dyn Memory, chunk: ChunkIndex, take: impl FnOnce() -> PageSet) -> io::Result<PageSet> {
        let mut noted = self.lock();
        let pages = take();
        if let Some(noted) = &mut *noted {
            for_each_body(
                &pages,
                |batch, bodies| ram.load(chunk, batch, bodies),
                |page, body| {
                    noted.entry(PageIndex { chunk, page }).or_insert_with(|| blake3::hash(body));
                },
            )?;
        }
        Ok(pages)
    }

    /// How many of these pages the VMM may have written since they left. They look written, and are not pending any
    /// more; of those that were not noted nothing is known. Nobody writes any page now.
    ///
    /// # Errors
    /// The RAM cannot be read, or the kernel does not tell which pages are merged.
    pub fn written(&self, ram: &dyn Memory, gone: &PageMap) -> io::Result<u64> {
        let noted = self.lock();
        let is_noted = |page: PageIndex, body: &[u8]| {
            noted.as_ref().and_then(|noted| noted.get(&page)).is_some_and(|hash| *hash == blake3::hash(body))
        };
        let mut written = 0;
        for (chunk, pages) in gone.iter().filter(|(_, pages)| !pages.is_empty()) {
            // What is not merged looks written because it was.
            let merged = pages.and(&ram.shared_in(chunk)?);
            let mut same = PageSet::EMPTY;
            for_each_body(
                &merged,
                |batch, bodies| ram.load(chunk, batch, bodies),
                |page, body| {
                    if is_noted(PageIndex { chunk, page }, body) {
                        same.insert(page);
                    }
                },
            )?;
            written += pages.without(&same).len() as u64;
        }
        Ok(written)
    }

    fn lock(&self) -> MutexGuard<'_, Option<HashMap<PageIndex, Hash>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use sterna_protocol::layout::PAGE_BYTES;
    use sterna_protocol::spec::BlockSpec;
    use sterna_sys::map::Access;

    use super::*;
    use crate::memory::BlockFile;
    use crate::memory::not_in_place::NotInPlace;
    use crate::memory::shared::SharedMemory;

    const CHUNK: ChunkIndex = ChunkIndex(0);

    fn set(pages: &[u8]) -> PageSet {
        pages.iter().copied().collect()
    }

    /// RAM in which these pages look merged, and each page up to the tenth holds its number.
    fn ram(merged: &[u8]) -> NotInPlace {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let spec = BlockSpec { id: "ram".into(), bytes: 1 << 20, page_bytes: 4096, path: String::new() };
        let block = BlockFile { spec, file, address: 0, process: None };
        let ram = NotInPlace(SharedMemory::open(&[block], Access::ReadWrite).unwrap(), set(merged));
        (1..10).for_each(|page| write(&ram, page, page));
        ram
    }

    fn write(ram: &dyn Memory, page: u8, byte: u8) {
        ram.write(CHUNK, &set(&[page]), &[byte; PAGE_BYTES]).unwrap();
    }

    fn written(leaving: &Leaving, ram: &dyn Memory, pages: &[u8]) -> u64 {
        let mut gone = PageMap::empty(ram.layout());
        gone.insert_all(CHUNK, &set(pages));
        leaving.written(ram, &gone).unwrap()
    }

    /// Failed while a merged page never counted as written: KSM may merge what the VMM has written at its first look.
    #[test]
    fn a_merged_page_that_left_was_written_where_it_holds_something_else() {
        let (ram, leaving) = (ram(&[1, 2, 3, 5, 6]), Leaving::default());
        leaving.begin();
        assert_eq!(leaving.take(&ram, CHUNK, || set(&[1, 2, 4, 5, 20])).unwrap(), set(&[1, 2, 4, 5, 20]));
        write(&ram, 2, 200);
        write(&ram, 5, 0);
        assert_eq!(written(&leaving, &ram, &[1]), 0, "KSM alone has made it look written");
        assert_eq!(written(&leaving, &ram, &[2]), 1, "another content");
        assert_eq!(written(&leaving, &ram, &[3]), 1, "it never left");
        assert_eq!(written(&leaving, &ram, &[4]), 1, "it is not merged");
        assert_eq!(written(&leaving, &ram, &[5]), 1, "zeros");
        assert_eq!(written(&leaving, &ram, &[1, 2, 3, 4, 5]), 4);
        assert_eq!(written(&leaving, &ram, &[]), 0);
        write(&ram, 2, 2);
        assert_eq!(written(&leaving, &ram, &[2]), 0, "as it left");
    }

    #[test]
    fn what_a_page_held_when_it_first_left_counts() {
        let (ram, leaving) = (ram(&[1]), Leaving::default());
        leaving.begin();
        let leave = || leaving.take(&ram, CHUNK, || set(&[1])).unwrap();
        leave();
        write(&ram, 1, 100);
        // Its body is asked for again, where it went as a reference.
        leave();
        assert_eq!(written(&leaving, &ram, &[1]), 1);
    }

    #[test]
    fn nothing_is_noted_but_in_the_pause() {
        let (ram, leaving) = (ram(&[1]), Leaving::default());
        let leave = || leaving.take(&ram, CHUNK, || set(&[1])).unwrap();
        assert_eq!(leave(), set(&[1]));
        assert_eq!(written(&leaving, &ram, &[1]), 1);
        leaving.begin();
        leave();
        leaving.end();
        assert_eq!(written(&leaving, &ram, &[1]), 1);
    }
}
