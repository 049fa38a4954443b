//! `-info`: what this runtime is, and what of a runtime's features it has.

use std::io::{self, IsTerminal, Read};

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use serde_json::json;

/// The name by which containerd knows this runtime.
const RUNTIME: &str = "io.containerd.thaw.v2";

/// The type of the features, as containerd packs JSON of the runtime specification.
const FEATURES: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Most bytes of runtime options.
const LIMIT: u64 = 4 << 20;

/// The answer, given the runtime options on standard input.
pub fn answer() -> io::Result<RuntimeInfo> {
    let mut bytes = Vec::new();
    if !io::stdin().is_terminal() {
        io::stdin().take(LIMIT).read_to_end(&mut bytes)?;
    }
    let options = Any::parse_from_bytes(&bytes).map_err(|error| {
        io::Error::other(format!(
            "-info: the runtime options on standard input are no google.protobuf.Any: {error}"
        ))
    })?;
    Ok(information(options))
}

fn information(options: Any) -> RuntimeInfo {
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..RuntimeVersion::default()
    };
    let features = Any {
        type_url: FEATURES.to_owned(),
        value: features().to_string().into_bytes(),
        ..Any::default()
    };
    RuntimeInfo {
        name: RUNTIME.to_owned(),
        version: Some(version).into(),
        options: (!options.type_url.is_empty()).then_some(options).into(),
        features: Some(features).into(),
        ..RuntimeInfo::default()
    }
}

/// The runtime specification's `features`: what a client may ask for. What is missing here a client
/// does not ask for, or refuses a pod that needs it.
fn features() -> serde_json::Value {
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": "1.2.0",
        "hooks": ["startContainer"],
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "uts"],
            "cgroup": { "v1": false, "v2": true, "systemd": false, "systemdUser": false },
            "seccomp": { "enabled": true },
            "apparmor": { "enabled": false },
            "selinux": { "enabled": false },
            // The guest's file systems are mounted without id mapping.
            "mountExtensions": { "idmap": { "enabled": false } },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_options_come_back_and_none_stay_none() {
        let options = Any {
            type_url: "runtimeoptions.v1.Options".into(),
            value: vec![1],
            ..Any::default()
        };
        assert_eq!(
            information(options.clone()).options.as_ref(),
            Some(&options)
        );
        assert!(information(Any::default()).options.is_none());
    }

    #[test]
    fn test_features_claim_no_id_mapping() {
        let info = information(Any::default());
        let features: serde_json::Value = serde_json::from_slice(&info.features.value).unwrap();
        assert_eq!(
            features["linux"]["mountExtensions"]["idmap"]["enabled"],
            false
        );
    }
}
