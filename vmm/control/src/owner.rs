//! The owner's end of the control channel: one request at a time, events in between.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use crate::{Channel, ChannelError, Event, FromVmm, Reply, Request};

/// The owner's end. Blocking: a request waits for its answer.
#[derive(Debug)]
pub struct Owner {
    channel: Channel,
    /// Events that came while a request waited for its answer.
    events: VecDeque<Event>,
}

impl Owner {
    /// An owner that talks to the VMM at the other end of `channel`.
    pub fn new(channel: Channel) -> Self {
        Self {
            channel,
            events: VecDeque::new(),
        }
    }

    /// Ask for `request`, with the descriptors that its text names, and wait for the answer.
    /// [`Reply::Failed`] comes back as [`ChannelError::Refused`]. Events that arrive meanwhile are
    /// kept for [`Owner::next_event`].
    pub fn request(
        &mut self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Reply, ChannelError> {
        self.channel.send(request, descriptors)?;
        loop {
            match self.channel.receive()? {
                Some((FromVmm::Event(event), _)) => self.events.push_back(event),
                Some((FromVmm::Reply(Reply::Failed(words)), _)) => {
                    return Err(ChannelError::Refused(words));
                }
                Some((FromVmm::Reply(reply), _)) => return Ok(reply),
                None => return Err(ChannelError::Closed),
            }
        }
    }

    /// The next event, in the order in which they happened; waits for it. `None` when the VMM is
    /// gone.
    pub fn next_event(&mut self) -> Result<Option<Event>, ChannelError> {
        match self.events.pop_front() {
            Some(event) => Ok(Some(event)),
            None => event(self.channel.receive()?),
        }
    }

    /// As [`Owner::next_event`], but [`ChannelError::WouldBlock`] when there is none yet. To wait for
    /// more, poll the descriptor of [`Owner::channel`] for input after this has said so.
    pub fn try_next_event(&mut self) -> Result<Option<Event>, ChannelError> {
        match self.events.pop_front() {
            Some(event) => Ok(Some(event)),
            None => event(self.channel.try_receive()?),
        }
    }

    /// The channel itself, to poll its descriptor.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }
}

fn event(
    received: Option<(FromVmm, Vec<std::os::fd::OwnedFd>)>,
) -> Result<Option<Event>, ChannelError> {
    match received {
        Some((FromVmm::Event(event), _)) => Ok(Some(event)),
        Some((FromVmm::Reply(_), _)) => Err(ChannelError::OutOfTurn("a reply")),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestExit;

    fn reply(channel: &Channel, reply: Reply) {
        channel.send(&FromVmm::Reply(reply), &[]).unwrap();
    }

    #[test]
    fn test_events_met_while_waiting_for_an_answer_are_kept_in_order() {
        let (a, vmm) = Channel::pair().unwrap();
        let mut owner = Owner::new(a);
        for text in ["one", "two"] {
            vmm.send(&FromVmm::Event(Event::Console(text.into())), &[])
                .unwrap();
        }
        reply(&vmm, Reply::Done);
        vmm.send(&FromVmm::Event(Event::GuestExit(GuestExit::Reset)), &[])
            .unwrap();

        assert_eq!(owner.request(&Request::Run, &[]).unwrap(), Reply::Done);
        assert_eq!(
            owner.next_event().unwrap(),
            Some(Event::Console("one".into()))
        );
        assert_eq!(
            owner.try_next_event().unwrap(),
            Some(Event::Console("two".into()))
        );
        assert_eq!(
            owner.next_event().unwrap(),
            Some(Event::GuestExit(GuestExit::Reset))
        );
        assert!(matches!(
            owner.try_next_event(),
            Err(ChannelError::WouldBlock)
        ));
        drop(vmm);
        assert_eq!(owner.next_event().unwrap(), None);
    }

    #[test]
    fn test_a_failure_is_an_error_with_the_words_of_the_vmm() {
        let (a, vmm) = Channel::pair().unwrap();
        let mut owner = Owner::new(a);
        reply(&vmm, Reply::Failed("slot 9: there are 8".into()));
        let error = owner.request(&Request::Run, &[]).unwrap_err();
        assert_eq!(error.to_string(), "slot 9: there are 8");
    }

    #[test]
    fn test_a_vmm_that_goes_away_during_a_request_is_an_error() {
        let (a, vmm) = Channel::pair().unwrap();
        let mut owner = Owner::new(a);
        let thread = std::thread::spawn(move || vmm.receive::<Request>().unwrap().unwrap().0);
        assert!(matches!(
            owner.request(&Request::Run, &[]),
            Err(ChannelError::Closed)
        ));
        assert_eq!(thread.join().unwrap(), Request::Run);
    }

    #[test]
    fn test_a_reply_without_a_request_is_out_of_turn() {
        let (a, vmm) = Channel::pair().unwrap();
        let mut owner = Owner::new(a);
        reply(&vmm, Reply::Done);
        assert!(matches!(
            owner.next_event(),
            Err(ChannelError::OutOfTurn("a reply"))
        ));
    }
}
