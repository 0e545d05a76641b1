//! `/v1/arrivals`: VMs that are about to arrive by live migration.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{MethodRouter, post};
use rtvirtio_units::Nanos;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::answers::{Ctx, problem};
use crate::arrivals::{ArrivalError, ArrivalSnapshot, ArrivingVm, LONGEST_HOLD, USUAL_HOLD};
use crate::shared::{ArrivalRequest, Command, Shared};

/// Largest description of a VM, in bytes: as of libvirt's answers.
const LARGEST_BODY: usize = 4 << 20;
/// Timeout of the loop's answer; a migration, or the stop of a VM, waits for it.
const ANSWER_TIME: Duration = Duration::from_secs(4);

/// Query of a request for a reservation.
#[derive(Deserialize)]
struct Asked {
    /// VM of a contract file with several.
    vm: Option<String>,
    /// Number of a VM of Proxmox VE, in place of a description.
    proxmox: Option<u32>,
    /// Time of the reservation, such as `10min`.
    r#for: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Named {
    vm: String,
}

/// Reservations, as of the last admission.
pub(super) async fn list(State(shared): Ctx) -> Json<Vec<ArrivalSnapshot>> {
    Json(shared.snapshot().arrivals.clone())
}

/// Handler that admits a VM and reserves for it.
pub(super) fn arrive() -> MethodRouter<Arc<Shared>> {
    post(reserve).layer(DefaultBodyLimit::max(LARGEST_BODY))
}

async fn reserve(State(shared): Ctx, Query(asked): Query<Asked>, body: String) -> Response {
    let hold = match asked.r#for.as_deref().map(str::parse::<Nanos>) {
        None => USUAL_HOLD,
        Some(Ok(hold)) if hold > Nanos(0) && hold <= LONGEST_HOLD => hold,
        Some(Ok(hold)) => {
            let why = format!("`for` is {hold}: more than 0, at most {LONGEST_HOLD}");
            return problem(StatusCode::BAD_REQUEST, &why);
        }
        Some(Err(e)) => return problem(StatusCode::BAD_REQUEST, &format!("`for`: {e}")),
    };
    let Ok(place) = Arc::clone(&shared.arriving).try_acquire_owned() else {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "too many VMs ask to arrive at once");
    };
    // A large description takes the parser a while: other clients are answered meanwhile.
    let parse = move || match asked.proxmox {
        Some(id) => Ok(ArrivingVm::of_proxmox(id)),
        None => ArrivingVm::of_body(&body, asked.vm.as_deref()),
    };
    let parsed = tokio::task::spawn_blocking(parse).await;
    let vm = match parsed {
        Ok(Ok(vm)) => vm,
        Ok(Err(why)) => return problem(StatusCode::BAD_REQUEST, &why),
        Err(e) => return problem(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()),
    };
    let (answer, answered) = oneshot::channel();
    let request = ArrivalRequest { vm, hold, _place: place, answer };
    if !shared.send(Command::Arrive(request)) {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends");
    }
    match timeout(ANSWER_TIME, answered).await {
        Ok(Ok(Ok(answer))) => Json(answer).into_response(),
        Ok(Ok(Err(e))) => problem(status_of(&e), &e.to_string()),
        Ok(Err(_)) => problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends"),
        // Nothing stays reserved: the loop sees that the client has gone.
        Err(_) => problem(StatusCode::SERVICE_UNAVAILABLE, "the service is busy: nothing was decided"),
    }
}

fn status_of(e: &ArrivalError) -> StatusCode {
    match e {
        ArrivalError::Contract { .. } => StatusCode::BAD_REQUEST,
        e if e.is_temporary() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::CONFLICT,
    }
}

/// Ends the reservations of a VM.
pub(super) async fn give_back(State(shared): Ctx, Query(named): Query<Named>) -> Response {
    let nothing = || problem(StatusCode::NOT_FOUND, "nothing is reserved for a VM of this name or UUID");
    // libvirt's hook asks at every stop of a VM: without a reservation the answer is here.
    if shared.snapshot().arrivals.is_empty() {
        return nothing();
    }
    let (answer, answered) = oneshot::channel();
    if !shared.send(Command::GiveArrivalBack(named.vm, answer)) {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends");
    }
    match timeout(ANSWER_TIME, answered).await {
        Ok(Ok(true)) => Json(json!({ "given_back": true })).into_response(),
        Ok(Ok(false)) => nothing(),
        Ok(Err(_)) => problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends"),
        Err(_) => {
            problem(StatusCode::SERVICE_UNAVAILABLE, "the service is busy: it will be given back later")
        }
    }
}
