//! Throttling: processor time is taken from a guest that writes faster than its pages go. It is the last resort.

use sterna_sys::quota::CpuQuota;

use crate::error::MigrateError;

/// A way to slow a guest down by its virtual processors' threads. The VMM's other threads keep their time: device
/// emulation and the VMM's control connection go on.
pub trait Throttle: Send {
    /// Checks that these threads can be slowed down. The trial leaves nothing behind.
    ///
    /// # Errors
    /// [`MigrateError::Throttle`] with the reason why not.
    fn try_out(&mut self, threads: &[u32]) -> Result<(), MigrateError>;

    /// Takes `percent` of the processor time of exactly these threads away from now on. It is called again when virtual
    /// processors may have come or gone.
    ///
    /// # Errors
    /// [`MigrateError::Throttle`].
    fn set(&mut self, percent: u8, threads: &[u32]) -> Result<(), MigrateError>;

    /// Gives the guest all of its time back, quickly: it is called while the guest is stopped.
    /// [`release`](Self::release) clears up the rest.
    fn loosen(&mut self);

    /// Removes the throttle and all that it changed.
    fn release(&mut self);
}

/// A CPU quota on threads of one process, by a cgroup.
#[derive(Debug)]
pub struct ProcessThrottle(CpuQuota);

impl ProcessThrottle {
    /// The throttle of the VMM with this process number.
    #[must_use]
    pub fn new(pid: u32) -> Self {
        Self(CpuQuota::of(pid))
    }
}

impl Throttle for ProcessThrottle {
    fn try_out(&mut self, threads: &[u32]) -> Result<(), MigrateError> {
        self.0.try_out(threads).map_err(MigrateError::Throttle)
    }

    fn set(&mut self, percent: u8, threads: &[u32]) -> Result<(), MigrateError> {
        self.0.limit(threads, 100_u8.saturating_sub(percent)).map_err(MigrateError::Throttle)
    }

    fn loosen(&mut self) {
        if let Err(error) = self.0.loosen() {
            tracing::warn!(%error, reason = source(&error), "cannot lift the limit on the guest's processor time yet");
        }
    }

    fn release(&mut self) {
        if let Err(error) = self.0.lift() {
            tracing::error!(%error, reason = source(&error), "cannot give the guest all of its processor time back");
        }
    }
}

fn source(error: &sterna_sys::Error) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

/// Gives a guest its processor time back where the daemon that took it has died.
pub fn release_left_over(pid: u32) {
    ProcessThrottle::new(pid).release();
}
