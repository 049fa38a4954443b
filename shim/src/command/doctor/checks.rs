//! What is looked at. Each check has a part that looks and a part that judges; the latter is tested.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};

use super::{Check, containerd};
use crate::paths::{Installation, InstallationError, TEMPLATE_DIRECTORY};
use crate::settings::{CONFIGURATION, Settings, SettingsError};
use crate::template::KvmFlavour;

/// The oldest kernel that is served.
const OLDEST_KERNEL: (u32, u32) = (5, 15);

/// Free space below which the template directory is mentioned: a few templates' worth.
const SCARCE_SPACE: u64 = 1 << 30;

/// Look at everything.
pub(super) fn all() -> Vec<Check> {
    vec![
        user(nix::unistd::geteuid().is_root()),
        processor(KvmFlavour::detect(), Path::new("/dev/kvm").exists()),
        kvm(File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .map(drop)),
        kernel(&kernel_release()),
        cgroup(
            statfs("/sys/fs/cgroup").is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC),
        ),
        overlay(
            fs::read_to_string("/proc/filesystems")
                .unwrap_or_default()
                .as_str(),
            module_exists("overlay"),
        ),
        user_namespaces(fs::read_to_string("/proc/sys/user/max_user_namespaces")),
        tun(fs::metadata("/dev/net/tun").is_ok_and(|m| m.file_type().is_char_device())),
        installation(Installation::find()),
        configuration(Settings::of_host()),
        containerd::check_shim(),
        templates(Path::new(TEMPLATE_DIRECTORY)),
        containerd::check(),
    ]
}

fn configuration(settings: Result<Settings, SettingsError>) -> Check {
    const NAME: &str = "configuration";
    match settings {
        Ok(settings) if settings == Settings::default() => Check::ok(NAME, "the defaults"),
        Ok(_) => Check::ok(NAME, CONFIGURATION),
        Err(error) => Check::failed(NAME, error.to_string(), format!("correct {CONFIGURATION}")),
    }
}

fn user(is_root: bool) -> Check {
    match is_root {
        true => Check::ok("user", "root"),
        false => Check::warning(
            "user",
            "not root",
            "run `sudo thaw doctor`: what follows was seen with another user's rights than containerd has",
        ),
    }
}

fn processor(flavour: KvmFlavour, kvm_exists: bool) -> Check {
    const NAME: &str = "processor";
    match (flavour, kvm_exists) {
        (KvmFlavour::Vmx, _) => Check::ok(NAME, "x86-64 with VMX"),
        (KvmFlavour::Svm, _) => Check::ok(NAME, "x86-64 with SVM"),
        (KvmFlavour::None, true) => Check::failed(
            NAME,
            "x86-64 without the vmx or svm flag: /dev/kvm here is an emulation that cannot run a Linux guest",
            "use a machine with VMX or SVM; if this one is virtual, let its host enable nested virtualisation",
        ),
        (KvmFlavour::None, false) => Check::failed(
            NAME,
            "x86-64 without the vmx or svm flag",
            "enable virtualisation in the firmware; if this machine is virtual, let its host enable nested virtualisation",
        ),
    }
}

fn kvm(opened: io::Result<()>) -> Check {
    const NAME: &str = "kvm";
    match opened {
        Ok(()) => Check::ok(NAME, "/dev/kvm opens"),
        Err(error) => {
            let advice = match error.kind() {
                io::ErrorKind::NotFound => {
                    "load the module: modprobe kvm_intel or modprobe kvm_amd; `dmesg | grep kvm` says why that fails"
                }
                io::ErrorKind::PermissionDenied => {
                    "run as root; in a container, pass the device in and allow it"
                }
                _ => "see `dmesg | grep kvm`: the firmware may have virtualisation disabled",
            };
            Check::failed(NAME, format!("/dev/kvm does not open: {error}"), advice)
        }
    }
}

