//! Points that end the process.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use crate::VARIABLE;

/// `VARIABLE=name`. Set once in the life of a process.
static ARMED: OnceLock<CString> = OnceLock::new();

/// See the unarmed one. Makes only system calls, so that a process that was just cloned from one with
/// threads may call it.
pub fn point(name: &str) {
    let armed = ARMED.get().map(|variable| variable.as_bytes());
    let armed = armed.and_then(|variable| variable.get(VARIABLE.len() + 1..));
    if armed == Some(name.as_bytes()) {
        end();
    }
}

fn end() -> ! {
    loop {
        // SAFETY: ends this process. The first process of a pid namespace is spared by its own SIGKILL,
        // and exits then.
        unsafe {
            libc::syscall(
                libc::SYS_kill,
                libc::syscall(libc::SYS_getpid),
                libc::SIGKILL,
            );
            libc::syscall(libc::SYS_exit_group, 128 + libc::SIGKILL);
        }
    }
}

/// See the unarmed one.
pub fn arm_by_spec(spec: &[u8]) {
    if let Some(name) = name_in(spec) {
        arm(name);
    }
}

/// See the unarmed one.
pub fn arm_by_environment() {
    if let Ok(name) = std::env::var(VARIABLE) {
        arm(&name);
    }
}

/// See the unarmed one.
pub fn environment() -> Option<&'static CStr> {
    ARMED.get().map(CString::as_c_str)
}

fn arm(name: &str) {
    if let Ok(variable) = CString::new(format!("{VARIABLE}={name}")) {
        // The first one counts: that of the container that the sandbox was started for.
        let _ = ARMED.set(variable);
    }
}

/// The name in the string of `spec` that begins with the variable's.
fn name_in(spec: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(spec).ok()?;
    let (_, rest) = text.split_once(&format!("\"{VARIABLE}="))?;
    rest.split_once('"').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_name_is_found_in_a_spec() {
        let spec = br#"{"process":{"env":["PATH=/bin","THAW_FAULT_POINT=vmm-restored","A=b"]}}"#;
        assert_eq!(name_in(spec), Some("vmm-restored"));
        assert_eq!(name_in(br#"{"process":{"env":["PATH=/bin"]}}"#), None);
    }
}
