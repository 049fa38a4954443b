//! Events for containerd, in the order in which they happened: over its ttrpc socket
//! (`TTRPC_ADDRESS`), or through the program that it names (`-publish-binary`) where it has none.
//!
//! One task sends them one after the other. While containerd does not answer, which is what a
//! restart of it looks like, the first one waits and the others wait behind it, so that an exit
//! never overtakes its start. An event may arrive twice when an answer was lost; it is never lost
//! while the shim lives.

mod program;

use std::time::{Duration, SystemTime};

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::EventsClient;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error};
use ttrpc::asynchronous::{Client, transport::Socket};

pub use program::PublishProgram;

/// Most events that wait. More than containerd can cause while it is away.
const QUEUE: usize = 2048;

/// How long one event may take before it is sent again on a new connection.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// First and longest time between two attempts to reach containerd.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Takes events and sends them in the background.
#[derive(Debug, Clone)]
pub struct Publisher {
    namespace: String,
    queue: mpsc::Sender<Item>,
}

/// How events get to containerd.
#[derive(Debug)]
pub enum Route {
    /// Over the ttrpc socket at this path.
    Socket(String),
    /// By executing its program.
    Program(PublishProgram),
    /// Not at all: they are logged.
    Nowhere,
}

impl Route {
    /// Over the socket at `address`, a path with or without `unix://`; nowhere without one.
    pub fn to_socket(address: Option<&str>) -> Self {
        match address.map(|a| a.strip_prefix("unix://").unwrap_or(a)) {
            Some(path) if !path.is_empty() => Self::Socket(path.to_owned()),
            _ => Self::Nowhere,
        }
    }
}

#[derive(Debug)]
enum Item {
    Event(Box<Envelope>),
    Flush(oneshot::Sender<()>),
}

impl Publisher {
    /// A publisher of the events of `namespace`.
    pub fn new(namespace: &str, route: Route) -> Self {
        let (queue, items) = mpsc::channel(QUEUE);
        tokio::spawn(send_all(route, items));
        Self {
            namespace: namespace.to_owned(),
            queue,
        }
    }

    /// Queue `event` under `topic`. Its place in the order is taken when this returns.
    pub fn publish<Event: Message>(&self, topic: &str, event: &Event) {
        let value = match event.write_to_bytes() {
            Ok(value) => value,
            Err(error) => return error!(topic, %error, "encoding an event"),
        };
        let mut envelope = Envelope::new();
        envelope.timestamp = Some(SystemTime::now().into()).into();
        envelope.namespace.clone_from(&self.namespace);
        envelope.topic = topic.to_owned();
        // All of them are of this package. Asking the message itself for its full name would build
        // the descriptors of all messages, half a megabyte of them.
        let type_url = format!("containerd.events.{}", Event::NAME);
        envelope.event = Some(Any {
            type_url,
            value,
            ..Any::default()
        })
        .into();
        if self
            .queue
            .try_send(Item::Event(Box::new(envelope)))
            .is_err()
        {
            error!(
                topic,
                "an event is lost: {QUEUE} are waiting for containerd"
            );
        }
    }

