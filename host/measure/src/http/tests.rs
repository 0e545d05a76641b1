use std::io::{BufRead, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::atomic::AtomicUsize;
use std::thread;

use super::*;

/// Starts a server that answers every request with these bytes, until the test ends.
fn server(answer: &'static [u8]) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head: Vec<String> = lines.map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
            assert_eq!(head[0], "GET /file HTTP/1.0");
            assert_eq!(head[1], format!("Host: 127.0.0.1:{port}"));
            count.fetch_add(1, Ordering::Relaxed);
            let _ = stream.write_all(answer);
        }
    });
    (port, asked)
}

fn request(port: u16) -> Request {
    Request::new(Url::local(port, "/file"))
}

const GOOD: &[u8] = b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nabcde";

#[test]
fn answers_are_counted() {
    let (port, asked) = server(GOOD);
    let load = Load::start(&request(port), 2);
    while load.counted().answers < 5 {
        assert!(!load.clients.iter().any(JoinHandle::is_finished));
        thread::sleep(Duration::from_millis(5));
    }
    assert!(load.bytes() >= 5 * GOOD.len() as u64);
    let counted = load.finish().unwrap();
    assert_eq!(counted.bytes, counted.answers * GOOD.len() as u64);
    assert!(asked.load(Ordering::Relaxed) as u64 >= counted.answers && counted.failed == 0);
    let never = AtomicBool::new(false);
    let (ms, failed) = periodic(&request(port), 4, Duration::from_millis(5), &never).unwrap().unwrap();
    assert_eq!((ms.len(), failed), (4, 0));
    let stopped = AtomicBool::new(true);
    assert!(periodic(&request(port), 4, Duration::from_millis(5), &stopped).unwrap().is_none());
}

fn one(answer: &'static [u8], length: Option<usize>) -> io::Result<Option<u64>> {
    let (port, _) = server(answer);
    let request = match length {
        Some(length) => request(port).expecting(length),
        None => request(port),
    };
    request.get(&AtomicU64::new(0), &AtomicBool::new(false))
}

#[test]
fn wrong_answers_are_no_answers() {
    assert_eq!(one(GOOD, None).unwrap(), Some(GOOD.len() as u64));
    assert_eq!(one(b"HTTP/1.1 200 OK\r\n\r\nabc", Some(3)).unwrap(), Some(22));
    let error = |answer, length| one(answer, length).unwrap_err();
    let wrong = error(b"HTTP/1.0 404 Not Found\r\n\r\n", None);
    assert_eq!(wrong.kind(), io::ErrorKind::InvalidData);
    assert!(wrong.to_string().contains("answers `HTTP/1.0 404 Not Found`"), "{wrong}");
    // Broken off: repeated, as with an overloaded server.
    let broken = error(b"HTTP/1.0 200 OK\r\nContent-length: 50\r\n\r\nabcde", None);
    assert_eq!(broken.kind(), io::ErrorKind::UnexpectedEof, "{broken}");
    assert_eq!(error(b"", None).kind(), io::ErrorKind::UnexpectedEof);
    // Another length than expected.
    assert_eq!(error(GOOD, Some(6)).kind(), io::ErrorKind::InvalidData);
    assert_eq!(error(b"SSH-2.0-OpenSSH\r\n", None).kind(), io::ErrorKind::InvalidData);
    let endless: &[u8] = Box::leak(vec![b'a'; LONGEST_HEAD + (64 << 10)].into_boxed_slice());
    assert!(error(endless, None).to_string().contains("does not end"));
}

#[test]
fn what_came_of_a_broken_answer_is_not_counted() {
    let (port, _) = server(b"HTTP/1.0 200 OK\r\nContent-length: 50\r\n\r\nabcde");
    let bytes = AtomicU64::new(7);
    assert!(request(port).get(&bytes, &AtomicBool::new(false)).is_err());
    assert_eq!(bytes.into_inner(), 7);
}

/// Cancelling works also when a server never ends an answer.
#[test]
fn ctrl_c_ends_the_wait_for_the_last_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let cancelled = AtomicBool::new(false);
    let open = thread::scope(|scope| {
        let asked =
            scope.spawn(|| periodic(&request(port), 2, Duration::from_millis(1), &cancelled).unwrap());
        let open: Vec<_> = listener.incoming().take(2).collect();
        cancelled.store(true, Ordering::Relaxed);
        assert!(asked.join().unwrap().is_none());
        open
    });
    assert_eq!(open.len(), 2);
}

#[test]
fn a_server_that_is_not_there_is_reported() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let load = Load::start(&request(port), 1);
    while load.counted().failed == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    let counted = load.finish().unwrap();
    assert!(counted.answers == 0 && counted.why.unwrap().contains("refused"));
}

#[test]
fn addresses_are_taken_apart() {
    let url = Url::find("http://127.0.0.1:8080/a?b=c#d").unwrap();
    assert_eq!((url.path(), url.authority(), url.address().port()), ("/a?b=c", "127.0.0.1:8080", 8080));
    assert_eq!(url.to_string(), "http://127.0.0.1:8080/a?b=c");
    let plain = Url::find("http://127.0.0.1").unwrap();
    assert_eq!((plain.path(), plain.address().port()), ("/", 80));
    assert_eq!(Url::find("http://[::1]/x").unwrap().address().port(), 80);
    for (text, why) in [
        ("https://127.0.0.1/", "TLS"),
        ("127.0.0.1", "http://"),
        ("http:///x", "no host"),
        ("http://a@127.0.0.1/", "user"),
        ("http://127.0.0.1/a b", "white space"),
        ("http://127.0.0.1?x", "begin with /"),
        ("http://127.0.0.1:99999/", "look up"),
    ] {
        let error = Url::find(text).unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}
