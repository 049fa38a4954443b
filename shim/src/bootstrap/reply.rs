//! What `start` answers: where the shim listens.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use containerd_shim_protos::TASK_API_VERSION;
use containerd_shim_protos::bootstrap_api::BootstrapResult;
use containerd_shim_protos::protobuf::Message;

/// The answer to one `start`.
#[derive(Debug)]
pub struct Reply {
    address: String,
    modern: bool,
}

impl Reply {
    /// The shim listens at `socket`; containerd understands a structured answer if `modern`.
    pub fn new(socket: &Path, modern: bool) -> Self {
        Self {
            address: format!("unix://{}", socket.display()),
            modern,
        }
    }

    /// Write the address into the bundle, where containerds before 2.0 look after a restart, and
    /// answer on standard output.
    pub fn give(&self, bundle: &Path) -> io::Result<()> {
        let unfinished = bundle.join(".address");
        fs::write(&unfinished, &self.address)?;
        fs::rename(&unfinished, bundle.join("address"))?;
        let mut output = io::stdout();
        output.write_all(&self.encode()?)?;
        output.flush()
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        if !self.modern {
            return Ok(self.address.clone().into_bytes());
        }
        let result = BootstrapResult {
            version: TASK_API_VERSION,
            address: self.address.clone(),
            protocol: "ttrpc".to_owned(),
            ..BootstrapResult::default()
        };
        result.write_to_bytes().map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_bare_address_for_those_who_know_no_more() {
        let reply = Reply::new(Path::new("/run/containerd/s/0a"), false);
        assert_eq!(reply.encode().unwrap(), b"unix:///run/containerd/s/0a");
    }

    #[test]
    fn test_structured_answer_names_version_and_protocol() {
        let bytes = Reply::new(Path::new("/run/s/0a"), true).encode().unwrap();
        let result = BootstrapResult::parse_from_bytes(&bytes).unwrap();
        assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
        assert_eq!(result.address, "unix:///run/s/0a");
        // By hand from the definition of `BootstrapResult`, and nothing else: what is not claimed
        // among the capabilities containerd does itself.
        assert_eq!(bytes, b"\x08\x03\x12\x10unix:///run/s/0a\x1a\x05ttrpc");
    }
}
