use std::ops::Range;

use crate::paging::{PageTables, Virtual};
use crate::vmcoreinfo::{Vmcoreinfo, text_offset};
use crate::{PAGE_BYTES, Physical};

/// The addresses in which every kernel maps its image (`__START_KERNEL_map`, `KERNEL_IMAGE_SIZE`;
/// `Documentation/arch/x86/x86_64/mm.rst`).
const IMAGE: Range<u64> = 0xffff_ffff_8000_0000..0xffff_ffff_c000_0000;

/// The kernel's lowest address with five levels of tables.
const HIGH: u64 = 0xff00_0000_0000_0000;

/// The most bytes of an image that are read: those of distributions have 30 to 80 MiB.
const LARGEST: u64 = 256 << 20;

/// The most words that are followed as pointers: in 6.1 the right one comes after 15,000 words that look like pointers.
const POINTERS: u32 = 1 << 16;

/// The bytes that are read at once.
const STRIDE: usize = 2 << 20;

/// Calls `each` for every description that the kernel's image points to, by these page tables, until it returns `Some`.
///
/// The description lies in a page of its own anywhere in RAM, and the kernel keeps a pointer to it among its variables
/// (`vmcoreinfo_data`, and `vmcoreinfo_note` to the other copy). So only an image is read, however large RAM is.
pub(crate) fn pointed_to<T>(
    ram: &dyn Physical,
    tables: PageTables,
    mut each: impl FnMut(Vmcoreinfo) -> Option<T>,
) -> Option<T> {
    // Each keeps the tables that it used last.
    let (mut image, mut elsewhere) = (Virtual::new(ram, tables), Virtual::new(ram, tables));
    let (mut bytes_left, mut pointers_left) = (LARGEST, POINTERS);
    let mut buffer = vec![0; STRIDE];
    let (mut address, mut before) = (IMAGE.start, 0);
    while address < IMAGE.end && bytes_left > 0 {
        let Ok(found) = image.translate(address) else {
            address += PAGE_BYTES;
            continue;
        };
        let bytes = found.bytes.min(IMAGE.end - address).min(STRIDE as u64);
        let piece = &mut buffer[..bytes as usize];
        let readable = ram.read(found.address, piece).is_ok();
        (address, bytes_left) = (address + bytes, bytes_left.saturating_sub(bytes));
        for word in piece.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).filter(|_| readable) {
            if word < HIGH || word == before || word % PAGE_BYTES != 0 || IMAGE.contains(&word) {
                continue;
            }
            before = word;
            pointers_left = pointers_left.checked_sub(1)?;
            let Ok(found) = elsewhere.translate(word) else { continue };
            let mut head = [0; 64];
            let Ok(()) = ram.read(found.address, &mut head) else { continue };
            let Some(at) = text_offset(&head).and_then(|offset| found.address.checked_add(offset)) else { continue };
            if let Some(found) = Vmcoreinfo::at(ram, at).and_then(&mut each) {
                return Some(found);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{NOTE, Toy};

    fn found(toy: &Toy) -> Option<u64> {
        pointed_to(&toy.ram, toy.processors()[0], |note| Some(note.address))
    }

    #[test]
    fn the_description_that_an_image_points_to_is_found() {
        let mut toy = Toy::default();
        assert_eq!(found(&toy), None, "nothing points to it");
        toy.point_to(0xd000, NOTE);
        assert_eq!(found(&toy), Some(NOTE));
        // What is refused is not the end.
        let mut seen = Vec::new();
        let all = pointed_to(&toy.ram, toy.processors()[0], |note| {
            seen.push(note.address);
            None::<()>
        });
        assert_eq!((all, seen), (None, vec![NOTE]));
        toy.write_note();
        assert!(crate::Introspection::find(&toy.ram, &toy.processors()).is_ok());
    }

    #[test]
    fn an_image_full_of_pointers_is_given_up() {
        let mut toy = Toy::default();
        for at in (0x10_0000..0x1f_0000).step_by(8) {
            toy.point_to(at, at % 16 * 512);
        }
        toy.point_to(0x1f_f000, NOTE);
        assert_eq!(found(&toy), None);
        assert!(crate::Introspection::find(&toy.ram, &toy.processors()).is_ok(), "then all RAM is searched");
        let nothing = PageTables { root: 0x1234_5000, five_levels: true };
        assert_eq!(pointed_to(&toy.ram, nothing, |_| Some(())), None);
    }
}
