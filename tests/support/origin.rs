//! An HTTP server that records what it gets.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;

use super::http::{Connection, Message};

/// What an origin does with a request.
pub(crate) type Behaviour = Arc<dyn Fn(&mut Connection, &Message) + Send + Sync>;

/// A server on an ephemeral port. Its threads live as long as the test process.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Message>>>,
}

impl Origin {
    /// Answers everything with its name.
    pub(crate) fn named(name: &'static str) -> Self {
        Self::start(Arc::new(move |connection, _| connection.send(&response(name))))
    }

    /// Answers as told. A behaviour that returns without an answer just leaves the connection open.
    pub(crate) fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let behaviour = Arc::clone(&behaviour);
                let recorded = Arc::clone(&recorded);
                thread::spawn(move || {
                    let mut connection = Connection::over(stream);
                    while let Some(request) = connection.read() {
                        recorded.lock().expect("no panic").push(request.clone());
                        behaviour(&mut connection, &request);
                    }
                });
            }
        });
        Self { address, requests }
    }

    /// What has come so far, without the health checks of HAProxy.
    pub(crate) fn requests(&self) -> Vec<Message> {
        let requests = self.requests.lock().expect("no panic");
        requests.iter().filter(|request| !request.start.contains(" /health ")).cloned().collect()
    }

    /// The request with this path.
    pub(crate) fn request(&self, path: &str) -> Option<Message> {
        self.requests().into_iter().find(|request| request.start.split(' ').nth(1) == Some(path))
    }
}

/// A 200 with this body.
pub(crate) fn response(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}
