//! The agent's own service: identity, facts, template builds, events.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::utsname::uname;
use nix::time::{ClockId, clock_gettime};
use thaw_agent_api::agent::{ConfigureRequest, ConfigureResponse, InfoRequest, InfoResponse};
use thaw_agent_api::agent_ttrpc::Sandbox;
use ttrpc::asynchronous::TtrpcContext;

use crate::identity::Identity;
use crate::status::Refusal;

/// The service.
#[derive(Debug, Default)]
pub struct SandboxService {
    identity: Arc<Mutex<Identity>>,
}

#[async_trait]
impl Sandbox for SandboxService {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        self.identity
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .configure(&request)?;
        Ok(ConfigureResponse::new())
    }

    async fn info(&self, _: &TtrpcContext, _: InfoRequest) -> ttrpc::Result<InfoResponse> {
        let monotonic = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map_err(|error| Refusal::failed(format!("read the clock: {error}")))?;
        let kernel = uname().map_err(|error| Refusal::failed(format!("uname: {error}")))?;
        Ok(InfoResponse {
            agent_version: env!("CARGO_PKG_VERSION").into(),
            kernel_release: kernel.release().to_string_lossy().into_owned(),
            monotonic_ns: i64::try_from(Duration::from(monotonic).as_nanos()).unwrap_or(i64::MAX),
            nonce: self
                .identity
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .nonce()
                .to_vec(),
            ..Default::default()
        })
    }
}
