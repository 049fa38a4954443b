//! The bus as a driver sees it, over a device and a KVM that only write down what is asked.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::virtio::{Activation, ActiveQueue, DeviceType};

#[derive(Default)]
struct Recorder {
    routes: Mutex<BTreeMap<u32, MsiRoute>>,
    interrupts: Mutex<BTreeMap<u32, EventFd>>,
    notifications: Mutex<BTreeMap<u64, EventFd>>,
}

impl Wiring for Recorder {
    fn set_routes(&self, routes: &BTreeMap<u32, MsiRoute>) -> io::Result<()> {
        *self.routes.lock().unwrap() = routes.clone();
        Ok(())
    }
    fn assign_interrupt(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        self.interrupts
            .lock()
            .unwrap()
            .insert(gsi, event.try_clone()?);
        Ok(())
    }
    fn release_interrupt(&self, _: &EventFd, gsi: u32) -> io::Result<()> {
        self.interrupts.lock().unwrap().remove(&gsi);
        Ok(())
    }
    fn assign_notification(&self, event: &EventFd, address: u64) -> io::Result<()> {
        self.notifications
            .lock()
            .unwrap()
            .insert(address, event.try_clone()?);
        Ok(())
    }
    fn release_notification(&self, _: &EventFd, address: u64) -> io::Result<()> {
        self.notifications.lock().unwrap().remove(&address);
        Ok(())
    }
}

/// A device of two queues that does nothing; what it was given is visible to the test.
#[derive(Clone, Default)]
struct Idle {
    activation: Arc<Mutex<Option<Activation>>>,
    without_backing: bool,
}

impl Device for Idle {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }
    fn queue_sizes(&self) -> &[u16] {
        &[64, 16]
    }
    fn features(&self) -> u64 {
        1 << 29
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(offset as u8);
    }
    fn has_backing(&self) -> bool {
        !self.without_backing
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        *self.activation.lock().unwrap() = Some(activation);
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.activation
            .lock()
            .unwrap()
            .take()
            .map(|active| active.queues)
            .unwrap_or_default()
    }
    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(vec![7])
    }
    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        if state == [7] {
            Ok(())
        } else {
            Err(DeviceError::State("not mine".into()))
        }
    }
}

/// Guest memory of the tests: 1 MiB, in which rings fit anywhere below.
const MEMORY: usize = 1 << 20;
/// BAR 0 of the first function.
const BAR: u64 = PCI_WINDOW + layout::BAR_SIZE;

fn bus(device: Idle) -> (PciRoot, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let mut root = PciRoot::new(
        Arc::new(InterruptRouter::new(recorder.clone())),
        LiveMemory::new(memory),
    );
    root.add(Box::new(device)).unwrap();
    (root, recorder)
}

fn config(root: &mut PciRoot, device: u32, register: u32) -> u32 {
    let address = ADDRESS_ENABLE | device << 11 | register & 0xfc;
    root.port_write(CONFIG_PORT, &address.to_le_bytes());
    let mut data = [0; 4];
    root.port_read(CONFIG_PORT + 4, &mut data);
    u32::from_le_bytes(data)
}

fn set_config(root: &mut PciRoot, device: u32, register: u32, value: u32) {
    let address = ADDRESS_ENABLE | device << 11 | register & 0xfc;
    root.port_write(CONFIG_PORT, &address.to_le_bytes());
    root.port_write(CONFIG_PORT + 4, &value.to_le_bytes());
}

fn read(root: &mut PciRoot, offset: u64) -> u32 {
    let mut data = [0; 4];
    root.window_read(BAR + offset, &mut data);
    u32::from_le_bytes(data)
}

fn write16(root: &mut PciRoot, offset: u64, value: u16) {
    root.window_write(BAR + offset, &value.to_le_bytes());
}

fn write32(root: &mut PciRoot, offset: u64, value: u32) {
    root.window_write(BAR + offset, &value.to_le_bytes());
}

/// What a Linux driver does before DRIVER_OK, for queue 0 with vector 1 and rings from `ring`.
fn set_up(root: &mut PciRoot, ring: u32) {
    for status in [1, 3] {
        root.window_write(BAR + 0x14, &[status]);
    }
    for (select, word) in [(0, 0), (1, 1)] {
        write32(root, 0x08, select);
        write32(root, 0x0c, word);
    }
    root.window_write(BAR + 0x14, &[0x0b]);
    write16(root, 0x16, 0);
    write16(root, 0x1a, 1);
    for (register, address) in [(0x20, ring), (0x28, ring + 0x1000), (0x30, ring + 0x2000)] {
        write32(root, register, address);
    }
    write16(root, 0x1c, 1);
    // Vector 1 to LAPIC 0, vector number 0x41, then MSI-X on.
    for (register, value) in [(0, 0xfee0_0000), (4, 0), (8, 0x41), (12, 0)] {
        write32(root, layout::MSIX_TABLE + 16 + register, value);
    }
    let msix = msix_capability(root);
    let control = config(root, 1, msix);
    set_config(root, 1, msix, control | 1 << 31);
}

