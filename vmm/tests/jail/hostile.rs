//! Every operation with arguments at random, in a small tmpfs: the server answers, and what was
//! outside of the export before is as it was.

use std::collections::BTreeSet;
use std::fs;

use virtiofsd::fuse::{Opcode, OutHeader};
use vm_memory::Bytes;

use crate::guest::{Caller, Guest, MESSAGE, REPLY, ROOT};
use crate::{Case, Inside, Sandbox, Test};

pub const TESTS: &[Test] = &[("random_messages_are_answered", random_messages_are_answered)];

pub const CASES: &[Case] = &[("send random messages", send_random_messages)];

/// Messages sent.
const MESSAGES: u64 = 60_000;

/// FUSE_INIT and FUSE_DESTROY are sent now and then only: most messages need a mounted tree.
const INIT: u32 = 26;
const DESTROY: u32 = 38;

/// Operations that some of the messages get done.
const EXPECTED: [Opcode; 28] = [
    Opcode::Lookup,
    Opcode::Getattr,
    Opcode::Setattr,
    Opcode::Symlink,
    Opcode::Readlink,
    Opcode::Mknod,
    Opcode::Mkdir,
    Opcode::Unlink,
    Opcode::Rmdir,
    Opcode::Rename,
    Opcode::Rename2,
    Opcode::Link,
    Opcode::Open,
    Opcode::Opendir,
    Opcode::Create,
    Opcode::Read,
    Opcode::Write,
    Opcode::Fsync,
    Opcode::Release,
    Opcode::Statfs,
    Opcode::Setxattr,
    Opcode::Getxattr,
    Opcode::Listxattr,
    Opcode::Readdir,
    Opcode::Readdirplus,
    Opcode::Lseek,
    Opcode::Fallocate,
    Opcode::CopyFileRange,
];

/// One more than the last operation of FUSE 7.41.
const OPERATIONS: u32 = 53;

fn random_messages_are_answered() {
    let mut sandbox = Sandbox::start();
    sandbox.mount_tmpfs("scratch", c"size=32m,nr_inodes=4096");
    let read_only = sandbox.mount_read_only("read-only");
    fs::write(read_only.join("file"), "text").unwrap();
    sandbox.run("send random messages");
    assert_eq!(fs::read_to_string(read_only.join("file")).unwrap(), "text");
    assert_eq!(fs::read_dir(&read_only).unwrap().count(), 1);
}

/// SplitMix64: the same messages in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// A number as a guest would send it, or one at an edge.
    fn number(&mut self) -> u64 {
        match self.below(12) {
            0 => self.next(),
            1 => 1 << self.below(64),
            2 => (1 << self.below(64)) - 1,
            3 => u64::MAX - self.below(3),
            4 | 5 => self.below(12),
            _ => 0,
        }
    }

    fn name(&mut self) -> &'static [u8] {
        let odd: [&[u8]; 6] = [b"..\0", b".\0", b"\0", b"a", b"a/b\0", b"a\0b\0c\0"];
        match self.one_in(8) {
            true => self.choose(&odd),
            false => self.choose(&[&b"a\0"[..], b"b\0", b"c\0", b"d\0", b"e\0", b"f\0"]),
        }
    }
}

/// Inodes and handles that the guest has been given.
#[derive(Default)]
struct Known {
    nodes: Vec<u64>,
    handles: Vec<(u64, u64)>,
}

impl Known {
    fn node(&self, random: &mut Random) -> u64 {
        match random.one_in(16) {
            true => random.number(),
            false => random.choose(&self.nodes),
        }
    }
}

/// Where a message has numbers that stand for something.
enum Fixed {
    /// As many bytes that mean nothing in particular.
    Plain(usize),
    /// As many bytes, a handle first.
    Handle(usize),
    /// An inode first.
    Node(usize),
}

/// The part of fixed size, and how many names follow it (`uapi/linux/fuse.h`).
fn layout(operation: Opcode) -> (Fixed, usize) {
    use Fixed::{Handle, Node, Plain};
    match operation {
        Opcode::Lookup | Opcode::Unlink | Opcode::Rmdir | Opcode::Removexattr => (Plain(0), 1),
        Opcode::Symlink => (Plain(0), 2),
        Opcode::Getattr | Opcode::Init => (Plain(16), 0),
        Opcode::Setattr => (Plain(88), 0),
        Opcode::Mknod | Opcode::Create => (Plain(16), 1),
        Opcode::Mkdir | Opcode::Getxattr => (Plain(8), 1),
        Opcode::Rename => (Node(8), 2),
        Opcode::Rename2 => (Node(16), 2),
        Opcode::Link => (Node(8), 1),
        Opcode::Setxattr => (Plain(16), 2),
        Opcode::Read | Opcode::Readdir | Opcode::Readdirplus | Opcode::Write => (Handle(40), 1),
        Opcode::Release | Opcode::Releasedir | Opcode::Flush | Opcode::Lseek => (Handle(24), 0),
        Opcode::Fsync | Opcode::Fsyncdir => (Handle(16), 0),
        Opcode::Fallocate => (Handle(32), 0),
        Opcode::CopyFileRange => (Handle(56), 0),
        _ => (Plain(8), 0),
    }
}

