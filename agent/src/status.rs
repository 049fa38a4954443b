//! Errors as ttrpc statuses.

use ttrpc::Code;

/// A refusal: its gRPC code and one line for the user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What kind of refusal; containerd and its clients act on this.
    pub code: Code,
    /// What was refused and why.
    pub message: String,
}

impl Refusal {
    /// With any code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The request itself is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::INVALID_ARGUMENT, message)
    }

    /// Right request, wrong moment.
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(Code::FAILED_PRECONDITION, message)
    }

    /// No such thing.
    pub fn missing(message: impl Into<String>) -> Self {
        Self::new(Code::NOT_FOUND, message)
    }

    /// Something failed that has no code of its own.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Code::UNKNOWN, message)
    }
}

impl From<Refusal> for ttrpc::Error {
    fn from(refusal: Refusal) -> Self {
        ttrpc::Error::RpcStatus(ttrpc::get_status(refusal.code, refusal.message))
    }
}
