use std::path::Path;

use proptest::prelude::*;
use virtiofsd::fuse::{
    BatchForgetIn, EntryOut, ForgetIn, ForgetOne, InHeader, InitInCompat, InitOut, Opcode, OpenOut,
    OutHeader, ReadIn,
};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::test_driver::{
    DriverQueue, FEATURES, INDIRECT, NEXT, TestInterrupt, WRITE, activation, memory,
};

const PRIORITY_RINGS: u64 = 0x1000;
const REQUEST_RINGS: u64 = 0x8000;
const REQUEST_RINGS_SIZE: u64 = 0x8000;
/// Where messages are put, and where replies are wanted.
const MESSAGE: u64 = 0x10_0000;
const REPLY: u64 = 0x20_0000;
const MEMORY: usize = 0x80_0000;
const ROOT: u64 = 1;
const EIO: i32 = -libc::EIO;

/// FUSE_INIT flags of a Linux guest that matter here: SUBMOUNTS.
const SUBMOUNTS: u32 = 1 << 27;

struct Guest {
    device: FileSystem,
    memory: GuestMemoryMmap,
    priority: DriverQueue,
    requests: DriverQueue,
    /// Queues for requests beside the first.
    others: Vec<DriverQueue>,
    interrupt: Arc<TestInterrupt>,
    unique: u64,
}

impl Guest {
    fn new(export: &Path) -> Self {
        Self::with_queues(export, 1, 1)
    }

    /// A guest of `vcpus` whose driver uses `queues` for requests.
    fn with_queues(export: &Path, vcpus: u8, queues: u16) -> Self {
        let root = FileServerRoot::without_jail(export).unwrap();
        let memory = memory(MEMORY);
        let interrupt = Arc::new(TestInterrupt::default());
        let queue = |index, size, base| DriverQueue::new(&memory, &interrupt, index, size, base);
        let mut guest = Guest {
            device: FileSystem::new("thaw", root, vcpus).unwrap(),
            priority: queue(0, PRIORITY_QUEUE_SIZE, PRIORITY_RINGS),
            requests: queue(1, REQUEST_QUEUE_SIZE, REQUEST_RINGS),
            others: (1..queues)
                .map(|number| {
                    let base = REQUEST_RINGS + REQUEST_RINGS_SIZE * u64::from(number);
                    queue(1 + number, REQUEST_QUEUE_SIZE, base)
                })
                .collect(),
            memory,
            interrupt,
            unique: 1,
        };
        let all = [&guest.priority, &guest.requests]
            .into_iter()
            .chain(&guest.others);
        let queues = all.map(DriverQueue::device_side).collect();
        guest.activate(queues);
        guest
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = activation(&self.memory, &self.interrupt, queues, FEATURES);
        self.device.activate(activation).unwrap();
    }

    fn message(&mut self, opcode: Opcode, nodeid: u64, body: &[&[u8]]) -> u32 {
        self.unique += 2;
        let len = size_of::<InHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
        let header = InHeader {
            len: len as u32,
            opcode: opcode as u32,
            unique: self.unique,
            nodeid,
            ..InHeader::default()
        };
        let mut at = GuestAddress(MESSAGE);
        for part in [header.as_slice()].iter().chain(body) {
            self.memory.write_slice(part, at).unwrap();
            at.0 += part.len() as u64;
        }
        len as u32
    }

    /// Send a message and wait for its reply: the body, or the error.
    fn call(&mut self, opcode: Opcode, nodeid: u64, body: &[&[u8]]) -> Result<Vec<u8>, i32> {
        let len = self.message(opcode, nodeid, body);
        let head = self
            .requests
            .submit(&[(MESSAGE, len, false), (REPLY, 0x1000, true)]);
        let (used, written) = self.requests.wait_used();
        assert_eq!(used, head);
        self.reply(written)
    }

    fn reply(&self, written: u32) -> Result<Vec<u8>, i32> {
        let header: OutHeader = self.memory.read_obj(GuestAddress(REPLY)).unwrap();
        assert_eq!(header.unique, self.unique);
        if header.error != 0 {
            return Err(header.error);
        }
        assert_eq!(header.len, written);
        let mut body = vec![0; written as usize - size_of::<OutHeader>()];
        let at = GuestAddress(REPLY + size_of::<OutHeader>() as u64);
        self.memory.read_slice(&mut body, at).unwrap();
        Ok(body)
    }

