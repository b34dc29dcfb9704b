//! Whereabouts: where each page of a machine is, in a file that outlives the daemon.
//!
//! A page is *here* (its content is in the RAM file), *at a holder* (another host has it: in post-copy the source, of a
//! split guest a memory host), or *nowhere* (never used, or reclaimed: it reads as zeros and has no content). The map
//! says which pages are away, and who holds them. It need not say which of the others are nowhere: those are the RAM
//! file's holes.
//!
//! ```text
//!   0          8        12      16         24          28        32                          32 + entries
//!   +----------+--------+-------+----------+-----------+---------+---------------------------+
//!   | STPAGES2 | chunks | begun | layout's | entry's   | nothing | an entry a chunk          |
//!   | or 3     |        |       | digest   | bytes     |         |                           |
//!   +----------+--------+-------+----------+-----------+---------+---------------------------+
//!
//!   an entry:   0                          32       33        40                          72
//!               +--------------------------+--------+---------+---------------------------+
//!               | the pages that are away  | holder | nothing | of these, at the source   |
//!               +--------------------------+--------+---------+---------------------------+
//!                                                             only in version 3
//! ```
//!
//! The holder is the source (1) or a memory host (2 for the first). A chunk's pages are all at one memory host. Where
//! that is two hosts that have the same pages, and only one of them is to be believed, 64 is added for the first of the
//! two or 128 for the second. A split guest that runs before all its pages have come from its source has chunks of
//! which some pages are there and others at a memory host: its map is of version 3.
//!
//! The last character of the first word is the version. Version 1 had a header of 16 bytes (`STPAGES1`, chunks, begun)
//! and entries of 32, without a holder: it is still read. A map that was begun in a version stays in it, because a map
//! that is rewritten while it is in use could be lost half way.
//!
//! The file lies in memory (tmpfs): the next daemon finds what is written there, however this one ends. A page's bit is
//! cleared only after its content is in the RAM file, so a daemon killed between the two asks for the page once more,
//! and never takes a stale page for a current one. A page that leaves is away before its content is taken out of the
//! file; a daemon killed between the two leaves memory behind, not a page that counts twice. Of a page that came from
//! the source it is no longer said that it is there before it may leave. Numbers are little-endian.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sterna_protocol::layout::{ChunkIndex, Layout};
use sterna_protocol::pages::{PageMap, PageSet};

pub use super::holder::Holder;

/// A version of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Format {
    magic: &'static [u8; 8],
    header_bytes: usize,
    entry_bytes: usize,
}

const V1: Format = Format { magic: b"STPAGES1", header_bytes: 16, entry_bytes: PageSet::BYTES };
const V2: Format = Format { magic: b"STPAGES2", header_bytes: 32, entry_bytes: PageSet::BYTES + 8 };
const V3: Format = Format { magic: b"STPAGES3", header_bytes: 32, entry_bytes: 2 * PageSet::BYTES + 8 };

/// A chunk's entry.
#[derive(Debug, Clone, Copy)]
struct Entry {
    away: PageSet,
    /// Said to be at the source; those of them that are away are.
    at_source: PageSet,
    holder: Holder,
}

impl Format {
    /// The header of a map that is valid.
    fn header(self, layout: &Layout) -> Vec<u8> {
        let mut header = vec![0; self.header_bytes];
        header[..8].copy_from_slice(self.magic);
        header[8..12].copy_from_slice(&layout.chunks().to_le_bytes());
        header[12..16].copy_from_slice(&1u32.to_le_bytes());
        if self != V1 {
            header[16..24].copy_from_slice(&layout.digest().to_le_bytes());
            header[24..28].copy_from_slice(&(self.entry_bytes as u32).to_le_bytes());
        }
        header
    }

    /// Where in an entry it is said which pages are at the source.
    fn at_source(self) -> Option<usize> {
        (self == V3).then_some(V2.entry_bytes)
    }

    fn entry(self, Entry { away, at_source, holder }: Entry) -> Vec<u8> {
        let mut entry = vec![0; self.entry_bytes];
        entry[..PageSet::BYTES].copy_from_slice(&away.to_bytes());
        if self != V1 && !away.is_empty() {
            entry[PageSet::BYTES] = holder.entry();
        }
        if let Some(at) = self.at_source() {
            entry[at..at + PageSet::BYTES].copy_from_slice(&at_source.to_bytes());
        }
        entry
    }

