//! The exported tree: the library's passthrough file system behind checks of our own.
//!
//! Arguments are those that the library has decoded from the guest's message: no longer in guest
//! memory, but as hostile as before. What is checked here is what the file system below would
//! panic on, would not bound, or would take for more than it is.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse;
use virtiofsd::passthrough::{CachePolicy, Config, NegotiationMode, PassthroughFs};

use super::counts::FileCounts;
use super::freshness::Freshness;
use super::root::FileServerRoot;
use super::stale::StaleNames;

/// How long the guest may believe a name or an attribute without asking again: the host (`docker cp`,
/// another sandbox with the same volume) may change files too.
const VALID: Duration = Duration::from_secs(1);

/// The most bytes that one `copy_file_range` copies. It may always copy less than was asked for, and
/// a request is to be a bounded amount of work.
const COPY_LIMIT: u64 = 16 << 20;

/// The exported tree.
#[derive(Clone)]
pub struct Export(Arc<Inner>);

struct Inner {
    files: PassthroughFs,
    freshness: Freshness,
    names: StaleNames,
    counts: Arc<FileCounts>,
    /// A guest has mounted it: FUSE_INIT was answered, and FUSE_DESTROY has not come.
    mounted: AtomicBool,
}

impl Inner {
    /// The guest has forgotten `inode`.
    fn forget(&self, inode: u64) {
        self.freshness.forget(inode);
        self.names.forget(inode);
    }

    /// The guest has forgotten all.
    fn forget_all(&self) {
        self.freshness.clear();
        self.names.clear();
    }
}

impl Export {
    /// Export `root`. Clears the umask of the calling thread and of those that share its directory
    /// (`CLONE_FS`), so that modes are what the guest says.
    pub fn new(root: FileServerRoot, counts: Arc<FileCounts>) -> io::Result<Self> {
        let files = PassthroughFs::new(Config {
            entry_timeout: VALID,
            attr_timeout: VALID,
            // Close-to-open: what is cached of a file is dropped when it is opened, unless the reply
            // says otherwise, which `Freshness` decides.
            cache_policy: CachePolicy::Auto,
            writeback: false,
            root_dir: root
                .directory
                .to_str()
                .ok_or(io::ErrorKind::InvalidFilename)?
                .to_owned(),
            xattr: true,
            proc_sfd_rawfd: Some(root.descriptors),
            // Inodes of different mounts may have the same number; the guest keeps them apart.
            announce_submounts: true,
            readdirplus: true,
            // Else the guest asks for security.capability before every write.
            killpriv_v2: true,
            posix_acl: NegotiationMode::Auto,
            guest_fd_limit: root.guest_limit,
            ..Config::default()
        })?;
        Ok(Self(Arc::new(Inner {
            files,
            freshness: Freshness::default(),
            names: StaleNames::default(),
            counts,
            mounted: AtomicBool::new(false),
        })))
    }

    /// Whether a guest has mounted it.
    pub fn is_mounted(&self) -> bool {
        self.0.mounted.load(Ordering::Acquire)
    }
}

