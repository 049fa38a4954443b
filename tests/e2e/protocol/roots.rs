//! Images and mounts that a first implementation breaks on, many in one container.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use containerd_shim_protos::api::Mount;
use nix::sys::stat::{Mode, SFlag, mknod};
use rustix::fs::{XattrFlags, setxattr};
use serde_json::{Value, json};
use thaw_tests::player::{Fifos, Player, Program, root_directory};

use super::{on_shim, run};

/// As many layers as the most that an image in the field has.
const LAYERS: usize = 127;

/// Capabilities of a file: version 2, effective, `CAP_NET_RAW` permitted (linux/capability.h,
/// `struct vfs_cap_data`).
const NET_RAW: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// An image's layers, an upper directory, and the overlay of both as containerd asks for it.
struct Layers {
    directory: tempfile::TempDir,
}

impl Layers {
    fn new(player: &Player) -> Self {
        let layers = Self {
            directory: player.directory(),
        };
        for index in 0..LAYERS {
            fs::create_dir_all(layers.layer(index)).unwrap();
            fs::write(layers.layer(index).join(format!("own-{index}")), "").unwrap();
            fs::write(layers.layer(index).join("changed"), format!("{index}\n")).unwrap();
        }
        for path in [layers.upper(), layers.work()] {
            fs::create_dir_all(path).unwrap();
        }
        layers
    }

    /// Long, as those of a snapshotter are.
    fn layer(&self, index: usize) -> PathBuf {
        let snapshots = self
            .directory
            .path()
            .join("io.containerd.snapshotter.v1.overlayfs");
        snapshots.join(format!("snapshots/{}/fs", 1000 + index))
    }

    fn bottom(&self) -> PathBuf {
        self.layer(0)
    }

    fn top(&self) -> PathBuf {
        self.layer(LAYERS - 1)
    }

    fn upper(&self) -> PathBuf {
        self.layer(LAYERS)
    }

    fn work(&self) -> PathBuf {
        self.upper().with_file_name("work")
    }

    fn mount(&self) -> Mount {
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let lower: Vec<_> = (0..LAYERS)
            .rev()
            .map(|index| path(self.layer(index)))
            .collect();
        let lower = lower.join(":");
        assert!(
            lower.len() > 4096,
            "no longer than mount(2) takes: {}",
            lower.len()
        );
        Mount {
            type_: "overlay".to_owned(),
            source: "overlay".to_owned(),
            options: vec![
                "index=off".to_owned(),
                format!("workdir={}", path(self.work())),
                format!("upperdir={}", path(self.upper())),
                format!("lowerdir={lower}"),
            ],
            ..Mount::default()
        }
    }
}

fn bind(source: &Path, destination: &str, option: &str) -> Value {
    json!({ "destination": destination, "type": "bind", "source": source, "options": ["rbind", option] })
}

fn push_mounts(spec: &mut Value, mounts: impl IntoIterator<Item = Value>) {
    spec["mounts"].as_array_mut().unwrap().extend(mounts);
}

