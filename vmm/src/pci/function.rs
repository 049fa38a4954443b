//! A virtio device as a PCI function: the transport of virtio 1.2, 4.1, over one BAR.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::common_config::{CommonConfig, CommonState, Written};
use super::config_space::{ConfigSpace, Effect};
use super::msix::{Msix, MsixState};
use super::router::InterruptRouter;
use super::{PciError, layout};
use crate::memory::LiveMemory;
use crate::virtio::{Activation, ActiveQueue, Device};

/// What a snapshot keeps of one function. Untrusted until [`Function::restore`] has taken it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FunctionState {
    device_type: u32,
    config_space: [u8; 4],
    msix: MsixState,
    common: CommonState,
    device: Vec<u8>,
}

/// One virtio device on the bus.
pub struct Function {
    device: Box<dyn Device>,
    config_space: ConfigSpace,
    common: CommonConfig,
    msix: Arc<Msix>,
    router: Arc<InterruptRouter>,
    memory: LiveMemory,
    bar: u64,
    /// Notification events by queue number while the device is active.
    notifications: Vec<(u16, EventFd)>,
    /// The queues of a device that is connected and not yet active.
    connected: Option<Vec<ActiveQueue>>,
    active: bool,
}

impl Function {
    /// `device` with its BAR 0 at guest physical address `bar`.
    pub fn new(
        device: Box<dyn Device>,
        bar: u64,
        router: Arc<InterruptRouter>,
        memory: LiveMemory,
    ) -> Result<Self, PciError> {
        let sizes = device.queue_sizes();
        if sizes.is_empty() || sizes.len() > layout::MAX_QUEUES {
            return Err(PciError::State("number of queues"));
        }
        let msix = Arc::new(Msix::new(router.clone(), sizes.len() as u16));
        let features = device.features() | 1 << VIRTIO_F_VERSION_1;
        Ok(Self {
            config_space: ConfigSpace::virtio(device.device_type(), msix.vectors(), bar as u32),
            common: CommonConfig::new(features, sizes),
            device,
            msix,
            router,
            memory,
            bar,
            notifications: Vec::new(),
            connected: None,
            active: false,
        })
    }

