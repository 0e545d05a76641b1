//! What handlers of several files share.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use serde_json::json;

use crate::shared::Shared;

/// Shared state, as handlers take it.
pub(super) type Ctx = State<Arc<Shared>>;

/// Answer with the reason why a request has none.
pub(super) fn problem(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({ "error": why }))).into_response()
}
