//! The decoder against damage. The state is a real one, of a machine on the host's KVM.

use std::sync::OnceLock;

use proptest::prelude::*;
use thaw_vmm_control::Shape;

use super::*;
use crate::machine::{BootSource, Environment, Machine};
use crate::memory::Extent;
use crate::phase::Phases;
use crate::virtio::fs::FileServerRoot;

/// The bytes of a state file, or nothing where there is no KVM.
fn real_state() -> Option<&'static [u8]> {
    static STATE: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    STATE.get_or_init(make_state).as_deref()
}

fn make_state() -> Option<Vec<u8>> {
    let hypervisor = crate::kvm::test_hypervisor()?;
    let export = tempfile::tempdir().unwrap();
    let files = FileServerRoot::without_jail(export.path()).unwrap();
    let environment = Environment {
        console: std::sync::Arc::new(|_: &[u8]| {}),
        files,
    };
    let source = BootSource {
        shape: Shape::new(2, 128).unwrap(),
        command_line: "console=ttyS0".into(),
        kernel: crate::machine::test_kernel(&[0xf4]),
        initramfs: tempfile::tempfile().unwrap(),
    };
    let mut machine =
        Machine::boot(&hypervisor, source, environment, &mut Phases::default()).unwrap();
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    machine.snapshot(&hypervisor, &state, &memory).unwrap();
    let mut bytes = vec![0; state.metadata().unwrap().len() as usize];
    state.read_exact_at(&mut bytes, 0).unwrap();
    Some(bytes)
}

/// Make the checksum right again, so that the body is looked at.
fn with_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - CHECKSUM_SIZE);
    let checksum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

/// `state` with another body, in an envelope that is in order.
fn with_body(body: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&FORMAT_EPOCH.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes.extend_from_slice(&[0; CHECKSUM_SIZE]);
    with_checksum(bytes)
}

fn body(bytes: &[u8]) -> &[u8] {
    &bytes[HEADER_SIZE..bytes.len() - CHECKSUM_SIZE]
}

/// What `decode` says of the state after `change`.
fn decode_changed(bytes: &[u8], change: impl FnOnce(&mut MachineState)) -> SnapshotError {
    let mut state = decode(bytes).unwrap();
    change(&mut state);
    decode(&encode(&state).unwrap()).unwrap_err()
}

#[test]
fn test_what_is_decoded_encodes_to_the_same_bytes() {
    let Some(bytes) = real_state() else { return };
    assert!(encode(&decode(bytes).unwrap()).unwrap() == bytes);
}

#[test]
fn test_a_single_damaged_byte_is_noticed() {
    let Some(bytes) = real_state() else { return };
    let mut damaged = bytes.to_vec();
    for position in (0..bytes.len()).step_by(5) {
        damaged[position] ^= 0x10;
        assert!(decode(&damaged).is_err(), "byte {position}");
        damaged[position] = bytes[position];
    }
}

#[test]
fn test_a_file_that_ends_early_is_an_error_wherever_it_ends() {
    let Some(bytes) = real_state() else { return };
    for length in (0..bytes.len()).step_by(7).chain(0..64) {
        assert!(decode(&bytes[..length]).is_err(), "{length} bytes");
    }
    // The same for the body, in an envelope that is in order.
    for length in (0..body(bytes).len()).step_by(7) {
        assert!(
            decode(&with_body(&body(bytes)[..length])).is_err(),
            "body of {length} bytes"
        );
    }
}

#[test]
fn test_another_format_and_another_file_are_told_apart() {
    let Some(bytes) = real_state() else { return };
    let mut other = bytes.to_vec();
    other[MAGIC.len()] ^= 0xff;
    assert!(matches!(
        decode(&with_checksum(other)),
        Err(SnapshotError::Epoch { .. })
    ));
    assert!(matches!(decode(&[b'x'; 100]), Err(SnapshotError::Magic)));
    assert!(matches!(decode(b""), Err(SnapshotError::Size(0))));
    let mut longer = body(bytes).to_vec();
    longer.push(0);
    assert!(matches!(
        decode(&with_body(&longer)),
        Err(SnapshotError::Invalid(_))
    ));
}

#[test]
fn test_a_file_larger_than_any_state_is_not_read() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(MAX_SIZE + 1).unwrap();
    assert!(matches!(read(&file), Err(SnapshotError::Size(_))));
}

#[test]
fn test_parts_that_do_not_fit_together_are_refused() {
    let Some(bytes) = real_state() else { return };
    let invalid = |change: fn(&mut MachineState)| {
        let error = decode_changed(bytes, change);
        assert!(matches!(error, SnapshotError::Invalid(_)), "{error}");
    };
    invalid(|state| drop(state.vcpus.pop()));
    invalid(|state| state.shape = Shape::new(3, 128).unwrap());
    invalid(|state| state.controllers.ioapic.chip_id = 0);
    invalid(|state| state.clock.flags = 2);
    let outside = Extent {
        offset: 128 << 20,
        length: 4096,
    };
    let error = decode_changed(bytes, |state| state.extents.push(outside));
    assert!(matches!(error, SnapshotError::Extents(_)), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// A damaged body behind a checksum that is right: an error or a state, never a panic.
    #[test]
    fn test_a_mutated_body_never_panics(
        mutations in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        if let Some(bytes) = real_state() {
            let mut body = body(bytes).to_vec();
            for (index, value) in mutations {
                let position = index.index(body.len());
                body[position] = value;
            }
            if let Ok(state) = decode(&with_body(&body)) {
                prop_assert!(encode(&state).is_ok());
            }
        }
    }

    /// Bytes that have nothing to do with a state.
    #[test]
    fn test_arbitrary_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..4096)) {
        prop_assert!(decode(&body).is_err());
        let _ = decode(&with_body(&body));
    }
}