    fn init(&mut self) -> Result<InitOut, i32> {
        let init = InitInCompat {
            major: 7,
            minor: 41,
            max_readahead: 1 << 17,
            flags: SUBMOUNTS,
        };
        self.call(Opcode::Init, 0, &[init.as_slice()])
            .map(|body| *InitOut::from_slice(&body).unwrap())
    }

    fn lookup(&mut self, name: &str) -> Result<EntryOut, i32> {
        let body = self.call(Opcode::Lookup, ROOT, &[name.as_bytes(), b"\0"])?;
        match *EntryOut::from_slice(&body).unwrap() {
            EntryOut { nodeid: 0, .. } => Err(-libc::ENOENT),
            entry => Ok(entry),
        }
    }

    /// That the device still answers.
    fn assert_alive(&mut self) {
        assert!(self.init().is_ok());
    }
}

fn export() -> tempfile::TempDir {
    let export = tempfile::tempdir().unwrap();
    std::fs::write(export.path().join("file"), "text").unwrap();
    export
}

#[test]
fn test_configuration_space_has_the_tag_and_a_request_queue_a_vcpu() {
    let export = export();
    for (vcpus, queues) in [(1, 1), (3, 3), (255, 8)] {
        let root = FileServerRoot::without_jail(export.path()).unwrap();
        let device = FileSystem::new("thaw", root, vcpus).unwrap();
        let mut config = [0xff; 44];
        device.read_config(0, &mut config);
        assert_eq!(&config[..5], b"thaw\0");
        assert_eq!(&config[36..], [queues, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(device.queue_sizes().len(), 1 + usize::from(queues));
    }
}

#[test]
fn test_requests_of_every_queue_are_answered() {
    let export = export();
    for (vcpus, queues) in [(3, 3), (8, 2)] {
        let mut guest = Guest::with_queues(export.path(), vcpus, queues);
        guest.init().unwrap();
        for number in 0..guest.others.len() {
            std::mem::swap(&mut guest.requests, &mut guest.others[number]);
            assert_eq!(guest.lookup("file").unwrap().attr.size, 4);
        }
        assert_eq!(guest.device.deactivate().len(), 1 + usize::from(queues));
    }
}

#[test]
fn test_a_tag_that_does_not_fit_is_refused() {
    let export = export();
    for tag in ["", "x\0y", &"x".repeat(37)] {
        let root = FileServerRoot::without_jail(export.path()).unwrap();
        let error = FileSystem::new(tag, root, 1).err().unwrap();
        assert!(matches!(error, FileSystemError::Tag(_)));
    }
    let root = FileServerRoot::without_jail(export.path()).unwrap();
    assert!(FileSystem::new(&"x".repeat(36), root, 1).is_ok());
}

#[test]
fn test_a_missing_queue_is_an_error() {
    let export = export();
    let root = FileServerRoot::without_jail(export.path()).unwrap();
    let mut device = FileSystem::new("thaw", root, 1).unwrap();
    let memory = memory(MEMORY);
    let interrupt = Arc::new(TestInterrupt::default());
    let queue = DriverQueue::new(&memory, &interrupt, 0, 128, PRIORITY_RINGS);
    let activation = activation(&memory, &interrupt, vec![queue.device_side()], FEATURES);
    assert!(matches!(
        device.activate(activation),
        Err(DeviceError::MissingQueue(1))
    ));
}

#[test]
fn test_a_guest_mounts_and_reads() {
    let export = export();
    let mut guest = Guest::new(export.path());
    let init = guest.init().unwrap();
    assert_eq!(
        (init.major, init.max_write, init.max_pages),
        (7, 1 << 20, 256)
    );
    let entry = guest.lookup("file").unwrap();
    assert_eq!(entry.attr.size, 4);
    assert_eq!((entry.entry_valid, entry.attr_valid), (1, 1));
    assert_eq!(guest.lookup("nothing").unwrap_err(), -libc::ENOENT);
    assert_eq!(guest.device.counts().requests(), 3);
}

#[test]
fn test_that_a_name_is_not_there_may_be_remembered_for_a_second() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let body = guest.call(Opcode::Lookup, ROOT, &[b"nothing\0"]).unwrap();
    let entry = EntryOut::from_slice(&body).unwrap();
    assert_eq!((entry.nodeid, entry.entry_valid), (0, 1));
}

#[test]
fn test_the_guest_is_told_not_to_flush() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let flushed = guest.call(Opcode::Flush, ROOT, &[&[0; 24]]);
    assert_eq!(flushed.unwrap_err(), -libc::ENOSYS);
}