fn msix_capability(root: &mut PciRoot) -> u32 {
    let mut at = config(root, 1, 0x34) & 0xff;
    while config(root, 1, at) & 0xff != 0x11 {
        at = config(root, 1, at) >> 8 & 0xff;
        assert_ne!(at, 0, "a function has an MSI-X capability");
    }
    at
}

fn driver_ok(root: &mut PciRoot) {
    root.window_write(BAR + 0x14, &[0x0f]);
}

#[test]
fn test_scan_finds_bridge_and_function() {
    let (mut root, _) = bus(Idle::default());
    assert_eq!(config(&mut root, 0, 8) >> 16, 0x0600);
    assert_eq!(config(&mut root, 1, 0), 0x1042_1af4);
    assert_eq!(config(&mut root, 2, 0), 0xffff_ffff);
}

#[test]
fn test_bar_answers_its_size_and_does_not_move() {
    let (mut root, _) = bus(Idle::default());
    set_config(&mut root, 1, 0x10, 0xffff_ffff);
    assert_eq!(config(&mut root, 1, 0x10), !(layout::BAR_SIZE as u32 - 1));
    set_config(&mut root, 1, 0x10, 0x1000_0000);
    assert_eq!(u64::from(config(&mut root, 1, 0x10)), BAR);
}

#[test]
fn test_driver_ok_activates_and_interrupts_arrive() {
    let device = Idle::default();
    let (mut root, recorder) = bus(device.clone());
    set_up(&mut root, 0);
    driver_ok(&mut root);
    let activation = device.activation.lock().unwrap();
    let activation = activation.as_ref().expect("the device is active");
    assert_eq!(activation.queues.len(), 1);
    activation.interrupt.queue(0);
    let gsi = 25;
    assert_eq!(
        recorder.routes.lock().unwrap()[&gsi],
        MsiRoute {
            address: 0xfee0_0000,
            data: 0x41
        }
    );
    assert_eq!(recorder.interrupts.lock().unwrap()[&gsi].read().unwrap(), 1);
    let notify = recorder.notifications.lock().unwrap();
    assert!(notify.contains_key(&(BAR + layout::NOTIFY)));
}

#[test]
fn test_masked_vector_is_pending_until_unmasked() {
    let device = Idle::default();
    let (mut root, recorder) = bus(device.clone());
    set_up(&mut root, 0);
    driver_ok(&mut root);
    write32(&mut root, layout::MSIX_TABLE + 16 + 12, 1);
    device
        .activation
        .lock()
        .unwrap()
        .as_ref()
        .unwrap()
        .interrupt
        .queue(0);
    assert_eq!(read(&mut root, layout::MSIX_PENDING), 1 << 1);
    assert!(recorder.interrupts.lock().unwrap()[&25].read().is_err());
    write32(&mut root, layout::MSIX_TABLE + 16 + 12, 0);
    assert_eq!(read(&mut root, layout::MSIX_PENDING), 0);
    assert_eq!(recorder.interrupts.lock().unwrap()[&25].read().unwrap(), 1);
}

#[test]
fn test_reset_takes_everything_back() {
    let device = Idle::default();
    let (mut root, recorder) = bus(device.clone());
    set_up(&mut root, 0);
    driver_ok(&mut root);
    root.window_write(BAR + 0x14, &[0]);
    assert!(device.activation.lock().unwrap().is_none());
    assert!(recorder.interrupts.lock().unwrap().is_empty());
    assert!(recorder.notifications.lock().unwrap().is_empty());
    assert_eq!(read(&mut root, 0x14) & 0xff, 0);
}

#[test]
fn test_rings_outside_of_memory_need_reset() {
    let device = Idle::default();
    let (mut root, _) = bus(device.clone());
    set_up(&mut root, MEMORY as u32);
    driver_ok(&mut root);
    assert!(device.activation.lock().unwrap().is_none());
    assert_eq!(read(&mut root, 0x14) & 0x40, 0x40);
}

#[test]
fn test_features_not_offered_are_not_ok() {
    let (mut root, _) = bus(Idle::default());
    root.window_write(BAR + 0x14, &[3]);
    for (select, word) in [(0, 1), (1, 1)] {
        write32(&mut root, 0x08, select);
        write32(&mut root, 0x0c, word);
    }
    root.window_write(BAR + 0x14, &[0x0b]);
    assert_eq!(read(&mut root, 0x14) & 0x08, 0);
}

#[test]
fn test_slot_without_backing_registers_nothing() {
    let device = Idle {
        without_backing: true,
        ..Default::default()
    };
    let (mut root, recorder) = bus(device.clone());
    set_up(&mut root, 0);
    driver_ok(&mut root);
    assert!(device.activation.lock().unwrap().is_none());
    assert!(recorder.interrupts.lock().unwrap().is_empty());
    assert!(recorder.notifications.lock().unwrap().is_empty());
}