    /// A chunk's entry; `None` where it names a holder that is unknown.
    fn read(self, entry: &[u8]) -> Option<Entry> {
        let (set, rest) = entry.split_first_chunk()?;
        let away = PageSet::from_bytes(set);
        let holder = match self {
            V1 => Holder::SOURCE,
            _ if away.is_empty() => Holder::SOURCE,
            _ => Holder::from_entry(*rest.first()?)?,
        };
        let at_source = match self.at_source() {
            Some(at) => PageSet::from_bytes(entry.get(at..)?.first_chunk()?),
            None if holder == Holder::SOURCE => away,
            None => PageSet::EMPTY,
        };
        Some(Entry { away, at_source, holder })
    }
}

/// The map and its file.
#[derive(Debug)]
pub struct Whereabouts {
    file: File,
    format: Format,
    pages: PageMap,
    /// Said to be at the source; those of them that are away are.
    at_source: PageMap,
    /// Who holds the others of each chunk.
    holders: Vec<Holder>,
    away: u64,
    /// How many of these are at the source.
    to_come: u64,
    /// How many chunks have pages at one of two hosts that is to be believed alone.
    alone: usize,
    /// How often pages of each chunk have arrived.
    arrivals: Vec<u32>,
}

impl Whereabouts {
    /// A map without pages that are away; the file is not valid yet.
    #[must_use]
    pub fn all_here(file: File, layout: &Layout) -> Self {
        let holders = vec![Holder::SOURCE; layout.chunks() as usize];
        let arrivals = vec![0; holders.len()];
        let [pages, at_source] = [(); 2].map(|()| PageMap::empty(layout));
        Self { file, format: V2, pages, at_source, holders, away: 0, to_come: 0, alone: 0, arrivals }
    }

