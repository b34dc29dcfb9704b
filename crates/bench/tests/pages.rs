//! The pages of experiments show what campaigns have kept.

use sterna_bench::pages;

#[test]
fn tables_and_plots_of_the_experiments_pages_are_made_from_the_results_that_are_kept() {
    if let Err(error) = sterna_bench::tools::qemu_7_2() {
        return eprintln!(
            "skipped: an experiment's plan, which draws its plots, names the QEMUs that are here: {error}"
        );
    }
    let different = pages::make(&pages::directory(), true).unwrap();
    assert!(different.is_empty(), "`./x bench pages` makes them anew: {different:#?}");
}