    /// Wait until all that was queued has been sent, for at most `limit`.
    pub async fn flush(&self, limit: Duration) {
        let (done, flushed) = oneshot::channel();
        let sent = async {
            if self.queue.send(Item::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        if tokio::time::timeout(limit, sent).await.is_err() {
            error!("containerd did not take the last events within {limit:?}");
        }
    }
}

async fn send_all(route: Route, mut items: mpsc::Receiver<Item>) {
    let mut client = None;
    while let Some(item) = items.recv().await {
        match item {
            Item::Event(envelope) => match &route {
                Route::Socket(path) => send(path, &mut client, *envelope).await,
                Route::Program(program) => execute(program, &envelope).await,
                Route::Nowhere => debug!(topic = envelope.topic, "an event that nobody takes"),
            },
            // Nobody waits any more where this fails.
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

/// Send one event, for as long as it takes.
async fn send(path: &str, client: &mut Option<EventsClient>, envelope: Envelope) {
    let request = ForwardRequest {
        envelope: Some(envelope).into(),
        ..Default::default()
    };
    let mut pause = Pause::default();
    loop {
        let result = match client {
            Some(client) => {
                let context = ttrpc::context::with_duration(SEND_LIMIT);
                client.forward(context, &request).await.map(drop)
            }
            None => match UnixStream::connect(path).await {
                Ok(stream) => {
                    *client = Some(EventsClient::new(Client::new(Socket::new(stream))));
                    continue;
                }
                Err(error) => Err(ttrpc::Error::Socket(error.to_string())),
            },
        };
        match result {
            Ok(()) => return,
            // containerd has it and refuses it: another attempt would be refused as well.
            Err(ttrpc::Error::RpcStatus(status)) if !is_passing(&status) => {
                return error!(
                    topic = request.envelope.topic,
                    ?status,
                    "containerd refused an event"
                );
            }
            Err(error) => {
                debug!(%error, "containerd does not take events now");
                *client = None;
                pause.wait().await;
            }
        }
    }
}

/// Have one event published by containerd's program, for as long as it takes: it fails while
/// containerd is away.
async fn execute(program: &PublishProgram, envelope: &Envelope) {
    let mut pause = Pause::default();
    while let Err(error) = program.publish(envelope).await {
        debug!(%error, "containerd does not take events now");
        pause.wait().await;
    }
}

/// The time between two attempts, longer each time: nothing announces that containerd is back.
struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(RETRY.0)
    }
}

impl Pause {
    async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(RETRY.1);
    }
}

/// Whether a refusal may be none the next time.
fn is_passing(status: &ttrpc::Status) -> bool {
    use ttrpc::Code;
    matches!(
        status.code.enum_value_or_default(),
        Code::UNAVAILABLE | Code::DEADLINE_EXCEEDED | Code::CANCELLED | Code::RESOURCE_EXHAUSTED
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use containerd_shim_protos::events::task::{TaskExit, TaskStart};
    use containerd_shim_protos::protobuf::well_known_types::empty::Empty;
    use containerd_shim_protos::shim_async::{Events, create_events};
    use ttrpc::asynchronous::{Server, TtrpcContext};

    use super::*;

    #[derive(Default)]
    struct Containerd {
        received: Mutex<Vec<Envelope>>,
    }

    struct Service(Arc<Containerd>);

    #[async_trait]
    impl Events for Service {
        async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            let envelope = request.envelope.unwrap();
            self.0.received.lock().unwrap().push(envelope);
            Ok(Empty::new())
        }
    }

    async fn serve(path: &Path, containerd: &Arc<Containerd>) -> Server {
        let _ = std::fs::remove_file(path);
        let mut server = Server::new()
            .bind(&format!("unix://{}", path.display()))
            .unwrap()
            .register_service(create_events(Arc::new(Service(containerd.clone()))));
        server.start().await.unwrap();
        server
    }

    fn start(pid: u32) -> TaskStart {
        TaskStart {
            container_id: "web".into(),
            pid,
            ..TaskStart::default()
        }
    }

    fn pids(containerd: &Containerd) -> Vec<u32> {
        let received = containerd.received.lock().unwrap();
        let pid = |envelope: &Envelope| {
            TaskStart::parse_from_bytes(&envelope.event.value)
                .unwrap()
                .pid
        };
        received.iter().map(pid).collect()
    }

    #[tokio::test]
    async fn test_events_arrive_in_order_with_their_type_and_topic() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let containerd = Arc::default();
        let _server = serve(&path, &containerd).await;
        let publisher = Publisher::new("default", Route::to_socket(path.to_str()));
        publisher.publish("/tasks/start", &start(0));
        let exit = TaskExit {
            container_id: "web".into(),
            exit_status: 7,
            ..TaskExit::default()
        };
        publisher.publish("/tasks/exit", &exit);
        publisher.flush(Duration::from_secs(10)).await;
        let received = containerd.received.lock().unwrap();
        let [first, second] = &received[..] else {
            panic!("{received:?}")
        };
        assert_eq!(first.topic, "/tasks/start");
        assert_eq!(first.event.type_url, "containerd.events.TaskStart");
        assert_eq!(second.topic, "/tasks/exit");
        assert_eq!(second.namespace, "default");
        assert_eq!(second.event.type_url, "containerd.events.TaskExit");
        assert_eq!(
            TaskExit::parse_from_bytes(&second.event.value).unwrap(),
            exit
        );
        assert!(second.timestamp.seconds > 0);
    }

    #[tokio::test]
    async fn test_order_holds_over_a_restart_of_containerd() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let containerd = Arc::default();
        let publisher = Publisher::new("default", Route::to_socket(path.to_str()));
        // Before containerd is there at all.
        (0..10).for_each(|pid| publisher.publish("/tasks/start", &start(pid)));
        let mut server = serve(&path, &containerd).await;
        publisher.flush(Duration::from_secs(10)).await;
        server.shutdown().await.unwrap();
        drop(server);
        (10..20).for_each(|pid| publisher.publish("/tasks/start", &start(pid)));
        let _server = serve(&path, &containerd).await;
        publisher.flush(Duration::from_secs(10)).await;
        let mut pids = pids(&containerd);
        pids.dedup();
        assert_eq!(pids, (0..20).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn test_a_flush_without_containerd_ends_in_time() {
        let publisher = Publisher::new("default", Route::to_socket(Some("/does/not/exist")));
        publisher.publish("/tasks/start", &start(0));
        publisher.flush(Duration::from_millis(50)).await;
        let nobody = Publisher::new("default", Route::Nowhere);
        nobody.publish("/tasks/start", &start(0));
        nobody.flush(Duration::from_secs(10)).await;
    }
}
