//! Clones that go to other hosts: each is moved there as a guest is in post-copy, and its source is the fork's image.
//!
//! ```text
//!   the clone's migration                       the fork
//!   connects, proposes the clone
//!   its VMM waits there
//!   ready ────────────────────────────────────▶ the guest stops, is saved, runs on
//!   the devices, the image's map ◀───────────── over
//!   nobody writes the image
//!   Commit: the clone runs there
//!   pages, asked for and pushed
//! ```
//!
//! For the migration the clone is a guest in a VMM of its own (`Still`): it stands still from the fork's pause on,
//! its devices are those that were saved, and its RAM is the image. There is nobody to let run here again: a clone that
//! does not arrive never was.
//!
//! The image does not change any more, so nothing of post-copy's races with a writer is left. Two are of the fork
//! itself:
//! * **What the guest writes before the pause** is in the file by then, and nobody has read it: `Writes` names all of
//!   the image once the pause is over, and no page goes before.
//! * **What the VMM could write after it** (what it has not unmapped yet, or has opened once more) would be seen by a
//!   clone. So before a clone is handed over nobody may be able to write the image
//!   (`wait_until_nobody_writes`): `Pause::nobody_writes`.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_protocol::pages::PageMap;

use super::{Image, Saved};
use crate::error::MigrateError;
use crate::memory::Memory;
use crate::source::throttle::Throttle;
use crate::source::track::{Cost, Tracker, Watch};
use crate::vmm::{Source, Stopped, VmmError};

/// What the pause of a fork leaves to clones on other hosts.
#[derive(Debug, Default)]
pub struct Pause {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    /// It is still to come.
    #[default]
    Ahead,
    Over(Left),
    /// It never came, or nothing was saved in it.
    CameToNothing,
}

/// What it leaves.
#[derive(Debug, Clone)]
struct Left {
    devices: Arc<Vec<u8>>,
    stopped: Stopped,
    image: Arc<Image>,
}

impl Pause {
    /// It is over: clones begin as this.
    pub fn over(&self, saved: &Saved, image: &Arc<Image>) {
        let devices = Arc::new(saved.devices.clone());
        self.ends(State::Over(Left { devices, stopped: saved.stopped, image: Arc::clone(image) }));
    }

    /// Nothing comes of it, unless it is over already: clones that wait for it end.
    pub fn came_to_nothing(&self) {
        let mut state = self.lock();
        if matches!(*state, State::Ahead) {
            *state = State::CameToNothing;
            self.changed.notify_all();
        }
    }

    /// Waits until nobody can write the image that it left.
    ///
    /// # Errors
    /// As [`Image::wait_until_nobody_writes`]; or it is not over.
    pub fn nobody_writes(&self) -> Result<(), MigrateError> {
        let left = match &*self.lock() {
            State::Over(left) => left.clone(),
            _ => return Err(MigrateError::Bug("a clone before its source was forked")),
        };
        left.image.wait_until_nobody_writes()
    }

    fn ends(&self, how: State) {
        *self.lock() = how;
        self.changed.notify_all();
    }

    /// Waits for its end.
    fn wait(&self) -> Result<Left, VmmError> {
        let ahead = |state: &mut State| matches!(state, State::Ahead);
        match &*self.changed.wait_while(self.lock(), ahead).unwrap_or_else(PoisonError::into_inner) {
            State::Over(left) => Ok(left.clone()),
            _ => Err(VmmError::Migration { reason: "the machine was not forked".into() }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A clone that leaves, as the guest of a VMM.
pub struct Still {
    pause: Arc<Pause>,
    /// Told once the clone's place is ready there, and dropped with this.
    ready: Option<Sender<()>>,
    left: Option<Left>,
    /// Where its devices go to, and the thread that writes them.
    stream: Option<UnixStream>,
    writing: Option<JoinHandle<std::io::Result<()>>>,
}

impl Still {
    /// A clone of the guest of this pause. `ready` is told once the clone waits for nothing but the pause.
    #[must_use]
    pub fn of(pause: &Arc<Pause>, ready: Sender<()>) -> Self {
        Self { pause: Arc::clone(pause), ready: Some(ready), left: None, stream: None, writing: None }
    }

    fn connection(doing: &str) -> impl FnOnce(std::io::Error) -> VmmError {
        move |source| VmmError::Connection { doing: doing.to_owned(), source }
    }
}

impl Source for Still {
    fn prepare(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    fn running(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    fn processor_threads(&mut self) -> Result<Vec<u32>, VmmError> {
        Ok(Vec::new())
    }

    /// Waits for the pause, however long that takes: nothing is held up by it.
    fn begin(&mut self) -> Result<UnixStream, VmmError> {
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(());
        }
        self.left = Some(self.pause.wait()?);
        let (ours, theirs) = UnixStream::pair().map_err(Self::connection("saving the devices"))?;
        self.stream = Some(ours);
        Ok(theirs)
    }

    fn stopped(&mut self, _timeout: Duration) -> Result<Option<Stopped>, VmmError> {
        Ok(self.left.as_ref().map(|left| left.stopped))
    }

    fn save_devices(&mut self) -> Result<(), VmmError> {
        let (Some(mut stream), Some(left)) = (self.stream.take(), &self.left) else { return Ok(()) };
        let devices = Arc::clone(&left.devices);
        // They may be more than lies in a socket's buffers.
        let write = move || stream.write_all(&devices).and_then(|()| stream.shutdown(Shutdown::Both));
        let thread = std::thread::Builder::new().name("devices".into()).spawn(write);
        self.writing = Some(thread.map_err(Self::connection("saving the devices"))?);
        Ok(())
    }

    fn saved(&mut self, _timeout: Duration) -> Result<(), VmmError> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let broke_off = |_| Err(std::io::Error::other("the thread that writes them broke off"));
        writing.join().unwrap_or_else(broke_off).map_err(Self::connection("saving the devices"))
    }

    fn rollback(&mut self) -> Result<(), VmmError> {
        (self.ready, self.stream) = (None, None);
        Ok(())
    }

    fn ended(&mut self) -> Option<VmmError> {
        None
    }

    fn quit(&mut self) {}
}

/// The writes of a clone that leaves: all that is in the image when it stands still, and nothing after that.
#[derive(Debug, Default)]
pub struct Writes {
    told: bool,
}

impl Tracker for Writes {
    fn arm(&mut self, _ram: &dyn Memory) -> Result<(), MigrateError> {
        Ok(())
    }

    fn collect(
        &mut self,
        ram: &dyn Memory,
        written: &mut PageMap,
        _discarded: &mut PageMap,
    ) -> Result<(), MigrateError> {
        if !std::mem::replace(&mut self.told, true) {
            written.add(&ram.allocated().map_err(MigrateError::host("looking for holes in the image"))?);
        }
        Ok(())
    }

    fn watch(&self) -> Option<Arc<dyn Watch>> {
        None
    }

    fn seal(&mut self) {}

    fn disarm(&mut self) {}

    fn cost(&self) -> Cost {
        Cost::default()
    }
}

/// The throttle of a guest that does not run.
#[derive(Debug)]
pub struct Unthrottled;

impl Throttle for Unthrottled {
    fn try_out(&mut self, _threads: &[u32]) -> Result<(), MigrateError> {
        Ok(())
    }

    fn set(&mut self, _percent: u8, _threads: &[u32]) -> Result<(), MigrateError> {
        Ok(())
    }

    fn loosen(&mut self) {}

    fn release(&mut self) {}
}
