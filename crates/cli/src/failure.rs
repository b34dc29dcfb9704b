//! Errors, as people see them, and exit codes.

use std::process::ExitCode;

use sterna_api::problem::Whereabouts;
use sterna_api::{Blame, Code, Problem, Report, Status};

/// Failed; the machine runs on at the source.
pub const FAILED: u8 = 1;
/// The command line was wrong.
pub const USAGE: u8 = 2;
/// Cancelled; the machine runs on at the source.
pub const CANCELLED: u8 = 3;
/// Failed; the machine is lost or paused, or runs at the destination with memory that is not what it was.
pub const LOST: u8 = 4;
/// The daemon cannot be reached.
pub const UNREACHABLE: u8 = 5;
/// Nobody reads what is printed, as shells say it of a program that SIGPIPE has ended.
const UNREAD: i32 = 141;

/// Ends quietly once nobody reads what is printed, as in `sterna watch | head`; the standard library says so by a
/// panic. The signal would also end a command whose daemon goes away, without a word.
pub fn end_with_the_reader() {
    let other = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let words = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if words.starts_with("failed printing to stdout") && words.contains("Broken pipe") {
            std::process::exit(UNREAD);
        }
        other(panic);
    }));
}

/// Why a command did not succeed, and the exit code that says so.
#[derive(Debug)]
pub struct Failure {
    /// What failed, whose fault it is, why, and what to do.
    pub problem: Box<Problem>,
    /// The exit code.
    pub code: u8,
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        let code = match problem.code {
            Code::InvalidRequest | Code::InvalidName | Code::ArgumentConflict | Code::RelativePath => USAGE,
            _ => FAILED,
        };
        Self { problem: Box::new(problem), code }
    }
}

impl Failure {
    /// The failure of a wrong argument.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { problem: Box::new(Problem::new(Code::Usage, Blame::Request, message)), code: USAGE }
    }

    /// The failure of this host.
    pub fn host(doing: impl Into<String>, error: &dyn std::error::Error) -> Self {
        let mut problem = Problem::from_error(Code::HostError, Blame::Host, error);
        problem.cause.insert(0, std::mem::replace(&mut problem.message, doing.into()));
        Self { problem: Box::new(problem), code: FAILED }
    }

    /// The failure of a command on one machine, with the exit code that says where its guest is.
    #[must_use]
    pub fn with_whereabouts(self) -> Self {
        let code = if self.code == FAILED { code_at(self.problem.guest) } else { self.code };
        Self { code, ..self }
    }

    /// Writes it to standard error.
    pub fn show(&self) -> ExitCode {
        eprint!("{}", describe("sterna", &self.problem));
        ExitCode::from(self.code)
    }
}

/// A problem as lines of text: what failed, whose fault it is, why, and what to do.
pub fn describe(who: &str, problem: &Problem) -> String {
    let fault = match problem.blame {
        Blame::Request => "the request",
        Blame::Ours => "Sterna itself: please report this",
        Blame::Peer => "the peer, or the link to it",
        Blame::Host => "this host or the destination",
        Blame::Qemu => "QEMU",
        Blame::Guest => "the guest",
    };
    let mut text = format!("{who}: {}\n  fault:   {fault} ({})\n", problem.message, problem.code);
    for cause in &problem.cause {
        text.push_str(&format!("  because: {cause}\n"));
    }
    if let Some(hint) = &problem.hint {
        text.push_str(&format!("  hint:    {hint}\n"));
    }
    text
}

/// Where the guest is after a migration that did not succeed, for people.
pub fn whereabouts(problem: &Problem) -> &'static str {
    match problem.guest {
        Whereabouts::Source => "it stays at the source, as it was",
        Whereabouts::Destination => "it runs at the destination",
        Whereabouts::Paused => "it is PAUSED: its state is where the causes above say",
        Whereabouts::Gone => "it is GONE",
    }
}

/// The exit code of a migration.
pub fn code_of(report: &Report) -> u8 {
    let at = code_at(report.error.as_ref().map(|problem| problem.guest).unwrap_or_default());
    match report.status {
        Status::Completed => 0,
        Status::Cancelled if at == FAILED => CANCELLED,
        Status::Cancelled | Status::Failed => at,
    }
}

/// The exit code of a failure after which the guest is there.
fn code_at(guest: Whereabouts) -> u8 {
    match guest {
        Whereabouts::Destination | Whereabouts::Paused | Whereabouts::Gone => LOST,
        Whereabouts::Source => FAILED,
    }
}

/// The exit code of a gang: the worst of its members'.
pub fn worst(codes: impl IntoIterator<Item = u8>) -> u8 {
    let rank = |code: &u8| [0, CANCELLED, FAILED, LOST].iter().position(|known| known == code);
    codes.into_iter().max_by_key(rank).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(status: Status, guest: Whereabouts) -> Report {
        let error = (status != Status::Completed).then(|| Problem::new("x".into(), Blame::Ours, "x").guest(guest));
        Report { status, error, ..Report::default() }
    }

    #[test]
    fn exit_codes_say_where_the_machine_is() {
        assert_eq!(code_of(&report(Status::Completed, Whereabouts::Source)), 0);
        assert_eq!(code_of(&report(Status::Failed, Whereabouts::Source)), 1);
        assert_eq!(code_of(&report(Status::Cancelled, Whereabouts::Source)), 3);
        assert_eq!(code_of(&report(Status::Failed, Whereabouts::Paused)), 4);
        // Both sides were compared, and differ.
        assert_eq!(code_of(&report(Status::Failed, Whereabouts::Destination)), 4);
        assert_eq!(code_of(&report(Status::Cancelled, Whereabouts::Gone)), 4);
    }

    #[test]
    fn a_gang_ends_with_its_worst_members_code() {
        assert_eq!(worst([0, 3, 0]), 3);
        assert_eq!(worst([3, 1]), 1);
        assert_eq!(worst([1, 4, 3]), 4);
        assert_eq!(worst([]), 0);
    }

    #[test]
    fn a_problem_is_told_with_fault_cause_and_hint() {
        let mut problem = Problem::new(Code::PeerUnreachable, Blame::Peer, "cannot reach b:1").hint("is it on?");
        problem.cause.push("connection refused".into());
        let text = describe("sterna", &problem);
        for part in ["cannot reach b:1", "the peer", "peer-unreachable", "connection refused", "is it on?"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
