//! Whole machines on the host's KVM, with a kernel of a few instructions that prints letters.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use thaw_vmm_control::{GuestExit, TouchedPages, WorkingSet};

use super::*;
use crate::kvm::{Hypervisor, test_hypervisor};
use crate::phase::Phases;
use crate::virtio::fs::FileServerRoot;

const ENTRY: u64 = 0x10_0000;
const LONG: Duration = Duration::from_secs(30);

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
    0xb9, 0x00, 0x10, 0x00, 0x00, // 0x16: mov ecx, 0x1000
    0xe2, 0xfe, // loop to itself
    0xeb, 0xe7, // jmp 6
];

/// An ELF image of one segment.
pub fn kernel(code: &[u8]) -> File {
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

/// A machine under test and its console.
struct Guest {
    machine: Machine,
    console: Receiver<Vec<u8>>,
    _export: tempfile::TempDir,
}

fn environment() -> (Environment, Receiver<Vec<u8>>, tempfile::TempDir) {
    let export = tempfile::tempdir().unwrap();
    let files = FileServerRoot::without_jail(export.path()).unwrap();
    let (sender, receiver) = channel();
    let console: crate::serial::ConsoleOutput = Arc::new(move |bytes: &[u8]| {
        // The test may have seen enough.
        let _ = sender.send(bytes.to_vec());
    });
    (Environment { console, files }, receiver, export)
}

fn boot(hypervisor: &Hypervisor, code: &[u8], vcpus: u8) -> Guest {
    let (environment, console, _export) = environment();
    let source = BootSource {
        shape: Shape::new(vcpus, 128).unwrap(),
        command_line: "console=ttyS0".into(),
        kernel: kernel(code),
        initramfs: tempfile::tempfile().unwrap(),
    };
    let machine = Machine::boot(hypervisor, source, environment, &mut Phases::default()).unwrap();
    Guest {
        machine,
        console,
        _export,
    }
}

fn restore(hypervisor: &Hypervisor, source: RestoreSource) -> Guest {
    let (environment, console, _export) = environment();
    let mut phases = Phases::default();
    let machine = Machine::restore(hypervisor, source, environment, &mut phases).unwrap();
    Guest {
        machine,
        console,
        _export,
    }
}

/// The files of a snapshot.
struct Files {
    state: File,
    memory: File,
}

impl Files {
    fn new() -> Self {
        Self {
            state: tempfile::tempfile().unwrap(),
            memory: tempfile::tempfile().unwrap(),
        }
    }

    /// What a machine is restored from without a working set.
    fn source(&self) -> RestoreSource {
        RestoreSource {
            state: self.state.try_clone().unwrap(),
            memory: self.memory.try_clone().unwrap(),
            working_set: WorkingSet::default(),
            pagemap: None,
        }
    }

    fn restore(&self, hypervisor: &Hypervisor) -> Guest {
        restore(hypervisor, self.source())
    }
}

impl Guest {
    /// What the console has shown once it has shown `count` letters.
    fn letters(&self, count: usize) -> String {
        let start = Instant::now();
        let mut text = String::new();
        while text.len() < count {
            let rest = LONG.saturating_sub(start.elapsed());
            let bytes = self.console.recv_timeout(rest).unwrap();
            text.extend(
                bytes
                    .iter()
                    .filter(|byte| **byte != b'\n')
                    .map(|byte| *byte as char),
            );
        }
        text
    }

    fn snapshot(&mut self, hypervisor: &Hypervisor) -> Files {
        let files = Files::new();
        self.machine
            .snapshot(hypervisor, &files.state, &files.memory)
            .unwrap();
        files
    }

    fn exit(&self) -> GuestExit {
        let flags = rustix::event::PollFlags::IN;
        let event = self.machine.notice().event();
        let mut poll = [rustix::event::PollFd::from_borrowed_fd(event, flags)];
        let timeout = rustix::event::Timespec {
            tv_sec: LONG.as_secs() as i64,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut poll, Some(&timeout)).unwrap(), 1);
        self.machine.notice().exit().unwrap()
    }

    /// All that the console has shown, after the machine is gone.
    fn rest(self) -> String {
        let Self {
            machine, console, ..
        } = self;
        drop(machine);
        console
            .iter()
            .flatten()
            .filter(|b| *b != b'\n')
            .map(|b| b as char)
            .collect()
    }
}

#[track_caller]
fn assert_letters_follow(text: &str, mut previous: char) {
    for letter in text.chars() {
        let next = if previous == 'Z' {
            'A'
        } else {
            (previous as u8 + 1) as char
        };
        assert_eq!(letter, next, "after {previous} in {text}");
        previous = letter;
    }
}

