//! The program as its owner sees it: launched, asked, answering, ending. The guest is a few
//! instructions that print letters. Needs root and `/dev/kvm`; says so where they are missing.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thaw_vmm_control::{
    ChannelError, Event, GuestExit, Launch, Launched, Owner, Reply, Request, Shape, WorkingSet,
};

const ENTRY: u64 = 0x10_0000;

/// Prints the letters from A to Z again and again, each on a line of its own.
const PRINT_LETTERS: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, 0x41, // mov al, 'A'
    0xee, // 6: out dx, al
    0x88, 0xc4, // mov ah, al
    0xb0, 0x0a, // mov al, '\n'
    0xee, // out dx, al
    0x88, 0xe0, // mov al, ah
    0xfe, 0xc0, // inc al
    0x3c, 0x5b, // cmp al, 'Z' + 1
    0x75, 0x02, // jne 0x16
    0xb0, 0x41, // mov al, 'A'
    0xb9, 0x00, 0x00, 0x01, 0x00, // 0x16: mov ecx, 0x10000
    0xe2, 0xfe, // loop to itself
    0xeb, 0xe7, // jmp 6
];

/// mov al, 0xfe; out 0x64, al
const RESET: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64, 0xf4];

/// An ELF image of one segment.
fn kernel(code: &[u8]) -> File {
    let mut image = Vec::new();
    image.extend_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    image.extend_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64
    for value in [ENTRY, 64, 0] {
        image.extend_from_slice(&value.to_le_bytes()); // entry, program headers, sections
    }
    image.extend_from_slice(&0u32.to_le_bytes());
    for value in [64u16, 56, 1, 0, 0, 0] {
        image.extend_from_slice(&value.to_le_bytes());
    }
    image.extend_from_slice(&1u32.to_le_bytes()); // PT_LOAD
    image.extend_from_slice(&7u32.to_le_bytes());
    let size = code.len() as u64;
    for value in [120, ENTRY, ENTRY, size, size, 4096] {
        image.extend_from_slice(&value.to_le_bytes());
    }
    image.extend_from_slice(code);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&image).unwrap();
    file
}

/// A VMM and the directory that it exports.
struct Vmm {
    launched: Launched,
    _root: tempfile::TempDir,
}

impl Vmm {
    /// A new process, or nothing where there can be none.
    fn start() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED, a test that needs root");
            return None;
        }
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            eprintln!("SKIPPED, a test that needs KVM: {error}");
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        let log = std::io::stderr();
        let launch = Launch {
            program: Path::new(env!("CARGO_BIN_EXE_thaw-vmm")),
            root: root.path(),
            network_namespace: None,
            log: Some(log.as_fd()),
        };
        Some(Self {
            launched: launch.start().unwrap(),
            _root: root,
        })
    }

    fn owner(&mut self) -> &mut Owner {
        &mut self.launched.owner
    }

    fn ask(&mut self, request: Request, files: &[&File]) -> Result<Reply, ChannelError> {
        let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        self.owner().request(&request, &descriptors)
    }

    fn boot(&mut self, code: &[u8]) {
        let shape = Shape::new(1, 128).unwrap();
        let request = Request::Boot {
            shape,
            command_line: "console=ttyS0".into(),
        };
        let initramfs = tempfile::tempfile().unwrap();
        assert_eq!(
            self.ask(request, &[&kernel(code), &initramfs]).unwrap(),
            Reply::Done
        );
    }

    /// The refusal of a request.
    fn refusal(&mut self, request: Request, files: &[&File]) -> String {
        match self.ask(request, files) {
            Err(ChannelError::Refused(words)) => words,
            other => panic!("{other:?}"),
        }
    }

    /// The next letters on the console, so many.
    fn letters(&mut self, count: usize) -> String {
        let mut text = String::new();
        while text.len() < count {
            match self.owner().next_event().unwrap() {
                Some(Event::Console(bytes)) => text.extend(
                    bytes
                        .iter()
                        .filter(|byte| **byte != b'\n')
                        .map(|byte| char::from(*byte)),
                ),
                other => panic!("{other:?} after {text}"),
            }
        }
        text
    }

    /// Wait for the process to end, and say with which status.
    fn end(self) -> Option<i32> {
        let Launched { owner, pidfd, pid } = self.launched;
        drop(owner);
        let timeout = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let mut events = [PollFd::new(&pidfd, PollFlags::IN)];
        assert_eq!(
            poll(&mut events, Some(&timeout)).unwrap(),
            1,
            "process {pid} goes on"
        );
        let status = rustix::process::waitid(
            rustix::process::WaitId::PidFd(pidfd.as_fd()),
            rustix::process::WaitIdOptions::EXITED,
        );
        status.unwrap().unwrap().exit_status()
    }
}

