//! Directories of the host in a container: what is read-only stays so, and what changes on the host is seen.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;

use thaw_tests::{Environment, Testbed, Version, on_containerd};

const PROGRAM: &str = env!("CARGO_BIN_EXE_file-cases");

/// A line of the shell that does `line` until it succeeds, or for a minute.
fn until(line: &str) -> String {
    format!("n=0; until {line}; do n=$((n + 1)); [ $n -lt 600 ] || exit 99; sleep 0.1; done")
}

/// Options of ctr that bind `source` at `target`, `how` being `ro` or `rw`.
pub fn mount(source: &Path, target: &str, how: &str) -> [String; 2] {
    let source = source.display();
    [
        "--mount".into(),
        format!("type=bind,src={source},dst={target},options=rbind:{how}"),
    ]
}

/// One directory, read-only at one place and writable at another, in both orders; root in the guest, with
/// all its privileges, can write only where it may.
#[test]
fn read_only_holds_against_root() {
    on_containerd(Version::V2_1, "read_only_holds_against_root", |bed| {
        let volume = bed.directory();
        fs::write(volume.path().join("f"), "host's").expect("it can be written");
        let read_only = mount(volume.path(), "/a", "ro");
        let writable = mount(volume.path(), "/b", "rw");
        for mounts in [[&read_only, &writable], [&writable, &read_only]] {
            let line = "echo x > /a/x; echo y > /b/y; cat /a/y; rm /b/y";
            let run = bed
                .run()
                .options(mounts.into_iter().flatten().cloned())
                .shell(line)
                .output();
            assert_eq!(run.stdout(), "y\n", "{run}");
            assert_eq!(
                run.stderr().matches("Read-only file system").count(),
                1,
                "{run}"
            );
        }
        // All that a root may try: a remount, a mount of what the guest has by that tag, all of its tree. (The
        // kernel gives the file system that it has made last of those that the tag stands for.)
        let line = "mount -o remount,rw /a; mount -o remount,rw,bind /a; echo x > /a/f; rm /a/f; chmod 777 /a; \
                    mkdir /m; mount -t virtiofs thaw /m; \
                    find /m -xdev -type d; find /m -type d -exec touch {}/touched \\; ; \
                    find /m -name f -exec sh -c 'echo x >> {}' \\; ; ls -d /m/touched; cat /a/f";
        let container =
            bed.run()
                .options(["--privileged"])
                .options(mount(volume.path(), "/a", "ro"));
        let run = container.shell(line).output();
        assert!(run.stdout().ends_with("host's"), "{run}");
        assert_eq!(
            fs::read_to_string(volume.path().join("f")).ok().as_deref(),
            Some("host's")
        );
        assert_eq!(
            fs::read_dir(volume.path()).map(Iterator::count).ok(),
            Some(1),
            "{run}"
        );
        if Environment::get().is_thaw() {
            // That the container's own could be written shows that this was tried at all.
            assert!(run.stdout().contains("/m/touched\n"), "{run}");
        }
    });
}

