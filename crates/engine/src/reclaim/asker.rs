//! The VMM, asked by a thread of its own: it may answer only once a thread of it goes on that waits for us.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Scope;
use std::time::Duration;

use sterna_introspect::PageTables;

use crate::vmm::{self, VmmError};

/// How often it is looked whether somebody waits for a page while the VMM has not answered.
const LOOK_FOR_WAITS: Duration = Duration::from_micros(200);

/// What the VMM said.
pub enum Answer {
    /// The processors' page tables, at an instant after the question.
    Tables(Vec<PageTables>),
    /// The guest was started again at some time before that.
    Reset,
    /// It did not say.
    Failed(VmmError),
    /// It has not said anything yet, and was not waited for any longer.
    TooLate,
}

/// The thread that asks. It ends with this.
pub struct Asker {
    questions: Sender<()>,
    answers: Receiver<Answer>,
    /// A question is under way.
    asked: bool,
}

impl Asker {
    /// Has a thread ask this VMM.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, vmm: &'scope mut dyn vmm::Source) -> Self {
        let (questions, to_ask) = channel();
        let (answered, answers) = channel();
        scope.spawn(move || {
            while to_ask.recv().is_ok() {
                if answered.send(ask(vmm)).is_err() {
                    return;
                }
            }
        });
        Self { questions, answers, asked: false }
    }

    /// Asks which page tables the processors use.
    pub fn ask(&mut self) {
        self.asked = self.questions.send(()).is_ok();
    }

    /// Waits for the answer, unless `give_way` says otherwise meanwhile.
    pub fn answer(&mut self, mut give_way: impl FnMut() -> bool) -> Answer {
        while self.asked {
            match self.answers.recv_timeout(LOOK_FOR_WAITS) {
                Ok(answer) => {
                    self.asked = false;
                    return answer;
                }
                Err(RecvTimeoutError::Timeout) if give_way() => return Answer::TooLate,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Answer::TooLate
    }

    /// Waits for an answer that came too late: what it says is of another time.
    pub fn settle(&mut self) {
        if self.asked {
            let _ = self.answers.recv();
            self.asked = false;
        }
    }
}

/// The reset is asked for last: the VMM tells of one before it answers what was asked after it.
fn ask(vmm: &mut dyn vmm::Source) -> Answer {
    let tables = match vmm.page_tables() {
        Ok(tables) => tables,
        Err(error) => return Answer::Failed(error),
    };
    match vmm.was_reset() {
        Ok(false) => Answer::Tables(tables),
        Ok(true) => Answer::Reset,
        Err(error) => Answer::Failed(error),
    }
}
