//! Giving a build up that nobody waits for any more: its sandbox was deleted meanwhile.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Signal, pidfd_send_signal};
use thaw_vmm_control::Launched;

/// Ends the VMM of a build, now or as soon as it is started, and with it the build. Clones are the
/// same one.
#[derive(Debug, Clone, Default)]
pub struct Abandonment(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    abandoned: bool,
    vmm: Option<OwnedFd>,
}

impl Abandonment {
    /// Give it up.
    pub fn declare(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        state.end();
    }

    /// `launched` is the VMM of the build from now on.
    pub(super) fn concerns(&self, launched: &Launched) -> std::io::Result<()> {
        let mut state = self.lock();
        state.vmm = Some(launched.pidfd.try_clone()?);
        if state.abandoned {
            state.end();
        }
        Ok(())
    }

    /// The build is done.
    pub(super) fn is_over(&self) {
        self.lock().vmm = None;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end(&self) {
        if let Some(vmm) = &self.vmm {
            // Fails only when it has ended.
            let _ = pidfd_send_signal(vmm.as_fd(), Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use thaw_vmm_control::{Channel, Owner};

    use super::*;

    fn vmm() -> (Child, Launched) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let owner = Owner::new(Channel::pair().unwrap().0);
        (child, Launched { pid, pidfd, owner })
    }

    #[test]
    fn test_an_abandoned_build_s_vmm_ends_now_and_when_it_comes_later() {
        let abandonment = Abandonment::default();
        let (mut first, launched) = vmm();
        abandonment.concerns(&launched).unwrap();
        assert!(first.try_wait().unwrap().is_none());
        abandonment.declare();
        assert_eq!(first.wait().unwrap().signal(), Some(9));
        let (mut second, launched) = vmm();
        abandonment.concerns(&launched).unwrap();
        assert_eq!(second.wait().unwrap().signal(), Some(9));
    }
}