/// What replaces a file on the host, atomically, is seen, and nothing in between.
#[test]
fn changes_of_the_host() {
    on_containerd(Version::V2_1, "changes_of_the_host", |bed| {
        let volume = bed.directory();
        let at = |name: &str| volume.path().join(name);
        let publish = |version: &str, text: &str| {
            fs::create_dir(at(version)).expect("it can be made");
            fs::write(at(version).join("f"), text).expect("it can be written");
            symlink(version, at("..new")).expect("it can be made");
            fs::rename(at("..new"), at("..data")).expect("it can be renamed");
        };
        publish("..v1", "one");
        symlink("..data/f", at("f")).expect("it can be made");
        let container = bed
            .run()
            .options(mount(volume.path(), "/config", "ro"))
            .options(mount(volume.path(), "/rw", "rw"))
            .command(["sleep", "3600"])
            .detach();
        let read = "cat /config/f; readlink /config/f; find /config -type f | wc -l";
        assert_eq!(
            container.exec_shell(read).succeeded().stdout(),
            "one..data/f\n1\n"
        );
        // It reads without a pause; each answer is a whole old one or a whole new one.
        let watch = "echo ready; while :; do t=$(cat /config/f) || exit 3; case $t in one) ;; two) exit 0 ;; *) exit 4 ;; esac; done";
        let mut watcher = container.exec_command(["sh", "-c", watch]);
        let mut watcher = watcher
            .stdout(Stdio::piped())
            .spawn()
            .expect("ctr is there");
        let mut ready = [0; 6];
        std::io::Read::read_exact(watcher.stdout.as_mut().expect("it is a pipe"), &mut ready)
            .expect("it says so");
        publish("..v2", "two");
        let ended = watcher.wait().expect("it is a child");
        assert!(
            ended.success(),
            "{ended}: something else than the old or the new content was read"
        );
        // Removed by the host, made by the guest, which has seen it until then; and replaced.
        fs::write(at("g"), "host").expect("it can be written");
        fs::write(at("h"), "old").expect("it can be written");
        let line = "cat /rw/g /rw/h > /dev/null; echo ready; read -r _; echo x > /rw/g; cat /rw/h";
        let mut guest = container.exec_command(["sh", "-c", line]);
        let mut guest = guest
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ctr is there");
        let mut output = BufReader::new(guest.stdout.take().expect("it is a pipe"));
        let mut said = String::new();
        output.read_line(&mut said).expect("it says so");
        fs::remove_file(at("g")).expect("it can be removed");
        fs::write(at("h.new"), "new").expect("it can be written");
        fs::rename(at("h.new"), at("h")).expect("it can be renamed");
        drop(guest.stdin.take().map(|mut input| input.write_all(b"\n")));
        output.read_to_string(&mut said).expect("it can be read");
        assert!(guest.wait().expect("it is a child").success());
        assert_eq!(said, "ready\nnew");
        assert_eq!(fs::read_to_string(at("g")).ok().as_deref(), Some("x\n"));
    });
}

/// A directory and one below it are one, whichever is written to, in one container and in two.
#[test]
fn nested_volumes() {
    on_containerd(Version::V2_1, "nested_volumes", |bed| {
        let volume = bed.directory();
        let inner = volume.path().join("d");
        fs::create_dir(&inner).expect("it can be made");
        let group = format!("io.containerd.runc.v2.group={}", bed.next_name("group"));
        let container = |options: Vec<String>| {
            let run = bed.run().options(["--annotation", &group]).options(options);
            run.command(["sleep", "3600"]).detach()
        };
        let both = [
            mount(volume.path(), "/all", "rw"),
            mount(&inner, "/data", "rw"),
        ]
        .concat();
        let one = container(both);
        let two = container(mount(&inner, "/data", "rw").to_vec());
        one.exec_shell("echo one > /all/d/f").succeeded();
        one.exec_shell(&until("grep one /data/f")).succeeded();
        two.exec_shell(&until("grep one /data/f")).succeeded();
        two.exec_shell("echo two >> /data/f; mkdir /data/e")
            .succeeded();
        one.exec_shell(&until("grep two /all/d/f && [ -d /all/d/e ]"))
            .succeeded();
        one.exec_shell(&until("grep two /data/f && [ -d /data/e ]"))
            .succeeded();
    });
}

