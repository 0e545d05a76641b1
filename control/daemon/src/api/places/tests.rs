use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use axum::Router;
use axum::response::sse::{Event, Sse};
use axum::routing::get;

use super::*;

/// A server with a limit of connections, until it is dropped.
struct Served {
    path: PathBuf,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Served {
    fn new(most: usize, head_time: Duration) -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("socket");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let events = || async {
                    let first = tokio_stream::iter([Ok::<_, Infallible>(Event::default().data("first"))]);
                    Sse::new(tokio_stream::StreamExt::chain(first, tokio_stream::pending()))
                };
                let late = || async {
                    tokio::time::sleep(Duration::from_millis(800)).await;
                    "late"
                };
                let router = Router::new()
                    .route("/", get(|| async { "here" }))
                    .route("/late", get(late))
                    .route("/events", get(events));
                let places = Places { head_time, ..Places::new(listener, most) };
                tokio::select! {
                    _ = stopped => {}
                    _ = axum::serve(places, router) => {}
                }
            });
        });
        Self { path, stop: Some(stop), thread: Some(thread), _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        // Far beyond what is waited for: a lost answer fails the test, and does not hang it.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        self.thread.take().unwrap().join().unwrap();
    }
}

fn ask(stream: &mut UnixStream, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
}

/// The status line's begin; `None` where the connection was closed.
fn answer(stream: &mut UnixStream) -> Option<String> {
    let mut answer = [0; 12];
    match stream.read_exact(&mut answer) {
        Ok(()) => Some(String::from_utf8_lossy(&answer).into_owned()),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => panic!("no answer within a minute"),
        Err(_) => None,
    }
}

const OK: Option<&str> = Some("HTTP/1.1 200");

/// Whether the other end has closed it.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
    }
}

const NEVER: Duration = Duration::from_secs(3600);

#[test]
fn idle_connections_give_their_places_up_oldest_first() {
    let served = Served::new(64, NEVER);
    let mut idle: Vec<UnixStream> = (0..64).map(|_| served.connect()).collect();
    // One of them has had an answer, and keeps its connection for the next.
    ask(&mut idle[0], "/");
    assert_eq!(answer(&mut idle[0]).as_deref(), OK);
    for _ in 0..70 {
        let mut client = served.connect();
        ask(&mut client, "/");
        assert_eq!(answer(&mut client).as_deref(), OK);
        idle.push(client);
    }
    assert!(is_closed(&mut idle[1]), "the first that never asked");
}

#[test]
fn a_client_that_trickles_is_closed_in_time_and_one_that_rests_is_not() {
    let served = Served::new(4, Duration::from_millis(400));
    let mut rests = served.connect();
    ask(&mut rests, "/");
    assert_eq!(answer(&mut rests).as_deref(), OK);
    let mut trickles = served.connect();
    let mut silent = served.connect();
    let head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ".iter().chain(std::iter::repeat(&b'x'));
    // It writes on until it is closed: a byte at a time is no head.
    let closed = head.take(1_000).any(|byte| {
        std::thread::sleep(Duration::from_millis(20));
        trickles.write_all(&[*byte]).is_err()
    });
    assert!(closed);
    assert!(is_closed(&mut silent));
    // Long after its first request, the time of a head has begun for none.
    let mut body = [0; 4096];
    let _ = rests.read(&mut body).unwrap();
    ask(&mut rests, "/");
    assert_eq!(answer(&mut rests).as_deref(), OK);
}

#[test]
fn what_is_being_answered_keeps_its_place() {
    let served = Served::new(2, NEVER);
    let mut late: Vec<UnixStream> = (0..2).map(|_| served.connect()).collect();
    for client in &mut late {
        ask(client, "/late");
    }
    let mut next = served.connect();
    ask(&mut next, "/");
    for client in &mut late {
        assert_eq!(answer(client).as_deref(), OK, "an answer that takes its time is no idle connection");
    }
    assert_eq!(answer(&mut next).as_deref(), OK);
}

#[test]
fn streams_give_way_after_all_that_is_idle() {
    let served = Served::new(2, NEVER);
    let mut stream = served.connect();
    ask(&mut stream, "/events");
    assert_eq!(answer(&mut stream).as_deref(), OK);
    let mut idle = served.connect();
    let mut first = served.connect();
    ask(&mut first, "/events");
    assert_eq!(answer(&mut first).as_deref(), OK);
    assert!(is_closed(&mut idle));
    // Both places have a stream now: the older one goes.
    let mut next = served.connect();
    ask(&mut next, "/");
    assert_eq!(answer(&mut next).as_deref(), OK);
    assert!(is_closed(&mut stream));
}

/// Bytes that only look like the end of a head claim no answer, and an answer has a limit.
#[test]
fn empty_lines_are_no_request_and_an_answer_that_never_comes_gives_way() {
    let begin = Instant::now();
    let mut activity = Activity::new(begin);
    activity.on_read(b"\r\n\r\n\r\n");
    assert_eq!(activity.phase, Phase::Head);
    assert!(activity.gives_way(begin + SETTLING * 2).is_some());
    activity.on_read(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!((activity.phase, activity.gives_way(Instant::now())), (Phase::Answer, None));
    assert!(activity.gives_way(Instant::now() + ANSWER_TIME).is_some());
}
