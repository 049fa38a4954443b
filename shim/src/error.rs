//! Errors of the task service, each with the code that containerd acts on.

use thiserror::Error;
use ttrpc::{Code, get_status};

/// Why a call of the task service failed. The text is what a user reads.
#[derive(Debug, Clone, Error)]
pub enum TaskError {
    /// No such container or exec, or it has ended.
    #[error("{0}")]
    NotFound(String),
    /// The id is taken.
    #[error("{0}")]
    AlreadyExists(String),
    /// Not in this state.
    #[error("{0}")]
    FailedPrecondition(String),
    /// Asked for something that makes no sense or is not supported.
    #[error("{0}")]
    InvalidArgument(String),
    /// Not done by this runtime.
    #[error("{0}")]
    Unimplemented(String),
    /// The guest is gone or does not answer.
    #[error("{0}")]
    Unavailable(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl TaskError {
    /// The kind of error in one word, as the counters have it.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not_found",
            Self::AlreadyExists(_) => "already_exists",
            Self::FailedPrecondition(_) => "failed_precondition",
            Self::InvalidArgument(_) => "invalid_argument",
            Self::Unimplemented(_) => "unimplemented",
            Self::Unavailable(_) => "unavailable",
            Self::Failed(_) => "failed",
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NOT_FOUND,
            Self::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Self::FailedPrecondition(_) => Code::FAILED_PRECONDITION,
            Self::InvalidArgument(_) => Code::INVALID_ARGUMENT,
            Self::Unimplemented(_) => Code::UNIMPLEMENTED,
            Self::Unavailable(_) => Code::UNAVAILABLE,
            Self::Failed(_) => Code::UNKNOWN,
        }
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        Self::RpcStatus(get_status(error.code(), error))
    }
}

/// What the agent answered: its own words and code. The texts matter to others (an exit status of
/// 126 or 127 is chosen by them), so nothing is put before them.
impl From<ttrpc::Error> for TaskError {
    fn from(error: ttrpc::Error) -> Self {
        let status = match error {
            ttrpc::Error::RpcStatus(status) => status,
            other => {
                return Self::Unavailable(format!("the guest's agent does not answer: {other}"));
            }
        };
        let code = status.code.enum_value_or_default();
        let text = status.message;
        match code {
            Code::NOT_FOUND => Self::NotFound(text),
            Code::ALREADY_EXISTS => Self::AlreadyExists(text),
            Code::FAILED_PRECONDITION => Self::FailedPrecondition(text),
            Code::INVALID_ARGUMENT => Self::InvalidArgument(text),
            Code::UNIMPLEMENTED => Self::Unimplemented(text),
            Code::DEADLINE_EXCEEDED => {
                Self::Unavailable(format!("the guest's agent did not answer in time: {text}"))
            }
            _ => Self::Failed(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_agent_s_code_and_words_pass_through() {
        let text = "exec: \"nope\": executable file not found in $PATH";
        let agent = ttrpc::Error::RpcStatus(get_status(Code::NOT_FOUND, text));
        let error = TaskError::from(agent.clone());
        assert_eq!(error.to_string(), text);
        assert_eq!(ttrpc::Error::from(error), agent);
    }

    #[test]
    fn test_a_closed_connection_is_unavailable() {
        let error = TaskError::from(ttrpc::Error::RemoteClosed);
        assert!(matches!(error, TaskError::Unavailable(_)), "{error:?}");
    }
}
