//! Levels and notes of contracts that are admitted together.

use rtvirtio_cpu::{Backend, Contract, Level, Order, attr, going_before, interference_us, levels};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::Role;

use super::Contracted;

/// Gives contracts that are admitted together their levels and notes.
pub(super) fn rank(contracts: &mut [Contracted]) {
    let of_all: Vec<_> = contracts.iter().map(|c| (c.backend, c.order, c.contract)).collect();
    contracts.iter_mut().zip(levels(&of_all)).for_each(|(c, level)| c.level = level);
    notes(contracts);
}

/// Adds the limits of each contract.
fn notes(all: &mut [Contracted]) {
    let given: Vec<(Backend, Order, Level, Contract)> =
        all.iter().map(|c| (c.backend, c.order, c.level, c.contract)).collect();
    for (place, one) in all.iter_mut().enumerate() {
        let others: Vec<Contract> = going_before(&given, place).iter().map(|other| given[*other].3).collect();
        let takes = interference_us(one.contract, &others);
        if one.backend == Backend::RtGroup && takes + one.contract.budget_us() > one.contract.period_us() {
            one.notes.push(format!(
                "in the worst case the contracts that go before it (`priorities = \"rt\"` first, then shorter periods, then the order of the spec) may take {} of its \
                 period of {}, and a part of its budget comes in the next one; give it a shorter period than theirs",
                Nanos(takes * 1000),
                Nanos(one.contract.period_us() * 1000)
            ));
        }
        // A contract that was given promises a budget; one that was found, a latest answer.
        if one.found.is_none() {
            continue;
        }
        let workers = attr(&Role::AioWorker, one.order, one.level, one.backend)
            .filter(|_| one.backend != Backend::Deadline);
        if one.backend != Backend::CpuMax && !workers.is_some_and(|a| a.policy.is_real_time()) {
            one.notes.push(
                "AIO workers are ordinary threads, which the budget does not limit: an answer that waits for one of them may come later than said (use `aio=native` or \
                 io_uring)"
                    .to_owned(),
            );
        }
        if one.backend == Backend::Deadline {
            one.notes.push(
                "each thread has a part of the budget: the latest answer is an estimate while the split follows the work, because the kernel lets deadlines pass where several CPUs share \
                 their threads".to_owned(),
            );
        }
    }
}
