# Reads what `cargo test … -- --show-output` printed; prints each skip with its reason, and the closing line.
# A test that cannot run here prints `skipped: REASON` and returns: cargo counts it as passed, this does not.
# status: cargo's exit status.

/^---- .* stdout ----$/ { test = $2 }

/^skipped: / && !(test in unable) {
    unable[test]
    unables++
    print test " " $0
}

/^test result: / {
    for (i = 2; i < NF; i++) {
        if ($(i + 1) == "passed;") passed += $i
        if ($(i + 1) == "failed;") failed += $i
        if ($(i + 1) == "ignored;") ignored += $i
    }
    # Names are unique within one program of tests only.
    split("", unable)
    test = ""
}

END {
    if (status != 0 && failed == 0) {
        print "the tests did not run to their end"
        failed = 1
    }
    printf "%d passed, %d failed, %d skipped\n", passed - unables, failed, ignored + unables
}
