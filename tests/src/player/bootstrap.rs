//! The ways in which containerds start a shim, and how they read its answer. The messages of 2.3 and
//! later are put together and taken apart byte by byte here, from the published definition
//! (containerd, `api/runtime/bootstrap/v1/bootstrap.proto`), so that the shim's own reading of it is
//! compared with something else.

use std::path::PathBuf;

/// Who starts the shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// containerd 1.6: the address of its ttrpc socket in the environment, a bare address expected.
    V1_6,
    /// 1.7: more in the environment; a bare address, or JSON of version 2 at most.
    V1_7,
    /// 2.0 to 2.2: the same; a bare address or JSON.
    V2_0,
    /// 2.3: `BootstrapParams` on standard input, `BootstrapResult` expected.
    V2_3,
    /// 2.4: the same, with fields and extensions that the shim may not know.
    V2_4,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::V1_6, Self::V1_7, Self::V2_0, Self::V2_3, Self::V2_4];

    /// Whether the answer is a `BootstrapResult`.
    pub fn is_modern(self) -> bool {
        matches!(self, Self::V2_3 | Self::V2_4)
    }

    /// The environment of the program beside PATH, given containerd's addresses.
    pub(super) fn environment(
        self,
        grpc: &str,
        ttrpc: Option<&str>,
        namespace: &str,
    ) -> Vec<(&'static str, String)> {
        let mut variables = vec![("GOMAXPROCS", "2".to_owned())];
        variables.extend(ttrpc.map(|address| ("TTRPC_ADDRESS", address.to_owned())));
        if self != Self::V1_6 {
            variables.push(("GRPC_ADDRESS", grpc.to_owned()));
            variables.push(("NAMESPACE", namespace.to_owned()));
            variables.push(("MAX_SHIM_VERSION", "2".to_owned()));
        }
        variables
    }

    /// Standard input of `start`.
    pub(super) fn input(self, params: &Params<'_>) -> Vec<u8> {
        match self {
            Self::V1_6 | Self::V1_7 | Self::V2_0 => params
                .options
                .map(|(url, value)| any(url, value))
                .unwrap_or_default(),
            Self::V2_3 => params.encode("v2.3.4"),
            Self::V2_4 => {
                let mut bytes = params.encode("v2.4.0");
                // An extension of a type that no shim of today knows, and fields that are not
                // defined yet: a number and a text.
                let unknown = any("containerd.io/example.v9.Unheard", b"\x08\x01");
                bytes.extend(text(8, &text(1, &unknown)));
                bytes.extend([10 << 3, 42]);
                bytes.extend(text(15, b"later"));
                bytes
            }
        }
    }

    /// What the shim has answered on standard output.
    ///
    /// # Panics
    ///
    /// When this containerd would not understand it.
    #[track_caller]
    pub fn parse(self, output: &[u8]) -> Answer {
        if self.is_modern() {
            return Answer::decode(output);
        }
        let address = std::str::from_utf8(output).expect("an address is text");
        let path = address.strip_prefix("unix://");
        let path = path.unwrap_or_else(|| panic!("no bare address: {address:?}"));
        assert_eq!(path.trim(), path, "an address and nothing else");
        Answer {
            version: 2,
            socket: path.into(),
            protocol: "ttrpc".to_owned(),
            capabilities: Vec::new(),
        }
    }
}

/// What `start` has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Version of the task API that containerd then speaks.
    pub version: u64,
    /// Path of the socket.
    pub socket: PathBuf,
    /// `ttrpc` or `grpc`.
    pub protocol: String,
    /// What the shim wants to do itself, as the bytes that say so.
    pub capabilities: Vec<u8>,
}

impl Answer {
    #[track_caller]
    fn decode(mut bytes: &[u8]) -> Self {
        let (mut version, mut address) = (0, String::new());
        let (mut protocol, mut capabilities) = (String::new(), Vec::new());
        while !bytes.is_empty() {
            let tag = take_number(&mut bytes);
            match tag {
                0x08 => version = take_number(&mut bytes),
                0x12 => address = take_text(&mut bytes),
                0x1a => protocol = take_text(&mut bytes),
                0x20 => capabilities.push(take_number(&mut bytes) as u8),
                0x22 => capabilities.extend(take_text(&mut bytes).bytes()),
                other => panic!("a BootstrapResult has no field of tag {other:#x}"),
            }
        }
        let path = address.strip_prefix("unix://");
        let path = path.unwrap_or_else(|| panic!("no address of a socket: {address:?}"));
        Self {
            version,
            socket: path.into(),
            protocol,
            capabilities,
        }
    }
}

/// Contents of a `BootstrapParams`.
#[derive(Debug)]
pub(super) struct Params<'a> {
    pub id: &'a str,
    pub namespace: &'a str,
    pub debug: bool,
    pub ttrpc: Option<&'a str>,
    pub grpc: &'a str,
    pub binary: &'a str,
    /// Type and value of runtime options.
    pub options: Option<(&'a str, &'a [u8])>,
    pub socket_directory: Option<&'a str>,
}

/// `LOG_LEVEL_DEBUG`, -4, as a field of type enum: ten bytes.
const DEBUG: [u8; 10] = [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];

impl Params<'_> {
    fn encode(&self, version: &str) -> Vec<u8> {
        let mut bytes = text(1, self.id.as_bytes());
        bytes.extend(text(2, self.namespace.as_bytes()));
        if self.debug {
            bytes.push(3 << 3);
            bytes.extend(DEBUG);
        }
        bytes.extend(text(4, version.as_bytes()));
        bytes.extend(text(5, self.ttrpc.unwrap_or_default().as_bytes()));
        bytes.extend(text(6, self.grpc.as_bytes()));
        bytes.extend(text(7, self.binary.as_bytes()));
        if let Some((url, value)) = self.options {
            bytes.extend(text(8, &text(1, &any(url, value))));
        }
        if let Some(directory) = self.socket_directory {
            bytes.extend(text(9, directory.as_bytes()));
        }
        bytes
    }
}

/// A `google.protobuf.Any`.
fn any(url: &str, value: &[u8]) -> Vec<u8> {
    [text(1, url.as_bytes()), text(2, value)].concat()
}

/// Field `number` with a length and that many bytes; nothing for none, as protobuf has it.
fn text(number: u8, value: &[u8]) -> Vec<u8> {
    if value.is_empty() {
        return Vec::new();
    }
    let mut bytes = vec![number << 3 | 2];
    let mut length = value.len();
    while length >= 0x80 {
        bytes.push(length as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
    bytes.extend(value);
    bytes
}

#[track_caller]
fn take_number(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().expect("a number ends");
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return number;
        }
    }
    panic!("a number of more than 64 bits");
}

#[track_caller]
fn take_text(bytes: &mut &[u8]) -> String {
    let length = take_number(bytes) as usize;
    assert!(length <= bytes.len(), "a text is as long as it says");
    let (text, rest) = bytes.split_at(length);
    *bytes = rest;
    String::from_utf8(text.to_vec()).expect("a text is text")
}