#[track_caller]
fn assert_same<T: Serialize>(name: &str, a: &T, b: &T) {
    let bytes = |value| postcard::to_stdvec(value).unwrap();
    assert!(bytes(a) == bytes(b), "{name} differs");
}

#[test]
fn test_clones_of_a_snapshot_go_on_where_it_was_taken_and_leave_it_alone() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let mut original = boot(&hypervisor, PRINT_LETTERS, 2);
    original.machine.run().unwrap();
    let mut text = original.letters(40);
    let files = original.snapshot(&hypervisor);
    text += &original.rest();
    assert_letters_follow(&text, 'Z');
    let last = text.chars().last().unwrap();

    let size = files.memory.metadata().unwrap().len();
    let mut before = vec![0; size as usize];
    files.memory.read_exact_at(&mut before, 0).unwrap();
    let mut clones = [files.restore(&hypervisor), files.restore(&hypervisor)];
    for clone in &mut clones {
        clone.machine.run().unwrap();
    }
    for clone in clones {
        let text = clone.letters(40) + &clone.rest();
        assert_letters_follow(&text, last);
    }
    let mut after = vec![0; size as usize];
    files.memory.read_exact_at(&mut after, 0).unwrap();
    assert!(before == after, "a clone changed the snapshot's memory");
}

#[test]
fn test_the_state_of_the_whole_machine_survives() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let mut original = boot(&hypervisor, PRINT_LETTERS, 2);
    mark_controllers(&original.machine.vm);
    original.machine.run().unwrap();
    original.letters(3);
    let first = original.snapshot(&hypervisor);
    // Restored, and saved again without having run.
    let second = first.restore(&hypervisor).snapshot(&hypervisor);

    let (first, second) = (
        crate::snapshot::read(&first.state).unwrap(),
        crate::snapshot::read(&second.state).unwrap(),
    );
    assert_eq!(first.shape, second.shape);
    assert_eq!(first.serial, second.serial);
    assert_same(
        "first PIC",
        &first.controllers.pic_master,
        &second.controllers.pic_master,
    );
    assert_same(
        "second PIC",
        &first.controllers.pic_slave,
        &second.controllers.pic_slave,
    );
    assert_same(
        "IOAPIC",
        &first.controllers.ioapic,
        &second.controllers.ioapic,
    );
    // SAFETY: the chip is an IOAPIC, of which all bytes are valid.
    #[allow(unsafe_code)]
    let redirection = unsafe { second.controllers.ioapic.chip.ioapic.redirtbl[7].bits };
    assert_eq!(redirection, 1 << 16 | 0x77);
    // It went on from where it stood and not from where the host's is.
    let elapsed = second.clock.clock - first.clock.clock;
    assert!(
        elapsed < 1_000_000_000 * LONG.as_secs(),
        "the clock jumped by {elapsed} ns"
    );
}

/// Give the interrupt controllers values that they do not have by themselves.
fn mark_controllers(vm: &VmFd) {
    let mut ioapic = kvm_bindings::kvm_irqchip {
        chip_id: kvm_bindings::KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    vm.get_irqchip(&mut ioapic).unwrap();
    let mut pic = kvm_bindings::kvm_irqchip::default();
    vm.get_irqchip(&mut pic).unwrap();
    // SAFETY: each chip is what its union is read as, and all bytes are valid in both.
    #[allow(unsafe_code)]
    unsafe {
        // Masked, vector 0x77.
        ioapic.chip.ioapic.redirtbl[7].bits = 1 << 16 | 0x77;
        pic.chip.pic.imr = 0xa5;
    }
    vm.set_irqchip(&ioapic).unwrap();
    vm.set_irqchip(&pic).unwrap();
}

#[test]
fn test_each_restore_has_a_generation_of_its_own() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let files = boot(&hypervisor, PRINT_LETTERS, 1).snapshot(&hypervisor);
    let generation = |guest: &Guest| -> [u8; 16] {
        let address = vm_memory::GuestAddress(crate::layout::GENERATION_ID);
        vm_memory::Bytes::read_obj(guest.machine.ram.memory(), address).unwrap()
    };
    let (a, b) = (files.restore(&hypervisor), files.restore(&hypervisor));
    assert_ne!(generation(&a), generation(&b));
    assert_ne!(generation(&a), [0; 16]);
}

#[test]
fn test_a_guest_ends_by_power_off_or_reset() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    // mov dx, port; mov al, value; out dx, al
    for (port, value) in [(0x600u16, 0x34), (0x64, 0xfe)] {
        let [low, high] = port.to_le_bytes();
        let code = [0x66, 0xba, low, high, 0xb0, value, 0xee, 0xf4];
        let mut guest = boot(&hypervisor, &code, 1);
        guest.machine.run().unwrap();
        assert_eq!(guest.exit(), GuestExit::Reset);
    }
}