#[test]
fn test_pages_are_kept_over_opens_until_the_host_writes() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let entry = guest.lookup("file").unwrap();
    let mut keeps = || {
        let flags = (libc::O_RDONLY as u64).to_le_bytes();
        let open = guest.call(Opcode::Open, entry.nodeid, &[&flags]).unwrap();
        OpenOut::from_slice(&open).unwrap().open_flags & 2 != 0
    };
    // Until changes of the file can be told from each other.
    std::thread::sleep(std::time::Duration::from_millis(60));
    assert_eq!((keeps(), keeps()), (false, true));
    std::fs::write(export.path().join("file"), "TEXT").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(60));
    assert_eq!((keeps(), keeps()), (false, true));
}

#[test]
fn test_what_the_host_changes_is_seen() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    assert!(guest.lookup("late").is_err());
    std::fs::write(export.path().join("late"), "12345").unwrap();
    assert_eq!(guest.lookup("late").unwrap().attr.size, 5);
    std::fs::remove_file(export.path().join("late")).unwrap();
    assert!(guest.lookup("late").is_err());
}

#[test]
fn test_a_file_that_the_host_has_removed_is_looked_up_anew_before_it_is_truncated() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let entry = guest.lookup("file").unwrap();
    let mut kept = std::fs::File::open(export.path().join("file")).unwrap();
    std::fs::remove_file(export.path().join("file")).unwrap();
    let flags = ((libc::O_WRONLY | libc::O_TRUNC) as u64).to_le_bytes();
    let opened = guest.call(Opcode::Open, entry.nodeid, &[&flags]);
    assert_eq!(opened.unwrap_err(), -libc::ESTALE);
    assert_eq!(std::io::read_to_string(&mut kept).unwrap(), "text");
    // Whoever comes again has no name for it.
    guest.call(Opcode::Open, entry.nodeid, &[&flags]).unwrap();
}

#[test]
fn test_a_mounted_device_is_not_saved() {
    let export = export();
    let mut guest = Guest::new(export.path());
    let queues = guest.device.deactivate();
    assert_eq!(queues.len(), 2);
    let state = guest.device.save().unwrap();
    guest.device.restore(&state).unwrap();

    guest.activate(queues);
    guest.init().unwrap();
    let queues = guest.device.deactivate();
    let error = guest.device.save().unwrap_err().to_string();
    assert!(error.contains("mounted"), "{error}");

    // The session outlives the pause, and ends when the guest says so.
    guest.activate(queues);
    assert!(guest.lookup("file").is_ok());
    let len = guest.message(Opcode::Destroy, 0, &[]);
    guest
        .requests
        .submit(&[(MESSAGE, len, false), (REPLY, 16, true)]);
    guest.requests.wait_used();
    guest.device.deactivate();
    guest.device.save().unwrap();
}

#[test]
fn test_state_of_another_device_is_refused() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.device.deactivate();
    for state in [&b""[..], b"thaw", &[0; 40], &[0xff; 4096]] {
        assert!(guest.device.restore(state).is_err());
    }
}

#[test]
fn test_a_guest_that_does_not_know_submounts_is_refused() {
    let export = export();
    let mut guest = Guest::new(export.path());
    let init = InitInCompat {
        major: 7,
        minor: 41,
        ..InitInCompat::default()
    };
    let error = guest.call(Opcode::Init, 0, &[init.as_slice()]).unwrap_err();
    assert_eq!(error, -libc::EPROTO);
    assert!(guest.device.save().is_ok());
}

