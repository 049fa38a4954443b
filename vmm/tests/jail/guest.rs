//! A guest made by hand: one FUSE message at a time, over real queues of the real device.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use thaw_vmm::virtio::fs::FileSystem;
use thaw_vmm::virtio::{Activation, ActiveQueue, Device, Interrupt};
use virtio_queue::{Queue, QueueT};
use virtiofsd::fuse::{
    AttrOut, CreateIn, EntryOut, GetxattrIn, InHeader, InitInCompat, InitInExt, LinkIn, MkdirIn,
    MknodIn, Opcode, OpenIn, OutHeader, ReadIn, ReleaseIn, Rename2In, SetattrIn, SetxattrIn,
    WriteIn,
};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const ROOT: u64 = 1;

const SIZE: u16 = 16;
const MEMORY: usize = 8 << 20;
/// Where messages are put, and where replies are wanted.
pub const MESSAGE: GuestAddress = GuestAddress(0x10_0000);
pub const REPLY: GuestAddress = GuestAddress(0x40_0000);
/// Room for a reply with 1 MiB of data.
const REPLY_SIZE: u32 = (1 << 20) + 4096;

/// FUSE_INIT flags of Linux (`uapi/linux/fuse.h`): DONT_MASK, DO_READDIRPLUS, READDIRPLUS_AUTO,
/// POSIX_ACL, MAX_PAGES, SUBMOUNTS, HANDLE_KILLPRIV_V2, SETXATTR_EXT, INIT_EXT.
const INIT_FLAGS: u32 =
    1 << 6 | 1 << 13 | 1 << 14 | 1 << 20 | 1 << 22 | 1 << 27 | 1 << 28 | 1 << 29 | 1 << 30;
/// CREATE_SUPP_GROUP, bit 34.
const INIT_FLAGS2: u32 = 1 << 2;

/// `FUSE_WRITE_KILL_SUIDGID`.
pub const KILL_PRIVILEGES: u32 = 1 << 2;

/// A result with the positive error number of the reply.
pub type Answer<T> = Result<T, i32>;

/// Who asks.
#[derive(Clone, Copy)]
pub struct Caller(pub u32, pub u32);

pub const SUPERUSER: Caller = Caller(0, 0);

#[derive(Default)]
struct Raised {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Interrupt for Raised {
    fn queue(&self, _queue: u16) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    fn config(&self) {}
}

pub struct Guest {
    device: FileSystem,
    memory: GuestMemoryMmap,
    notify: [EventFd; 2],
    raised: Arc<Raised>,
    /// Messages sent, by queue.
    sent: [u16; 2],
    unique: u64,
}

/// Descriptor table, available ring and used ring of a queue.
fn rings(queue: usize) -> (u64, u64, u64) {
    let base = 0x1000 * (1 + queue as u64);
    (base, base + 0x400, base + 0x800)
}

impl Guest {
    pub fn new(device: FileSystem) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let notify = [(); 2].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
        let mut guest = Guest {
            device,
            memory,
            notify,
            raised: Arc::default(),
            sent: [0; 2],
            unique: 0,
        };
        let queues = (0..2).map(|index| guest.device_side(index)).collect();
        guest.activate(queues);
        guest
    }

    fn device_side(&self, index: usize) -> ActiveQueue {
        let (descriptors, available, used) = rings(index);
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_desc_table_address(Some(descriptors as u32), None);
        queue.set_avail_ring_address(Some(available as u32), None);
        queue.set_used_ring_address(Some(used as u32), None);
        queue.set_ready(true);
        let notify = self.notify[index].try_clone().unwrap();
        let index = index as u16;
        ActiveQueue {
            index,
            queue,
            notify,
        }
    }

