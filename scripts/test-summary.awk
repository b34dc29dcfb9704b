# Reads what `cargo test … -- --show-output` printed; prints each skip with its reason, each failure with its first
# words, and the closing line.
# A test that cannot run here prints `skipped: REASON` and returns: cargo counts it as passed, this does not.
# A test that was still running when its program was ended has no result.
# status: cargo's exit status.

/^---- .* stdout ----$/ { test = $2 }

/^skipped: / && !(test in unable) {
    unable[test]
    unables++
    print test " " $0
}

# Tests that are to panic say so, too; theirs comes before this word.
/^failures:$/ { failing = 1 }

failing && /^thread .* panicked at / && !(test in broken) {
    place = $0
    sub(/.* panicked at /, "", place)
    broken[test]
    awaited = 1
    next
}

awaited {
    failure[++failures] = test " failed at " place " " $0
    awaited = 0
}

/^ +Running / { split("", running) }

/^test .* has been running for over / { running[$2] }

/^test .* \.\.\. / { delete running[$2] }

/^timeout: sending signal / {
    for (name in running) failure[++failures] = name " did not end"
    split("", running)
    failed++
}

/^test result: / {
    for (i = 2; i < NF; i++) {
        if ($(i + 1) == "passed;") passed += $i
        if ($(i + 1) == "failed;") failed += $i
        if ($(i + 1) == "ignored;") ignored += $i
    }
    # Names are unique within one program of tests only.
    split("", unable)
    split("", broken)
    failing = 0
    test = ""
}

END {
    if (status != 0 && failed == 0) {
        print "the tests did not run to their end"
        failed = 1
    }
    for (i = 1; i <= failures; i++) print failure[i]
    printf "%d passed, %d failed, %d skipped\n", passed - unables, failed, ignored + unables
}