#[test]
fn test_forgets_need_no_room_for_a_reply() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let entry = guest.lookup("file").unwrap();
    let forget = ForgetIn { nlookup: 1 };
    let len = guest.message(Opcode::Forget, entry.nodeid, &[forget.as_slice()]);
    guest.priority.submit(&[(MESSAGE, len, false)]);
    assert_eq!(guest.priority.wait_used().1, 0);
    assert_eq!(
        guest.call(Opcode::Readlink, entry.nodeid, &[]).unwrap_err(),
        -libc::EBADF
    );

    let entry = guest.lookup("file").unwrap();
    let batch = BatchForgetIn { count: 2, dummy: 0 };
    let ones = [entry.nodeid, 77].map(|nodeid| ForgetOne { nodeid, nlookup: 9 });
    let body = [batch.as_slice(), ones[0].as_slice(), ones[1].as_slice()];
    let len = guest.message(Opcode::BatchForget, 0, &body);
    guest.priority.submit(&[(MESSAGE, len, false)]);
    assert_eq!(guest.priority.wait_used().1, 0);
    assert_eq!(
        guest.call(Opcode::Readlink, entry.nodeid, &[]).unwrap_err(),
        -libc::EBADF
    );
}

#[test]
fn test_names_with_a_slash_are_refused() {
    let export = export();
    std::fs::create_dir(export.path().join("dir")).unwrap();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    for name in ["/", "dir/..", "/etc", "dir/", "../x"] {
        assert_eq!(guest.lookup(name).unwrap_err(), -libc::EINVAL);
        let unlinked = guest.call(Opcode::Unlink, ROOT, &[name.as_bytes(), b"\0"]);
        assert_eq!(unlinked.unwrap_err(), -libc::EINVAL);
    }
    // The parent of the root is the root.
    assert_eq!(guest.lookup("..").unwrap().nodeid, ROOT);
}

#[test]
fn test_offsets_beyond_what_a_file_can_have_are_refused() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let entry = guest.lookup("file").unwrap();
    let flags = (libc::O_RDWR as u64).to_le_bytes();
    let open = guest.call(Opcode::Open, entry.nodeid, &[&flags]).unwrap();
    let fh = u64::from_le_bytes(open[..8].try_into().unwrap());
    for offset in [1 << 63, u64::MAX, i64::MAX as u64, u64::MAX - 1] {
        let read = ReadIn {
            fh,
            offset,
            size: 16,
            ..ReadIn::default()
        };
        for opcode in [Opcode::Read, Opcode::Write] {
            let result = guest.call(opcode, entry.nodeid, &[read.as_slice(), &[0; 16]]);
            assert_eq!(result.unwrap_err(), -libc::EINVAL, "{offset:#x}");
        }
        let readdir = guest.call(Opcode::Readdir, entry.nodeid, &[read.as_slice()]);
        assert!(readdir.is_err());
    }
}

#[test]
fn test_a_reply_without_room_does_not_reach_the_library() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let entry = guest.lookup("file").unwrap();
    let read = ReadIn::default();
    for opcode in [
        Opcode::Read,
        Opcode::Readdir,
        Opcode::Readdirplus,
        Opcode::Lookup,
    ] {
        for room in [0, 1, 15] {
            let len = guest.message(opcode, entry.nodeid, &[read.as_slice()]);
            guest
                .requests
                .submit(&[(MESSAGE, len, false), (REPLY, room, true)]);
            assert_eq!(guest.requests.wait_used().1, 0);
        }
    }
    guest.assert_alive();
}

#[test]
fn test_a_message_that_ends_early_is_answered_with_an_error() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    for opcode in 0..60u32 {
        for cut in [0, 1, 39, 40, 41, 48] {
            let len = guest.message(Opcode::Setxattr, ROOT, &[&[0x41; 64]]);
            let at = GuestAddress(MESSAGE + 4);
            guest.memory.write_obj(opcode, at).unwrap();
            let chain = [(MESSAGE, len.min(cut), false), (REPLY, 4096, true)];
            guest.requests.submit(&chain);
            guest.requests.wait_used();
        }
    }
    // The header is there, the body is not.
    let len = guest.message(Opcode::Write, ROOT, &[]);
    guest
        .requests
        .submit(&[(MESSAGE, len, false), (REPLY, 4096, true)]);
    let (_, written) = guest.requests.wait_used();
    assert_eq!(guest.reply(written).unwrap_err(), EIO);
    guest.assert_alive();
}