#[test]
fn test_restored_function_activates_with_its_queues_and_routes() {
    let slot = Idle {
        without_backing: true,
        ..Default::default()
    };
    let (mut template, _) = bus(slot);
    set_up(&mut template, 0x4000);
    driver_ok(&mut template);
    let state = template.save().unwrap();

    let device = Idle::default();
    let (mut clone, recorder) = bus(device.clone());
    clone.restore(state).unwrap();
    assert!(
        recorder.routes.lock().unwrap().is_empty(),
        "KVM hears of routes once, in activate"
    );
    clone.activate().unwrap();
    let activation = device.activation.lock().unwrap();
    let queue = &activation.as_ref().unwrap().queues[0].queue;
    assert_eq!(virtio_queue::QueueT::desc_table(queue), 0x4000);
    assert_eq!(recorder.routes.lock().unwrap()[&25].data, 0x41);
}

/// A restored function whose device has backing now, and what watches it.
fn restored() -> (PciRoot, Arc<Recorder>, Idle) {
    let slot = Idle {
        without_backing: true,
        ..Default::default()
    };
    let (mut template, _) = bus(slot);
    set_up(&mut template, 0x4000);
    driver_ok(&mut template);
    let device = Idle::default();
    let (mut clone, recorder) = bus(device.clone());
    clone.restore(template.save().unwrap()).unwrap();
    (clone, recorder, device)
}

#[test]
fn test_a_notification_between_connect_and_start_waits_for_the_device() {
    let (mut clone, recorder, device) = restored();
    clone.connect().unwrap();
    assert!(device.activation.lock().unwrap().is_none());
    let notifications = recorder.notifications.lock().unwrap();
    notifications[&(BAR + layout::NOTIFY)].write(1).unwrap();
    clone.start().unwrap();
    let activation = device.activation.lock().unwrap();
    let queue = &activation.as_ref().unwrap().queues[0];
    assert_eq!(queue.notify.read().unwrap(), 1);
}

#[test]
fn test_a_reset_between_connect_and_start_leaves_nothing_to_start() {
    let (mut clone, recorder, device) = restored();
    clone.connect().unwrap();
    clone.window_write(BAR + 0x14, &[0]);
    clone.start().unwrap();
    assert!(device.activation.lock().unwrap().is_none());
    assert!(recorder.notifications.lock().unwrap().is_empty());
}

#[test]
fn test_restore_refuses_what_does_not_fit() {
    let (mut template, _) = bus(Idle::default());
    set_up(&mut template, 0);
    let good = template.save().unwrap();
    let refused = |change: fn(&mut serde_json::Value)| {
        let mut value = serde_json::to_value(&good).unwrap();
        change(&mut value);
        let state = serde_json::from_value(value).unwrap();
        bus(Idle::default())
            .0
            .restore(state)
            .expect_err("must be refused");
    };
    refused(|state| state["functions"] = serde_json::json!([]));
    refused(|state| state["functions"][0]["device_type"] = 19.into());
    refused(|state| state["functions"][0]["common"]["queues"][0]["size"] = 3.into());
    refused(|state| state["functions"][0]["common"]["queues"][0]["size"] = 128.into());
    refused(|state| state["functions"][0]["common"]["queues"][0]["used_ring"] = u64::MAX.into());
    refused(|state| state["functions"][0]["common"]["driver_features"] = u64::MAX.into());
    refused(|state| state["functions"][0]["msix"]["config_vector"] = 3.into());
    refused(|state| state["functions"][0]["msix"]["entries"] = serde_json::json!([]));
    refused(|state| state["functions"][0]["device"] = serde_json::json!([8]));
}

proptest! {
    /// Whatever a guest does to ports and window, nothing panics and the bus still answers.
    #[test]
    fn test_any_access_is_survived(accesses in prop::collection::vec(
        (any::<bool>(), any::<bool>(), 0u64..0x2_0000, any::<u64>(), prop::sample::select(vec![1usize, 2, 4, 8])),
        1..200,
    )) {
        let (mut root, _) = bus(Idle::default());
        set_up(&mut root, 0);
        driver_ok(&mut root);
        for (port, store, place, value, length) in accesses {
            let mut data = value.to_le_bytes();
            let data = &mut data[..length];
            let number = CONFIG_PORT + (place % u64::from(CONFIG_PORTS)) as u16;
            match (port, store) {
                (true, true) => root.port_write(number, data),
                (true, false) => root.port_read(number, data),
                (false, true) => root.window_write(PCI_WINDOW + place, data),
                (false, false) => root.window_read(PCI_WINDOW + place, data),
            }
        }
        prop_assert_eq!(config(&mut root, 1, 0), 0x1042_1af4);
    }
}
