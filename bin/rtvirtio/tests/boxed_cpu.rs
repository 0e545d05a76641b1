//! CPU contracts and priorities under KVM, on a host with cgroup v2 only: once with Debian's kernel
//! as that host, once with its PREEMPT_RT kernel. In the box, because the machine that runs the
//! tests may have none of it.

// Not beside this file, where cargo would take it for a test of its own.
#[path = "boxed_cpu/crash.rs"]
mod crash;
#[path = "boxed/inside.rs"]
mod inside;
#[path = "boxed_cpu/plc.rs"]
mod plc;
#[path = "boxed_cpu/urgency.rs"]
mod urgency;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use plc::{Plc, program, read};
use rtvirtio_cpu::Backend;
use rtvirtio_kernel::{Root, preempt_rt, sched};
use rtvirtio_testbed::boxed::{BoxOutcome, BoxRun};
use rtvirtio_testbed::image::Kernel;
use rtvirtio_units::Bytes;
use serde_json::Value;

/// One box after the other: two would share two cores.
static TURN: Mutex<()> = Mutex::new(());
/// What the box's script passes on: the release that the kernel's version must confirm.
const KERNEL: &str = "RTVIRTIO_TEST_KERNEL";

#[test]
fn contracts_under_kvm_on_cgroup_v2() {
    in_the_box("contracts_under_kvm_on_cgroup_v2", Kernel::Standard);
}

#[test]
fn contracts_under_kvm_on_a_preempt_rt_host() {
    in_the_box("contracts_under_kvm_on_a_preempt_rt_host", Kernel::Rt);
}

fn in_the_box(test: &str, kernel: Kernel) {
    let Some(image) = inside::the_box(test, kernel) else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // This very program goes into the box and runs the test below there, with the program under
    // test.
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap();
    let script = format!("{KERNEL}={kernel:?} {name} --ignored --exact inside_the_box --nocapture\n");
    let mut run = BoxRun::new(&script, inside::LIMIT);
    let guest = rtvirtio_testkit::site::program("rtvirtio-guest");
    let programs = [me.as_path(), Path::new(env!("CARGO_BIN_EXE_rtvirtio")), &guest];
    run.programs = &programs;
    run.memory = Bytes(run.memory.0 + image.guest_memory().0);
    let lost = |out: &BoxOutcome| out.exit_code != Some(0) && out.output.contains(plc::LOST);
    let output = inside::ok_with_guests(&image, &run, &lost);
    assert!(output.contains("1 passed"), "{output}");
}

/// What a thread of each role has under a mechanism: policy of sched(7), and priority.
fn expected(backend: Backend, role: &str) -> (u64, u64) {
    let ours = ["vcpu", "io_thread", "emulator", "vhost", "kvm_pit"].contains(&role);
    match backend {
        Backend::Deadline if ours => (6, 0),
        Backend::Throttle if role == "vcpu" => (1, 48),
        Backend::Throttle if ours => (1, 49),
        _ => (0, 0),
    }
}

/// Applies the contract of `spec` with the program itself, and compares what the kernel's own files
/// say then. The machine may run on both CPUs.
fn apply(plc: &Plc, spec: &str, backend: Backend) {
    apply_on(2, plc, spec, backend);
}

/// The same for a machine that may run on `cpus` CPUs.
fn apply_on(cpus: u64, plc: &Plc, spec: &str, backend: Backend) {
    let held: Value = serde_json::from_str(&program(&["apply", spec, "--cpu-only", "--json"])).unwrap();
    assert_eq!(held[0]["backend"], serde_json::to_value(backend).unwrap(), "{held}");
    assert_eq!(held[0]["strength"], serde_json::to_value(backend.strength()).unwrap(), "{held}");
    let threads = plc.threads();
    let mut runtimes = 0;
    for t in &threads {
        let role = t["role"]["kind"].as_str().unwrap();
        let (pid, tid) = (t["pid"].as_u64().unwrap(), t["tid"].as_u64().unwrap());
        // QEMU ends threads of its pool that have had nothing to do for 10 s, also between the
        // listing and this; no other may go.
        let of = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/{file}"));
        let (sched, cgroup) = match (of("sched"), of("cgroup")) {
            (Ok(sched), Ok(cgroup)) => (sched, cgroup),
            (sched, cgroup) => {
                assert!(["aio_worker", "io_uring_worker"].contains(&role), "{t}: {sched:?} {cgroup:?}");
                continue;
            }
        };
        let field = |name: &str| {
            let line = sched.lines().find_map(|l| l.strip_prefix(name))?;
            line.trim_start().strip_prefix(':')?.trim().parse::<u64>().ok()
        };
        // The kernel's thread stays in the kernel's cgroup, and so off a partition. Linux 7 leaves
        // it all CPUs, and so takes its reservation.
        let off = cpus == 1 && role == "kvm_pit" && t["affinity"] != "0-1";
        let (policy, priority) = if off { (0, 0) } else { expected(backend, role) };
        // The kernel's prio of a real-time thread is 99 less its priority.
        assert_eq!(field("policy"), Some(policy), "{t}\n{sched}");
        if policy == 1 {
            assert_eq!(field("prio"), Some(99 - priority), "{t}\n{sched}");
        }
        // There these are what is left of the running period; the reservation itself only the
        // system call tells.
        if policy == 6 {
            let attr = sched::get(u32::try_from(tid).unwrap()).unwrap();
            let r = attr.reservation.unwrap();
            assert_eq!((r.deadline, r.period, attr.reset_on_fork), (20_000_000, 20_000_000, true), "{attr}");
            runtimes += r.runtime;
        }
        let by = &t["control"]["by"];
        let in_unit = cgroup.trim() == format!("0::{}", plc::GROUP);
        match backend {
            Backend::Deadline => assert_eq!(by == "deadline", policy == 6, "{t}"),
            Backend::CpuMax => assert_eq!(by == "cpu_max", in_unit, "{t}"),
            _ => assert!(by.is_null(), "{t}"),
        }
    }
    // 15 ms on each CPU, and so for one thread at most; the parts are whole nanoseconds.
    if backend == Backend::Deadline {
        assert!((15_000_000 - 10..=15_000_000 * cpus).contains(&runtimes), "{runtimes}");
    }
    let cap = if backend == Backend::CpuMax { "30000 20000" } else { "max 100000" };
    assert_eq!(read(&format!("{}/cpu.max", plc::group_dir())).trim(), cap);
}

