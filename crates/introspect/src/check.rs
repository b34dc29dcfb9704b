use crate::counters::ZoneCounters;
use crate::free::{Blocks, pages};
use crate::layout::MAX_ORDERS;
use crate::linux::Unfit;

/// The agreement of a look with what the kernel counts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    /// Every block of every order is in the free lists, and nothing changed during the look. This holds for a stopped
    /// guest, unless it was stopped while it moved a block.
    Exact,
    /// The difference is one that a running guest explains.
    Within {
        /// The number of free pages by which the look differs from what the kernel counted at either end of it.
        difference_pages: u64,
        /// The largest difference that was allowed.
        allowed_pages: u64,
    },
}

/// The pages that a guest may allocate and free again between two reads of its counters without changing them: a
/// sixty-fourth of its pages, which at 10 ms for each GiB is 1.6 GiB a second, and some more for small guests. A
/// structure that is read wrongly shows no free pages at all, or absurd numbers of them.
fn allowed_pages(ram_pages: u64) -> u64 {
    ram_pages / 64 + 256
}

/// Compares what was found with the kernel's counters before and after.
///
/// # Errors
/// [`Unfit::CountersDisagree`] where a running guest does not explain the difference; [`Unfit::Malformed`] for invalid
/// counters.
pub(crate) fn agreement(
    before: &[ZoneCounters],
    after: &[ZoneCounters],
    found: &Blocks,
    ram_pages: u64,
) -> Result<Agreement, Unfit> {
    for zone in before.iter().chain(after) {
        if zone.free_pages() > zone.spanned_pages {
            return Err(Unfit::Malformed {
                what: format!("zone {} of node {} has more free pages than it spans", zone.zone, zone.node),
            });
        }
    }
    let (then, now) = (blocks(before), blocks(after));
    let agreement = if then == *found && now == *found {
        Agreement::Exact
    } else {
        let found_pages = pages(found);
        let (least, most) = (pages(&then).min(pages(&now)), pages(&then).max(pages(&now)));
        let difference_pages = least.saturating_sub(found_pages).max(found_pages.saturating_sub(most));
        let allowed_pages = allowed_pages(ram_pages);
        if difference_pages > allowed_pages {
            return Err(Unfit::CountersDisagree { found_pages, counted_pages: pages(&now), allowed_pages });
        }
        Agreement::Within { difference_pages, allowed_pages }
    };
    // Other code of the kernel keeps the other counter, so it confirms that the lists were read rightly.
    let counted = after.iter().map(|zone| zone.nr_free_pages).fold(0_i64, i64::saturating_add);
    let (counted, allowed_pages) = (u64::try_from(counted).unwrap_or(0), allowed_pages(ram_pages));
    if counted.abs_diff(pages(&now)) > allowed_pages {
        return Err(Unfit::CountersDisagree { found_pages: pages(&now), counted_pages: counted, allowed_pages });
    }
    Ok(agreement)
}

/// The free lists of all zones.
fn blocks(zones: &[ZoneCounters]) -> Blocks {
    let mut blocks = [0_u64; MAX_ORDERS];
    for zone in zones {
        for (sum, &count) in blocks.iter_mut().zip(&zone.free_blocks) {
            *sum = sum.saturating_add(count);
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(free_blocks: &[u64]) -> Vec<ZoneCounters> {
        let nr_free_pages = pages(free_blocks).cast_signed();
        vec![ZoneCounters {
            node: 0,
            zone: 1,
            spanned_pages: 1 << 20,
            free_blocks: free_blocks.to_vec(),
            nr_free_pages,
        }]
    }

    fn found(blocks: &[u64]) -> Blocks {
        let mut all = [0; MAX_ORDERS];
        all[..blocks.len()].copy_from_slice(blocks);
        all
    }

    const RAM: u64 = 1 << 20;

    #[test]
    fn the_same_in_every_order_is_exact_and_the_same_sum_is_not() {
        assert_eq!(agreement(&zone(&[4, 3]), &zone(&[4, 3]), &found(&[4, 3]), RAM), Ok(Agreement::Exact));
        let other = agreement(&zone(&[4, 3]), &zone(&[4, 3]), &found(&[2, 4]), RAM);
        assert_eq!(other, Ok(Agreement::Within { difference_pages: 0, allowed_pages: RAM / 64 + 256 }));
    }

    #[test]
    fn what_lies_between_the_counters_or_near_them_is_explained_and_what_is_far_off_is_not() {
        let (before, after) = (zone(&[100_000]), zone(&[300_000]));
        for (pages, difference_pages) in [(100_000, 0), (200_000, 0), (300_000, 0), (90_000, 10_000), (310_000, 10_000)]
        {
            let agreed = agreement(&before, &after, &found(&[pages]), RAM).unwrap();
            assert_eq!(agreed, Agreement::Within { difference_pages, allowed_pages: 16_640 });
        }
        for pages in [0, 80_000, 320_000, u64::MAX] {
            assert!(matches!(agreement(&before, &after, &found(&[pages]), RAM), Err(Unfit::CountersDisagree { .. })));
        }
    }

    #[test]
    fn counters_that_contradict_each_other_or_cannot_be_are_refused() {
        let mut zones = zone(&[100_000]);
        zones[0].nr_free_pages = 10_000;
        assert!(matches!(agreement(&zones, &zones, &found(&[100_000]), RAM), Err(Unfit::CountersDisagree { .. })));
        zones[0].nr_free_pages = i64::MIN;
        assert!(matches!(agreement(&zones, &zones, &found(&[100_000]), RAM), Err(Unfit::CountersDisagree { .. })));
        let impossible = zone(&[1 << 21]);
        assert!(matches!(agreement(&impossible, &impossible, &found(&[1 << 21]), RAM), Err(Unfit::Malformed { .. })));
    }
}
