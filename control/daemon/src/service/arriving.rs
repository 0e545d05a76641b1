//! Requests about VMs that arrive by live migration, in the loop.

use super::{Service, ServiceEvent};
use crate::arrivals::ArrivalAnswer;
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
        let admitted = self.daemon.host().arrive(&vm, hold, &desired);
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
        let is_reserved = admitted.is_ok();
        self.event(kind, Some(&name), text, Vec::new(), &mut |_| {});
        if is_reserved {
            // Whoever is answered finds the reservation listed.
            self.publish();
        }
        if answer.send(admitted).is_err() && is_reserved {
            self.give_arrival_back(&name);
        }
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
        let desired = self.daemon.desired().clone();
        let (ended, unstored) = self.daemon.host().end_arrivals(&desired);
        if !ended.is_empty() {
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
