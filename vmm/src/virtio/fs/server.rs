//! One message in, one answer out.

use std::io::{self, Read, Write};
use std::sync::Arc;

use thiserror::Error;
use virtiofsd::descriptor_utils::{self, Reader, Writer};
use virtiofsd::filesystem::{Context, FileSystem};
use virtiofsd::fuse::{BatchForgetIn, ForgetIn, ForgetOne, InHeader, Opcode, OutHeader};
use virtiofsd::server::Server;
use vm_memory::ByteValued;

use super::counts::FileCounts;
use super::export::Export;
use super::root::FileServerRoot;
use super::view::View;
use crate::virtio::queue::Chain;

/// The most bytes that a request or a reply takes: 1 MiB of data, which is what FUSE_INIT agrees on,
/// and room for headers and names.
const MESSAGE_LIMIT: usize = (1 << 20) + (64 << 10);

/// The most inodes that one FUSE_BATCH_FORGET names: as many as fit in a page of the guest's kernel
/// many times over.
const FORGET_LIMIT: u32 = 1 << 16;

/// What is wrong with a message. The driver's fault.
#[derive(Debug, Error)]
pub enum MessageError {
    /// The chain does not lie in guest memory.
    #[error("a message that is not guest memory: {0}")]
    Chain(descriptor_utils::Error),
    /// More than [`MESSAGE_LIMIT`].
    #[error("a message of {0} bytes: at most {MESSAGE_LIMIT} are taken")]
    Size(usize),
    /// No room for the header of a reply, and not one of the messages that have no reply.
    #[error("no room for the reply to operation {0}")]
    NoRoom(u32),
    /// Shorter than it says or than its operation needs.
    #[error("a message that ends early: {0}")]
    Short(io::Error),
    /// The library could not make sense of it.
    #[error("{0}")]
    Malformed(virtiofsd::Error),
}

/// The file server of one guest.
pub struct FileServer {
    server: Server<Export>,
    export: Export,
    counts: Arc<FileCounts>,
}

impl FileServer {
    /// A server of `root`, with nothing mounted.
    pub fn new(root: FileServerRoot) -> io::Result<Self> {
        let counts = Arc::<FileCounts>::default();
        let export = Export::new(root, counts.clone())?;
        Ok(Self {
            server: Server::new(export.clone()),
            export,
            counts,
        })
    }

    /// Counts what is served.
    pub fn counts(&self) -> Arc<FileCounts> {
        self.counts.clone()
    }

    /// Whether a guest has mounted the tree.
    pub fn is_mounted(&self) -> bool {
        self.export.is_mounted()
    }

    /// Serve the message in `chain`; returns the number of bytes written into it. The calling
    /// thread must not share its working directory and umask (`CLONE_FS`) with others.
    pub fn serve(&self, view: &View, chain: Chain<'_>) -> Result<u32, MessageError> {
        let (reader, writer) = buffers(view, chain.clone())?;
        if writer.available_bytes() < size_of::<OutHeader>() {
            self.serve_without_reply(reader)?;
            return Ok(0);
        }
        self.counts.count_request();
        match self.server.handle_message(reader, writer, None::<&mut ()>) {
            // At most `MESSAGE_LIMIT`.
            Ok(written) => Ok(written as u32),
            Err(error) => {
                refuse(view, chain);
                Err(MessageError::Malformed(error))
            }
        }
    }

    /// Serve a message that leaves no room for a reply. The library is not asked, because it counts on
    /// that room for some operations, and what it reads of the guest's memory need not be what was
    /// read here.
    fn serve_without_reply(&self, mut reader: Reader<'_>) -> Result<(), MessageError> {
        let header: InHeader = reader.read_obj().map_err(MessageError::Short)?;
        let context = Context::from(header);
        match Opcode::try_from(header.opcode) {
            Ok(Opcode::Forget) => {
                let forget: ForgetIn = reader.read_obj().map_err(MessageError::Short)?;
                self.export.forget(context, header.nodeid, forget.nlookup);
            }
            Ok(Opcode::BatchForget) => {
                let batch: BatchForgetIn = reader.read_obj().map_err(MessageError::Short)?;
                for _ in 0..batch.count.min(FORGET_LIMIT) {
                    let one: ForgetOne = reader.read_obj().map_err(MessageError::Short)?;
                    self.export.forget(context, one.nodeid, one.nlookup);
                }
            }
            _ => return Err(MessageError::NoRoom(header.opcode)),
        }
        Ok(())
    }
}

fn buffers<'v>(view: &'v View, chain: Chain<'_>) -> Result<(Reader<'v>, Writer<'v>), MessageError> {
    let memory = view.library();
    let reader = Reader::new(memory, chain.clone()).map_err(MessageError::Chain)?;
    let writer = Writer::new(memory, chain).map_err(MessageError::Chain)?;
    for size in [reader.available_bytes(), writer.available_bytes()] {
        if size > MESSAGE_LIMIT {
            return Err(MessageError::Size(size));
        }
    }
    Ok((reader, writer))
}

/// Answer a malformed message with EIO, as far as it can be answered.
fn refuse(view: &View, chain: Chain<'_>) {
    let Ok((mut reader, mut writer)) = buffers(view, chain) else {
        return;
    };
    let mut header = InHeader::default();
    // What is not there stays zero.
    let _ = reader.read(header.as_mut_slice());
    let reply = OutHeader {
        len: size_of::<OutHeader>() as u32,
        error: -libc::EIO,
        unique: header.unique,
    };
    // There is room for it, or the guest has taken the buffers away, which is its own loss.
    let _ = writer.write_all(reply.as_slice());
}
