//! The host's processor, for guests that were given it as it is (`-cpu host` or `max` under KVM).

use std::collections::BTreeSet;

/// Describes this host's processor: `vendor/family/model/flag flag …`.
#[must_use]
pub fn describe() -> Option<String> {
    describe_text(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn describe_text(cpuinfo: &str) -> Option<String> {
    let field = |name: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_string())
        })
    };
    Some(format!("{}/{}/{}/{}", field("vendor_id")?, field("cpu family")?, field("model")?, field("flags")?))
}

/// What this processor lacks to run a guest that was given `wanted`; `None` where it lacks nothing.
#[must_use]
pub fn lacks(wanted: &str, here: &str) -> Option<String> {
    let parts = |text: &str| {
        let mut fields = text.splitn(4, '/').map(String::from);
        let head = [fields.next(), fields.next(), fields.next()].map(Option::unwrap_or_default);
        let flags: BTreeSet<String> = fields.next().unwrap_or_default().split_whitespace().map(String::from).collect();
        (head, flags)
    };
    let ([vendor, ..], flags) = parts(wanted);
    let ([own_vendor, ..], own_flags) = parts(here);
    if vendor != own_vendor {
        return Some(format!("it is {own_vendor}'s, the source's is {vendor}'s"));
    }
    let missing: Vec<&str> = flags.difference(&own_flags).map(String::as_str).take(8).collect();
    (!missing.is_empty()).then(|| format!("it lacks {}", missing.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_can_stand_in_for_one_with_fewer_features_of_the_same_maker() {
        let text =
            "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu sse avx2\n\nvendor_id\t: x";
        let here = describe_text(text).unwrap();
        assert_eq!(here, "AuthenticAMD/25/17/fpu sse avx2");
        assert_eq!(lacks("AuthenticAMD/23/1/fpu sse", &here), None);
        assert_eq!(lacks("AuthenticAMD/25/17/fpu avx512f sse", &here).unwrap(), "it lacks avx512f");
        assert!(lacks("GenuineIntel/6/1/fpu", &here).unwrap().contains("GenuineIntel"));
    }
}
