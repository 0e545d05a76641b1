//! Routes of the HTTP interface, which `docs/reference/openapi.json` describes.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{MethodRouter, delete, get, post};
use rtvirtio_apply::{Machine, NoGuests};
use rtvirtio_kernel::Root;
use rtvirtio_workflow::{Dirs, scope_files, scopes};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::wrappers::{BroadcastStream, IntervalStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};

use super::answers::{Ctx, problem};
use super::{arrivals, metrics};
use crate::history::{Event, now};
use crate::observe::{Observation, WaitsObservation};
use crate::shared::{Command, Shared};
use crate::snapshot::Snapshot;

/// OpenAPI description of the interface.
pub const OPENAPI: &str = include_str!("../../../../docs/reference/openapi.json");
const INDEX: &str = include_str!("../../page/index.html");
const TRANSPORT: &str = include_str!("../../page/transport.js");
const SCRIPT: &str = include_str!("../../page/app.js");
const STYLE: &str = include_str!("../../page/app.css");
/// Content security policy: the page loads nothing from elsewhere, and runs no script but its own.
const POLICY: &str =
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'self'";
/// Most events of one answer.
const MOST_EVENTS: usize = 1_000;
/// Interval of messages in a stream without events, so that a client that is gone is noticed, and
/// the page inside Cockpit notices a service that is gone.
const ALIVE_EVERY: Duration = Duration::from_secs(5);

/// All routes, for the Unix socket.
pub(super) fn all(shared: Arc<Shared>) -> Router {
    router(reads().into_iter().chain(changes())).with_state(shared)
}

/// Read-only routes, for TCP. A page of another site must not read them by DNS rebinding, so the
/// `Host` header has to name loopback.
pub(super) fn read_only(shared: Arc<Shared>) -> Router {
    router(reads()).layer(from_fn(loopback_only)).with_state(shared)
}

/// Method, path and handler.
type Route = (&'static str, &'static str, MethodRouter<Arc<Shared>>);

/// Router of these routes and the files of the page; anything else is 404.
fn router(routes: impl IntoIterator<Item = Route>) -> Router<Arc<Shared>> {
    let page = Router::new()
        .route("/", get(|| async { file("text/html; charset=utf-8", INDEX) }))
        .route("/transport.js", get(|| async { file("text/javascript; charset=utf-8", TRANSPORT) }))
        .route("/app.js", get(|| async { file("text/javascript; charset=utf-8", SCRIPT) }))
        .route("/app.css", get(|| async { file("text/css; charset=utf-8", STYLE) }))
        .route("/copy.html", get(copy));
    routes.into_iter().fold(page, |router, (_, path, answers)| router.route(path, answers)).fallback(
        || async { problem(StatusCode::NOT_FOUND, "there is nothing of this name: see /openapi.json") },
    )
}

fn reads() -> Vec<Route> {
    let described = || async { ([(header::CONTENT_TYPE, "application/json")], OPENAPI) };
    vec![
        ("get", "/v1/status", get(status)),
        ("get", "/v1/plan", get(plan)),
        ("get", "/v1/vms/{vm}", get(vm)),
        ("get", "/v1/vms/{vm}/settings", get(settings)),
        ("get", "/v1/arrivals", get(arrivals::list)),
        ("get", "/v1/observation", get(observation)),
        ("get", "/v1/waits", get(waits)),
        ("get", "/v1/history", get(history)),
        ("get", "/v1/events", get(events)),
        ("get", "/metrics", get(metrics)),
        ("get", "/openapi.json", get(described)),
    ]
}

fn changes() -> Vec<Route> {
    vec![
        ("post", "/v1/vms/{vm}/accept", post(accept)),
        ("post", "/v1/plan/accept", post(|shared: Ctx| answer_plan(shared, true))),
        ("post", "/v1/plan/refuse", post(|shared: Ctx| answer_plan(shared, false))),
        ("post", "/v1/compare", post(compare)),
        ("post", "/v1/arrivals", arrivals::arrive()),
        ("delete", "/v1/arrivals", delete(arrivals::give_back)),
    ]
}

async fn loopback_only(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = host
        .rsplit_once(':')
        .map_or(host, |(name, port)| if port.bytes().all(|b| b.is_ascii_digit()) { name } else { host });
    if ["localhost", "127.0.0.1", "[::1]"].contains(&name) {
        next.run(request).await
    } else {
        problem(StatusCode::FORBIDDEN, "ask for localhost, 127.0.0.1 or [::1]")
    }
}

async fn status(State(shared): Ctx) -> Json<Snapshot> {
    Json((*shared.snapshot()).clone())
}

/// Query for the VM of a libvirt domain.
#[derive(Deserialize)]
struct OfDomain {
    /// Name of the VM in libvirt; then the path has its UUID.
    domain: Option<String>,
}

