//! The last steps of a container process: finding its program and becoming it.
//!
//! Errors are worded as the established runtime words them, because clients choose exit codes (126,
//! 127) by these words.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::LinuxSeccomp;
use libcontainer::seccomp::initialize_seccomp;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{self, AccessFlags, faccessat};

use super::description::{ProcessDescription, Rlimit};
use super::identity::{self, Privileges};
use crate::status::Refusal;
use crate::sys;

/// How much of a container's `passwd` is looked at.
const PASSWD_LIMIT: u64 = 4 << 20;

/// A program that has been found, with all that it gets.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    arguments: Vec<String>,
    environment: Vec<String>,
    limits: Vec<Rlimit>,
    seccomp: Option<LinuxSeccomp>,
    no_new_privileges: bool,
    privileges: Privileges,
}

impl Program {
    /// Finds the program of a process that has become its user. What it was told of its home does not
    /// count with `find_home`.
    pub fn find(
        process: &ProcessDescription,
        find_home: bool,
        seccomp: Option<LinuxSeccomp>,
        privileges: Privileges,
    ) -> Result<Self, Refusal> {
        let mut environment = environment(&process.env);
        if find_home {
            set_home(&mut environment, process.user.uid);
        }
        let name = process.args.first().map_or("", String::as_str);
        let path = find_program(name, &environment).map_err(Refusal::failed)?;
        // The filter of one that may not gain privileges needs none; so they are final now.
        if seccomp.is_none() || process.no_new_privileges {
            privileges.settle()?;
        }
        Ok(Self {
            path,
            arguments: process.args.clone(),
            environment,
            limits: process.rlimits.clone(),
            seccomp,
            no_new_privileges: process.no_new_privileges,
            privileges,
        })
    }

    /// Its variables.
    pub fn environment(&self) -> &[String] {
        &self.environment
    }

    /// As late as can be: what is done after it, the filter must allow.
    fn confine(&self) -> Result<(), Refusal> {
        let Some(filter) = &self.seccomp else {
            return Ok(());
        };
        if !self.no_new_privileges {
            self.privileges.regain()?;
        }
        initialize_seccomp(filter)
            .map_err(|error| Refusal::failed(format!("linux.seccomp: {error}")))?;
        if self.no_new_privileges {
            return Ok(());
        }
        self.privileges.settle()
    }

    /// Returns only the reason why it returns.
    pub fn execute(self) -> Refusal {
        let shown = self.path.display().to_string();
        let strings = |list: &[String]| -> Result<Vec<CString>, _> {
            list.iter()
                .map(|text| CString::new(text.as_bytes()))
                .collect()
        };
        let program = CString::new(self.path.as_os_str().as_encoded_bytes());
        let (Ok(program), Ok(arguments), Ok(environment)) = (
            program,
            strings(&self.arguments),
            strings(&self.environment),
        ) else {
            return Refusal::failed(format!("exec {shown}: invalid argument"));
        };
        // Rust's programs ignore it, and this one's descendants would too.
        sys::default_sigpipe();
        if let Err(refusal) = identity::set_limits(0, &self.limits).and_then(|()| self.confine()) {
            return refusal;
        }
        match unistd::execve(&program, &arguments, &environment) {
            Ok(never) => match never {},
            Err(errno) => Refusal::failed(format!("exec {shown}: {}", words(errno))),
        }
    }
}

/// The variables of a spec in their order, of equal names the last.
fn environment(given: &[String]) -> Vec<String> {
    let mut result: Vec<String> = Vec::with_capacity(given.len());
    let mut places: HashMap<&str, usize> = HashMap::new();
    for variable in given {
        let name = variable.split('=').next().unwrap_or_default();
        match places.get(name) {
            Some(&place) => result[place].clone_from(variable),
            None => {
                places.insert(name, result.len());
                result.push(variable.clone());
            }
        }
    }
    result
}

/// The home of a user in the text of a `passwd` file.
///
/// Read here rather than asked of the C library, which would load the container's own modules for
/// its name service.
fn home(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        let found: u32 = fields.next()?.parse().ok()?;
        let home = fields.nth(2)?;
        (found == uid && !home.is_empty()).then_some(home)
    })
}

