//! The container's files are the host's.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use thaw_tests::on_each_containerd;

on_each_containerd! {
    /// A bind mount is seen from both sides: what either writes, the other reads.
    fn bind_mount(bed: &Testbed) {
        let directory = bed.directory();
        fs::write(directory.path().join("from-host"), "host\n").expect("it can be written");
        let mount = format!("type=bind,src={},dst=/data,options=rbind:rw", directory.path().display());
        let container = bed.run().options(["--mount", &mount]).command(["sleep", "3600"]).detach();
        let line = "cat /data/from-host; echo guest > /data/from-guest; mkdir /data/made; chown 12:34 /data/made";
        assert_eq!(container.exec_shell(line).succeeded().stdout(), "host\n");
        assert_eq!(fs::read_to_string(directory.path().join("from-guest")).ok().as_deref(), Some("guest\n"));
        let made = fs::metadata(directory.path().join("made")).expect("it is there");
        assert_eq!((made.uid(), made.gid()), (12, 34));
        // While the container runs, and one that it has looked for in vain.
        container.exec_shell("test ! -e /data/later").succeeded();
        fs::write(directory.path().join("later"), "later\n").expect("it can be written");
        let seen = "n=0; until cat /data/later 2> /dev/null || [ $n = 50 ]; do n=$((n + 1)); sleep 0.1; done";
        assert_eq!(container.exec_shell(seen).succeeded().stdout(), "later\n");
        fs::write(directory.path().join("from-host"), "changed on the host\n").expect("it can be written");
        let seen = "n=0; until grep changed /data/from-host || [ $n = 50 ]; do n=$((n + 1)); sleep 0.1; done";
        assert_eq!(container.exec_shell(seen).succeeded().stdout(), "changed on the host\n");
    }

    /// A file can be mounted, and a read-only mount refuses what would change it.
    fn read_only_mounts(bed: &Testbed) {
        let directory = bed.directory();
        let file = directory.path().join("one file, with spaces");
        fs::write(&file, "content\n").expect("it can be written");
        let mounts = [
            "--mount".to_owned(),
            format!("type=bind,src={},dst=/data,options=rbind:ro", directory.path().display()),
            "--mount".to_owned(),
            format!("\"type=bind\",\"src={}\",\"dst=/etc/file\",\"options=rbind:ro\"", file.display()),
        ];
        let line = "cat /etc/file; echo x > /data/new; echo x > /etc/file; rm '/data/one file, with spaces'; true";
        let run = bed.run().options(mounts).shell(line).output().succeeded();
        assert_eq!(run.stdout(), "content\n");
        assert_eq!(run.stderr().matches("Read-only file system").count(), 3, "{run}");
        assert_eq!(fs::read_to_string(&file).ok().as_deref(), Some("content\n"));
        assert_eq!(fs::read_dir(directory.path()).map(Iterator::count).ok(), Some(1));
    }

    /// What the container writes to its root lies in the upper directory of the host's overlay, whole
    /// and with its owner.
    fn upper_directory(bed: &Testbed) {
        let container = bed.sleeper();
        let line = "dd if=/dev/urandom of=/home/user/big bs=1M count=40 2> /dev/null && \
                    chown 1000:2000 /home/user/big && chmod 4750 /home/user/big && sha256sum < /home/user/big";
        let sum = container.exec_shell(line).succeeded().stdout();
        container.exec_shell("sync").succeeded();
        let big = bed.upper_directory(&container.id).join("home/user/big");
        let metadata = fs::metadata(&big).unwrap_or_else(|error| panic!("{}: {error}", big.display()));
        assert_eq!(metadata.len(), 40 << 20);
        assert_eq!((metadata.uid(), metadata.gid()), (1000, 2000));
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o4750);
        let file = fs::File::open(&big).expect("it is there");
        let output = std::process::Command::new("sha256sum").stdin(file).output().expect("coreutils are there");
        assert_eq!(String::from_utf8_lossy(&output.stdout), sum);
    }

    /// Renames, links, pipes and deletions work as on a local file system.
    fn file_operations(bed: &Testbed) {
        let line = "set -e; cd /home/user; echo one > a; mv a b; ln b c; ln -s b d; cat b c d; \
                    [ $(stat -c %h b) = 2 ]; mkfifo p; [ -p p ]; \
                    exec 3< b; rm b c; cat <&3; mkdir -p x/y/z; rm -r x; truncate -s 10M s; stat -c %s s; ls";
        let run = bed.run().shell(line).output().succeeded();
        assert_eq!(run.stdout(), "one\none\none\none\n10485760\nd\np\ns\n");
    }

    /// The specification's file systems are there, each with its own content.
    fn mounted_file_systems(bed: &Testbed) {
        let line = "for m in /proc /dev /dev/pts /dev/shm /dev/mqueue /sys /run; do \
                    awk -v m=$m '$2 == m { print $2, $3 }' /proc/mounts | tail -1; done";
        let run = bed.run().shell(line).output().succeeded();
        let expected = "/proc proc\n/dev tmpfs\n/dev/pts devpts\n/dev/shm tmpfs\n/dev/mqueue mqueue\n/sys sysfs\n/run tmpfs\n";
        assert_eq!(run.stdout(), expected);
        let run = bed.run().shell("ls /dev; echo x > /dev/null; head -c 4 /dev/zero | od -An -tx1").output().succeeded();
        for device in ["full", "null", "ptmx", "random", "tty", "urandom", "zero"] {
            assert!(run.stdout().lines().any(|line| line == device), "no {device}: {run}");
        }
    }
}