/// Puts back with the program itself; nothing may differ from before.
fn revert(plc: &Plc, before: &str, what: &str) {
    program(&["revert"]);
    let after = plc.snapshot();
    assert!(before == after, "{what}: before\n{before}\nafter\n{after}");
}

#[test]
#[ignore = "runs inside the box; the tests above start it there"]
fn inside_the_box() {
    assert_eq!(std::env::var("RTVIRTIO_GUEST_IMAGE").as_deref(), Ok("/guest"), "this is not the box");
    let real_time = std::env::var(KERNEL).unwrap() == "Rt";
    assert_eq!(preempt_rt(&Root::default()).unwrap(), real_time);
    let start = Instant::now();
    let say = |what: &str| println!("{:.1} {what}", start.elapsed().as_secs_f64());
    plc::prepare_host();
    let contract = plc::write_spec("contract", "");
    let priorities = plc::write_spec("priorities", "priorities = \"rt\"");

    // While the guest boots: it must come up under the contract. With PREEMPT_RT a boot in the box
    // takes 40 s without one, and none ended within 60 s under it: there the guest runs before.
    let (mut plc, before) = Plc::boot(|plc| {
        let before = plc.snapshot();
        if !real_time {
            apply(plc, &contract, Backend::Deadline);
        }
        before
    });
    if real_time {
        apply(&plc, &contract, Backend::Deadline);
    }
    say("the guest came up with its threads under SCHED_DEADLINE");
    plc.works("under SCHED_DEADLINE");
    revert(&plc, &before, "SCHED_DEADLINE");

    apply(&plc, &priorities, Backend::Throttle);
    plc.works("at real-time priorities");
    plc.spins();
    revert(&plc, &before, "priorities");
    say("priorities");

    let urgency = plc::write_spec(
        "urgency",
        "priorities = \"rt\"\nurgency = { budget = \"1s\", interrupts = \"kvm\" }",
    );
    urgency::moves_its_vcpu(&mut plc, &urgency, &say);
    revert(&plc, &before, "urgency");
    say("urgency");

    // The first mechanism is not to be had where the kernel grants real-time work nothing.
    let limit = "/proc/sys/kernel/sched_rt_runtime_us";
    // Linux 7 refuses less than the share of the fair server.
    std::fs::write(limit, "0").or_else(|_| std::fs::write(limit, "50000")).unwrap();
    apply(&plc, &contract, Backend::CpuMax);
    plc.works("under cpu.max");
    revert(&plc, &before, "cpu.max");
    std::fs::write(limit, "950000").unwrap();
    say("cpu.max");

    // Pinned by its cpuset, a machine has reservations where the CPUs are a partition.
    if !real_time {
        plc::partition(Some("1"));
        // A thread that slept when its CPUs changed is refused until it has run again.
        plc.works("pinned");
        let pinned = plc.snapshot();
        apply_on(1, &plc, &contract, Backend::Deadline);
        plc.works("under SCHED_DEADLINE on a partition");
        revert(&plc, &pinned, "SCHED_DEADLINE on a partition");
        plc::partition(None);
        say("a partition");
    }

    // The journal asks nothing of the host's kernel that the standard one does not show; a box is
    // slow.
    let killed: &[Backend] =
        if real_time { &[] } else { &[Backend::Throttle, Backend::CpuMax, Backend::Deadline] };
    for &backend in killed {
        let (applied, reverted) = crash::sweep(&plc, &before, backend);
        say(&format!("{backend}: killed at {applied} points of apply, {reverted} of revert; 0 differences"));
    }
    plc.works("after all that");

    // A machine that ends takes its settings with it, and leaves nothing to print_error of.
    apply(&plc, &priorities, Backend::Throttle);
    let empty = plc.end();
    let said = program(&["revert"]);
    assert!(said.contains("gone: "), "{said}");
    assert_eq!(plc::cgroup_files(), empty);
    say("a machine that ended");
}