on_shim! {
    /// 127 layers, of which later ones change and hide what earlier ones have; no `/etc`, `/bin`, `/dev` or
    /// `/proc`, a working directory that no layer has, and symbolic links where mounts go, which lead to
    /// nowhere but the container's own root.
    fn layers_of_an_image(player: &Player) {
        let layers = Layers::new(player);
        let (bottom, top) = (layers.bottom(), layers.top());
        fs::copy(root_directory().join("bin/busybox"), bottom.join("busybox")).unwrap();
        // Whiteout and opaque directory (Documentation/filesystems/overlayfs.rst).
        fs::write(bottom.join("hidden"), "").unwrap();
        mknod(&top.join("hidden"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
        for layer in [&bottom, &top] {
            fs::create_dir(layer.join("replaced")).unwrap();
        }
        fs::write(bottom.join("replaced/old"), "").unwrap();
        fs::write(top.join("replaced/new"), "").unwrap();
        setxattr(top.join("replaced"), "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
        fs::write(top.join("n".repeat(255)), "").unwrap();
        fs::hard_link(top.join("changed"), top.join("linked")).unwrap();
        File::create(top.join("sparse")).unwrap().set_len(1 << 30).unwrap();
        symlink("/", bottom.join("link")).unwrap();
        symlink("../../../../../../..", bottom.join("up")).unwrap();
        let source = player.directory();
        fs::write(source.path().join("file"), "mounted\n").unwrap();

        let line = "cd / && pwd > /dev/null; /busybox ls -d own-* | /busybox wc -l; /busybox cat changed linked; \
                    /busybox ls hidden 2> /dev/null; /busybox ls replaced; \
                    /busybox stat -c '%s %b' sparse; /busybox stat -c %h linked; \
                    /busybox ls -d n* | /busybox wc -c; /busybox cat /one/file /two/file; \
                    /busybox readlink /proc/1/cwd; echo x > new";
        let program = Program::new(["/busybox", "sh", "-c", line]).with(|spec| {
            spec["process"]["cwd"] = json!("/made/for/it");
            push_mounts(spec, [
                bind(source.path(), "/link/one", "ro"), bind(source.path(), "/up/two", "ro"),
            ]);
        });
        let said = run(player, program, Some(layers.mount()));
        let expected = format!(
            "{LAYERS}\n{last}\n{last}\nnew\n1073741824 0\n2\n256\nmounted\nmounted\n/\n",
            last = LAYERS - 1
        );
        assert_eq!(said, expected);
        // Made for the container, in its own layer.
        for made in ["made/for/it", "one", "two", "new", "proc", "dev"] {
            assert!(layers.upper().join(made).exists(), "{made}");
        }
    }

    /// Programs that give rights to who executes them: by their mode, by capabilities of the file.
    fn programs_with_rights(player: &Player) {
        let directory = player.directory();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        for (name, mode) in [("plain", 0o755), ("setuid", 0o4755), ("capable", 0o755)] {
            let path = directory.path().join(name);
            fs::create_dir(&path).unwrap();
            // By its name it knows what it is to do.
            fs::copy(root_directory().join("bin/busybox"), path.join("ping")).unwrap();
            fs::set_permissions(path.join("ping"), Permissions::from_mode(mode)).unwrap();
        }
        let capable = directory.path().join("capable/ping");
        setxattr(&capable, "security.capability", &NET_RAW, XattrFlags::empty()).unwrap();
        let line = "for name in plain setuid capable; do \
                    /rights/$name/ping -c 1 -w 20 127.0.0.1 > /dev/null 2>&1 && echo $name; done; id -u";
        let program = Program::shell(line).with(|spec| {
            spec["process"]["user"] = json!({ "uid": 1000, "gid": 1000 });
            spec["process"]["capabilities"] = json!({ "bounding": ["CAP_NET_RAW"] });
            push_mounts(spec, [bind(directory.path(), "/rights", "rw")]);
        });
        assert_eq!(run(player, program, None), "setuid\ncapable\n1000\n");
    }

    /// Names with all that a name may have, in sources, destinations and files; one source twice, writable
    /// at one place and not at the other, whichever comes first.
    fn names_and_one_source_twice(player: &Player) {
        let directory = player.directory();
        let long = "l".repeat(255);
        let names = ["a b", "a,b=c", "a:b", "a\\b", "ü", "line\nbreak", "\"quoted\"", long.as_str()];
        for (index, name) in names.iter().enumerate() {
            let source = directory.path().join(name);
            fs::create_dir(&source).unwrap();
            fs::write(source.join(name), format!("{index}\n")).unwrap();
        }
        let odd = OsStr::from_bytes(b"\xff\xfe");
        fs::write(directory.path().join("a b").join(odd), "").unwrap();
        let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
        for source in [&first, &second] {
            fs::create_dir(source).unwrap();
        }
        let line = "i=0; for n in \"$@\"; do cat \"/m/$n/$n\"; echo $i > \"/m/$n/from guest\"; i=$((i + 1)); done; \
                    for f in '/m/a b'/*; do printf '%s/' \"$f\"; done | od -An -tx1 | grep -o 'ff fe'; \
                    for d in /a /b /c /d; do touch $d/x 2> /dev/null && echo $d; done; \
                    mount -o remount,rw /a; mount -o remount,rw,bind /a; touch /a/y 2> /dev/null && echo /a; \
                    truncate -s 1G /b/sparse; echo end >> /b/sparse; stat -c %s /a/sparse";
        let mut words = vec!["sh", "-c", line, "sh"];
        words.extend(names);
        let program = Program::new(words).with(|spec| {
            push_mounts(spec, names.map(|name| {
                bind(&directory.path().join(name), &format!("/m/{name}"), "rw")
            }));
            push_mounts(spec, [
                bind(&first, "/a", "ro"), bind(&first, "/b", "rw"),
                bind(&second, "/c", "rw"), bind(&second, "/d", "ro"),
            ]);
            let all = ["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"];
            spec["process"]["capabilities"] = json!({ "bounding": all, "effective": all, "permitted": all });
        });
        assert_eq!(run(player, program, None), "0\n1\n2\n3\n4\n5\n6\n7\nff fe\n/b\n/c\n1073741828\n");
        for (index, name) in names.iter().enumerate() {
            let made = fs::read_to_string(directory.path().join(name).join("from guest")).unwrap();
            assert_eq!(made, format!("{index}\n"), "{name:?}");
        }
        assert!(!first.join("y").exists() && first.join("x").exists());
        let sparse = fs::metadata(first.join("sparse")).unwrap();
        assert!(sparse.blocks() * 512 < 1 << 20, "{}", sparse.blocks());
    }

    /// Starts that fail, and one whose shim is killed, leave the files of a mount as they were.
    fn failed_starts_leave_files_alone(player: &Player) {
        let directory = player.directory();
        for number in 0..1000 {
            fs::write(directory.path().join(number.to_string()), number.to_string()).unwrap();
        }
        let _open = File::open(directory.path().join("7")).unwrap();
        let mount = |spec: &mut Value| push_mounts(spec, [bind(directory.path(), "/data", "rw")]);
        for round in 0..3 {
            let shim = player.bundle(Program::new(["/does/not/exist"]).with(mount)).start();
            let request = shim.create_request(&Fifos::none());
            if round == 2 {
                let killed = player.created(Program::new(["true"]).with(mount));
                killed.kill_shim();
                killed.shim.bundle.delete();
            }
            let refused = shim.task.create(&request).unwrap_err();
            assert!(refused.to_string().contains("no such file"), "{refused}");
            shim.shut_down();
            shim.bundle.delete();
        }
        for number in 0..1000 {
            let content = fs::read_to_string(directory.path().join(number.to_string())).unwrap();
            assert_eq!(content, number.to_string());
        }
    }
}