/// A name is one component of a path. The guest's kernel sends nothing else; names go to system calls
/// that would take a path.
fn one_component(name: &CStr) -> io::Result<()> {
    match name.to_bytes().contains(&b'/') {
        false => Ok(()),
        true => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// A range that file offsets can express, which are signed.
fn expressible(offset: u64, size: u32) -> io::Result<()> {
    match offset.checked_add(u64::from(size)) {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Pass calls on to the file system below, after the checks that are named.
macro_rules! pass_on {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty $(, $check:ident($($checked:ident),*))*;)*) => {
        $(fn $name(&self $(, $argument: $type)*) -> $result {
            $($check($($checked),*)?;)*
            self.0.files.$name($($argument),*)
        })*
    };
}

impl FileSystem for Export {
    type Inode = u64;
    type Handle = u64;
    type DirIter = <PassthroughFs as FileSystem>::DirIter;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        // A guest without them would see inodes of different mounts as one file.
        if !capable.contains(FsOptions::SUBMOUNTS) {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        let options = self.0.files.init(capable)?;
        self.0.forget_all();
        self.0.mounted.store(true, Ordering::Release);
        Ok(options)
    }

    fn destroy(&self) {
        self.0.files.destroy();
        self.0.forget_all();
        self.0.mounted.store(false, Ordering::Release);
    }

    /// A name that is not there is an answer too, and valid as long as any other. (FUSE: an entry
    /// with inode 0; an error would not be remembered.) Programs look for many files in vain.
    fn lookup(&self, context: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        one_component(name)?;
        match self.0.files.lookup(context, parent, name) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Entry {
                inode: 0,
                generation: 0,
                attr: fuse::Attr::default(),
                attr_timeout: VALID,
                entry_timeout: VALID,
            }),
            result => result,
        }
    }

    /// Not implemented on purpose: told so once, the guest's kernel does without, and saves a round
    /// trip at each `close`. Nothing is held back here that a flush could write: data is written
    /// when the guest sends it.
    fn flush(&self, _: Context, _: u64, _: u64, _: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }

    fn forget(&self, context: Context, inode: u64, count: u64) {
        self.0.forget(inode);
        self.0.files.forget(context, inode, count);
    }

    fn batch_forget(&self, context: Context, requests: Vec<(u64, u64)>) {
        for (inode, _) in &requests {
            self.0.forget(*inode);
        }
        self.0.files.batch_forget(context, requests);
    }

    fn open(
        &self,
        context: Context,
        inode: u64,
        kill_privileges: bool,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        // Before the file is opened, which may truncate it.
        let (attributes, _) = self.0.files.getattr(context, inode, None)?;
        self.0.names.check(inode, attributes.nlink)?;
        let (handle, mut options) = self.0.files.open(context, inode, kill_privileges, flags)?;
        // After the file was opened, which may have truncated it.
        if let Ok((attributes, _)) = self.0.files.getattr(context, inode, handle)
            && self.0.freshness.is_unchanged(inode, &attributes)
        {
            options |= OpenOptions::KEEP_CACHE;
        }
        Ok((handle, options))
    }

    /// The guest's kernel may have forgotten the inode before: a file is known by its handle.
    fn release(
        &self,
        context: Context,
        inode: u64,
        flags: u32,
        handle: u64,
        flush: bool,
        unlock: bool,
        lock_owner: Option<u64>,
    ) -> io::Result<()> {
        self.0.counts.count_release();
        self.0
            .files
            .release(context, inode, flags, handle, flush, unlock, lock_owner)
    }

    fn releasedir(&self, context: Context, inode: u64, flags: u32, handle: u64) -> io::Result<()> {
        self.0.counts.count_release();
        self.0.files.releasedir(context, inode, flags, handle)
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        context: Context,
        inode: u64,
        handle: u64,
        writer: W,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        flags: u32,
    ) -> io::Result<usize> {
        expressible(offset, size)?;
        self.0.files.read(
            context, inode, handle, writer, size, offset, lock_owner, flags,
        )
    }

    fn write<R: ZeroCopyReader>(
        &self,
        context: Context,
        inode: u64,
        handle: u64,
        reader: R,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        delayed: bool,
        kill_privileges: bool,
        flags: u32,
    ) -> io::Result<usize> {
        expressible(offset, size)?;
        self.0.files.write(
            context,
            inode,
            handle,
            reader,
            size,
            offset,
            lock_owner,
            delayed,
            kill_privileges,
            flags,
        )
    }

    fn copyfilerange(
        &self,
        context: Context,
        inode_in: u64,
        handle_in: u64,
        offset_in: u64,
        inode_out: u64,
        handle_out: u64,
        offset_out: u64,
        length: u64,
        flags: u64,
    ) -> io::Result<usize> {
        self.0.files.copyfilerange(
            context,
            inode_in,
            handle_in,
            offset_in,
            inode_out,
            handle_out,
            offset_out,
            length.min(COPY_LIMIT),
            flags,
        )
    }

    pass_on! {
        fn getattr(&self, context: Context, inode: u64, handle: Option<u64>)
            -> io::Result<(fuse::Attr, Duration)>;
        fn setattr(&self, context: Context, inode: u64, attributes: fuse::SetattrIn,
            handle: Option<u64>, valid: SetattrValid) -> io::Result<(fuse::Attr, Duration)>;
        fn readlink(&self, context: Context, inode: u64) -> io::Result<Vec<u8>>;
        fn symlink(&self, context: Context, target: &CStr, parent: u64, name: &CStr,
            extensions: Extensions) -> io::Result<Entry>, one_component(name);
        fn mknod(&self, context: Context, parent: u64, name: &CStr, mode: u32, device: u32,
            umask: u32, extensions: Extensions) -> io::Result<Entry>, one_component(name);
        fn mkdir(&self, context: Context, parent: u64, name: &CStr, mode: u32, umask: u32,
            extensions: Extensions) -> io::Result<Entry>, one_component(name);
        fn unlink(&self, context: Context, parent: u64, name: &CStr) -> io::Result<()>,
            one_component(name);
        fn rmdir(&self, context: Context, parent: u64, name: &CStr) -> io::Result<()>,
            one_component(name);
        fn rename(&self, context: Context, parent: u64, name: &CStr, new_parent: u64,
            new_name: &CStr, flags: u32) -> io::Result<()>,
            one_component(name), one_component(new_name);
        fn link(&self, context: Context, inode: u64, parent: u64, name: &CStr)
            -> io::Result<Entry>, one_component(name);
        fn create(&self, context: Context, parent: u64, name: &CStr, mode: u32,
            kill_privileges: bool, flags: u32, umask: u32, extensions: Extensions)
            -> io::Result<(Entry, Option<u64>, OpenOptions)>, one_component(name);
        fn fsync(&self, context: Context, inode: u64, data_only: bool, handle: u64)
            -> io::Result<()>;
        fn fallocate(&self, context: Context, inode: u64, handle: u64, mode: u32, offset: u64,
            length: u64) -> io::Result<()>;
        fn statfs(&self, context: Context, inode: u64) -> io::Result<libc::statvfs64>;
        fn setxattr(&self, context: Context, inode: u64, name: &CStr, value: &[u8], flags: u32,
            extra: SetxattrFlags) -> io::Result<()>;
        fn getxattr(&self, context: Context, inode: u64, name: &CStr, size: u32)
            -> io::Result<GetxattrReply>;
        fn listxattr(&self, context: Context, inode: u64, size: u32)
            -> io::Result<ListxattrReply>;
        fn removexattr(&self, context: Context, inode: u64, name: &CStr) -> io::Result<()>;
        fn opendir(&self, context: Context, inode: u64, flags: u32)
            -> io::Result<(Option<u64>, OpenOptions)>;
        fn readdir(&self, context: Context, inode: u64, handle: u64, size: u32, offset: u64)
            -> io::Result<Self::DirIter>;
        fn fsyncdir(&self, context: Context, inode: u64, data_only: bool, handle: u64)
            -> io::Result<()>;
        fn access(&self, context: Context, inode: u64, mask: u32) -> io::Result<()>;
        fn lseek(&self, context: Context, inode: u64, handle: u64, offset: u64, whence: u32)
            -> io::Result<u64>;
        fn syncfs(&self, context: Context, inode: u64) -> io::Result<()>;
    }
}