async fn vm(State(shared): Ctx, Path(name): Path<String>, Query(of): Query<OfDomain>) -> Response {
    let snapshot = shared.snapshot();
    let found = match &of.domain {
        Some(domain) => snapshot.of_domain(domain, &name),
        None => snapshot.vms.iter().find(|vm| vm.name == name),
    };
    match found {
        Some(vm) => Json(vm).into_response(),
        None => problem(StatusCode::NOT_FOUND, "no contract names a VM of this name"),
    }
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

/// Settings in force for a VM: each with its value before, ours and now.
async fn settings(State(shared): Ctx, Path(name): Path<String>) -> Response {
    if !shared.snapshot().vms.iter().any(|vm| vm.name == name) {
        return problem(StatusCode::NOT_FOUND, "no contract names a VM of this name");
    }
    let dirs = shared.dirs().clone();
    match tokio::task::spawn_blocking(move || settings_of(&dirs, &name)).await {
        Ok(Ok(settings)) => Json(settings).into_response(),
        Ok(Err(why)) => problem(StatusCode::INTERNAL_SERVER_ERROR, &why),
        Err(e) => problem(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()),
    }
}

fn settings_of(dirs: &Dirs, vm: &str) -> Result<Value, String> {
    let root = Root::default();
    let read = || {
        let status = scopes::status(dirs, vm, &Machine::new(&root, &NoGuests))?;
        Ok::<_, rtvirtio_workflow::Error>((status, scope_files::in_force(dirs, vm)?))
    };
    let (status, in_force) = read().map_err(|e| format!("{e:#}"))?;
    Ok(json!({
        "knobs": status.map(|status| status.knobs).unwrap_or_default(),
        "reason": in_force.as_ref().map(|f| f.reason.clone()),
        "since": in_force.as_ref().map(|f| f.since.clone()),
    }))
}

/// The page as one file with the present data, to be kept and opened anywhere. It is a download, as
/// the policy of the page forbids inline scripts.
async fn copy(State(shared): Ctx) -> Response {
    let (dirs, snapshot) = (shared.dirs().clone(), shared.snapshot());
    let names: Vec<String> = snapshot.vms.iter().map(|vm| vm.name.clone()).collect();
    let read = move || -> serde_json::Map<String, Value> {
        let one = |name: String| {
            let settings = settings_of(&dirs, &name).unwrap_or_else(|why| json!({ "error": why }));
            (name, settings)
        };
        names.into_iter().map(one).collect()
    };
    let settings = match tokio::task::spawn_blocking(read).await {
        Ok(settings) => settings,
        Err(e) => return problem(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()),
    };
    let saved = json!({
        "time": now(),
        "status": *snapshot,
        "observation": *shared.observation(),
        "history": shared.history(0, MOST_EVENTS),
        "settings": settings,
    });
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"rtvirtio.html\""),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, copy_of(&saved)).into_response()
}

/// The page with its style, its script and `saved` inlined.
fn copy_of(saved: &Value) -> String {
    // Escaped, so that no text of the data closes the script element.
    let data = saved.to_string().replace('<', "\\u003c");
    let style = "<link rel=\"stylesheet\" href=\"app.css\">";
    let scripts = "<script src=\"transport.js\"></script>\n<script src=\"app.js\"></script>";
    let within = format!(
        "<script type=\"application/json\" id=\"saved\">{data}</script>\n<script>{TRANSPORT}</script>\n<script>{SCRIPT}</script>"
    );
    INDEX.replace(style, &format!("<style>{STYLE}</style>")).replace(scripts, &within)
}

async fn observation(State(shared): Ctx) -> Json<Observation> {
    Json((*shared.observation()).clone())
}

async fn waits(State(shared): Ctx) -> Json<WaitsObservation> {
    Json(shared.observation().waits.clone())
}

#[derive(Deserialize)]
struct Which {
    #[serde(default)]
    after: u64,
    limit: Option<usize>,
}

async fn history(State(shared): Ctx, Query(which): Query<Which>) -> Json<Vec<Event>> {
    Json(shared.history(which.after, which.limit.unwrap_or(MOST_EVENTS).min(MOST_EVENTS)))
}

/// The state now and whenever it changes, and every event. A slow client delays its own connection
/// only: it misses events, and gets their number.
async fn events(State(shared): Ctx, headers: HeaderMap) -> Sse<impl Stream<Item = Result<Sent, Infallible>>> {
    let last = headers.get("last-event-id").and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    // Subscribed before the past is read, so that no event is lost between.
    let live = BroadcastStream::new(shared.events());
    let missed = last.map_or_else(Vec::new, |id| shared.history(id, MOST_EVENTS));
    let newest = missed.last().map_or(0, |e| e.id);
    let past = tokio_stream::iter(missed).map(|event| sent(&event));
    let live = live.filter_map(move |event| match event {
        Ok(event) if event.id <= newest => None,
        Ok(event) => Some(sent(&event)),
        Err(BroadcastStreamRecvError::Lagged(n)) => Some(Sent::default().event("lost").data(n.to_string())),
    });
    let status = |shared: &Shared| {
        let data = serde_json::to_string(&*shared.snapshot()).unwrap_or_default();
        Sent::default().event("status").data(data)
    };
    let observed = |shared: &Shared| {
        let data = serde_json::to_string(&*shared.observation()).unwrap_or_default();
        Sent::default().event("observation").data(data)
    };
    let (of_states, of_ages) = (Arc::clone(&shared), Arc::clone(&shared));
    let states = WatchStream::new(shared.snapshots()).map(move |_| status(&of_states));
    // A loop that hangs publishes nothing, but the age of its last state grows.
    let mut every = tokio::time::interval(ALIVE_EVERY);
    // A client that did not read for a while gets one state, not all that it missed.
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let ages = IntervalStream::new(every).skip(1);
    let ages = ages.map(move |_| status(&of_ages));
    let seen = WatchStream::new(shared.observations()).map(move |_| observed(&shared));
    let all = past.chain(live).merge(states).merge(seen).merge(ages);
    Sse::new(all.map(Ok)).keep_alive(KeepAlive::new().interval(ALIVE_EVERY))
}

