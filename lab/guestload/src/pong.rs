//! An urgent task that waits for the network: sends each byte back.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};

use rtvirtio_kernel::sched::{self, Attr};

use crate::Done;

/// Priority under `SCHED_FIFO`.
const PRIORITY: u32 = 80;

/// Serves one connection after the other until it is killed.
pub fn serve(port: u16) -> Done {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    sched::set(0, &Attr::fifo(PRIORITY))?;
    answer(&listener)
}

fn answer(listener: &TcpListener) -> Done {
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        // A broken connection ends like a closed one.
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn bytes_come_back_on_one_connection_after_the_other() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::spawn(move || answer(&listener).map_err(|e| e.to_string()));
        for sent in [7, 8] {
            let mut stream = TcpStream::connect(at).unwrap();
            let mut back = [0];
            stream.write_all(&[sent]).unwrap();
            stream.read_exact(&mut back).unwrap();
            assert_eq!(back, [sent]);
        }
    }
}
