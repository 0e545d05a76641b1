//! vhost-user messages of a compromised QEMU ([`qemu`] has the input's layout), through the real
//! socket to a real control thread.

use std::fs::File;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_engine::blk::Limits;
use rtvirtio_engine::confine::Confine;
use rtvirtio_engine::memory::Trust;
use rtvirtio_engine::vhost_user::{DeviceInfo, FrontEnds, VhostUserServer};
use rtvirtio_sched::VmId;

use super::engine::{house, vm_status};
use super::qemu;

struct Door {
    socket: PathBuf,
    kinds: Vec<File>,
    _frontend: VhostUserServer,
    _front_ends: FrontEnds,
}

fn door() -> &'static Mutex<Door> {
    static DOOR: OnceLock<Mutex<Door>> = OnceLock::new();
    DOOR.get_or_init(|| {
        let house = house().lock().expect("an engine that lives");
        let socket = house.dir.path().join("socket");
        let limits = Limits { size: 128 << 10, read_only: false, discard: true };
        let disk = DeviceInfo {
            name: "fuzz".into(),
            vm: VmId(0),
            features: rtvirtio_engine::feature::blk::offered(&limits),
            config: rtvirtio_engine::blk::config_space(&limits, 2, [512; 2]).to_vec().into(),
            queues: 2,
            largest_queue: 1_024,
            trust: Trust::None,
            has_inflight: true,
            use_lock: None,
            first_uses: None,
            pinner: None,
        };
        let listening = SocketListener::bind(&socket).expect("a socket");
        let front_ends = FrontEnds::start(Box::new(Confine::none()), &Confine::none()).expect("a thread");
        let frontend =
            VhostUserServer::start(disk, listening, house.handle.clone(), &front_ends).expect("a descriptor");
        let kinds = qemu::descriptors();
        Mutex::new(Door { socket, kinds, _frontend: frontend, _front_ends: front_ends })
    })
}

/// Sends all messages of an input on one connection.
///
/// # Panics
/// The domain does not end the connection, or keeps a resource of it.
pub fn play(data: &[u8]) {
    let door = door().lock().expect("a door that stands");
    // No other test uses its first VM meanwhile.
    let house = house().lock().expect("an engine that lives");
    qemu::say(&door.socket, &door.kinds, data);
    // The thread may close the socket before or after its command to the engine; the next
    // connection waits for that.
    let again = UnixStream::connect(&door.socket).expect("a connection");
    let _ = again.shutdown(Shutdown::Write);
    let _ = (&again).read(&mut [0; 64]);
    let status = vm_status(&house.handle, VmId(0));
    assert_eq!((status.outstanding, status.queues), (0, 0), "something of it is left");
}
