//! What an error of a list or a watch means.

use super::list::ListError;
use super::outage::Failure;
use ::kube::core::Status;
use std::time::Duration;

/// Why a watch does not work.
#[derive(Debug)]
pub(super) enum WatchError {
    /// It could not be started.
    Start(::kube::Error),
    /// It broke.
    Broken(::kube::Error),
    /// The server says in the stream why it does not go on.
    Event(Box<Status>),
    /// An object without a position.
    NoVersion,
}

#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// For the operator; `None` if it is no outage (yet).
    pub failure: Option<Failure>,
    /// The position is too old (410).
    pub expired: bool,
    /// The server answered with an error.
    pub refused: bool,
    /// The server does not know the kind or keeps it from us.
    pub absent: bool,
    /// The answer cannot be decoded.
    pub undecodable: bool,
    /// How long the server wants us to wait.
    pub retry_after: Duration,
}

impl From<&ListError> for Trouble {
    fn from(error: &ListError) -> Self {
        match error {
            ListError::Refused(status) => Self::refused(status),
            ListError::Unreachable(why) => Self { failure: Some(Failure::Unreachable(why.clone())), ..Self::default() },
            ListError::Unreadable(why) => {
                Self { failure: Some(Failure::Unreadable(why.clone())), undecodable: true, ..Self::default() }
            }
        }
    }
}

impl From<&WatchError> for Trouble {
    fn from(error: &WatchError) -> Self {
        use ::kube::Error;
        let (error, connected) = match error {
            WatchError::Start(error) => (error, false),
            // The connection worked until now. If it cannot be made again, that is the news.
            WatchError::Broken(error) => (error, true),
            WatchError::Event(status) => return Self::refused(status),
            WatchError::NoVersion => return Self { undecodable: true, ..Self::default() },
        };
        match error {
            // kube 5 `Client::request_events` reads a line that is no event as a Status, of which every field may be missing.
            Error::Api(status) if connected && status.code == 0 => Self { undecodable: true, ..Self::default() },
            Error::Api(status) => Self::refused(status),
            Error::SerdeError(_) => Self { undecodable: true, ..Self::default() },
            _ if connected => Self::default(),
            error => Self { failure: Some(Failure::Unreachable(root_cause(error))), ..Self::default() },
        }
    }
}

impl Trouble {
    fn refused(status: &Status) -> Self {
        let expired = status.code == 410;
        let message = if status.message.is_empty() { status.reason.clone() } else { status.message.clone() };
        let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        Self {
            failure: (!expired).then_some(Failure::Refused(status.code, message)),
            expired,
            refused: !matches!(status.code, 401 | 403 | 429),
            absent: matches!(status.code, 403 | 404),
            undecodable: false,
            retry_after: Duration::from_secs(retry_after.into()),
        }
    }
}

/// The last of the chain of causes says most: `connection refused`, not `client error`.
pub(super) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