/// A restore with nothing made ready.
fn restore() -> Request {
    Request::Restore {
        working_set: WorkingSet::default(),
    }
}

#[track_caller]
fn assert_letters_follow(text: &str, mut previous: u8) {
    for letter in text.bytes() {
        let next = if previous == b'Z' { b'A' } else { previous + 1 };
        assert_eq!(letter, next, "in {text}");
        previous = letter;
    }
}

#[test]
fn test_a_guest_is_booted_saved_and_restored_by_processes_of_their_own() {
    let Some(mut first) = Vmm::start() else {
        return;
    };
    first.boot(PRINT_LETTERS);
    let mut text = first.letters(30);
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    assert_eq!(
        first.ask(Request::Snapshot, &[&state, &memory]).unwrap(),
        Reply::Done
    );
    while let Ok(Some(Event::Console(bytes))) = first.owner().try_next_event() {
        text.extend(
            bytes
                .iter()
                .filter(|byte| **byte != b'\n')
                .map(|byte| char::from(*byte)),
        );
    }
    assert_letters_follow(&text, b'Z');
    assert_eq!(first.end(), Some(0));

    let last = *text.as_bytes().last().unwrap();
    for _ in 0..2 {
        let mut clone = Vmm::start().unwrap();
        assert_eq!(
            clone.ask(restore(), &[&state, &memory]).unwrap(),
            Reply::Done
        );
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(1 << 20).unwrap();
        let attach = Request::AttachBlock {
            slot: 7,
            read_only: false,
        };
        assert_eq!(clone.ask(attach, &[&disk]).unwrap(), Reply::Done);
        assert_eq!(clone.ask(Request::Run, &[]).unwrap(), Reply::Done);
        let text = clone.letters(10);
        assert_letters_follow(&text, last);

        let Reply::Statistics(statistics) = clone.ask(Request::Statistics, &[]).unwrap() else {
            panic!("another answer than statistics");
        };
        let names: Vec<_> = statistics
            .phases
            .iter()
            .map(|phase| phase.name.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "start", "jail", "state", "memory", "kvm", "vcpus", "devices", "run"
            ]
        );
        assert!(
            statistics
                .phases
                .is_sorted_by_key(|phase| phase.monotonic_ns)
        );
        assert!(statistics.kvm.iter().any(|(name, _)| name == "exits"));
        // The generation id's page, and little else.
        assert!((4096..256 << 10).contains(&statistics.guest_dirty_bytes));
        assert_eq!(clone.end(), Some(0));
    }
}

#[test]
fn test_the_end_of_a_guest_is_told_and_ends_the_process() {
    let Some(mut vmm) = Vmm::start() else { return };
    vmm.boot(RESET);
    let event = vmm.owner().next_event().unwrap();
    assert_eq!(event, Some(Event::GuestExit(GuestExit::Reset)));
    assert_eq!(vmm.owner().next_event().unwrap(), None);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn test_a_vmm_ends_with_its_owner() {
    let Some(mut vmm) = Vmm::start() else { return };
    vmm.boot(PRINT_LETTERS);
    vmm.letters(3);
    assert_eq!(vmm.end(), Some(0));
    // Also one that was never asked for anything.
    assert_eq!(Vmm::start().unwrap().end(), Some(0));
}

#[test]
fn test_requests_that_cannot_be_met_are_refused_with_words_and_change_nothing() {
    let Some(mut vmm) = Vmm::start() else { return };
    let file = tempfile::tempfile().unwrap();
    assert_eq!(vmm.refusal(Request::Run, &[]), "there is no machine yet");
    assert_eq!(
        vmm.refusal(Request::Statistics, &[]),
        "there is no machine yet"
    );
    assert_eq!(
        vmm.refusal(restore(), &[&file]),
        "the request needs 2 descriptors and came with 1"
    );
    vmm.boot(PRINT_LETTERS);
    assert!(
        vmm.refusal(restore(), &[&file, &file])
            .contains("has had its machine")
    );
    assert!(vmm.refusal(Request::Run, &[]).contains("started already"));
    let attach = Request::AttachBlock {
        slot: 8,
        read_only: true,
    };
    assert_eq!(
        vmm.refusal(attach, &[&file]),
        "block slot 8: there are 8, from 0 on"
    );
    vmm.letters(3);
}

#[test]
fn test_a_damaged_state_is_refused_with_words() {
    let Some(mut vmm) = Vmm::start() else { return };
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    (&state).write_all(&[0x55; 4096]).unwrap();
    assert_eq!(
        vmm.refusal(restore(), &[&state, &memory]),
        "not a snapshot's state"
    );
}