    pub fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            memory: self.memory.clone().into(),
            queues,
            interrupt: self.raised.clone(),
            features: 1 << 32,
        };
        self.device.activate(activation).unwrap();
    }

    pub fn device(&mut self) -> &mut FileSystem {
        &mut self.device
    }

    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Make the chain of `parts` (address, length, flags) available on `queue` and wait until it is
    /// used. Returns the bytes that the device says it has written.
    pub fn submit(&mut self, queue: usize, parts: &[(u64, u32, u16)]) -> u32 {
        let (descriptors, available, used) = rings(queue);
        for (at, (address, len, flags)) in parts.iter().enumerate() {
            let next = if at + 1 < parts.len() { 1 } else { 0 };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
            bytes[12..14].copy_from_slice(&(flags | next).to_le_bytes());
            bytes[14..].copy_from_slice(&(at as u16 + 1).to_le_bytes());
            let address = GuestAddress(descriptors + 16 * at as u64);
            self.memory.write_slice(&bytes, address).unwrap();
        }
        let slot = self.sent[queue] % SIZE;
        let put = |value: u16, at: u64| {
            let order = std::sync::atomic::Ordering::Release;
            self.memory.store(value, GuestAddress(at), order).unwrap();
        };
        put(0, available + 4 + 2 * u64::from(slot));
        let sent = self.sent[queue].wrapping_add(1);
        put(sent, available + 2);
        self.sent[queue] = sent;
        self.notify[queue].write(1).unwrap();

        let order = std::sync::atomic::Ordering::Acquire;
        let done = || {
            let index: u16 = self.memory.load(GuestAddress(used + 2), order).unwrap();
            index == sent
        };
        let count = self.raised.count.lock().unwrap();
        let time = Duration::from_secs(30);
        let (_count, timeout) = self
            .raised
            .changed
            .wait_timeout_while(count, time, |_| !done())
            .unwrap();
        assert!(!timeout.timed_out(), "the device does not answer");
        let entry = used + 4 + 8 * u64::from(slot);
        self.memory.read_obj(GuestAddress(entry + 4)).unwrap()
    }

    pub fn put_message(&mut self, opcode: u32, nodeid: u64, caller: Caller, body: &[&[u8]]) -> u32 {
        self.unique += 2;
        let len = size_of::<InHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
        let header = InHeader {
            len: len as u32,
            opcode,
            unique: self.unique,
            nodeid,
            uid: caller.0.into(),
            gid: caller.1.into(),
            ..InHeader::default()
        };
        let mut at = MESSAGE.0;
        for part in [header.as_slice()].iter().chain(body) {
            self.memory.write_slice(part, GuestAddress(at)).unwrap();
            at += part.len() as u64;
        }
        len as u32
    }

    pub fn call_as(
        &mut self,
        caller: Caller,
        opcode: Opcode,
        nodeid: u64,
        body: &[&[u8]],
    ) -> Answer<Vec<u8>> {
        let len = self.put_message(opcode as u32, nodeid, caller, body);
        let written = self.submit(1, &[(MESSAGE.0, len, 0), (REPLY.0, REPLY_SIZE, 2)]);
        if written == 0 {
            return Ok(Vec::new());
        }
        let header: OutHeader = self.memory.read_obj(REPLY).unwrap();
        assert_eq!(header.unique, self.unique);
        if header.error != 0 {
            return Err(-header.error);
        }
        let mut body = vec![0; written as usize - size_of::<OutHeader>()];
        let at = GuestAddress(REPLY.0 + size_of::<OutHeader>() as u64);
        self.memory.read_slice(&mut body, at).unwrap();
        Ok(body)
    }

    pub fn call(&mut self, opcode: Opcode, nodeid: u64, body: &[&[u8]]) -> Answer<Vec<u8>> {
        self.call_as(SUPERUSER, opcode, nodeid, body)
    }

    pub fn mount(&mut self) {
        let init = InitInCompat {
            major: 7,
            minor: 41,
            max_readahead: 1 << 17,
            flags: INIT_FLAGS,
        };
        let more = InitInExt {
            flags2: INIT_FLAGS2,
            ..InitInExt::default()
        };
        let body = [init.as_slice(), more.as_slice()];
        self.call(Opcode::Init, 0, &body).unwrap();
    }

    pub fn lookup(&mut self, parent: u64, name: &str) -> Answer<EntryOut> {
        let body = self.call(Opcode::Lookup, parent, &[name.as_bytes(), b"\0"])?;
        match object::<EntryOut>(&body) {
            EntryOut { nodeid: 0, .. } => Err(libc::ENOENT),
            entry => Ok(entry),
        }
    }

    /// The inode of an existing path of the export.
    pub fn node(&mut self, path: &str) -> u64 {
        path.split('/').fold(ROOT, |parent, name| {
            self.lookup(parent, name)
                .unwrap_or_else(|error| panic!("lookup of {path}: {error}"))
                .nodeid
        })
    }

    /// Create a file and open it: its entry and its handle.
    pub fn create(
        &mut self,
        caller: Caller,
        parent: u64,
        name: &str,
        mode: u32,
    ) -> Answer<(EntryOut, u64)> {
        let create = CreateIn {
            flags: libc::O_RDWR as u32,
            mode: mode | libc::S_IFREG,
            ..CreateIn::default()
        };
        let body = [create.as_slice(), name.as_bytes(), b"\0"];
        let reply = self.call_as(caller, Opcode::Create, parent, &body)?;
        let handle = &reply[size_of::<EntryOut>()..];
        Ok((object(&reply), object(handle)))
    }

    pub fn mkdir(&mut self, caller: Caller, parent: u64, name: &str) -> Answer<EntryOut> {
        let mkdir = MkdirIn {
            mode: 0o755,
            umask: 0,
        };
        let body = [mkdir.as_slice(), name.as_bytes(), b"\0"];
        self.call_as(caller, Opcode::Mkdir, parent, &body)
            .map(|body| object(&body))
    }

    pub fn mknod(&mut self, parent: u64, name: &str, mode: u32, device: u32) -> Answer<EntryOut> {
        let mknod = MknodIn {
            mode,
            rdev: device,
            ..MknodIn::default()
        };
        let body = [mknod.as_slice(), name.as_bytes(), b"\0"];
        self.call(Opcode::Mknod, parent, &body)
            .map(|body| object(&body))
    }

    pub fn symlink(&mut self, caller: Caller, parent: u64, name: &str, target: &str) -> Answer<()> {
        let body: [&[u8]; 4] = [name.as_bytes(), b"\0", target.as_bytes(), b"\0"];
        self.call_as(caller, Opcode::Symlink, parent, &body)
            .map(drop)
    }

    pub fn link(&mut self, node: u64, parent: u64, name: &str) -> Answer<EntryOut> {
        let link = LinkIn { oldnodeid: node };
        let body = [link.as_slice(), name.as_bytes(), b"\0"];
        self.call(Opcode::Link, parent, &body)
            .map(|body| object(&body))
    }

    pub fn rename(&mut self, parent: u64, name: &str, new_name: &str, flags: u32) -> Answer<()> {
        let rename = Rename2In {
            newdir: parent,
            flags,
            padding: 0,
        };
        let parts = [name.as_bytes(), new_name.as_bytes()];
        let body = [rename.as_slice(), parts[0], b"\0", parts[1], b"\0"];
        self.call(Opcode::Rename2, parent, &body).map(drop)
    }

    pub fn unlink(&mut self, parent: u64, name: &str) -> Answer<()> {
        self.call(Opcode::Unlink, parent, &[name.as_bytes(), b"\0"])
            .map(drop)
    }

    pub fn attributes(&mut self, node: u64) -> Answer<AttrOut> {
        self.call(Opcode::Getattr, node, &[&[0; 16]])
            .map(|body| object(&body))
    }

    pub fn set_attributes(&mut self, node: u64, set: SetattrIn) -> Answer<AttrOut> {
        self.call(Opcode::Setattr, node, &[set.as_slice()])
            .map(|body| object(&body))
    }

    pub fn chmod(&mut self, node: u64, mode: u32) -> Answer<AttrOut> {
        let valid = 1;
        self.set_attributes(
            node,
            SetattrIn {
                valid,
                mode,
                ..SetattrIn::default()
            },
        )
    }

    pub fn chown(&mut self, node: u64, uid: u32, gid: u32) -> Answer<AttrOut> {
        self.set_attributes(
            node,
            SetattrIn {
                valid: 1 << 1 | 1 << 2,
                uid: uid.into(),
                gid: gid.into(),
                ..SetattrIn::default()
            },
        )
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Answer<u64> {
        let open = OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        self.call(Opcode::Open, node, &[open.as_slice()])
            .map(|body| object(&body))
    }

    pub fn release(&mut self, node: u64, handle: u64) -> Answer<()> {
        let release = ReleaseIn {
            fh: handle,
            ..ReleaseIn::default()
        };
        self.call(Opcode::Release, node, &[release.as_slice()])
            .map(drop)
    }

    pub fn read(&mut self, node: u64, handle: u64, offset: u64, size: u32) -> Answer<Vec<u8>> {
        let read = ReadIn {
            fh: handle,
            offset,
            size,
            ..ReadIn::default()
        };
        // The room for a reply is the size that is read, as Linux has it.
        let len = self.put_message(Opcode::Read as u32, node, SUPERUSER, &[read.as_slice()]);
        let room = size_of::<OutHeader>() as u32 + size;
        let written = self.submit(1, &[(MESSAGE.0, len, 0), (REPLY.0, room, 2)]);
        let header: OutHeader = self.memory.read_obj(REPLY).unwrap();
        if header.error != 0 {
            return Err(-header.error);
        }
        let mut data = vec![0; written as usize - size_of::<OutHeader>()];
        let at = GuestAddress(REPLY.0 + size_of::<OutHeader>() as u64);
        self.memory.read_slice(&mut data, at).unwrap();
        Ok(data)
    }

    pub fn write(
        &mut self,
        node: u64,
        handle: u64,
        offset: u64,
        data: &[u8],
        write_flags: u32,
    ) -> Answer<usize> {
        let write = WriteIn {
            fh: handle,
            offset,
            size: data.len() as u32,
            write_flags,
            ..WriteIn::default()
        };
        let reply = self.call(Opcode::Write, node, &[write.as_slice(), data])?;
        Ok(object::<u32>(&reply) as usize)
    }

    pub fn set_xattr(&mut self, node: u64, name: &str, value: &[u8]) -> Answer<()> {
        let set = SetxattrIn {
            size: value.len() as u32,
            ..SetxattrIn::default()
        };
        let body = [set.as_slice(), name.as_bytes(), b"\0", value];
        self.call(Opcode::Setxattr, node, &body).map(drop)
    }

    pub fn xattr(&mut self, node: u64, name: &str) -> Answer<Vec<u8>> {
        let get = GetxattrIn {
            size: 4096,
            padding: 0,
        };
        let body = [get.as_slice(), name.as_bytes(), b"\0"];
        self.call(Opcode::Getxattr, node, &body)
    }

    pub fn xattrs(&mut self, node: u64) -> Answer<Vec<String>> {
        let get = GetxattrIn {
            size: 4096,
            padding: 0,
        };
        let names = self.call(Opcode::Listxattr, node, &[get.as_slice()])?;
        let names = String::from_utf8(names).unwrap();
        Ok(names.split_terminator('\0').map(String::from).collect())
    }

    /// Names in a directory, by READDIRPLUS.
    pub fn list(&mut self, node: u64) -> Answer<Vec<String>> {
        let open = OpenIn::default();
        let reply = self.call(Opcode::Opendir, node, &[open.as_slice()])?;
        let read = ReadIn {
            fh: object(&reply),
            size: 1 << 16,
            ..ReadIn::default()
        };
        let listed = self.call(Opcode::Readdirplus, node, &[read.as_slice()])?;
        let mut names = Vec::new();
        let mut rest = listed.as_slice();
        let fixed = size_of::<EntryOut>() + 24;
        while rest.len() > fixed {
            let length: u32 = object(&rest[size_of::<EntryOut>() + 16..]);
            let length = length as usize;
            let name = &rest[fixed..fixed + length];
            names.push(String::from_utf8(name.to_vec()).unwrap());
            rest = &rest[(fixed + length).next_multiple_of(8)..];
        }
        names.sort();
        Ok(names)
    }

    pub fn unmount(&mut self) {
        self.call(Opcode::Destroy, 0, &[]).unwrap();
    }
}

/// The first object of `bytes`.
fn object<T: ByteValued + Default>(bytes: &[u8]) -> T {
    let mut object = T::default();
    object
        .as_mut_slice()
        .copy_from_slice(&bytes[..size_of::<T>()]);
    object
}
