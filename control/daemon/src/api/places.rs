//! A listener with so many places for connections. One that waits for a place costs the service
//! nothing: clients never take the descriptors that contracts are kept with.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A listener that accepts a connection when it has a place for it.
pub(super) struct Places<L> {
    listener: L,
    free: Arc<Semaphore>,
}

impl<L> Places<L> {
    /// With `most` connections at a time.
    pub fn new(listener: L, most: usize) -> Self {
        Self { listener, free: Arc::new(Semaphore::new(most)) }
    }
}

impl<L: Listener> Listener for Places<L> {
    type Io = Placed<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // It is never closed, so there is a place some time.
        let place = Arc::clone(&self.free).acquire_owned().await.ok();
        let (io, address) = self.listener.accept().await;
        (Placed { io, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection, with its place until it is closed.
pub(super) struct Placed<I> {
    io: I,
    _place: Option<OwnedSemaphorePermit>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Placed<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(context, into)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Placed<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(context, from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(context, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use axum::Router;
    use axum::routing::get;

    use super::*;

    #[test]
    fn a_client_without_a_place_waits_for_one() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("socket");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let served = std::thread::spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let router = Router::new().route("/", get(|| async { "here" }));
                tokio::select! {
                    _ = stopped => {}
                    _ = axum::serve(Places::new(listener, 2), router) => {}
                }
            });
        });
        let ask = |stream: &mut UnixStream| {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        };
        let answered = |stream: &mut UnixStream| {
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).map(|()| answer == *b"HTTP/1.1 200")
        };
        let mut clients: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        // Those before have a place for certain, and keep it.
        for client in &mut clients[..2] {
            ask(client);
            assert!(answered(client).unwrap());
        }
        let mut last = clients.pop().unwrap();
        ask(&mut last);
        last.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!(answered(&mut last).unwrap_err().kind(), ErrorKind::WouldBlock);
        last.set_read_timeout(None).unwrap();
        clients.pop();
        assert!(answered(&mut last).unwrap());
        stop.send(()).unwrap();
        served.join().unwrap();
    }
}
