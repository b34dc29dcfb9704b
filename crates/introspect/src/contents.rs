//! A kernel may rely on what its free pages hold. A word of its command line asks for that, and kernels keep the
//! command line in different places. But it shows in the pages themselves, in every one, because it can be switched on
//! at boot only and then holds for every page that becomes free:
//!
//! - `page_poison=1` fills each page with a byte when it is freed and checks it when it is allocated
//!   (`mm/page_poison.c`). Zeros in place of that would be reported as corrupted memory. Without the kernel's support
//!   (`CONFIG_PAGE_POISONING`) the word has no effect, and is ignored here, too.
//! - `debug_pagealloc=on` takes free pages out of the kernel's page tables (`CONFIG_DEBUG_PAGEALLOC`). Their contents
//!   do not matter then; but such a kernel looks for misuse of free memory, and is left alone.
//! - `init_on_free=1` fills them with zeros and relies on it: a page that was not sent reads as zeros.

use std::ops::Range;

use crate::linux::Unfit;
use crate::paging::{Fault, Virtual};
use crate::runs::count;
use crate::{PAGE_BYTES, Physical};

/// `PAGE_POISON` of `include/linux/poison.h`.
const POISON: u8 = 0xaa;

/// Free pages that are looked at, spread evenly.
const SAMPLES: u64 = 32;

/// Looks at some of the free pages. `direct` is where the kernel maps physical memory.
///
/// A few may be allocated, and written, between the walk and this check, so half of them decide. A guest most of whose
/// free pages happen to be filled with the poison's byte counts as one that poisons: that costs time, and no page.
///
/// # Errors
/// [`Unfit::Poisons`] or [`Unfit::Hides`] where the kernel relies on its free pages.
pub(crate) fn check(
    ram: &dyn Physical,
    memory: &mut Virtual<'_>,
    direct: u64,
    free: &[Range<u64>],
) -> Result<(), Unfit> {
    let (mut poisoned, mut hidden, mut looked) = (0, 0, 0);
    let mut page = vec![0; PAGE_BYTES as usize];
    for frame in samples(free) {
        let address = frame * PAGE_BYTES;
        if ram.read(address, &mut page).is_err() {
            continue;
        }
        looked += 1;
        poisoned += u64::from(page.iter().all(|&byte| byte == POISON));
        hidden += u64::from(memory.translate(direct.wrapping_add(address)) == Err(Fault::NotMapped));
    }
    match () {
        () if looked == 0 => Ok(()),
        () if poisoned * 2 >= looked => Err(Unfit::Poisons),
        () if hidden * 2 >= looked => Err(Unfit::Hides),
        () => Ok(()),
    }
}

/// Frames out of the runs, at even distances.
fn samples(free: &[Range<u64>]) -> Vec<u64> {
    let total = count(free);
    let wanted = SAMPLES.min(total);
    let mut runs = free.iter();
    let mut run = runs.next().cloned().unwrap_or(0..0);
    let mut before = 0;
    let mut samples = Vec::new();
    for number in 0..wanted {
        let index = (u128::from(total) * u128::from(number) / u128::from(wanted)) as u64;
        while index - before >= run.end - run.start {
            before += run.end - run.start;
            let Some(next) = runs.next() else { return samples };
            run = next.clone();
        }
        samples.push(run.start + (index - before));
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_all_runs() {
        assert_eq!(samples(&[]), []);
        assert_eq!(samples(&[4..6, 9..10]), [4, 5, 9]);
        let spread = samples(&[0..100, 1000..1100, 5000..5120]);
        assert_eq!(spread.len(), 32);
        assert_eq!((spread[0], spread[31]), (0, 5110));
        assert!(spread.is_sorted_by(|one, next| one < next));
    }
}
