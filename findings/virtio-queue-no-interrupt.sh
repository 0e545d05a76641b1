#!/bin/sh
# virtio-queue (rust-vmm): a driver's VIRTQ_AVAIL_F_NO_INTERRUPT and `needs_notification`.
#
# Guess: without VIRTIO_F_EVENT_IDX, `Queue::needs_notification` is false while the driver has set
# VIRTQ_AVAIL_F_NO_INTERRUPT in the available ring: the flag is that feature's plain form.
# Seen (virtio-queue 0.18.0): the flag is not read. Without event indices each call says true, so a
# device that asks this function interrupts a driver that polls (firmware) for each request; with
# event indices it follows `used_event`.
#
# Needs cargo and its registry. Fails when the behaviour has changed.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/src"
cat >"$dir/Cargo.toml" <<'EOF'
[package]
name = "check"
version = "0.0.0"
edition = "2021"
[dependencies]
virtio-queue = "=0.18.0"
vm-memory = { version = "=0.18.0", features = ["backend-mmap"] }
EOF
cat >"$dir/src/main.rs" <<'EOF'
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;

/// Answers to the first three completions, with the flags that the driver has set.
fn answers(flags: u16, event_idx: bool) -> Vec<bool> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    let mut queue = Queue::new(16).unwrap();
    queue.set_desc_table_address(Some(0), Some(0));
    queue.set_avail_ring_address(Some(AVAIL as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    memory.write_obj(flags.to_le(), GuestAddress(AVAIL)).unwrap();
    // `used_event`, behind the ring's 16 entries: the driver asks for the first completion only.
    memory.write_obj(0u16, GuestAddress(AVAIL + 4 + 2 * 16)).unwrap();
    let complete = |_| {
        queue.add_used(&memory, 0, 0).unwrap();
        queue.needs_notification(&memory).unwrap()
    };
    (0..3).map(complete).collect()
}

fn main() {
    println!("flags 0, no event index:            {:?}", answers(0, false));
    println!("flags NO_INTERRUPT, no event index: {:?}", answers(1, false));
    println!("event index 0:                      {:?}", answers(0, true));
    let all = [true; 3];
    let is_as_seen = answers(0, false) == all && answers(1, false) == all && answers(0, true) == [true, false, false];
    std::process::exit(i32::from(!is_as_seen));
}
EOF
echo "virtio-queue 0.18.0"
cargo run --quiet --manifest-path "$dir/Cargo.toml" || { echo "the behaviour has changed" >&2; exit 1; }
