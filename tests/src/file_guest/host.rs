//! The host's side: a VMM without shim or containerd, and what it counts.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;
use thaw_vmm_control::{Event, Launch, Launched, Reply, Request, Shape, Statistics};

use super::{PORT, READY};

const COMMAND_LINE: &str = "console=hvc0 quiet panic=-1 reboot=t tsc=reliable no_timer_check \
     pci=conf1 8250.nr_uarts=0";

/// What one operation costs, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Requests to the file server that the program waited for.
    pub waits: f64,
    /// Those that nobody waited for.
    pub releases: f64,
    /// Exits of the guest, where KVM counts them.
    pub exits: Option<f64>,
    /// As the guest's clock says.
    pub took: Duration,
}

/// An initramfs that holds `program` as `/init`, at `path`.
///
/// # Errors
///
/// When `strip` or `cpio` is missing or fails.
pub fn initramfs(program: &Path, path: &Path) -> Result<()> {
    let root = tempfile::tempdir()?;
    // Without what a debugger wants, which is most of a test's program and would be copied into the guest.
    let strip = Command::new("strip")
        .arg("-o")
        .arg(root.path().join("init"))
        .arg(program)
        .status()
        .context("starting strip")?;
    ensure!(strip.success(), "strip fails");
    let mut cpio = Command::new("cpio")
        .args(["-o", "-H", "newc", "-R", "0:0", "--quiet"])
        .current_dir(root.path())
        .stdin(Stdio::piped())
        .stdout(File::create(path)?)
        .spawn()
        .context("starting cpio")?;
    let mut names = cpio.stdin.take().context("cpio has no input")?;
    names.write_all(b"init\n")?;
    drop(names);
    ensure!(cpio.wait()?.success(), "cpio fails");
    Ok(())
}

/// A mounted tmpfs, unmounted with the value.
#[derive(Debug)]
struct Memory(PathBuf);

impl Memory {
    fn mount(path: &Path) -> io::Result<Self> {
        fs::create_dir(path)?;
        mount(
            Some("tmpfs"),
            path,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// A guest that runs, with a directory in memory as its files. It ends with the value.
#[derive(Debug)]
pub struct FileGuest {
    vmm: Launched,
    lines: BufReader<UnixStream>,
    _disk: Memory,
    _directory: TempDir,
}

impl FileGuest {
    /// Boots the installed kernel below `prefix` with `program`, which calls [`super::serve`].
    ///
    /// # Errors
    ///
    /// When the guest does not come up.
    pub fn boot(prefix: &Path, program: &Path) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let image = directory.path().join("initramfs");
        initramfs(program, &image)?;
        let export = directory.path().join("export");
        fs::create_dir(&export)?;
        let disk = Memory::mount(&export.join("disk"))?;
        let log = io::stderr();
        let launch = Launch {
            program: &prefix.join("libexec/thaw/thaw-vmm"),
            root: &export,
            network_namespace: None,
            log: Some(log.as_fd()),
        };
        let mut vmm = launch.start()?;
        let boot = Request::Boot {
            shape: Shape::new(2, 512)?,
            command_line: COMMAND_LINE.into(),
        };
        let (kernel, image) = (
            File::open(prefix.join("share/thaw/vmlinux"))?,
            File::open(image)?,
        );
        vmm.owner.request(&boot, &[kernel.as_fd(), image.as_fd()])?;
        wait_for(&mut vmm, READY)?;
        let (ours, guests) = UnixStream::pair()?;
        let guests = OwnedFd::from(guests);
        vmm.owner
            .request(&Request::ConnectVsock { port: PORT }, &[guests.as_fd()])?;
        drop(guests);
        Ok(Self {
            vmm,
            lines: BufReader::new(ours),
            _disk: disk,
            _directory: directory,
        })
    }

    /// Has `operation`, one of [`super::OPERATIONS`], done `count` times.
    ///
    /// # Errors
    ///
    /// When the guest does not do it.
    pub fn measure(&mut self, operation: &str, count: u32) -> Result<Cost> {
        let before = self.statistics()?;
        writeln!(self.lines.get_mut(), "{operation} {count}")?;
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        let nanoseconds: u64 = line
            .trim()
            .parse()
            .with_context(|| format!("{operation}: the guest says {line:?}"))?;
        let after = self.statistics()?;
        let releases = after.file_releases - before.file_releases;
        let requests = after.file_requests - before.file_requests;
        let exits = after
            .exits()
            .zip(before.exits())
            .map(|(after, before)| after - before);
        let each = |sum: u64| sum as f64 / f64::from(count);
        Ok(Cost {
            waits: each(requests.saturating_sub(releases)),
            releases: each(releases),
            exits: exits.map(each),
            took: Duration::from_nanos(nanoseconds) / count,
        })
    }

    fn statistics(&mut self) -> Result<Statistics> {
        match self.vmm.owner.request(&Request::Statistics, &[])? {
            Reply::Statistics(statistics) => Ok(statistics),
            other => bail!("no statistics but {other:?}"),
        }
    }
}

impl Drop for FileGuest {
    fn drop(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

/// Waits until the guest has said `word` on its console.
fn wait_for(vmm: &mut Launched, word: &str) -> Result<()> {
    let mut console = String::new();
    while !console.contains(word) {
        match vmm.owner.next_event()? {
            Some(Event::Console(bytes)) => console.push_str(&String::from_utf8_lossy(&bytes)),
            other => bail!("the guest ended: {other:?}\n{console}"),
        }
    }
    Ok(())
}