#[test]
fn test_chains_outside_of_memory_are_used_without_a_byte() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let end = MEMORY as u64;
    let chains: [&[(u64, u32, bool)]; 8] = [
        &[(end, 100, false), (REPLY, 4096, true)],
        &[(end - 1, 100, false), (REPLY, 4096, true)],
        &[(u64::MAX, 1, false), (REPLY, 4096, true)],
        &[(u64::MAX - 8, 100, false), (REPLY, 4096, true)],
        &[(MESSAGE, 40, false), (end - 10, 4096, true)],
        &[(MESSAGE, u32::MAX, false), (REPLY, u32::MAX, true)],
        &[(MESSAGE, 0, false), (REPLY, 0, true)],
        &[(REPLY, 4096, true)],
    ];
    guest.message(Opcode::Statfs, ROOT, &[]);
    for chain in chains {
        guest.requests.submit(chain);
        guest.requests.wait_used();
    }
    guest.assert_alive();
}

#[test]
fn test_messages_over_the_bound_are_not_served() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.init().unwrap();
    let len = guest.message(Opcode::Statfs, ROOT, &[]);
    let served = guest.device.counts().requests();
    for chain in [
        [(MESSAGE, len, false), (REPLY, 2 << 20, true)],
        [(MESSAGE, 2 << 20, false), (REPLY, 4096, true)],
    ] {
        guest.requests.submit(&chain);
        assert_eq!(guest.requests.wait_used().1, 0);
    }
    assert_eq!(guest.device.counts().requests(), served);
    guest.assert_alive();
}

#[test]
fn test_a_chain_in_circles_ends() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.message(Opcode::Statfs, ROOT, &[]);
    let at = REQUEST_QUEUE_SIZE - 2;
    guest.requests.set_descriptor(at, MESSAGE, 40, NEXT, at + 1);
    guest
        .requests
        .set_descriptor(at + 1, REPLY, 4096, NEXT | WRITE, at);
    guest.requests.offer(at);
    guest.requests.kick();
    guest.requests.wait_used();
    guest.assert_alive();
}

#[test]
fn test_indirect_tables_that_lie_are_used_without_a_byte() {
    let export = export();
    let mut guest = Guest::new(export.path());
    let at = REQUEST_QUEUE_SIZE - 1;
    // A table of 65535 descriptors that each name the whole message area, then each other.
    let table = 0x60_0000;
    for entry in 0..0xffffu64 {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&MESSAGE.to_le_bytes());
        bytes[8..12].copy_from_slice(&64u32.to_le_bytes());
        bytes[12..14].copy_from_slice(&NEXT.to_le_bytes());
        bytes[14..].copy_from_slice(&(entry as u16 + 1).to_le_bytes());
        let address = GuestAddress(table + 16 * entry);
        guest.memory.write_slice(&bytes, address).unwrap();
    }
    for (address, len) in [
        (table, 16 * 0xffff),
        (table, 15),
        (table, 0),
        (table, u32::MAX),
        (MEMORY as u64 - 8, 16),
        (u64::MAX, 16),
    ] {
        guest.requests.set_descriptor(at, address, len, INDIRECT, 0);
        guest.requests.offer(at);
        guest.requests.kick();
        assert_eq!(guest.requests.wait_used().1, 0);
    }
    guest.assert_alive();
}

#[test]
fn test_a_broken_ring_stops_the_queue_and_not_the_device() {
    let export = export();
    let mut guest = Guest::new(export.path());
    guest.requests.set_avail_index(9999);
    guest.requests.kick();
    let forget = ForgetIn { nlookup: 1 };
    let len = guest.message(Opcode::Forget, 5, &[forget.as_slice()]);
    guest.priority.submit(&[(MESSAGE, len, false)]);
    guest.priority.wait_used();
    assert_eq!(guest.device.deactivate().len(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Descriptors and message bytes at random, on both queues: every chain comes back.
    #[test]
    fn test_random_chains_come_back(
        chains in prop::collection::vec(
            prop::collection::vec(
                (0..(MEMORY as u64 + 0x1000), prop_oneof![0..64u32, any::<u32>()], any::<bool>()),
                1..8,
            ),
            1..20,
        ),
        bytes in prop::collection::vec(any::<u8>(), 4096),
    ) {
        let export = export();
        let mut guest = Guest::new(export.path());
        for chain in chains {
            // Operations that write to files are left to the test in the jail.
            guest.memory.write_slice(&bytes, GuestAddress(MESSAGE)).unwrap();
            let head = guest.requests.submit(&chain);
            prop_assert_eq!(guest.requests.wait_used().0, head);
            let head = guest.priority.submit(&chain);
            prop_assert_eq!(guest.priority.wait_used().0, head);
        }
    }
}
