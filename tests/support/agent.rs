//! A small SPOE agent with the codec of the crate `spop`, so that nothing of ours judges itself.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use spop::actions::VarScope;
use spop::frame::{FramePayload, FrameType, Message};
use spop::frames::{Ack, AgentHello, FrameCapabilities, HaproxyHello};
use spop::parser::parse_frame_with_limit;
use spop::{SpopFrame, TypedData};

/// More than any test's `tune.bufsize`.
const FRAME_BYTES: u32 = 16 * 1024 * 1024;

/// The variables with which a message is answered; `None`: it never is.
pub(crate) type Answer = Arc<dyn Fn(&Message) -> Option<Vec<(&'static str, TypedData)>> + Send + Sync>;

/// An agent on a port of its own. Its threads live as long as the test process.
#[derive(Clone)]
pub(crate) struct StubAgent {
    pub(crate) address: SocketAddr,
    messages: Arc<Mutex<Vec<Message>>>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    killed: Arc<AtomicBool>,
}

impl StubAgent {
    /// Answers every message with these variables.
    pub(crate) fn answering(variables: &[(&'static str, &str)]) -> Self {
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, TypedData::String((*value).to_owned()))).collect();
        Self::start(Arc::new(move |_| Some(variables.clone())))
    }

    pub(crate) fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let agent =
            Self { address, messages: Arc::default(), connections: Arc::default(), killed: Arc::default() };
        let shared = agent.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.killed.load(Ordering::SeqCst) {
                    return;
                }
                shared.connections.lock().expect("no panic").push(stream.try_clone().expect("a handle"));
                let (messages, answer) = (Arc::clone(&shared.messages), Arc::clone(&answer));
                thread::spawn(move || serve(stream, &messages, &answer));
            }
        });
        agent
    }

    /// Ends it as the end of its process would: the port and every connection are closed at once.
    pub(crate) fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        for connection in self.connections.lock().expect("no panic").iter() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// The messages that have come so far.
    pub(crate) fn messages(&self) -> Vec<Message> {
        self.messages.lock().expect("no panic").clone()
    }
}

fn serve(mut stream: TcpStream, messages: &Mutex<Vec<Message>>, answer: &Answer) {
    let _ = stream.set_nodelay(true);
    let mut buffer = Vec::new();
    let mut chunk = vec![0; 65536];
    loop {
        while let Ok((rest, frame)) = parse_frame_with_limit(&buffer, FRAME_BYTES) {
            let consumed = buffer.len() - rest.len();
            let reply = reply(&*frame, messages, answer).map(|reply| reply.serialize().expect("a frame"));
            if reply.is_some_and(|reply| stream.write_all(&reply).is_err()) {
                return;
            }
            buffer.drain(..consumed);
        }
        match stream.read(&mut chunk) {
            Ok(length @ 1..) => buffer.extend_from_slice(chunk.get(..length).unwrap_or_default()),
            _ => return,
        }
    }
}

fn reply(
    frame: &dyn SpopFrame,
    messages: &Mutex<Vec<Message>>,
    answer: &Answer,
) -> Option<Box<dyn SpopFrame>> {
    match frame.frame_type() {
        FrameType::HaproxyHello => {
            let hello = HaproxyHello::try_from(frame.payload()).expect("a HELLO");
            Some(Box::new(AgentHello {
                version: hello.negotiate_version().expect("a version"),
                max_frame_size: hello.negotiate_max_frame_size(FRAME_BYTES).expect("a size"),
                capabilities: vec![FrameCapabilities::Pipelining],
            }))
        }
        FrameType::Notify => {
            let mut ack = Ack::new(frame.metadata().stream_id, frame.metadata().frame_id);
            let FramePayload::ListOfMessages(list) = frame.payload() else { return None };
            for message in list {
                messages.lock().expect("no panic").push(message.clone());
                for (name, value) in answer(message)? {
                    ack = ack.set_var(VarScope::Transaction, name, value);
                }
            }
            Some(Box::new(ack))
        }
        _ => None,
    }
}
