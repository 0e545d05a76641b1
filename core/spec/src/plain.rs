//! Tasks and VMs that a program makes, instead of a file.

use rtvirtio_units::{Bytes, Iops};

use crate::traffic::Traffic;
use crate::types::{Arrival, Criticality, Kernel, LabKind, Op, Pattern, Reach, Task, Vm, VmCpu};

impl Task {
    /// Random reads of 4 KiB, one at a time, evenly at a rate where there is one, without targets.
    #[must_use]
    pub fn reads(name: &str, rate: Option<Iops>) -> Self {
        Self {
            name: name.to_owned(),
            op: Op::Read,
            block: Bytes::from_kib(4),
            mix: Vec::new(),
            pattern: Pattern::Random,
            rate,
            depth: 1,
            arrival: Arrival::Closed,
            burst: None,
            sync: None,
            targets: Vec::new(),
        }
    }
}

impl Vm {
    /// A VM of the lab with these tasks and no contract for CPUs, networks and traffic.
    #[must_use]
    pub fn of_lab(name: &str, kind: LabKind, tasks: Vec<Task>) -> Self {
        Self {
            name: name.to_owned(),
            reach: Reach::Lab(kind),
            cpu: VmCpu::default(),
            kernel: Kernel::Standard,
            criticality: Criticality::default(),
            traffic: Traffic::default(),
            tasks,
            nics: Vec::new(),
            flows: Vec::new(),
        }
    }
}