/// An inode and the bytes behind the header.
fn message(random: &mut Random, known: &Known, operation: u32) -> (u64, Vec<u8>) {
    let mut node = known.node(random);
    let Ok(operation) = Opcode::try_from(operation) else {
        return (node, random.next().to_le_bytes().to_vec());
    };
    let (fixed, names) = layout(operation);
    let (size, first) = match fixed {
        Fixed::Plain(size) => (size, None),
        Fixed::Node(size) => (size, Some(known.node(random))),
        Fixed::Handle(size) => {
            let handle;
            (node, handle) = random.choose(&known.handles);
            (size, Some(handle))
        }
    };
    let mut body = Vec::new();
    body.extend(first.iter().flat_map(|number| number.to_le_bytes()));
    while body.len() < size {
        body.extend((random.number() as u32).to_le_bytes());
    }
    match operation {
        // Copy to a file that is there, and set what has the length that is said.
        Opcode::CopyFileRange => {
            let (out, handle) = random.choose(&known.handles);
            body[16..24].copy_from_slice(&out.to_le_bytes());
            body[24..32].copy_from_slice(&handle.to_le_bytes());
        }
        Opcode::Setxattr => body[..4].copy_from_slice(&2u32.to_le_bytes()),
        _ => {}
    }
    for _ in 0..names {
        if matches!(
            operation,
            Opcode::Getxattr | Opcode::Setxattr | Opcode::Removexattr
        ) {
            body.extend(b"user.");
        }
        body.extend(random.name());
    }
    if matches!(operation, Opcode::Setxattr) {
        body.truncate(16 + b"user.a\0".len() + 2);
    }
    if random.one_in(16) {
        body.truncate(random.below(body.len() as u64 + 1) as usize);
    }
    (node, body)
}

fn send_random_messages(inside: &mut Inside) {
    let guest = inside.guest();
    let mut random = Random(2);
    let mut known = refill(guest);
    let mut answered = 0;
    let mut done = BTreeSet::new();
    for number in 0..MESSAGES {
        if number % 64 == 0 {
            known = refill(guest);
        }
        let operation = match random.below(u64::from(OPERATIONS) + 4) as u32 {
            INIT | DESTROY if number % 64 != 63 => continue,
            operation => operation,
        };
        let caller = match random.one_in(8) {
            true => Caller(random.number() as u32, random.number() as u32),
            false => Caller(0, 0),
        };
        let (node, body) = message(&mut random, &known, operation);
        let sent = guest.put_message(operation, node, caller, &[&body]);
        if random.one_in(32) {
            // A header that says something else than what was sent.
            let says = random.number() as u32;
            guest.memory().write_obj(says, MESSAGE).unwrap();
        }
        let len = match random.below(32) {
            0 => random.below(u64::from(sent) + 1) as u32,
            1 => 4096,
            _ => sent,
        };
        let room = match random.one_in(16) {
            true => random.below(64) as u32,
            false => 8192,
        };
        let queue = usize::from(!random.one_in(8));
        let parts = [(MESSAGE.0, len, 0), (REPLY.0, room, 2)];
        if guest.submit(queue, &parts) != 0 {
            answered += 1;
            let reply: OutHeader = guest.memory().read_obj(REPLY).unwrap();
            if reply.error == 0 {
                done.insert(operation);
            }
        }
    }
    assert!(answered > MESSAGES / 2, "{answered} messages had an answer");
    // Arguments at random are right often enough to get past the first check.
    for operation in EXPECTED {
        let number = operation as u32;
        assert!(done.contains(&number), "{operation:?} never worked");
    }
    guest.mount();
    guest.node("scratch");
}

/// Mount anew and open a few files: what the guest knows then.
fn refill(guest: &mut Guest) -> Known {
    const SUPERUSER: Caller = Caller(0, 0);
    guest.mount();
    let scratch = guest.node("scratch");
    let read_only = guest.node("read-only");
    let mut known = Known {
        nodes: vec![scratch, scratch, scratch, ROOT, read_only],
        handles: vec![(scratch, 0)],
    };
    for name in ["a", "b", "c", "d"] {
        // What random messages have left there may be of any kind, and there may be no room.
        if let Ok((entry, handle)) = guest.create(SUPERUSER, scratch, name, 0o644) {
            known.nodes.push(entry.nodeid);
            known.handles.push((entry.nodeid, handle));
        } else if let Ok(entry) = guest.lookup(scratch, name) {
            known.nodes.push(entry.nodeid);
        }
    }
    if let Ok(directory) = guest.open(scratch, libc::O_DIRECTORY) {
        known.handles.push((scratch, directory));
    }
    let file = guest.node("read-only/file");
    known.nodes.push(file);
    known
        .handles
        .push((file, guest.open(file, libc::O_RDONLY).unwrap()));
    known
}
