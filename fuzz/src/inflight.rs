//! In-flight memory that QEMU may write at any time: for any contents, `recover` ends, returns
//! heads within the queue, each once, and leaves the other queue's memory untouched; a region whose
//! dimensions do not match its size is refused.
//!
//! Layout of the input: size of the queues, index of the used one, dimensions of the region (12
//! bytes; a flag decides whether they are used unchanged), then steps of four bytes: action,
//! descriptor or offset, value (2 bytes).

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rtvirtio_engine::inflight::Region;
use vhost::vhost_user::message::VhostUserInflight;

/// Queues of the region.
const QUEUES: u16 = 2;
/// Most steps of one input.
const MOST: usize = 200;

/// Runs the steps of an input on a real shared mapping.
///
/// # Panics
/// `recover` returns an invalid head, or the other queue's memory is written.
pub fn play(data: &[u8]) {
    let Some(([size, index, numbers @ ..], steps)) = data.split_first_chunk::<14>() else { return };
    let size = u16::from(size % 33).max(1);
    let (file, shape) = Region::create(QUEUES, size).expect("memory");
    let shared = file.try_clone().expect("a descriptor");
    let of = |i: usize| u64::from(u16::from_le_bytes([numbers[i], numbers[i + 1]])) << (numbers[i + 2] % 49);
    if index & 0x80 != 0 {
        let wrong = VhostUserInflight::new(of(0), of(3), of(6) as u16, of(9) as u16);
        let there = shared.metadata().expect("its length").len();
        if let Ok(region) = Region::open(file, &wrong) {
            assert!(wrong.mmap_offset < there, "beyond the memory");
            let region = Arc::new(region);
            assert!(region.queue(region.queues()).is_none());
            for queue in 0..region.queues() {
                let mut queue = region.queue(queue).expect("a queue of it");
                check(&queue.recover(numbers[11].into()), wrong.queue_size);
            }
        }
        return;
    }
    let region = Arc::new(Region::open(file, &shape).expect("as it was made"));
    let bytes = shared.metadata().expect("its length").len() as usize / usize::from(QUEUES);
    let index = u16::from(index % 2);
    let (own, other) = (u64::from(index) * bytes as u64, u64::from(1 - index) * bytes as u64);
    let before = vec![0xa5; bytes];
    shared.write_all_at(&before, other).expect("the other queue");
    let mut queue = region.queue(index).expect("one of two");
    for step in steps.chunks_exact(4).take(MOST) {
        let [action, at, low, high] = [step[0], step[1], step[2], step[3]];
        let (head, value) = (u16::from(at), u16::from_le_bytes([low, high]));
        match action % 8 {
            0 => queue.mark_inflight(head),
            1 => queue.pre_put(head),
            2 => queue.post_put(head, value),
            // A write of QEMU.
            3 => shared
                .write_all_at(&value.to_le_bytes(), own + u64::from(at & 0xfe) % (bytes as u64 - 1))
                .expect("memory"),
            4 => shared.write_all_at(&[low], own + u64::from(at) % bytes as u64).expect("memory"),
            // A killed and restarted domain, or a guest that stopped and started the queue.
            5 => {
                queue = region.queue(index).expect("one of two");
                check(&queue.recover(value), size);
            }
            6 => check(&queue.recover(value), size),
            // Nothing was completed between two recoveries, and the first one initialised memory of
            // another version.
            _ => {
                check(&queue.recover(value), size);
                let second = queue.recover(value);
                check(&second, size);
                assert_eq!(queue.recover(value), second);
            }
        }
    }
    let mut after = vec![0; bytes];
    shared.read_exact_at(&mut after, other).expect("the other queue");
    assert!(before == after, "the other queue's memory");
}

fn check(heads: &[u16], size: u16) {
    let mut seen = heads.to_vec();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() == heads.len() && heads.iter().all(|h| *h < size), "{heads:?} of {size}");
}
