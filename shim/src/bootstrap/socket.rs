//! The socket on which a shim serves, at the place where containerd's own shims have theirs.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// What became of binding a socket.
#[derive(Debug)]
pub enum Bound {
    /// It is this process'.
    New(UnixListener),
    /// Another shim serves it.
    Served,
}

/// The path of the socket of `sandbox`: the digest of what tells it from all others on the host.
pub fn path(directory: PathBuf, grpc_address: &str, namespace: &str, sandbox: &str) -> PathBuf {
    let name = Path::new(grpc_address).join(namespace).join(sandbox);
    let digest = Sha256::digest(name.as_os_str().as_encoded_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(hex)
}

/// Whether somebody answers at `path`.
pub fn is_served(path: &Path) -> bool {
    UnixStream::connect(path).is_ok()
}

/// Make the directory of the socket at `path`, mode 0700, if there is none.
pub fn prepare_directory(path: &Path) -> io::Result<()> {
    let Some(directory) = path.parent() else {
        return Ok(());
    };
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory);
    made.map_err(|error| {
        let text = format!(
            "making the directory of the shim's socket, {}: {error}",
            directory.display()
        );
        io::Error::new(error.kind(), text)
    })
}

/// Bind and listen at `path`, mode 0600. A socket that nobody serves is replaced.
pub fn bind(path: &Path) -> io::Result<Bound> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            if is_served(path) {
                return Ok(Bound::Served);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    };
    let listener = listener.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("listening at {}: {error}", path.display()),
        )
    })?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(Bound::New(listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_path_is_containerd_s() {
        let path = path(
            "/run/containerd/s".into(),
            "/run/containerd/containerd.sock",
            "default",
            "web",
        );
        // printf /run/containerd/containerd.sock/default/web | sha256sum
        assert_eq!(
            path,
            Path::new(
                "/run/containerd/s/\
                 2cde4450fa38c74f53603e01d2afd903b315a27a596f12a151414cd59897d883"
            )
        );
        assert!(path.as_os_str().len() < 108);
    }

    #[test]
    fn test_a_served_socket_is_kept_and_a_dead_one_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s/0a");
        assert!(!is_served(&path));
        prepare_directory(&path).unwrap();
        let Bound::New(listener) = bind(&path).unwrap() else {
            panic!("not bound")
        };
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(matches!(bind(&path).unwrap(), Bound::Served));
        drop(listener);
        assert!(!is_served(&path));
        assert!(matches!(bind(&path).unwrap(), Bound::New(_)));
    }
}