    /// Read configuration space.
    pub fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.config_space.read(offset, data);
    }

    /// Write configuration space.
    pub fn config_write(&mut self, offset: usize, data: &[u8]) {
        if let Effect::MsixControl(control) = self.config_space.write(offset, data) {
            self.msix.set_control(control);
        }
    }

    /// Read at `offset` of BAR 0. What does not exist reads as zero.
    pub fn bar_read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            layout::COMMON..layout::ISR => self.common.read(offset, data, &self.msix),
            layout::DEVICE..layout::NOTIFY => {
                self.device.read_config(offset - layout::DEVICE, data)
            }
            layout::MSIX_TABLE..layout::MSIX_PENDING => {
                read_words(offset - layout::MSIX_TABLE, data, |at| {
                    self.msix.read_table(at)
                });
            }
            layout::MSIX_PENDING..layout::BAR_SIZE => {
                read_words(offset - layout::MSIX_PENDING, data, |at| {
                    self.msix.read_pending(at)
                });
            }
            _ => {}
        }
    }

    /// Write at `offset` of BAR 0. What does not exist is ignored.
    pub fn bar_write(&mut self, offset: u64, data: &[u8]) {
        match offset {
            layout::COMMON..layout::ISR => self.common_write(offset, data),
            layout::DEVICE..layout::NOTIFY => {
                self.device.write_config(offset - layout::DEVICE, data)
            }
            layout::NOTIFY..layout::MSIX_TABLE => self.notify(offset - layout::NOTIFY),
            layout::MSIX_TABLE..layout::MSIX_PENDING => {
                for (at, word) in (offset - layout::MSIX_TABLE..)
                    .step_by(4)
                    .zip(data.chunks_exact(4))
                {
                    let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    self.msix.write_table(at, word);
                }
            }
            _ => {}
        }
    }

    fn common_write(&mut self, offset: u64, data: &[u8]) {
        match self.common.write(offset, data, &self.msix) {
            Written::Nothing => {}
            Written::Reset => self.reset(),
            Written::DriverOk => {
                if let Err(error) = self.activate() {
                    let device = self.device.device_type();
                    tracing::warn!(?device, %error, "the driver's set-up cannot be used");
                    self.common.status |= VIRTIO_CONFIG_S_NEEDS_RESET as u8;
                }
            }
        }
    }

    /// A notification that did not go to an event descriptor by itself.
    fn notify(&self, offset: u64) {
        let queue = offset / layout::NOTIFY_STRIDE;
        if let Some((_, event)) = self
            .notifications
            .iter()
            .find(|(n, _)| u64::from(*n) == queue)
        {
            // Nonblocking: a full counter is a notification already.
            let _ = event.write(1);
        }
    }

    fn reset(&mut self) {
        self.deactivate();
        self.common.reset(self.device.queue_sizes());
        self.msix.reset_vectors();
    }

    /// Start the device if its driver is ready and there is something behind it.
    pub fn activate(&mut self) -> Result<(), PciError> {
        self.connect()?;
        self.start()
    }

    /// The first half of [`Function::activate`]: wire notifications and interrupts. What the driver
    /// notifies from now on waits for the device.
    pub fn connect(&mut self) -> Result<(), PciError> {
        let ready = u32::from(self.common.status) & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        let connected = self.active || self.connected.is_some();
        if connected || !ready || !self.device.has_backing() {
            return Ok(());
        }
        let queues = self.active_queues()?;
        self.msix.connect()?;
        for queue in &queues {
            let event = queue
                .notify
                .try_clone()
                .map_err(PciError::system("copying an event"))?;
            self.router
                .wiring()
                .assign_notification(&event, self.notify_address(queue.index))
                .map_err(PciError::system("connecting a notification"))?;
            self.notifications.push((queue.index, event));
        }
        self.connected = Some(queues);
        Ok(())
    }

    /// The second half of [`Function::activate`]: start the device, if it is connected.
    pub fn start(&mut self) -> Result<(), PciError> {
        let Some(queues) = self.connected.take() else {
            return Ok(());
        };
        let activation = Activation {
            memory: self.memory.view(),
            queues,
            interrupt: self.msix.clone(),
            features: self.common.driver_features,
        };
        self.device.activate(activation).map_err(PciError::Device)?;
        self.active = true;
        Ok(())
    }

    /// The queues that the driver has enabled, checked against guest memory.
    fn active_queues(&self) -> Result<Vec<ActiveQueue>, PciError> {
        let event_idx = self.common.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let memory = self.memory.view();
        let mut active = Vec::new();
        for (index, state) in (0..).zip(&self.common.queues) {
            if !state.ready {
                continue;
            }
            let mut queue = Queue::try_from(*state).map_err(|_| PciError::Queue(index))?;
            queue.set_event_idx(event_idx);
            if !queue.is_valid(&*memory) {
                return Err(PciError::Queue(index));
            }
            let notify = EventFd::new(EFD_NONBLOCK).map_err(PciError::system("making an event"))?;
            active.push(ActiveQueue {
                index,
                queue,
                notify,
            });
        }
        Ok(active)
    }

    fn notify_address(&self, queue: u16) -> u64 {
        self.bar + layout::NOTIFY + u64::from(queue) * layout::NOTIFY_STRIDE
    }

    /// Stop the device; the indices of its queues are kept. Harmless when it is not active.
    pub fn deactivate(&mut self) {
        for active in self.device.deactivate() {
            if let Some(state) = self.common.queues.get_mut(usize::from(active.index)) {
                *state = active.queue.state();
            }
        }
        for (queue, event) in std::mem::take(&mut self.notifications) {
            // Closing the descriptor, which follows, releases it just as well.
            let _ = self
                .router
                .wiring()
                .release_notification(&event, self.notify_address(queue));
        }
        self.msix.disconnect();
        self.connected = None;
        self.active = false;
    }

    /// What a snapshot keeps. The device must not be active.
    pub fn save(&self) -> Result<FunctionState, PciError> {
        Ok(FunctionState {
            device_type: self.device.device_type() as u32,
            config_space: self.config_space.save(),
            msix: self.msix.save(),
            common: self.common.save(),
            device: self.device.save().map_err(PciError::Device)?,
        })
    }

    /// Take back what a snapshot kept; the device is not active afterwards. Refused when it is not
    /// of a function like this.
    pub fn restore(&mut self, state: FunctionState) -> Result<(), PciError> {
        if state.device_type != self.device.device_type() as u32 {
            return Err(PciError::State("device type"));
        }
        self.msix.restore(state.msix)?;
        self.config_space
            .restore(state.config_space, self.msix.control());
        self.common
            .restore(state.common, self.device.queue_sizes())?;
        if u32::from(self.common.status) & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            self.common.driver_features = 0;
        }
        self.device
            .restore(&state.device)
            .map_err(PciError::Device)?;
        // Rings out of the guest's memory are found now, not when the guest runs.
        self.active_queues().map(|_| ())
    }

    /// The interrupt routes that the guest has set up.
    pub fn msix(&self) -> &Msix {
        &self.msix
    }
}

/// Aligned four-byte registers, read in any multiple of four bytes.
fn read_words(offset: u64, data: &mut [u8], register: impl Fn(u64) -> u32) {
    for (at, word) in (offset..).step_by(4).zip(data.chunks_exact_mut(4)) {
        word.copy_from_slice(&register(at).to_le_bytes());
    }
}
