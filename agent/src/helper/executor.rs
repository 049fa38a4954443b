//! The last steps of a container process: finding its program and becoming it.
//!
//! Errors are worded as the established runtime words them, because clients choose exit codes (126,
//! 127) by these words.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use libcontainer::capabilities::drop_privileges;
use libcontainer::oci_spec::runtime::{LinuxCapabilities, LinuxSeccomp, Spec};
use libcontainer::seccomp::initialize_seccomp;
use libcontainer::syscall::syscall::create_syscall;
use libcontainer::workload::{
    Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError,
};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{self, AccessFlags, faccessat};

use crate::sys;

/// How much of a container's `passwd` is looked at.
const PASSWD_LIMIT: u64 = 4 << 20;

/// What libcontainer leaves out for a process that joins a container and that the executor
/// therefore does: the seccomp filter, and the capabilities that were kept only to install it.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// The container's filter.
    pub seccomp: LinuxSeccomp,
    /// What to drop to afterwards; `None` when libcontainer has done so already.
    pub capabilities: Option<LinuxCapabilities>,
}

/// What a process does for itself before it becomes its program.
#[derive(Debug, Default)]
pub struct LastSteps {
    /// Confines itself.
    pub confinement: Option<Confinement>,
    /// Sets the size of its terminal, rows and columns.
    pub window: Option<(u16, u16)>,
    /// Looks up its home directory in the container.
    pub find_home: bool,
}

/// Runs inside the container's process.
#[derive(Clone)]
pub struct ContainerExecutor {
    /// Takes the text of an error; closed by a successful exec.
    report: Rc<OwnedFd>,
    steps: Rc<LastSteps>,
}

impl ContainerExecutor {
    /// Reports errors to `report`.
    pub fn new(report: OwnedFd, steps: LastSteps) -> Self {
        Self {
            report: Rc::new(report),
            steps: Rc::new(steps),
        }
    }

    fn report(&self, message: &str) {
        let _ = unistd::write(&*self.report, message.as_bytes());
    }

    fn confine(&self) -> Result<(), String> {
        let Some(confinement) = &self.steps.confinement else {
            return Ok(());
        };
        initialize_seccomp(&confinement.seccomp).map_err(|error| format!("seccomp: {error}"))?;
        if let Some(capabilities) = &confinement.capabilities {
            drop_privileges(capabilities, &*create_syscall())
                .map_err(|error| format!("drop capabilities: {error}"))?;
        }
        Ok(())
    }

    /// Returns only the reason why it returns.
    fn become_program(&self, spec: &Spec) -> String {
        let arguments = arguments(spec);
        let mut environment = environment(spec);
        if self.steps.find_home {
            let process = spec.process().as_ref();
            set_home(
                &mut environment,
                process.map_or(0, |process| process.user().uid()),
            );
        }
        let path = match find_program(arguments.first().map_or("", String::as_str), &environment) {
            Ok(path) => path,
            Err(message) => return message,
        };
        let shown = path.display().to_string();
        if let Some((rows, columns)) = self.steps.window {
            let _ = sys::set_window_size(std::io::stdin(), rows, columns);
        }
        if let Err(message) = self.confine() {
            return message;
        }
        let strings = |list: &[String]| -> Result<Vec<CString>, _> {
            list.iter()
                .map(|text| CString::new(text.as_bytes()))
                .collect()
        };
        let program = CString::new(path.into_os_string().into_encoded_bytes());
        let (Ok(program), Ok(arguments), Ok(environment)) =
            (program, strings(&arguments), strings(&environment))
        else {
            return format!("exec {shown}: invalid argument");
        };
        match unistd::execve(&program, &arguments, &environment) {
            Ok(never) => match never {},
            Err(errno) => format!("exec {shown}: {}", words(errno)),
        }
    }
}

impl Executor for ContainerExecutor {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let message = self.become_program(spec);
        self.report(&message);
        Err(ExecutorError::Other(message))
    }

    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let arguments = arguments(spec);
        let name = arguments.first().map_or("", String::as_str);
        match find_program(name, &environment(spec)) {
            Ok(_) => Ok(()),
            Err(message) => {
                self.report(&message);
                Err(ExecutorValidationError::ArgValidationError(message))
            }
        }
    }

    /// Nothing: the environment is given to exec, in its order.
    fn setup_envs(&self, _: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }
}

fn arguments(spec: &Spec) -> Vec<String> {
    let process = spec.process().as_ref();
    process
        .and_then(|process| process.args().clone())
        .unwrap_or_default()
}

/// The spec's variables in their order, of equal names the last.
fn environment(spec: &Spec) -> Vec<String> {
    let process = spec.process().as_ref();
    let given = process
        .and_then(|process| process.env().clone())
        .unwrap_or_default();
    let mut result: Vec<String> = Vec::with_capacity(given.len());
    let mut places: HashMap<String, usize> = HashMap::new();
    for variable in given {
        let name = variable.split('=').next().unwrap_or_default().to_owned();
        match places.get(&name) {
            Some(&place) => result[place] = variable,
            None => {
                places.insert(name, result.len());
                result.push(variable);
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
    use libcontainer::oci_spec::runtime::{ProcessBuilder, SpecBuilder};

    use super::*;

    fn spec(env: &[&str]) -> Spec {
        let env: Vec<String> = env.iter().map(ToString::to_string).collect();
        let process = ProcessBuilder::default().env(env).build().unwrap();
        SpecBuilder::default().process(process).build().unwrap()
    }

    #[test]
    fn test_environment_keeps_order_and_the_last_of_equal_names() {
        let spec = spec(&["B=1", "A=2", "B=3", "ODD"]);
        assert_eq!(environment(&spec), ["B=3", "A=2", "ODD"]);
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
