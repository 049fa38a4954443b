//! Stdio streams on their way from the host: connections that have said their id, and requests that
//! wait for one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thaw_agent_api::{StreamHeader, parse_stream_uri};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::warn;
use ttrpc::Code;

use crate::io::{Listener, Stream};
use crate::status::Refusal;

/// How long a request waits for its streams, and a connection may take to say its id.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many connections may wait for their request.
const WAITING_LIMIT: usize = 128;

/// The table.
#[derive(Debug, Default)]
pub struct StreamTable {
    table: Mutex<HashMap<u64, Slot>>,
}

#[derive(Debug)]
enum Slot {
    /// With what tells its task, by being dropped, that it has been taken.
    Connected {
        stream: Stream,
        _taken: oneshot::Sender<()>,
    },
    Wanted(oneshot::Sender<Stream>),
}

/// The streams of one process.
#[derive(Debug, Default)]
pub struct ProcessStreams {
    /// To the process.
    pub stdin: Option<Stream>,
    /// From the process; everything a terminal says.
    pub stdout: Option<Stream>,
    /// From the process, unless it has a terminal.
    pub stderr: Option<Stream>,
}

impl StreamTable {
    /// Takes connections until the end of the guest.
    pub async fn serve(self: Arc<Self>, listener: Listener) {
        loop {
            match listener.accept().await {
                Ok(stream) => drop(tokio::spawn(Arc::clone(&self).admit(stream))),
                Err(error) => {
                    // Out of descriptors or memory: nothing says when that is over.
                    warn!("accept a stream: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn admit(self: Arc<Self>, stream: Stream) {
        let mut header = [0; StreamHeader::LENGTH];
        match timeout(PATIENCE, stream.read_exact(&mut header)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return warn!("a stream without a header: {error}"),
            Err(_) => return warn!("a stream that does not say its id"),
        }
        match StreamHeader::decode(header) {
            Ok(header) => self.keep(header.id, stream).await,
            Err(error) => warn!("{error}"),
        }
    }

    /// Hands a stream to its request, or keeps it for one, but not for ever.
    async fn keep(&self, id: u64, stream: Stream) {
        let Some(taken) = self.connected(id, stream) else {
            return;
        };
        if timeout(PATIENCE, taken).await.is_err() {
            warn!("stream {id}: no request for it");
            self.lock().remove(&id);
        }
    }

    /// Returns what ends when somebody takes the stream, if it has to wait for that.
    fn connected(&self, id: u64, stream: Stream) -> Option<oneshot::Receiver<()>> {
        let mut table = self.lock();
        let waiting = table.len();
        match table.entry(id) {
            Entry::Occupied(entry) if matches!(entry.get(), Slot::Wanted(_)) => {
                if let Slot::Wanted(wanted) = entry.remove() {
                    // The request may have given up; its stream then closes.
                    let _ = wanted.send(stream);
                }
            }
            Entry::Occupied(_) => warn!("stream {id} connected twice"),
            Entry::Vacant(_) if waiting >= WAITING_LIMIT => {
                warn!("stream {id} refused: {WAITING_LIMIT} wait already");
            }
            Entry::Vacant(entry) => {
                let (sender, taken) = oneshot::channel();
                entry.insert(Slot::Connected {
                    stream,
                    _taken: sender,
                });
                return Some(taken);
            }
        }
        None
    }

    /// The streams that a request names by its three URIs.
    pub async fn take(
        &self,
        stdin: &str,
        stdout: &str,
        stderr: &str,
    ) -> Result<ProcessStreams, Refusal> {
        let ids = [("stdin", stdin), ("stdout", stdout), ("stderr", stderr)].map(|(field, uri)| {
            let id = parse_stream_uri(uri);
            id.map_err(|_| Refusal::invalid(format!("{field}: {uri:?} is not stream://ID")))
        });
        let [stdin, stdout, stderr] = ids;
        let (stdin, stdout, stderr) = (stdin?, stdout?, stderr?);
        Ok(ProcessStreams {
            stdin: self.take_one(stdin).await?,
            stdout: self.take_one(stdout).await?,
            stderr: self.take_one(stderr).await?,
        })
    }

    async fn take_one(&self, id: Option<u64>) -> Result<Option<Stream>, Refusal> {
        let Some(id) = id else { return Ok(None) };
        let receiver = {
            let mut table = self.lock();
            match table.remove(&id) {
                Some(Slot::Connected { stream, .. }) => return Ok(Some(stream)),
                Some(Slot::Wanted(other)) => {
                    table.insert(id, Slot::Wanted(other));
                    return Err(Refusal::invalid(format!("stream {id} is wanted twice")));
                }
                None => {
                    let (sender, receiver) = oneshot::channel();
                    table.insert(id, Slot::Wanted(sender));
                    receiver
                }
            }
        };
        match timeout(PATIENCE, receiver).await {
            Ok(Ok(stream)) => Ok(Some(stream)),
            _ => {
                self.lock().remove(&id);
                let message = format!("stream {id} was not connected within {PATIENCE:?}");
                Err(Refusal::new(Code::DEADLINE_EXCEEDED, message))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Slot>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use thaw_agent_api::stream_uri;

    use super::*;

    fn pair() -> (UnixStream, Stream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, Stream::new(theirs.into()).unwrap())
    }

    /// A connection as the host makes it, with some data behind the header.
    fn connect(table: &Arc<StreamTable>, bytes: &[u8]) -> UnixStream {
        let (mut host, stream) = pair();
        host.write_all(bytes).unwrap();
        tokio::spawn(Arc::clone(table).admit(stream));
        host
    }

    #[tokio::test]
    async fn test_stream_reaches_its_request_whichever_comes_first() {
        let table = Arc::new(StreamTable::default());
        let mut first = [StreamHeader { id: 1 }.encode().as_slice(), b"data"].concat();
        let _host = connect(&table, &first);
        tokio::task::yield_now().await;
        let uris = [stream_uri(1), stream_uri(2)];
        let (streams, _late) = tokio::join!(table.take(&uris[0], "", &uris[1]), async {
            first = StreamHeader { id: 2 }.encode().to_vec();
            connect(&table, &first)
        });
        let streams = streams.unwrap();
        let mut data = [0; 4];
        streams.stdin.unwrap().read_exact(&mut data).await.unwrap();
        assert_eq!(&data, b"data");
        assert!(streams.stdout.is_none() && streams.stderr.is_some());
        assert!(table.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn test_request_does_not_wait_for_ever() {
        let table = StreamTable::default();
        let refusal = table.take(&stream_uri(1), "", "").await.unwrap_err();
        assert_eq!(refusal.code, Code::DEADLINE_EXCEEDED);
        assert!(table.lock().is_empty());
    }

    #[tokio::test]
    async fn test_uri_that_names_no_stream_is_refused_with_its_field() {
        let refusal = StreamTable::default()
            .take("", "/run/fifo", "")
            .await
            .unwrap_err();
        assert_eq!(refusal.code, Code::INVALID_ARGUMENT);
        assert!(refusal.message.starts_with("stdout:"), "{refusal}");
    }

    #[tokio::test]
    async fn test_malformed_short_and_repeated_headers_change_nothing() {
        let table = Arc::new(StreamTable::default());
        let good = StreamHeader { id: 1 }.encode();
        drop(connect(&table, &good[..15]));
        let _bad = connect(&table, &[0; 16]);
        let _first = connect(&table, &good);
        let _second = connect(&table, &good);
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert_eq!(table.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn test_connection_without_a_request_is_dropped_in_the_end() {
        let table = StreamTable::default();
        table.keep(1, pair().1).await;
        assert!(table.lock().is_empty());
    }

    #[tokio::test]
    async fn test_connections_without_a_request_are_bounded() {
        let table = StreamTable::default();
        let _waiting: Vec<_> = (0..200).map(|id| table.connected(id, pair().1)).collect();
        assert_eq!(table.lock().len(), WAITING_LIMIT);
    }
}