fn kernel_release() -> String {
    let uname = nix::sys::utsname::uname();
    uname
        .map(|uname| uname.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn kernel(release: &str) -> Check {
    const NAME: &str = "kernel";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let advice = "boot Linux 5.15 or later";
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= OLDEST_KERNEL => {
            Check::ok(NAME, release)
        }
        (Some(Ok(_)), Some(Ok(_))) => Check::failed(NAME, format!("{release} is too old"), advice),
        _ => Check::warning(NAME, format!("release {release:?} has no version"), advice),
    }
}

fn cgroup(unified: bool) -> Check {
    match unified {
        true => Check::ok("cgroups", "version 2"),
        false => Check::failed(
            "cgroups",
            "/sys/fs/cgroup is not a cgroup2 file system",
            "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line, or mount cgroup2 there",
        ),
    }
}

fn overlay(file_systems: &str, module: bool) -> Check {
    let known = file_systems
        .lines()
        .any(|line| line.split_whitespace().last() == Some("overlay"));
    match (known, module) {
        (true, _) => Check::ok("overlayfs", "available"),
        (false, true) => Check::ok("overlayfs", "a module, loaded when needed"),
        (false, false) => Check::failed(
            "overlayfs",
            "the kernel does not have it",
            "use a kernel with CONFIG_OVERLAY_FS",
        ),
    }
}

/// Whether the running kernel has a module of that name installed.
fn module_exists(name: &str) -> bool {
    let list = Path::new("/lib/modules")
        .join(kernel_release())
        .join("modules.dep");
    let list = fs::read_to_string(list).unwrap_or_default();
    list.lines().any(|line| {
        let file = line
            .split(':')
            .next()
            .unwrap_or_default()
            .rsplit('/')
            .next();
        file.and_then(|file| file.split_once(".ko"))
            .is_some_and(|(module, _)| module == name)
    })
}

fn user_namespaces(limit: io::Result<String>) -> Check {
    const NAME: &str = "user namespaces";
    let advice =
        "allow them: sysctl -w user.max_user_namespaces=65536 (and set it in /etc/sysctl.d)";
    match limit.as_deref().map(|limit| limit.trim().parse::<u64>()) {
        Ok(Ok(0)) => Check::failed(NAME, "none allowed", advice),
        Ok(Ok(limit)) => Check::ok(NAME, format!("{limit} allowed")),
        Ok(Err(_)) => Check::warning(NAME, "their limit is no number", advice),
        Err(error) => Check::failed(
            NAME,
            format!("their limit cannot be read: {error}"),
            "use a kernel with CONFIG_USER_NS",
        ),
    }
}

fn tun(exists: bool) -> Check {
    match exists {
        true => Check::ok("tun", "/dev/net/tun"),
        false => Check::warning(
            "tun",
            "/dev/net/tun is missing: sandboxes have no network",
            "load the module: modprobe tun (and name it in /etc/modules-load.d)",
        ),
    }
}

fn installation(found: Result<Installation, InstallationError>) -> Check {
    const NAME: &str = "installation";
    match found {
        Ok(installation) => {
            let prefix = installation
                .vmm
                .ancestors()
                .nth(3)
                .unwrap_or(Path::new("/"));
            Check::ok(NAME, format!("complete in {}", prefix.display()))
        }
        Err(error) => {
            // The words behind the semicolon are the advice.
            let text = error.to_string();
            let (found, advice) = text
                .rsplit_once("; ")
                .unwrap_or((&text, "install thaw again"));
            Check::failed(NAME, found, advice)
        }
    }
}

fn templates(directory: &Path) -> Check {
    const NAME: &str = "templates";
    // Made by the first start.
    let existing = directory
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    let existing: PathBuf = existing.to_owned();
    if !existing.is_dir() || access(&existing, AccessFlags::W_OK).is_err() {
        return Check::warning(
            NAME,
            format!(
                "{} cannot be written: every start builds its own in memory",
                existing.display()
            ),
            format!("let root write to {}", directory.display()),
        );
    }
    let free = match statvfs(&existing) {
        Ok(fs) => fs.blocks_available() * fs.fragment_size(),
        Err(error) => {
            let found = format!("{}: free space unknown: {error}", existing.display());
            return Check::warning(NAME, found, "see whether the file system is mounted");
        }
    };
    let found = format!(
        "{}, {} free",
        directory.display(),
        super::super::output::bytes(free)
    );
    match free < SCARCE_SPACE {
        true => Check::warning(
            NAME,
            format!("{found}: little for templates"),
            "make room, or mount a file system there",
        ),
        false => Check::ok(NAME, found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn test_configuration_is_told_with_what_is_wrong_in_it() {
        assert_eq!(configuration(Ok(Settings::default())).found, "the defaults");
        let error = SettingsError::Refused {
            place: format!("{CONFIGURATION}, line 3"),
            problem: "there is no field \"x\"".into(),
        };
        let check = configuration(Err(error));
        assert_eq!(check.status, Status::Failed);
        assert!(
            check.found.contains("line 3: there is no field"),
            "{}",
            check.found
        );
    }

    #[test]
    fn test_kvm_without_a_flag_is_named_as_emulation() {
        let check = processor(KvmFlavour::None, true);
        assert_eq!(check.status, Status::Failed);
        assert!(
            check
                .found
                .contains("emulation that cannot run a Linux guest"),
            "{}",
            check.found
        );
        assert!(
            !processor(KvmFlavour::None, false)
                .found
                .contains("emulation")
        );
        assert_eq!(processor(KvmFlavour::Svm, true).status, Status::Ok);
    }

    #[test]
    fn test_kvm_that_does_not_open_says_what_to_do() {
        assert_eq!(kvm(Ok(())).status, Status::Ok);
        let missing = kvm(Err(io::ErrorKind::NotFound.into()));
        assert_eq!(missing.status, Status::Failed);
        assert!(missing.advice.unwrap().contains("modprobe"));
        let denied = kvm(Err(io::ErrorKind::PermissionDenied.into()));
        assert!(denied.advice.unwrap().contains("root"));
    }

    #[test]
    fn test_kernel_releases() {
        for (release, status) in [
            ("5.15.0-91-generic", Status::Ok),
            ("6.1.0-18-amd64", Status::Ok),
            ("6.12", Status::Ok),
            ("5.14.21-default", Status::Failed),
            ("4.18.0-513.el8", Status::Failed),
            ("5.9.0", Status::Failed),
            ("unknown", Status::Warning),
            ("", Status::Warning),
        ] {
            assert_eq!(kernel(release).status, status, "{release}");
        }
    }

    #[test]
    fn test_overlay_is_built_in_loaded_or_a_module() {
        assert_eq!(
            overlay("nodev\tproc\nnodev\toverlay\n", false).status,
            Status::Ok
        );
        assert_eq!(overlay("nodev\tproc\n", true).status, Status::Ok);
        assert_eq!(
            overlay("nodev\toverlayfs\n\text4\n", false).status,
            Status::Failed
        );
    }

    #[test]
    fn test_user_namespaces_that_are_not_allowed_fail() {
        assert_eq!(user_namespaces(Ok("95000\n".into())).status, Status::Ok);
        assert_eq!(user_namespaces(Ok("0\n".into())).status, Status::Failed);
        let error = user_namespaces(Err(io::ErrorKind::NotFound.into()));
        assert!(error.advice.unwrap().contains("CONFIG_USER_NS"));
    }

    #[test]
    fn test_incomplete_installation_names_the_file_and_what_to_do() {
        let prefix = tempfile::tempdir().unwrap();
        let check = installation(Installation::at(prefix.path()));
        assert_eq!(check.status, Status::Failed);
        assert!(
            check.found.contains("libexec/thaw/thaw-vmm is missing"),
            "{}",
            check.found
        );
        assert!(check.advice.unwrap().contains("make install"));
    }

    #[test]
    fn test_template_directory_that_is_not_there_yet_is_judged_by_its_parent() {
        let parent = tempfile::tempdir().unwrap();
        let check = templates(&parent.path().join("lib/thaw/templates"));
        assert!(check.found.contains("free"), "{}", check.found);
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let check = templates(&file.join("templates"));
        assert_eq!(check.status, Status::Warning);
        assert!(check.found.contains("in memory"), "{}", check.found);
    }

    #[test]
    fn test_everything_that_is_wrong_has_advice() {
        for check in all() {
            assert_eq!(
                check.status != Status::Ok,
                check.advice.is_some(),
                "{check:?}"
            );
        }
    }
}
