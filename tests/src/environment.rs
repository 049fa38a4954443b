//! What `tests/environment` has put in place.

use std::path::PathBuf;
use std::sync::OnceLock;

/// A containerd that the tests run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// 1.6, as in Debian 12: bootstrap protocol 2, task API v2.
    V1_6,
    /// 1.7, as in Debian 13: bootstrap protocol 2, task API v2 or v3.
    V1_7,
    /// 2.1: bootstrap protocol 3, task API v3.
    V2_1,
}

impl Version {
    /// As in the names of directories.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1_6 => "1.6",
            Self::V1_7 => "1.7",
            Self::V2_1 => "2.1",
        }
    }
}

/// Paths and names, from the environment's variables.
#[derive(Debug)]
pub struct Environment {
    /// A directory for what tests make; not on an overlay.
    pub directory: PathBuf,
    /// Directories `containerd-VERSION` with programs.
    pub binaries: PathBuf,
    /// The image to import.
    pub image: PathBuf,
    /// Installed tree of thaw.
    pub prefix: PathBuf,
    /// Installed tree of a thaw with fault points; there only with [`FAULTY`].
    pub faulty_prefix: PathBuf,
    /// The runtime that containers are run with.
    pub runtime: String,
    /// Whether this machine is ours alone.
    pub in_lab: bool,
}

/// Name of the imported image.
pub const IMAGE: &str = "thaw.test/busybox:latest";

/// Name of the imported image with a user.
pub const USER_IMAGE: &str = "thaw.test/busybox:user";

/// The runtime of the build whose processes a test can end at certain points.
pub const FAULTY: &str = "io.containerd.thawfaulty.v2";

/// The runtime that is tested.
const THAW: &str = "io.containerd.thaw.v2";

impl Environment {
    /// The environment of this process.
    ///
    /// # Panics
    ///
    /// When the process was not started by `tests/run`.
    pub fn get() -> &'static Self {
        static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
        ENVIRONMENT.get_or_init(|| Self {
            directory: path("THAW_TEST_DIRECTORY"),
            binaries: path("THAW_BINARIES"),
            image: path("THAW_IMAGE"),
            prefix: path("THAW_PREFIX"),
            faulty_prefix: path("THAW_FAULTY_PREFIX"),
            runtime: std::env::var("THAW_RUNTIME").unwrap_or_else(|_| THAW.into()),
            in_lab: std::env::var_os("THAW_IN_LAB").is_some(),
        })
    }

    /// Directory of the programs of a containerd.
    pub fn containerd(&self, version: Version) -> PathBuf {
        self.binaries.join(format!("containerd-{}", version.name()))
    }

    /// Whether thaw is what runs the containers.
    pub fn is_thaw(&self) -> bool {
        self.runtime == THAW
    }
}

fn path(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(value) => value.into(),
        None => panic!(
            "{variable} is not set: end-to-end tests are started by `make e2e`, through tests/run"
        ),
    }
}
