//! git on a volume: many small files made, renamed over, linked, locked by name and read through mappings.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use thaw_tests::{Version, on_containerd};

/// What is done: a repository made, cloned, changed in the clone, fetched back, collected and checked.
const SCRIPT: &str = r#"
set -e
export HOME=/v GIT_EXEC_PATH=/git GIT_CONFIG_NOSYSTEM=1 PATH=/git:$PATH
git config --global user.name nobody
git config --global user.email nobody@localhost
git config --global safe.directory '*'
git init -q -b main /v/one
cd /v/one
n=0
while [ $n -lt 30 ]; do
  mkdir -p d$((n % 10))/e$((n % 3))
  echo "the content of $n" > d$((n % 10))/e$((n % 3))/f$n
  n=$((n + 1))
done
ln -s d0 link
chmod +x d1/e1/f1
git add .
git commit -q -m one
git checkout -q -b other
git mv d2 moved
git rm -q -r d3
echo changed > d4/e1/f4
git commit -q -a -m two
git clone -q file:///v/one /v/two
cd /v/two
git checkout -q main
git checkout -q -
git checkout -q -b third
echo third > new
git add new
git commit -q -m three
git push -q origin third
cd /v/one
git checkout -q third
git gc -q
for repository in /v/one /v/two; do
  cd $repository
  git fsck --strict --no-progress
  git status --porcelain
done
git rev-list --count HEAD
git ls-tree -r HEAD | wc -l
"#;

/// The host's git with its libraries in `directory`, as programs that need nothing else but a shell.
fn portable_git(directory: &Path) {
    let program = find_git();
    let libraries = Command::new("ldd")
        .arg(&program)
        .output()
        .expect("ldd is there");
    let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
    let mut loader = None;
    for path in libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let path = Path::new(path);
        let name = path.file_name().expect("it is a file's path");
        fs::copy(path, directory.join(name)).expect("a library can be copied");
        if name.as_encoded_bytes().starts_with(b"ld-linux") {
            loader = Some(name.to_owned());
        }
    }
    let loader = loader
        .expect("git is dynamic, so it has a loader")
        .into_string();
    let loader = loader.expect("its name is text");
    fs::copy(program, directory.join("git.program")).expect("it can be copied");
    for (name, command) in [
        ("git", ""),
        ("git-upload-pack", "upload-pack"),
        ("git-receive-pack", "receive-pack"),
    ] {
        let path = directory.join(name);
        let mut file = File::create(&path).expect("it can be made");
        let start = format!("/git/{loader} --library-path /git /git/git.program {command}");
        writeln!(file, "#!/bin/sh\nexec {start} \"$@\"").expect("it can be written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it can be changed");
    }
}

fn find_git() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join("git"))
        .find(|path| path.exists())
        .expect("packaging/setup installs git")
}

/// The guest finds its work right, and so does the host's git in the same directories.
#[test]
fn clone_checkout_and_gc() {
    on_containerd(Version::V2_1, "clone_checkout_and_gc", |bed| {
        let (git, volume) = (bed.directory(), bed.directory());
        portable_git(git.path());
        let run = bed
            .run()
            .options(super::volumes::mount(git.path(), "/git", "ro"))
            .options(super::volumes::mount(volume.path(), "/v", "rw"))
            .shell(SCRIPT)
            .output()
            .succeeded();
        assert_eq!(run.stdout(), "3\n29\n", "{run}");
        for repository in ["one", "two"] {
            for arguments in [["fsck", "--strict"], ["status", "--porcelain"]] {
                let output = Command::new(find_git())
                    .args(["-c", "safe.directory=*", "-C"])
                    .arg(volume.path().join(repository))
                    .args(arguments)
                    .output()
                    .expect("git is there");
                assert!(output.status.success(), "{output:?}");
                assert!(output.stdout.is_empty(), "{output:?}");
            }
        }
    });
}
