//! CPUs of a VM's threads: a CPU for each vCPU, and some for the others together.

use std::collections::BTreeSet;
use std::fmt;

use rtvirtio_apply::{Target, Write};
use rtvirtio_cores::Placement;
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_vmm::{Role, Thread};
use serde::{Deserialize, Serialize};

/// CPUs of a VM's threads, as chosen when its contract was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cores {
    /// Numbers of the vCPUs, in the order of their CPUs.
    pub vcpus: Vec<u32>,
    /// CPUs of these, and of the other threads; without CPUs for the others these share those of
    /// the vCPUs.
    pub placement: Placement,
    /// CPUs among which the spec lets them be chosen; all that the VM may use where `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub among: Option<BTreeSet<u32>>,
    /// All CPUs of the cores that whole vCPUs have: of a CPU that is offline the kernel does not
    /// tell the core. Empty without whole vCPUs.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub siblings: BTreeSet<u32>,
}

impl Cores {
    /// CPUs that a thread is to have; `None` for one that gets none, with the reason where a user
    /// would expect some.
    fn cpus_for(&self, thread: &Thread) -> Result<Option<BTreeSet<u32>>, String> {
        if thread.reservation.is_some() {
            return Err("a thread with a deadline reservation must be allowed on all CPUs".to_owned());
        }
        match &thread.role {
            // The kernel refuses: such a worker has the CPUs of its ring.
            Role::IoUringWorker | Role::KvmHugePages => Ok(None),
            Role::Vcpu(numbers) => {
                let cpus: BTreeSet<u32> = numbers.iter().filter_map(|n| self.cpu_of(*n)).collect();
                if cpus.is_empty() {
                    return Err(format!("{} was plugged in later and has no CPU of its own", thread.role));
                }
                Ok(Some(cpus))
            }
            _ => Ok(Some(self.service())),
        }
    }

    /// First of the vCPUs of a thread that is to have a CPU of its own and has none yet.
    #[must_use]
    pub fn lacking(&self, thread: &Thread) -> Option<u32> {
        let Role::Vcpu(numbers) = &thread.role else { return None };
        let lacks = thread.reservation.is_none() && numbers.iter().all(|n| self.cpu_of(*n).is_none());
        numbers.first().copied().filter(|_| lacks)
    }

    /// CPUs of the VM with one more vCPU, which has the last one of this placement.
    #[must_use]
    pub fn with_hotplugged(&self, vcpu: u32, placement: Placement) -> Self {
        let mut vcpus = self.vcpus.clone();
        vcpus.push(vcpu);
        Self { vcpus, placement, ..self.clone() }
    }

    fn cpu_of(&self, vcpu: u32) -> Option<u32> {
        let at = self.vcpus.iter().position(|number| *number == vcpu)?;
        self.placement.vcpus.get(at).copied()
    }

    /// CPUs of the threads that run no vCPU.
    #[must_use]
    pub fn service(&self) -> BTreeSet<u32> {
        let own = &self.placement.service;
        if own.is_empty() { &self.placement.vcpus } else { own }.iter().copied().collect()
    }

    /// The threads as they are with these CPUs.
    #[must_use]
    pub fn pinned(&self, threads: &[Thread]) -> Vec<Thread> {
        let pinned = |t: &Thread| match self.cpus_for(t) {
            Ok(Some(cpus)) => Thread { affinity: cpu_ranges(&cpus), ..t.clone() },
            Ok(None) | Err(_) => t.clone(),
        };
        threads.iter().map(pinned).collect()
    }

    /// Writes that give these threads of the VM `vm` their CPUs, and the threads that get none,
    /// each with the reason.
    #[must_use]
    pub fn writes(&self, vm: &str, threads: &[Thread]) -> (Vec<Write>, Vec<(u32, String)>) {
        let (mut writes, mut without) = (Vec::new(), Vec::new());
        for t in threads {
            match self.cpus_for(t) {
                Ok(Some(cpus)) => {
                    let target = Target::affinity(t.pid, t.tid, t.start);
                    writes.push(Write::new(format!("CPUs of {} ({vm})", t.role), target, cpu_ranges(&cpus)));
                }
                Ok(None) => {}
                Err(why) => without.push((t.tid, why)),
            }
        }
        (writes, without)
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (vcpu, cpu) in self.vcpus.iter().zip(&self.placement.vcpus) {
            write!(f, "vCPU {vcpu} on CPU {cpu}, ")?;
        }
        write!(f, "its other threads on CPU {}", cpu_ranges(&self.service()))
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_cores::{Request, Use};
    use rtvirtio_kernel::sched::Policy;

    use super::*;

    fn thread(tid: u32, role: Role) -> Thread {
        let (policy, affinity) = (Some(Policy::Other), "0-7".to_owned());
        Thread { pid: 7, tid, role, policy, affinity, ..Thread::default() }
    }

    fn cores(service: &[u32]) -> Cores {
        let request = Request {
            vcpus: 2,
            each: Use::Part(200),
            service: u32::try_from(service.len()).unwrap(),
            service_share: 200,
            node: None,
        };
        let placement = Placement {
            request,
            vcpus: vec![4, 5],
            service: service.to_vec(),
            nodes: 1,
            domains: 1,
            beyond: 0,
        };
        Cores { vcpus: vec![0, 2], placement, among: None, siblings: BTreeSet::new() }
    }

    #[test]
    fn each_vcpu_gets_its_cpu_and_the_others_theirs_together() {
        let threads = [
            thread(7, Role::Emulator),
            thread(8, Role::Vcpu(vec![0])),
            thread(9, Role::Vcpu(vec![2])),
            thread(10, Role::Vcpu(vec![0, 2])),
            thread(11, Role::Vhost),
            thread(12, Role::IoUringWorker),
            thread(13, Role::Vcpu(vec![1])),
        ];
        let (writes, without) = cores(&[6, 7]).writes("plc", &threads);
        let of: Vec<&str> = writes.iter().map(|write| write.value.as_str()).collect();
        assert_eq!(of, ["6-7", "4", "5", "4-5", "6-7"]);
        assert_eq!(without.len(), 1);
        assert!(without[0].0 == 13 && without[0].1.contains("vcpu 1 was plugged in later"), "{without:?}");
        let lacking: Vec<_> = threads.iter().filter_map(|thread| cores(&[]).lacking(thread)).collect();
        assert_eq!(lacking, [1]);
        let mut more = cores(&[6, 7]).placement;
        more.vcpus.push(3);
        let (writes, without) = cores(&[6, 7]).with_hotplugged(1, more).writes("plc", &threads);
        let of: Vec<&str> = writes.iter().map(|write| write.value.as_str()).collect();
        assert_eq!((&of[..], without.len()), (&["6-7", "4", "5", "4-5", "6-7", "3"][..], 0));
        let pinned: Vec<String> =
            cores(&[]).pinned(&threads).into_iter().map(|thread| thread.affinity).collect();
        assert_eq!(pinned, ["4-5", "4", "5", "4-5", "4-5", "0-7", "0-7"]);
        let text = "vCPU 0 on CPU 4, vCPU 2 on CPU 5, its other threads on CPU 6-7";
        assert_eq!(cores(&[6, 7]).to_string(), text);
        let read: Cores = serde_json::from_str(&serde_json::to_string(&cores(&[6])).unwrap()).unwrap();
        assert_eq!(read, cores(&[6]));
    }
}