/// Puts the user's home in place of the one that stands for none.
fn set_home(environment: &mut [String], uid: u32) {
    let mut passwd = String::new();
    let read = fs::File::open("/etc/passwd")
        .and_then(|file| file.take(PASSWD_LIMIT).read_to_string(&mut passwd));
    if let (Ok(_), Some(home)) = (read, home(&passwd, uid))
        && let Some(place) = environment
            .iter_mut()
            .find(|variable| variable.starts_with("HOME="))
    {
        *place = format!("HOME={home}");
    }
}

/// Finds what a name stands for, or says why nothing.
fn find_program(name: &str, environment: &[String]) -> Result<PathBuf, String> {
    if name.contains('/') {
        let path = PathBuf::from(name);
        return match check_program(&path) {
            Ok(()) => Ok(path),
            Err(reason) => Err(format!("exec: {name:?}: {reason}")),
        };
    }
    let search = environment
        .iter()
        .find_map(|variable| variable.strip_prefix("PATH="));
    for directory in search
        .unwrap_or_default()
        .split(':')
        .filter(|_| !name.is_empty())
    {
        let path = Path::new(directory).join(name);
        if check_program(&path).is_ok() {
            if path.is_absolute() {
                return Ok(path);
            }
            return Err(format!(
                "exec: {name:?}: cannot run executable found relative to current directory"
            ));
        }
    }
    Err(format!(
        "exec: {name:?}: executable file not found in $PATH"
    ))
}

/// A file that the process may execute, as its own user.
fn check_program(path: &Path) -> Result<(), String> {
    let metadata = fs::metadata(path).map_err(|error| {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
        format!("stat {}: {}", path.display(), words(errno))
    })?;
    if metadata.is_dir() {
        return Err(words(Errno::EISDIR));
    }
    match faccessat(AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS) {
        Ok(()) => Ok(()),
        // Kernels and filters without faccessat2: judge by the mode.
        Err(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL) => {
            let executable = metadata.permissions().mode() & 0o111 != 0;
            executable.then_some(()).ok_or_else(|| words(Errno::EACCES))
        }
        Err(errno) => Err(words(errno)),
    }
}

/// The kernel's error in lower case, as other runtimes print it.
fn words(errno: Errno) -> String {
    errno.desc().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_environment_keeps_order_and_the_last_of_equal_names() {
        let given = ["B=1", "A=2", "B=3", "ODD"].map(str::to_owned);
        assert_eq!(environment(&given), ["B=3", "A=2", "ODD"]);
    }

    #[test]
    fn test_home_is_that_of_the_first_line_with_the_uid() {
        let passwd = "root:x:0:0::/root:/bin/sh\nbroken\na:x:7:7::/a:\nb:x:7:7::/b:\nc:x:8:8:::\n";
        assert_eq!(home(passwd, 0), Some("/root"));
        assert_eq!(home(passwd, 7), Some("/a"));
        assert_eq!(home(passwd, 8), None);
        assert_eq!(home(passwd, 9), None);
    }

    #[test]
    fn test_find_program_says_what_other_runtimes_say() {
        let directory = tempfile::tempdir().unwrap();
        let plain = directory.path().join("plain");
        fs::write(&plain, "x").unwrap();
        let plain = plain.to_str().unwrap();
        let path = format!("PATH=/nowhere:{}", directory.path().display());
        let cases = [
            (
                "foo",
                r#"exec: "foo": executable file not found in $PATH"#.into(),
            ),
            ("", r#"exec: "": executable file not found in $PATH"#.into()),
            (
                "plain",
                r#"exec: "plain": executable file not found in $PATH"#.into(),
            ),
            (
                "/no/such",
                r#"exec: "/no/such": stat /no/such: no such file or directory"#.into(),
            ),
            ("/", r#"exec: "/": is a directory"#.into()),
            (plain, format!("exec: {plain:?}: permission denied")),
        ];
        for (name, expected) in cases {
            assert_eq!(
                find_program(name, std::slice::from_ref(&path)),
                Err(expected),
                "{name}"
            );
        }
    }

    #[test]
    fn test_find_program_takes_the_first_of_the_path() {
        let path = vec!["PATH=/nowhere:/bin:/usr/bin".to_owned()];
        assert_eq!(find_program("sh", &path), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(find_program("/bin/sh", &[]), Ok(PathBuf::from("/bin/sh")));
    }
}