#[test]
fn test_a_guest_ends_by_a_triple_fault() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    // mov al, [0x1_0000_0000]: not mapped, and there is no interrupt table to find a handler in.
    let code = [0xa0, 0, 0, 0, 0, 1, 0, 0, 0];
    let mut guest = boot(&hypervisor, &code, 1);
    guest.machine.run().unwrap();
    assert_eq!(guest.exit(), GuestExit::Shutdown);
}

#[test]
fn test_a_guest_that_has_ended_has_nothing_to_save() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let mut guest = boot(&hypervisor, &[0xb0, 0xfe, 0xe6, 0x64, 0xf4], 1);
    guest.machine.run().unwrap();
    guest.exit();
    let files = Files::new();
    let error = guest
        .machine
        .snapshot(&hypervisor, &files.state, &files.memory)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the machine has ended: there is nothing to save"
    );
}

#[test]
fn test_a_machine_runs_once_and_is_saved_once() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let mut guest = boot(&hypervisor, PRINT_LETTERS, 1);
    guest.machine.run().unwrap();
    assert!(matches!(guest.machine.run(), Err(MachineError::Phase(_))));
    let mut guest = boot(&hypervisor, PRINT_LETTERS, 1);
    let files = guest.snapshot(&hypervisor);
    let again = guest
        .machine
        .snapshot(&hypervisor, &files.state, &files.memory);
    assert!(matches!(again, Err(MachineError::Phase(_))));
}

#[test]
fn test_memory_of_another_size_than_the_state_says_is_refused() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let files = boot(&hypervisor, PRINT_LETTERS, 1).snapshot(&hypervisor);
    files.memory.set_len(64 << 20).unwrap();
    let (environment, _console, _export) = environment();
    let mut phases = Phases::default();
    let result = Machine::restore(&hypervisor, files.source(), environment, &mut phases);
    let error = result.err().unwrap().to_string();
    assert!(
        error.contains("67108864 bytes instead of 134217728"),
        "{error}"
    );
}

#[test]
fn test_a_rehearsal_finds_the_working_set_that_a_clone_then_has_ready() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let mut original = boot(&hypervisor, PRINT_LETTERS, 2);
    original.machine.run().unwrap();
    let mut text = original.letters(10);
    let files = original.snapshot(&hypervisor);
    text += &original.rest();
    let last = text.chars().last().unwrap();
    let mut rehearsal = restore(
        &hypervisor,
        RestoreSource {
            pagemap: Some(File::open("/proc/self/pagemap").unwrap()),
            ..files.source()
        },
    );
    rehearsal.machine.run().unwrap();
    assert_letters_follow(&rehearsal.letters(10), last);
    let working_set = match rehearsal.machine.touched() {
        Ok(working_set) => working_set,
        Err(error) => return eprintln!("SKIPPED, needs Linux 6.7: {error}"),
    };
    let touched = |page: u64, written: bool| {
        working_set.ranges().iter().any(|range| {
            (range.first..range.first + range.count).contains(&(page as u32))
                && range.written == written
        })
    };
    assert!(touched(ENTRY / 4096, false), "{working_set:?}");
    let generation = crate::layout::GENERATION_ID / 4096;
    assert!(touched(generation, true), "{working_set:?}");
    // One more, which the guest itself never touches.
    let more = TouchedPages {
        first: 20_000,
        count: 3,
        written: true,
    };
    let ranges = [working_set.ranges(), &[more]].concat();
    let source = RestoreSource {
        working_set: WorkingSet::new(ranges).unwrap(),
        ..files.source()
    };
    let mut clone = restore(&hypervisor, source);
    assert!(clone.machine.touched().is_err());
    clone.machine.populate();
    clone.machine.run().unwrap();
    assert_letters_follow(&clone.letters(10), last);
    let mut smaps = File::open("/proc/self/smaps").unwrap();
    let own = crate::statistics::anonymous_bytes(&mut smaps, &clone.machine.memory_ranges());
    assert!(own >= 4 * 4096, "{own}");
}

#[test]
fn test_a_working_set_outside_of_the_memory_is_refused() {
    let Some(hypervisor) = test_hypervisor() else {
        return;
    };
    let files = boot(&hypervisor, PRINT_LETTERS, 1).snapshot(&hypervisor);
    let (environment, _console, _export) = environment();
    let outside = TouchedPages {
        first: (128 << 20) / 4096,
        count: 1,
        written: false,
    };
    let source = RestoreSource {
        working_set: WorkingSet::new(vec![outside]).unwrap(),
        ..files.source()
    };
    let result = Machine::restore(&hypervisor, source, environment, &mut Phases::default());
    assert!(matches!(result, Err(MachineError::WorkingSet(_))));
}
