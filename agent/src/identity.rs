//! What makes this clone of the template a machine of its own: entropy, time, name, mounts.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Component, Path};
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use nix::unistd::sethostname;
use thaw_agent_api::agent::{ConfigureRequest, DiskNumbers, Mount};

use crate::disks;
use crate::status::Refusal;
use crate::sys;

/// Least length of the nonce, in bytes.
const NONCE_LENGTH: usize = 8;
/// Least amount of entropy, in bytes.
const ENTROPY_LENGTH: usize = 32;

/// What has been applied so far.
#[derive(Debug, Default)]
pub struct Identity {
    nonce: Vec<u8>,
    /// The disks of this clone.
    disks: Vec<DiskNumbers>,
    /// Targets mounted by an attempt that failed later; not mounted again by the next one.
    mounted: Vec<String>,
}

impl Identity {
    /// The nonce of the clone; empty until it has been configured.
    pub fn nonce(&self) -> &[u8] {
        &self.nonce
    }

    /// The numbers of its disks, in their order.
    pub fn disks(&self) -> &[DiskNumbers] {
        &self.disks
    }

    /// Applies a request wholly, or fails. The generator comes first: everything after it may draw
    /// from it.
    pub fn configure(&mut self, request: &ConfigureRequest) -> Result<(), Refusal> {
        if request.nonce.len() < NONCE_LENGTH {
            return Err(Refusal::invalid(format!(
                "nonce: shorter than {NONCE_LENGTH} bytes"
            )));
        }
        if self.nonce == request.nonce {
            return Ok(());
        }
        if !self.nonce.is_empty() {
            return Err(Refusal::state(
                "this guest is configured already, with another nonce",
            ));
        }
        if request.entropy.len() < ENTROPY_LENGTH {
            return Err(Refusal::invalid(format!(
                "entropy: shorter than {ENTROPY_LENGTH} bytes"
            )));
        }
        let time = u64::try_from(request.wall_time_ns)
            .map_err(|_| Refusal::invalid("wall_time_ns: before 1970"))?;
        seed(&request.entropy).map_err(|error| failed("seed the random generator", &error))?;
        clock_settime(
            ClockId::CLOCK_REALTIME,
            TimeSpec::from(Duration::from_nanos(time)),
        )
        .map_err(|error| failed("set the clock", &error.into()))?;
        if !request.hostname.is_empty() {
            sethostname(&request.hostname).map_err(|error| {
                failed(
                    &format!("set the hostname to {:?}", request.hostname),
                    &error.into(),
                )
            })?;
        }
        self.disks = disks::take(&request.disks)?;
        for mount in &request.mounts {
            if !self.mounted.contains(&mount.target) {
                perform(mount)?;
                self.mounted.push(mount.target.clone());
            }
        }
        self.nonce.clone_from(&request.nonce);
        Ok(())
    }
}

fn failed(what: &str, error: &io::Error) -> Refusal {
    Refusal::failed(format!("{what}: {error}"))
}

/// Credits the entropy and makes the generator use it now, not at its next regular reseed.
fn seed(entropy: &[u8]) -> io::Result<()> {
    let random = OpenOptions::new().write(true).open("/dev/urandom")?;
    sys::add_entropy(&random, entropy)?;
    sys::reseed_generator(&random)
}

/// Makes the target and mounts on it.
fn perform(request: &Mount) -> Result<(), Refusal> {
    let target = Path::new(&request.target);
    let plain = target
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !target.is_absolute() || !plain {
        return Err(Refusal::invalid(format!(
            "mount target {:?}: not a plain path",
            request.target
        )));
    }
    let described = format!(
        "mount {} {:?} on {:?}",
        request.type_, request.source, request.target
    );
    fs::create_dir_all(target).map_err(|error| failed(&described, &error))?;
    let (flags, data) = parse_options(&request.options);
    mount(
        Some(request.source.as_str()),
        target,
        Some(request.type_.as_str()),
        flags,
        Some(data.as_str()),
    )
    .map_err(|error| failed(&described, &error.into()))
}