fn sent(event: &Event) -> Sent {
    let data = serde_json::to_string(event).unwrap_or_default();
    Sent::default().event("event").id(event.id.to_string()).data(data)
}

async fn accept(State(shared): Ctx, Path(vm): Path<String>) -> Response {
    let (answer, answered) = oneshot::channel();
    if !shared.send(Command::Accept(vm, answer)) {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends");
    }
    match answered.await {
        Ok(true) => Json(json!({ "accepted": true })).into_response(),
        Ok(false) => problem(StatusCode::CONFLICT, "no contract of a VM of this name waits"),
        Err(_) => problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends"),
    }
}

async fn plan(State(shared): Ctx) -> Response {
    match &shared.snapshot().plan {
        Some(plan) => Json(plan).into_response(),
        None => problem(StatusCode::NOT_FOUND, "no plan is held: `[plan]` in the configuration asks for one"),
    }
}

async fn answer_plan(State(shared): Ctx, accepts: bool) -> Response {
    let (answer, answered) = oneshot::channel();
    if !shared.send(Command::AnswerPlan(accepts, answer)) {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends");
    }
    match answered.await {
        Ok(true) => Json(json!({ "accepted": accepts })).into_response(),
        Ok(false) => problem(StatusCode::CONFLICT, "no plan waits"),
        Err(_) => problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends"),
    }
}

async fn compare(State(shared): Ctx) -> Response {
    if shared.send(Command::Compare) {
        (StatusCode::ACCEPTED, Json(json!({ "compares": true }))).into_response()
    } else {
        problem(StatusCode::SERVICE_UNAVAILABLE, "the service ends")
    }
}

async fn metrics(State(shared): Ctx) -> Response {
    match metrics::text(&shared) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(e) => problem(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_description_has_the_routes_and_no_others() {
        let description: Value = serde_json::from_str(OPENAPI).unwrap();
        let paths = description["paths"].as_object().unwrap();
        let described: BTreeSet<(&str, &str)> = paths
            .iter()
            .flat_map(|(path, all)| all.as_object().unwrap().keys().map(move |m| (m.as_str(), path.as_str())))
            .collect();
        let routes: Vec<Route> = reads().into_iter().chain(changes()).collect();
        let served: BTreeSet<(&str, &str)> = routes.iter().map(|route| (route.0, route.1)).collect();
        assert_eq!(described, served);
        // TCP serves GET requests only, and the description marks all others.
        for (path, all) in paths {
            for (method, operation) in all.as_object().unwrap() {
                let says = operation["summary"].as_str().unwrap().contains("Unix socket only");
                assert_eq!(says, method != "get", "{method} {path}");
            }
        }
    }

    #[test]
    fn a_copy_has_everything_within_and_no_text_of_it_ends_an_element() {
        let copy = copy_of(&json!({ "status": { "vms": [{ "name": "</script><b>x" }] } }));
        assert!(!copy.contains("href=\"app.css\"") && !copy.contains("src=\"app.js\""), "{copy}");
        assert!(copy.contains(STYLE) && copy.contains(TRANSPORT) && copy.contains(SCRIPT));
        assert!(!copy.contains("<b>x") && !SCRIPT.contains("</script") && !TRANSPORT.contains("</script"));
        let data = copy.split("id=\"saved\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["status"]["vms"][0]["name"], "</script><b>x");
    }

    /// Every reference resolves, and every schema is used.
    #[test]
    fn the_description_is_whole() {
        let description: Value = serde_json::from_str(OPENAPI).unwrap();
        let mut used = BTreeSet::new();
        references(&description, &mut used);
        for name in &used {
            let pointer = name.strip_prefix('#').unwrap();
            assert!(description.pointer(pointer).is_some(), "{name} leads nowhere");
        }
        for (kind, parts) in description["components"].as_object().unwrap() {
            for name in parts.as_object().unwrap().keys() {
                assert!(used.contains(&format!("#/components/{kind}/{name}")), "{name} is not used");
            }
        }
    }

    fn references(value: &Value, into: &mut BTreeSet<String>) {
        match value {
            Value::Array(all) => all.iter().for_each(|one| references(one, into)),
            Value::Object(fields) => {
                into.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|one| references(one, into));
            }
            _ => {}
        }
    }
}
