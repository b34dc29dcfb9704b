//! Problems of the API that several places report. They are in one place, so that one code always means one thing.

use std::fmt::Display;

use sterna_api::problem::Whereabouts;
use sterna_api::{Blame, Code, Problem};

/// The problem of a name that no machine has.
#[must_use]
pub fn unknown_vm(name: &str) -> Problem {
    Problem::new(Code::UnknownVm, Blame::Request, format!("there is no virtual machine '{name}' on this host"))
        .hint("'sterna ps' lists them")
}

/// The problem of a name that is taken.
#[must_use]
pub fn name_taken(name: &str) -> Problem {
    Problem::new(Code::NameTaken, Blame::Request, format!("there already is a virtual machine '{name}' on this host"))
        .hint("choose another name, or stop the other machine")
}

/// The problem of a machine that is busy with something else.
#[must_use]
pub fn busy(name: &str, with: &str) -> Problem {
    Problem::new(Code::VmBusy, Blame::Request, format!("'{name}' cannot do that now: {with}"))
        .hint("wait until that has ended, or 'sterna cancel' it")
}

/// Whether a machine is busy with something else, or pages follow it: that ends by itself, and then it can be asked
/// again.
#[must_use]
pub fn passes(problem: &Problem) -> bool {
    [Code::VmBusy, Code::StillArriving].contains(&problem.code)
}

/// The problem of a request that contradicts itself or the rules.
#[must_use]
pub fn invalid(message: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidRequest, Blame::Request, message).guest(Whereabouts::Gone)
}

/// The problem of this host's files, memory or kernel.
#[must_use]
pub fn host(doing: impl Into<String>, error: &dyn std::error::Error) -> Problem {
    let mut problem = Problem::new(Code::HostError, Blame::Host, doing);
    let mut cause = Some(error);
    while let Some(error) = cause {
        problem.cause.push(error.to_string());
        cause = error.source();
    }
    problem
}

/// The problem of a QEMU that did not do what it was asked.
#[must_use]
pub fn qemu(doing: impl Into<String>, error: &dyn std::error::Error) -> Problem {
    let mut problem = host(doing, error);
    problem.code = Code::QemuError;
    problem.blame = Blame::Qemu;
    problem
}

/// Checks a machine's name. Names are parts of paths, socket names and metric labels, so the rule is narrow.
///
/// # Errors
/// A [`Problem`] with the rule that the name breaks.
pub fn check_name(name: &str) -> Result<(), Problem> {
    let wrong = |why: &dyn Display| {
        Err(Problem::new(Code::InvalidName, Blame::Request, format!("'{name}' cannot be a machine's name: {why}"))
            .hint("letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"))
    };
    if name.is_empty() || name.len() > 64 {
        return wrong(&format!("it has {} characters", name.len()));
    }
    if let Some(c) = name.chars().find(|c| !c.is_ascii_alphanumeric() && !"._-".contains(*c)) {
        return wrong(&format!("it contains {c:?}"));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return wrong(&"it begins with neither a letter nor a digit");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        for name in ["", ".", "..", "a/b", "-rf", "ä", "a b", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        for name in ["a", "db1", "web.example-2_x", &"x".repeat(64)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
    }
}