/// Splits fstab's fourth field into mount(2)'s flags and what is left for the file system.
fn parse_options(options: &[String]) -> (MsFlags, String) {
    let mut flags = MsFlags::empty();
    let mut data = Vec::new();
    for option in options {
        let (set, flag) = match option.as_str() {
            "defaults" => continue,
            "ro" => (true, MsFlags::MS_RDONLY),
            "rw" => (false, MsFlags::MS_RDONLY),
            "nosuid" => (true, MsFlags::MS_NOSUID),
            "suid" => (false, MsFlags::MS_NOSUID),
            "nodev" => (true, MsFlags::MS_NODEV),
            "dev" => (false, MsFlags::MS_NODEV),
            "noexec" => (true, MsFlags::MS_NOEXEC),
            "exec" => (false, MsFlags::MS_NOEXEC),
            "sync" => (true, MsFlags::MS_SYNCHRONOUS),
            "dirsync" => (true, MsFlags::MS_DIRSYNC),
            "noatime" => (true, MsFlags::MS_NOATIME),
            "nodiratime" => (true, MsFlags::MS_NODIRATIME),
            "relatime" => (true, MsFlags::MS_RELATIME),
            "strictatime" => (true, MsFlags::MS_STRICTATIME),
            "bind" => (true, MsFlags::MS_BIND),
            "rbind" => (true, MsFlags::MS_BIND | MsFlags::MS_REC),
            other => {
                data.push(other);
                continue;
            }
        };
        flags.set(flag, set);
    }
    (flags, data.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ConfigureRequest {
        ConfigureRequest {
            nonce: vec![1; 8],
            entropy: vec![2; 32],
            ..Default::default()
        }
    }

    #[test]
    fn test_configure_short_input_is_refused_before_anything_is_applied() {
        let mut identity = Identity::default();
        let nonce = ConfigureRequest {
            nonce: vec![1; 7],
            ..request()
        };
        assert_eq!(
            identity.configure(&nonce).unwrap_err().code,
            ttrpc::Code::INVALID_ARGUMENT
        );
        let entropy = ConfigureRequest {
            entropy: vec![2; 31],
            ..request()
        };
        assert_eq!(
            identity.configure(&entropy).unwrap_err().code,
            ttrpc::Code::INVALID_ARGUMENT
        );
        let time = ConfigureRequest {
            wall_time_ns: -1,
            ..request()
        };
        assert_eq!(
            identity.configure(&time).unwrap_err().code,
            ttrpc::Code::INVALID_ARGUMENT
        );
        assert!(identity.nonce().is_empty());
    }

    #[test]
    fn test_configure_same_nonce_changes_nothing_and_another_is_refused() {
        let mut identity = Identity {
            nonce: vec![1; 8],
            ..Identity::default()
        };
        assert_eq!(identity.configure(&request()), Ok(()));
        let other = ConfigureRequest {
            nonce: vec![3; 8],
            ..request()
        };
        assert_eq!(
            identity.configure(&other).unwrap_err().code,
            ttrpc::Code::FAILED_PRECONDITION
        );
    }

    #[test]
    fn test_mount_target_outside_of_the_tree_is_refused() {
        for target in ["run", "/run/../etc", "/run/./x/..", ""] {
            let mount = Mount {
                target: target.into(),
                ..Default::default()
            };
            assert_eq!(
                perform(&mount).unwrap_err().code,
                ttrpc::Code::INVALID_ARGUMENT,
                "{target}"
            );
        }
    }

    #[test]
    fn test_options_are_split_into_flags_and_data() {
        let options = ["ro", "nosuid", "size=1m", "rw", "mode=0700", "defaults"].map(String::from);
        assert_eq!(
            parse_options(&options),
            (MsFlags::MS_NOSUID, "size=1m,mode=0700".into())
        );
    }
}
