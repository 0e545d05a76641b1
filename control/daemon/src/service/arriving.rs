//! Requests about VMs that arrive by live migration, in the loop.

use super::{Service, ServiceEvent};
use crate::arrivals::{Arrival, ArrivalAnswer, USUAL_HOLD};
use crate::history::EventKind;
use crate::linux::EndedArrival;
use crate::shared::ArrivalRequest;

impl Service {
    /// Answers a request. Nothing stays reserved for a client that has gone.
    pub(super) fn arrive(&mut self, request: ArrivalRequest) {
        let ArrivalRequest { vm, hold, answer, .. } = request;
        if answer.is_closed() {
            return;
        }
        let desired = self.daemon.desired().clone();
        let (admitted, before) = match self.daemon.host().arrive(&vm, hold, &desired) {
            Ok((admitted, before)) => (Ok(admitted), before),
            Err(e) => (Err(e), None),
        };
        let (kind, text) = match &admitted {
            Ok(ArrivalAnswer::Reserved { until, .. }) => {
                (EventKind::Note, format!("its contract is reserved until {until}: it is about to arrive"))
            }
            Ok(_) => {
                let _ = answer.send(admitted);
                return;
            }
            Err(e) => (EventKind::Refused, format!("it was not let in: {e}")),
        };
        let name = match &admitted {
            Ok(ArrivalAnswer::Reserved { vm, .. }) => vm.clone(),
            _ => vm.name,
        };
        self.event(kind, Some(&name), text, Vec::new(), &mut |_| {});
        if before.is_some() {
            // A client that has its answer finds the reservation listed.
            self.publish();
        }
        if let (Err(_), Some(before)) = (answer.send(admitted), before) {
            self.undo_arrival(name, before);
        }
    }

    /// Restores the reservations from before the request of a client that has gone: an earlier
    /// client may rely on its own.
    fn undo_arrival(&mut self, vm: String, before: Vec<Arrival>) {
        let had = before.iter().any(|of| of.vm() == vm);
        let earlier = if had { ", and the earlier one counts again" } else { "" };
        let unstored = self.daemon.host().undo_arrival(before);
        let why = format!("the client that asked for it has gone{earlier}");
        self.arrivals_ended(&[(vm, why)], unstored.as_deref(), &mut |_| {});
        self.publish();
    }

    /// Ends the reservations of a VM; returns whether there was one.
    pub(super) fn give_arrival_back(&mut self, vm: &str) -> bool {
        let (ended, unstored) = self.daemon.host().give_arrival_back(vm);
        let had = !ended.is_empty();
        self.arrivals_ended(&ended, unstored.as_deref(), &mut |_| {});
        if had {
            self.publish();
        }
        had
    }

    /// Ends reservations of VMs that have come, or have not come in time.
    pub(super) fn end_arrivals(&mut self, tell: &mut dyn FnMut(ServiceEvent<'_>)) {
        if !self.daemon.host_ref().has_arrivals() {
            return;
        }
        let (renewed, unstored) = self.daemon.host().renew_arrivals();
        for (vm, why) in &renewed {
            let lost = unstored.as_ref().map(|why| format!("; a restart of the service loses that: {why}"));
            let text = format!(
                "its contract is reserved for {USUAL_HOLD} more: {why}{}; `rtvirtio contract release` ends it",
                lost.unwrap_or_default()
            );
            self.event(EventKind::Note, Some(vm), text, Vec::new(), tell);
        }
        let desired = self.daemon.desired().clone();
        let (ended, unstored) = self.daemon.host().end_arrivals(&desired);
        if !ended.is_empty() || !renewed.is_empty() {
            self.was_asked = true;
            self.daemon.look_next();
        }
        self.arrivals_ended(&ended, unstored.as_deref(), tell);
    }

    fn arrivals_ended(
        &mut self,
        ended: &[EndedArrival],
        unstored: Option<&str>,
        tell: &mut dyn FnMut(ServiceEvent<'_>),
    ) {
        for (vm, why) in ended {
            let text = format!("the reservation for its arrival has ended: {why}");
            self.event(EventKind::Note, Some(vm), text, Vec::new(), tell);
            if let Some(why) = unstored {
                let text =
                    format!("after a restart of the service it counts again until its time is over: {why}");
                self.event(EventKind::Note, Some(vm), text, Vec::new(), tell);
            }
        }
    }
}
