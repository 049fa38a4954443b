//! The agent's own service: identity, facts, template builds, events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::utsname::uname;
use nix::time::{ClockId, clock_gettime};
use thaw_agent_api::agent::{
    ConfigureRequest, ConfigureResponse, Event, EventsRequest, InfoRequest, InfoResponse,
    MemoryWanted, OutOfMemory, PluggableMemoryRequest, PluggableMemoryResponse, QuiesceRequest,
    QuiesceResponse,
};
use thaw_agent_api::agent_ttrpc::Sandbox;
use tokio::sync::broadcast::error::RecvError;
use ttrpc::asynchronous::{ServerStreamSender, TtrpcContext};

use crate::engine::Engine;
use crate::identity::Identity;
use crate::memory::MemoryWatch;
use crate::status::Refusal;
use crate::warm::{give_memory_back, warm_up};

/// The service.
#[derive(Debug)]
pub struct SandboxService {
    identity: Mutex<Identity>,
    engine: Arc<Engine>,
    memory: Arc<MemoryWatch>,
    /// Whether all of this machine is ours.
    is_guest: bool,
}

impl SandboxService {
    /// Not configured yet. `is_guest` is false where the agent runs for tests, on a machine that is
    /// not its own.
    pub fn new(engine: Arc<Engine>, memory: Arc<MemoryWatch>, is_guest: bool) -> Self {
        Self {
            identity: Mutex::default(),
            engine,
            memory,
            is_guest,
        }
    }

    fn allow_growth(&self, bytes: u64) -> Result<(), Refusal> {
        let allowed = self.memory.allow_growth(bytes);
        allowed.map_err(|error| Refusal::failed(format!("let the memory grow: {error}")))
    }

    fn identity(&self) -> MutexGuard<'_, Identity> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Sandbox for SandboxService {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        let disks = {
            let mut identity = self.identity();
            identity.configure(&request)?;
            identity.disks().to_vec()
        };
        self.allow_growth(request.pluggable_memory_bytes)?;
        Ok(ConfigureResponse {
            disks,
            ..Default::default()
        })
    }

    async fn info(&self, _: &TtrpcContext, _: InfoRequest) -> ttrpc::Result<InfoResponse> {
        let monotonic = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map_err(|error| Refusal::failed(format!("read the clock: {error}")))?;
        let kernel = uname().map_err(|error| Refusal::failed(format!("uname: {error}")))?;
        Ok(InfoResponse {
            agent_version: env!("CARGO_PKG_VERSION").into(),
            kernel_release: kernel.release().to_string_lossy().into_owned(),
            monotonic_ns: i64::try_from(Duration::from(monotonic).as_nanos()).unwrap_or(i64::MAX),
            nonce: self.identity().nonce().to_vec(),
            ..Default::default()
        })
    }

    async fn quiesce(&self, _: &TtrpcContext, _: QuiesceRequest) -> ttrpc::Result<QuiesceResponse> {
        warm_up(&self.engine).await?;
        self.engine.prepare()?;
        if self.is_guest {
            give_memory_back()
                .map_err(|error| Refusal::failed(format!("give memory back: {error}")))?;
        }
        Ok(QuiesceResponse::new())
    }

    async fn pluggable_memory(
        &self,
        _: &TtrpcContext,
        request: PluggableMemoryRequest,
    ) -> ttrpc::Result<PluggableMemoryResponse> {
        self.allow_growth(request.bytes)?;
        Ok(PluggableMemoryResponse::new())
    }

    async fn events(
        &self,
        _: &TtrpcContext,
        _: EventsRequest,
        stream: ServerStreamSender<Event>,
    ) -> ttrpc::Result<()> {
        let mut kills = self.memory.subscribe();
        let mut wanted = self.memory.growth().subscribe();
        loop {
            let mut event = Event::new();
            tokio::select! {
                kill = kills.recv() => match kill {
                    Ok(container_id) => event.set_out_of_memory(OutOfMemory {
                        container_id,
                        ..Default::default()
                    }),
                    Err(RecvError::Lagged(_)) => continue,
                    Err(RecvError::Closed) => return Ok(()),
                },
                changed = wanted.changed() => match changed {
                    Ok(()) => event.set_memory_wanted(MemoryWanted {
                        bytes: *wanted.borrow_and_update(),
                        ..Default::default()
                    }),
                    Err(_) => return Ok(()),
                },
            }
            stream.send(&event).await?;
        }
    }
}