    /// The map that an earlier daemon left; `None` where that daemon never began one.
    ///
    /// # Errors
    /// The file cannot be read, is of another machine, or of a later version.
    pub fn recover(file: File, layout: &Layout) -> io::Result<Option<Self>> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        if file.metadata()?.len() == 0 {
            return Ok(None);
        }
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0)?;
        let format = [V1, V2, V3].into_iter().find(|format| *format.magic == magic);
        let format = format.ok_or_else(|| invalid("it is no map of missing pages that this version reads"))?;
        let mut header = vec![0; format.header_bytes];
        file.read_exact_at(&mut header, 0)?;
        if header != format.header(layout) {
            return Err(invalid("it is not the map of this machine's missing pages"));
        }
        let mut entries = vec![0; layout.chunks() as usize * format.entry_bytes];
        file.read_exact_at(&mut entries, format.header_bytes as u64)?;
        let mut found = Self { format, ..Self::all_here(file, layout) };
        for (chunk, entry) in layout.iter().zip(entries.chunks_exact(format.entry_bytes)) {
            let entry = format.read(entry).ok_or_else(|| invalid("it names a holder of pages that is not known"))?;
            *found.pages.chunk_mut(chunk) = entry.away;
            *found.at_source.chunk_mut(chunk) = entry.at_source;
            found.holders[chunk.index()] = entry.holder;
        }
        found.count(layout);
        Ok(Some(found))
    }

    /// Begins the map: these pages are at the source, and no others are away.
    ///
    /// # Errors
    /// No memory for the file.
    pub fn begin(&mut self, pages: PageMap, layout: &Layout) -> io::Result<()> {
        let holders = vec![Holder::SOURCE; layout.chunks() as usize];
        self.begin_with((pages.clone(), pages, holders), V2, layout)
    }

    /// Begins the map of a guest that was split elsewhere: these pages are at these memory hosts, those at the source,
    /// and no others are away.
    ///
    /// # Errors
    /// No memory for the file; a page at two holders, or pages of one chunk at two memory hosts.
    pub fn begin_elsewhere(
        &mut self,
        away: &[(Holder, PageMap)],
        at_source: PageMap,
        layout: &Layout,
    ) -> io::Result<()> {
        let mut pages = PageMap::empty(layout);
        let mut holders = vec![Holder::SOURCE; layout.chunks() as usize];
        for (holder, of_holder) in away {
            for (chunk, set) in of_holder.iter().filter(|(_, set)| !set.is_empty()) {
                if !pages.chunk(chunk).is_empty() || !set.and(at_source.chunk(chunk)).is_empty() {
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, "a chunk has pages at two holders"));
                }
                pages.insert_all(chunk, set);
                holders[chunk.index()] = *holder;
            }
        }
        pages.add(&at_source);
        let format = if at_source.is_empty() { V2 } else { V3 };
        self.begin_with((pages, at_source, holders), format, layout)
    }

    fn begin_with(
        &mut self,
        (pages, at_source, holders): (PageMap, PageMap, Vec<Holder>),
        format: Format,
        layout: &Layout,
    ) -> io::Result<()> {
        let entry = |chunk: ChunkIndex| {
            let (away, at_source) = (*pages.chunk(chunk), *at_source.chunk(chunk));
            format.entry(Entry { away, at_source, holder: holders[chunk.index()] })
        };
        let entries: Vec<u8> = layout.iter().flat_map(entry).collect();
        self.file.write_all_at(&entries, format.header_bytes as u64)?;
        // The header is written last: a file without it is not valid.
        self.file.write_all_at(&format.header(layout), 0)?;
        (self.format, self.pages, self.at_source, self.holders) = (format, pages, at_source, holders);
        self.count(layout);
        Ok(())
    }

    fn count(&mut self, layout: &Layout) {
        self.away = self.pages.len();
        self.to_come = layout.iter().map(|chunk| self.at_source_in(chunk).len() as u64).sum();
        self.alone = layout.iter().filter(|chunk| self.is_alone(*chunk)).count();
    }

    /// All pages that are at memory hosts, by who holds them.
    #[must_use]
    pub fn by_holder(&self, layout: &Layout) -> Vec<(Holder, PageMap)> {
        let mut all: Vec<(Holder, PageMap)> = Vec::new();
        for chunk in layout.iter() {
            if let Some(holder) = self.holder(chunk) {
                map_of(&mut all, holder, layout).insert_all(chunk, &self.at_hosts_in(chunk));
            }
        }
        all
    }

    /// The memory host that has pages of a chunk; `None` where none has.
    #[must_use]
    pub fn holder(&self, chunk: ChunkIndex) -> Option<Holder> {
        (!self.at_hosts_in(chunk).is_empty()).then(|| self.holders[chunk.index()])
    }

    /// Notes that these pages are at a memory host from now on, which has all others of the chunk that are away: what
    /// the RAM file has of them counts no more. Of two hosts that had them both, one may be the holder alone from now
    /// on.
    ///
    /// # Errors
    /// The file cannot be written; then they still count as here. Others of the chunk are at another memory host, or
    /// the map is of a version that cannot say it.
    pub fn departed(&mut self, chunk: ChunkIndex, pages: &PageSet, holder: Holder) -> io::Result<()> {
        let set = *self.pages.chunk(chunk);
        let may_have = |other: Holder| other == holder || other == holder.whole();
        let others = self.holder(chunk).is_some_and(|other| !may_have(other));
        let one_holder = self.format == V1 || self.format == V2 && !self.at_source_in(chunk).is_empty();
        if others || one_holder {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the chunk has pages at another holder"));
        }
        if pages.is_empty() {
            return Ok(());
        }
        self.forget_source(chunk, pages)?;
        if self.holder(chunk) != Some(holder) {
            // Before it means anything: an entry may lie across two pages of the file, and a daemon that is killed
            // between them leaves some of the pages away, which is as good, but not without a holder, nor with one that
            // has them as they were before.
            self.write_holder(chunk, holder)?;
        }
        self.write_pages(chunk, set.or(pages))
    }

    /// Notes that these pages, which are at the source, are at a memory host from now on, which has all others of the
    /// chunk that are at one.
    ///
    /// # Errors
    /// The file cannot be written; then they still are at the source. Others of the chunk are at another memory host,
    /// or the map is of a version that cannot say it.
    pub fn left_source(&mut self, chunk: ChunkIndex, pages: &PageSet, holder: Holder) -> io::Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let others = self.holder(chunk).is_some_and(|other| other != holder);
        if others || self.format != V3 || !pages.without(&self.at_source_in(chunk)).is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the chunk has pages at another holder"));
        }
        if self.holder(chunk).is_none() {
            // Before it means anything.
            self.write_holder(chunk, holder)?;
        }
        self.forget_source(chunk, pages)?;
        self.to_come -= pages.len() as u64;
        Ok(())
    }

    /// These pages, which are here, have come from the source: it is not said that they are there any more.
    fn forget_source(&mut self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let rest = self.at_source.chunk(chunk).without(pages);
        if rest == *self.at_source.chunk(chunk) {
            return Ok(());
        }
        if let Some(at) = self.format.at_source() {
            self.file.write_all_at(&rest.to_bytes(), self.at(chunk) + at as u64)?;
        }
        *self.at_source.chunk_mut(chunk) = rest;
        Ok(())
    }

    /// Notes that of two hosts that had a chunk's pages that are away one is to be believed alone.
    ///
    /// # Errors
    /// The file cannot be written; then both are. Nothing of the chunk is away at these two.
    pub fn left_alone(&mut self, chunk: ChunkIndex, holder: Holder) -> io::Result<()> {
        if self.holder(chunk) != Some(holder.whole()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the chunk has no pages at these two"));
        }
        self.write_holder(chunk, holder)
    }

    /// Notes that both of two hosts have a chunk's pages that are away, of which one was to be believed alone.
    ///
    /// # Errors
    /// The file cannot be written; then it still is.
    pub fn mended(&mut self, chunk: ChunkIndex) -> io::Result<()> {
        self.write_holder(chunk, self.holders[chunk.index()].whole())
    }

    /// How many chunks have pages at one of two hosts that is to be believed alone.
    #[must_use]
    pub fn alone(&self) -> usize {
        self.alone
    }

    fn is_alone(&self, chunk: ChunkIndex) -> bool {
        self.holder(chunk).and_then(Holder::alone).is_some()
    }

    fn write_holder(&mut self, chunk: ChunkIndex, holder: Holder) -> io::Result<()> {
        let was_alone = self.is_alone(chunk);
        self.file.write_all_at(&[holder.entry()], self.at(chunk) + PageSet::BYTES as u64)?;
        self.holders[chunk.index()] = holder;
        self.count_alone(chunk, was_alone);
        Ok(())
    }

    fn write_pages(&mut self, chunk: ChunkIndex, away: PageSet) -> io::Result<()> {
        let (was_alone, before) = (self.is_alone(chunk), self.pages.chunk(chunk).len());
        let to_come = self.at_source_in(chunk).len() as u64;
        self.file.write_all_at(&away.to_bytes(), self.at(chunk))?;
        *self.pages.chunk_mut(chunk) = away;
        self.away = self.away + away.len() as u64 - before as u64;
        self.to_come = self.to_come + self.at_source_in(chunk).len() as u64 - to_come;
        self.count_alone(chunk, was_alone);
        Ok(())
    }

    fn count_alone(&mut self, chunk: ChunkIndex, was: bool) {
        self.alone = self.alone + usize::from(self.is_alone(chunk)) - usize::from(was);
    }

    fn at(&self, chunk: ChunkIndex) -> u64 {
        (self.format.header_bytes + chunk.index() * self.format.entry_bytes) as u64
    }

    /// Whether the page is away.
    #[must_use]
    pub fn is_away(&self, chunk: ChunkIndex, page: u8) -> bool {
        self.pages.chunk(chunk).contains(page)
    }

    /// The pages of a chunk that are away.
    #[must_use]
    pub fn away_in(&self, chunk: ChunkIndex) -> &PageSet {
        self.pages.chunk(chunk)
    }

    /// Those of them that are at the source.
    #[must_use]
    pub fn at_source_in(&self, chunk: ChunkIndex) -> PageSet {
        self.pages.chunk(chunk).and(self.at_source.chunk(chunk))
    }

    /// Those of them that are at a memory host.
    #[must_use]
    pub fn at_hosts_in(&self, chunk: ChunkIndex) -> PageSet {
        self.pages.chunk(chunk).without(self.at_source.chunk(chunk))
    }

    /// All pages that are at the source.
    #[must_use]
    pub fn pages_at_source(&self, layout: &Layout) -> PageMap {
        let mut pages = PageMap::empty(layout);
        layout.iter().for_each(|chunk| pages.insert_all(chunk, &self.at_source_in(chunk)));
        pages
    }

    /// All pages that are away.
    #[must_use]
    pub fn pages_away(&self) -> &PageMap {
        &self.pages
    }

    /// How many pages are away.
    #[must_use]
    pub fn away(&self) -> u64 {
        self.away
    }

    /// How many of them are at the source.
    #[must_use]
    pub fn to_come(&self) -> u64 {
        self.to_come
    }

    /// Whether the guest is a split one that its source had pages of.
    #[must_use]
    pub fn has_both(&self) -> bool {
        self.format == V3
    }

    /// Notes that these pages are here: their content is in the RAM file.
    ///
    /// # Errors
    /// The file cannot be written; then the pages still count as away.
    pub fn arrived(&mut self, chunk: ChunkIndex, pages: &PageSet) -> io::Result<()> {
        let rest = self.pages.chunk(chunk).without(pages);
        self.arrivals[chunk.index()] = self.arrivals[chunk.index()].wrapping_add(1);
        self.write_pages(chunk, rest)
    }

    /// How often pages of a chunk have arrived: another number than before where some have.
    #[must_use]
    pub fn arrivals(&self, chunk: ChunkIndex) -> u32 {
        self.arrivals[chunk.index()]
    }
}

/// The map of a holder's pages among these, which has none yet where it was not among them.
pub fn map_of<'a>(maps: &'a mut Vec<(Holder, PageMap)>, holder: Holder, layout: &Layout) -> &'a mut PageMap {
    let at = maps.iter().position(|(known, _)| *known == holder).unwrap_or_else(|| {
        maps.push((holder, PageMap::empty(layout)));
        maps.len() - 1
    });
    &mut maps[at].1
}

#[cfg(test)]
#[path = "whereabouts_tests.rs"]
mod tests;
