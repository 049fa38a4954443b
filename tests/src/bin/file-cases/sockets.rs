//! What is no regular file: sockets, pipes with names, devices.

use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

use rustix::fs::{CWD, FileType, Mode, OFlags, makedev, mknodat};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{Case, Failure, Outcome, as_user, done, words};

pub const CASES: &[Case] = &[
    ("socket: listen and connect", listen_and_connect),
    ("socket: bind twice", || {
        let _one = UnixListener::bind("s")?;
        Ok(done(UnixListener::bind("s")))
    }),
    ("socket: bind again after unlink", || {
        drop(UnixListener::bind("s")?);
        let refused = done(UnixStream::connect("s"));
        fs::remove_file("s")?;
        let _again = UnixListener::bind("s")?;
        Ok(format!("{refused} {}", done(UnixStream::connect("s"))))
    }),
    ("socket: after rename", || {
        let _listener = UnixListener::bind("s")?;
        fs::rename("s", "t")?;
        Ok(format!(
            "{} {}",
            done(UnixStream::connect("t")),
            done(UnixStream::connect("s"))
        ))
    }),
    ("socket: mode and another user", socket_mode),
    ("socket: datagrams", || {
        let (one, two) = (UnixDatagram::bind("a")?, UnixDatagram::bind("b")?);
        one.send_to(b"hello", "b")?;
        let mut bytes = [0; 10];
        let (length, from) = two.recv_from(&mut bytes)?;
        Ok(format!("{length} {:?}", from.as_pathname()))
    }),
    ("socket: a descriptor through it", pass_descriptor),
    ("socket: open as a file", || {
        let _listener = UnixListener::bind("s")?;
        Ok(done(File::open("s")))
    }),
    ("socket: by mknod", || {
        let made = done(mknodat(
            CWD,
            "s",
            FileType::Socket,
            Mode::from_raw_mode(0o644),
            0,
        ));
        Ok(format!(
            "{made} {}",
            words(fs::metadata("s").map(|data| data.file_type().is_socket()))
        ))
    }),
    ("pipe: write and read", pipe),
    ("pipe: open to write without a reader", || {
        make_pipe()?;
        let nonblocking = OFlags::NONBLOCK.bits() as i32;
        Ok(done(
            OpenOptions::new()
                .write(true)
                .custom_flags(nonblocking)
                .open("p"),
        ))
    }),
    ("pipe: twice", || {
        make_pipe()?;
        Ok(done(make_pipe()))
    }),
    ("pipe: unlinked while open", || {
        make_pipe()?;
        let mut both = OpenOptions::new().read(true).write(true).open("p")?;
        fs::remove_file("p")?;
        both.write_all(b"one")?;
        let mut bytes = [0; 3];
        both.read_exact(&mut bytes)?;
        Ok(format!("{bytes:?}"))
    }),
    ("regular file by mknod", || {
        let made = done(mknodat(
            CWD,
            "f",
            FileType::RegularFile,
            Mode::from_raw_mode(0o640),
            0,
        ));
        Ok(format!("{made} {:o}", fs::metadata("f")?.mode()))
    }),
    ("device by mknod", || {
        let null = makedev(1, 3);
        let made = done(mknodat(
            CWD,
            "n",
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            null,
        ));
        Ok(format!(
            "{made} {}",
            done(OpenOptions::new().write(true).open("n"))
        ))
    }),
    ("device by mknod as a user", || {
        fs::set_permissions(".", fs::Permissions::from_mode(0o777))?;
        let null = makedev(1, 3);
        let mode = Mode::from_raw_mode(0o666);
        as_user(1000, &[], || {
            done(mknodat(CWD, "n", FileType::CharacterDevice, mode, null))
        })
    }),
    ("overlay whiteout by mknod", || {
        Ok(done(mknodat(
            CWD,
            "w",
            FileType::CharacterDevice,
            Mode::empty(),
            0,
        )))
    }),
];

/// Listens on `path`, says so, and answers one that connects.
pub fn listen(path: &str) -> std::io::Result<()> {
    let listener = UnixListener::bind(path)?;
    println!("listening");
    let (mut client, _) = listener.accept()?;
    let mut ping = [0; 4];
    client.read_exact(&mut ping)?;
    client.write_all(b"pong")
}

/// Connects to `path`: the answer.
pub fn connect(path: &str) -> Outcome {
    let mut socket = UnixStream::connect(path)?;
    socket.write_all(b"ping")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

fn make_pipe() -> Result<(), Failure> {
    Ok(mknodat(
        CWD,
        "p",
        FileType::Fifo,
        Mode::from_raw_mode(0o644),
        0,
    )?)
}

fn listen_and_connect() -> Outcome {
    let listener = UnixListener::bind("s")?;
    let mut client = UnixStream::connect("s")?;
    let (mut server, _) = listener.accept()?;
    client.write_all(b"ping")?;
    let mut bytes = [0; 4];
    server.read_exact(&mut bytes)?;
    let metadata = fs::metadata("s")?;
    Ok(format!(
        "{bytes:?} {} {:o}",
        metadata.file_type().is_socket(),
        metadata.mode()
    ))
}

fn socket_mode() -> Outcome {
    let _listener = UnixListener::bind("s")?;
    fs::set_permissions("s", fs::Permissions::from_mode(0o600))?;
    let refused = as_user(1000, &[], || done(UnixStream::connect("s")))?;
    fs::set_permissions("s", fs::Permissions::from_mode(0o666))?;
    let accepted = as_user(1000, &[], || done(UnixStream::connect("s")))?;
    Ok(format!("{refused} {accepted}"))
}

fn pass_descriptor() -> Outcome {
    fs::write("f", "passed")?;
    let listener = UnixListener::bind("s")?;
    let client = UnixStream::connect("s")?;
    let (server, _) = listener.accept()?;
    let file = File::open("f")?;
    let descriptors = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(
        &client,
        &[IoSlice::new(b"x")],
        &mut ancillary,
        SendFlags::empty(),
    )?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(
        &server,
        &mut [IoSliceMut::new(&mut byte)],
        &mut ancillary,
        RecvFlags::empty(),
    )?;
    let mut text = String::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for descriptor in descriptors {
                File::from(descriptor).read_to_string(&mut text)?;
            }
        }
    }
    Ok(text)
}

fn pipe() -> Outcome {
    make_pipe()?;
    let mut both = OpenOptions::new().read(true).write(true).open("p")?;
    let mut writer = OpenOptions::new().write(true).open("p")?;
    writer.write_all(b"through")?;
    let mut bytes = [0; 7];
    both.read_exact(&mut bytes)?;
    Ok(format!(
        "{} {}",
        String::from_utf8_lossy(&bytes),
        fs::metadata("p")?.file_type().is_fifo()
    ))
}
