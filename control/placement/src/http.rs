//! Requests with JSON, and their answers.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use crate::error::PlacementError;

use rtvirtio_kernel::trusted::CONFIG_LIMIT;

/// Timeout of one request; only the publication waits for it.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Largest answer: a provider's allocations, of which each has some 200 bytes.
const LARGEST: u64 = 16 << 20;

/// An answer, whatever its status.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// Header `X-Subject-Token`, with Keystone's token.
    pub(crate) subject_token: Option<String>,
}

impl Answer {
    /// Parses the body as JSON; `what` names the request in the error.
    pub(crate) fn json<T: DeserializeOwned>(&self, what: &str) -> Result<T, PlacementError> {
        serde_json::from_slice(&self.body)
            .map_err(|e| PlacementError::Answer { what: what.to_owned(), why: e.to_string() })
    }

    /// Error text of the body: of Placement's list of errors, Keystone's error, or the body;
    /// without control characters.
    pub(crate) fn why(&self) -> String {
        let json: Option<Value> = serde_json::from_slice(&self.body).ok();
        let listed = json.as_ref().and_then(|j| j["errors"][0]["detail"].as_str());
        let single = json.as_ref().and_then(|j| j["error"]["message"].as_str());
        let text =
            listed.or(single).map_or_else(|| String::from_utf8_lossy(&self.body).into_owned(), str::to_owned);
        let is_between = |c: char| c.is_whitespace() || c.is_control();
        let words: Vec<&str> = text.split(is_between).filter(|word| !word.is_empty()).collect();
        words.join(" ").chars().take(300).collect()
    }
}

/// HTTP client without a proxy, with a timeout.
pub(crate) struct Http {
    agent: ureq::Agent,
}

impl Http {
    /// Trusts the system's certificate authorities and those of `ca`.
    pub(crate) fn new(ca: Option<&Path>) -> Result<Self, PlacementError> {
        let system = rustls_native_certs::load_native_certs().certs;
        let mut roots: Vec<Certificate<'static>> =
            system.iter().map(|c| Certificate::from_der(c.as_ref()).to_owned()).collect();
        if let Some(path) = ca {
            let own = read(path)?;
            let before = roots.len();
            roots.extend(parse_pem(&own).filter_map(|item| match item {
                Ok(PemItem::Certificate(c)) => Some(c),
                _ => None,
            }));
            if roots.len() == before {
                return Err(PlacementError::Config(format!(
                    "`placement.ca`: {} has no certificate in PEM's form",
                    path.display()
                )));
            }
        }
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::from(roots))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // A proxy of the environment would see the token, so none is used.
            .proxy(None)
            .timeout_global(Some(TIMEOUT))
            .user_agent(concat!("rtvirtio/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .build();
        Ok(Self { agent: ureq::Agent::new_with_config(config) })
    }

    /// Sends a request with these headers, and `body` as JSON.
    pub(crate) fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Answer, PlacementError> {
        let away = |why: String| PlacementError::Away { url: url.to_owned(), why };
        let mut request =
            ureq::http::Request::builder().method(method).uri(url).header("accept", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = match body {
            None => request.body(()).map_err(|e| away(e.to_string())).map(|r| self.agent.run(r)),
            Some(json) => request
                .header("content-type", "application/json")
                .body(json.to_string())
                .map_err(|e| away(e.to_string()))
                .map(|r| self.agent.run(r)),
        };
        let mut response = response?.map_err(|e| away(e.to_string()))?;
        let subject_token = response.headers().get("x-subject-token");
        let subject_token = subject_token.and_then(|t| t.to_str().ok()).map(str::to_owned);
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(LARGEST).read_to_vec();
        Ok(Answer { status, subject_token, body: body.map_err(|e| away(e.to_string()))? })
    }
}

/// Reads a regular file of at most `CONFIG_LIMIT` bytes.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, PlacementError> {
    rtvirtio_kernel::trusted::read_config(path, CONFIG_LIMIT)
        .map_err(|source| PlacementError::Read { path: path.to_owned(), source })
}

/// A file's content as one word.
pub(crate) fn read_word(path: &Path) -> Result<String, PlacementError> {
    let text = String::from_utf8_lossy(&read(path)?).trim().to_owned();
    if text.is_empty() || text.contains(char::is_whitespace) || !text.is_ascii() {
        return Err(PlacementError::Config(format!("{}: one token or secret in a line", path.display())));
    }
    Ok(text)
}
