//! The rehearsal of a new template: restored once as every start will restore it, to see that it can
//! be and which pages of its memory that takes.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use thaw_agent_api::agent::InfoRequest;
use thaw_vmm_control::{ChannelError, Reply, Request, WorkingSet};

use super::super::build::BuildError;
use super::super::digest::descriptor_path;
use super::super::watchdog::Step;
use super::{Guest, end, host};

const REHEARSAL: Step = Step {
    doing: "restoring the new template",
    limit: Duration::from_secs(60),
};

/// State and memory of a template anew, for reading: the VMM must not be able to change what is about
/// to be published. Of this one, whose guest runs nobody's programs, that is wall enough.
pub(super) fn reopen([state, memory]: [&File; 2]) -> Result<[File; 2], BuildError> {
    let reopen = |file: &File| {
        File::open(descriptor_path(file)).map_err(host("opening the new template for reading"))
    };
    Ok([reopen(state)?, reopen(memory)?])
}

impl Guest {
    /// Restore the template in `files`, state and memory, until its agent has answered a call; then the
    /// VMM's end. Returns the pages touched by then; none where the host's kernel cannot tell.
    pub(super) fn rehearse(mut self, files: &[File; 2]) -> Result<WorkingSet, BuildError> {
        self.watchdog.step(REHEARSAL);
        let result = self
            .restore(files)
            .and_then(|()| self.ask_agent())
            .and_then(|()| self.touched());
        end(&self.launched);
        result
    }

    /// Run the guest, with its accesses recorded where that is possible.
    fn restore(&mut self, [state, memory]: &[File; 2]) -> Result<(), BuildError> {
        let path = format!("/proc/{}/pagemap", self.launched.pid);
        let owner = &mut self.launched.owner;
        let restored = match File::open(&path) {
            Ok(pagemap) => owner.request(
                &Request::Rehearse,
                &[state.as_fd(), memory.as_fd(), pagemap.as_fd()],
            ),
            Err(error) => {
                tracing::warn!(path, %error, "cannot see what a start touches");
                let request = Request::Restore {
                    working_set: WorkingSet::default(),
                };
                owner.request(&request, &[state.as_fd(), memory.as_fd()])
            }
        };
        restored
            .and_then(|_| owner.request(&Request::Run, &[]))
            .map(drop)
            .map_err(|error| self.channel_failed(REHEARSAL, error))
    }

    /// What a start waits for first: any answer of the agent.
    fn ask_agent(&mut self) -> Result<(), BuildError> {
        self.call_agent(REHEARSAL, async |client, context| {
            client.info(context, &InfoRequest::new()).await.map(drop)
        })
        .map(drop)
    }

    fn touched(&mut self) -> Result<WorkingSet, BuildError> {
        match self.launched.owner.request(&Request::WorkingSet, &[]) {
            Ok(Reply::WorkingSet(working_set)) => {
                let (pages, written) = working_set.pages();
                let ranges = working_set.ranges().len();
                tracing::info!(pages, written, ranges, "recorded what a start touches");
                Ok(working_set)
            }
            Ok(_) => Err(self.failed(REHEARSAL, "the VMM answered out of turn".to_owned())),
            Err(ChannelError::Refused(reason)) => {
                tracing::warn!(reason, "starts will not have their pages ready");
                Ok(WorkingSet::default())
            }
            Err(error) => Err(self.channel_failed(REHEARSAL, error)),
        }
    }
}