/// Sockets and locks on a volume are those of all containers in the VM that have it (field case 13); a
/// socket of the host refuses at once.
#[test]
fn sockets_on_volumes() {
    on_containerd(Version::V2_1, "sockets_on_volumes", |bed| {
        let volume = bed.directory();
        let program = volume.path().join("file-cases");
        fs::copy(PROGRAM, &program).expect("the program is built beside this one");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
            .expect("it can be changed");
        let _host = UnixListener::bind(volume.path().join("host")).expect("it can listen");
        let group = format!("io.containerd.runc.v2.group={}", bed.next_name("group"));
        let container = |bed| -> thaw_tests::Container<'_> {
            let bed: &Testbed = bed;
            let run = bed.run().options(["--annotation", &group]).options(mount(
                volume.path(),
                "/v",
                "rw",
            ));
            run.command(["sleep", "3600"]).detach()
        };
        let (one, two) = (container(bed), container(bed));
        let mut listener = one.exec_command(["/v/file-cases", "listen", "/v/s"]);
        let mut listener = listener
            .stdout(Stdio::piped())
            .spawn()
            .expect("ctr is there");
        let mut said = [0; 10];
        Read::read_exact(listener.stdout.as_mut().expect("it is a pipe"), &mut said)
            .expect("it listens");
        assert_eq!(&said, b"listening\n");
        let connect = |container: &thaw_tests::Container<'_>, socket: &str| {
            let connected = container.exec(["/v/file-cases", "connect", socket]);
            connected.succeeded().stdout()
        };
        if Environment::get().is_thaw() {
            assert_eq!(connect(&two, "/v/host"), "ECONNREFUSED\n");
        }
        assert_eq!(connect(&two, "/v/s"), "pong\n");
        assert!(listener.wait().expect("it is a child").success());
        let lock = "/v/file-cases lock /v/lock < /dev/null";
        fs::write(volume.path().join("lock"), "").expect("it can be written");
        let mut holder = one.exec_command(["/v/file-cases", "lock", "/v/lock"]);
        let mut holder = holder
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ctr is there");
        let mut said = [0; 7];
        let output = holder.stdout.as_mut().expect("it is a pipe");
        output.read_exact(&mut said).expect("it says so");
        assert_eq!(&said, b"locked\n");
        assert_eq!(two.exec_shell(lock).succeeded().stdout(), "taken\n");
        drop(holder.stdin.take());
        assert!(holder.wait().expect("it is a child").success());
        assert_eq!(two.exec_shell(lock).succeeded().stdout(), "locked\n");
        let metadata = volume.path().join("s").metadata();
        assert!(metadata.is_ok_and(|data| data.file_type().is_socket()));
    });
}

/// Ten thousand files of the host: all are listed, and what the guest remembered of a container is let go
/// when that is removed, though its VM lives on.
#[test]
fn many_files_and_removal() {
    on_containerd(Version::V2_1, "many_files_and_removal", |bed| {
        let volume = bed.directory();
        for number in 0..10_000 {
            fs::write(volume.path().join(format!("f{number}")), "").expect("it can be written");
        }
        let group = format!("io.containerd.runc.v2.group={}", bed.next_name("group"));
        let container = |options: Vec<String>| {
            let run = bed.run().options(["--annotation", &group]).options(options);
            run.command(["sleep", "3600"]).detach()
        };
        let stays = container(Vec::new());
        let goes = container(mount(volume.path(), "/v", "rw").to_vec());
        let listed = goes
            .exec_shell("ls /v | wc -l; ls -l /v | grep -c f")
            .succeeded()
            .stdout();
        assert_eq!(listed, "10000\n10000\n");
        goes.exec_shell("dd if=/dev/zero of=/root/big bs=1M count=64 2> /dev/null")
            .succeeded();
        let upper = bed.upper_directory(&goes.id);
        assert_eq!(
            fs::metadata(upper.join("root/big"))
                .map(|data| data.len())
                .ok(),
            Some(64 << 20)
        );
        let free = || {
            let parent = upper
                .ancestors()
                .nth(2)
                .expect("it lies in a directory of snapshots");
            nix::sys::statfs::statfs(parent)
                .map(|data| data.blocks_free() * data.block_size() as u64)
                .unwrap_or(0)
        };
        let full = free();
        goes.remove();
        let begun = std::time::Instant::now();
        while upper.exists() || free() < full + (48 << 20) {
            assert!(
                begun.elapsed() < thaw_tests::LIMIT,
                "the space of a removed container is not free"
            );
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        stays.exec_shell("true").succeeded();
    });
}
