//! Which containerd there is.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Check;

const NAME: &str = "containerd";

/// Where services find programs when nothing else was configured (systemd's default).
const SERVICE_PATH: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// A version as far as it matters.
type Version = (u32, u32, u32);

/// The containerd in `PATH`.
pub(super) fn check() -> Check {
    let Some(program) = find_program(NAME) else {
        return Check::warning(
            NAME,
            "not found in PATH",
            "install containerd 1.6, 1.7, or 2.0.6 or later, unless it runs from elsewhere",
        );
    };
    let output = match Command::new(&program).arg("--version").output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => {
            let found = format!("{} does not run: {error}", program.display());
            return Check::warning(NAME, found, "install containerd again");
        }
    };
    judge(&program, &output)
}

/// Judge what `containerd --version` said.
fn judge(program: &Path, output: &str) -> Check {
    let Some(version) = parse(output) else {
        let found = format!("{} has no version: {:?}", program.display(), output.trim());
        return Check::warning(
            NAME,
            found,
            "install containerd 1.6, 1.7, or 2.0.6 or later",
        );
    };
    let (major, minor, patch) = version;
    let found = format!("{major}.{minor}.{patch} ({})", program.display());
    if is_supported(version) {
        Check::ok(NAME, found)
    } else {
        Check::failed(
            NAME,
            found,
            "install containerd 1.6, 1.7, or 2.0.6 or later",
        )
    }
}

fn is_supported(version: Version) -> bool {
    match version {
        (1, minor, _) => (6..=7).contains(&minor),
        (2, 0, patch) => patch >= 6,
        (2, ..) => true,
        _ => false,
    }
}

/// The version in a line such as `containerd containerd.io v2.1.9 1234abc`: the first word that
/// begins with three numbers.
fn parse(output: &str) -> Option<Version> {
    output.split_whitespace().find_map(|word| {
        let word = word.strip_prefix('v').unwrap_or(word);
        let mut parts = word.splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        let rest = parts.next()?;
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        Some((major, minor, rest[..digits].parse().ok()?))
    })
}

/// The first program of that name in `PATH`, or where services look.
pub(super) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SERVICE_PATH.iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| is_program(candidate))
}

fn is_program(path: &Path) -> bool {
    use nix::unistd::{AccessFlags, access};
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

/// containerd looks for its shims in its own `PATH`.
pub(super) fn check_shim() -> Check {
    const SHIM: &str = "containerd-shim-thaw-v2";
    let own = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join(SHIM)));
    let Some(own) = own.filter(|own| is_program(own)) else {
        return Check::failed(
            "shim",
            format!("{SHIM} is not beside this program"),
            "install thaw with `make install` and run the installed program",
        );
    };
    let found_by_services = SERVICE_PATH
        .iter()
        .filter_map(|directory| Path::new(directory).join(SHIM).canonicalize().ok())
        .any(|found| own.canonicalize().is_ok_and(|own| own == found));
    match found_by_services {
        true => Check::ok("shim", own.display().to_string()),
        false => Check::warning(
            "shim",
            format!("{} is not where services look for programs", own.display()),
            format!("link it: ln -sfn {} /usr/local/bin/", own.display()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn test_versions_as_they_are_printed() {
        for (line, version) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1",
                (1, 6, 20),
            ),
            (
                "containerd github.com/containerd/containerd/v2 v2.1.9 0123abc",
                (2, 1, 9),
            ),
            (
                "containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da",
                (1, 7, 27),
            ),
            (
                "containerd github.com/containerd/containerd/v2 2.0.0-rc.1 x",
                (2, 0, 0),
            ),
        ] {
            assert_eq!(parse(line), Some(version), "{line}");
        }
        for line in ["", "containerd", "containerd x v2 y", "containerd 1.2.x"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn test_only_served_versions_are_ok() {
        let status =
            |version: &str| judge(Path::new("/c"), &format!("containerd x {version}")).status;
        for version in ["1.6.0", "1.7.29", "2.0.6", "2.1.0", "2.4.1"] {
            assert_eq!(status(version), Status::Ok, "{version}");
        }
        for version in ["1.5.18", "1.8.0", "2.0.5", "3.0.0", "0.2.3"] {
            assert_eq!(status(version), Status::Failed, "{version}");
        }
        assert_eq!(status("unknown"), Status::Warning);
    }
}
