//! Tokens from Keystone by an application credential (Identity API v3, `POST /v3/auth/tokens`).

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::json;

use crate::config::KeystoneConfig;
use crate::error::PlacementError;
use crate::http::{Http, read_word};

/// Tokens are renewed this long before they expire: clocks differ, and a round takes a while.
const EARLY: SignedDuration = SignedDuration::from_secs(120);

/// A token and its expiry.
pub(crate) struct Token {
    pub(crate) value: String,
    expires: Timestamp,
}

impl Token {
    /// Whether the token is still valid, with `EARLY` to spare.
    pub(crate) fn is_good_at(&self, now: Timestamp) -> bool {
        self.expires.checked_sub(EARLY).is_ok_and(|end| now < end)
    }
}

#[derive(Deserialize)]
struct Body {
    token: Ends,
}

#[derive(Deserialize)]
struct Ends {
    expires_at: String,
}

/// Requests a token with an application credential.
pub(crate) fn token(http: &Http, of: &KeystoneConfig) -> Result<Token, PlacementError> {
    let secret = read_word(&of.secret_file)?;
    let body = json!({ "auth": { "identity": {
        "methods": ["application_credential"],
        "application_credential": { "id": of.id, "secret": secret },
    } } });
    let url = format!("{}/auth/tokens", of.url.trim_end_matches('/'));
    let answer = http.send("POST", &url, &[], Some(&body))?;
    if answer.status != 201 {
        return Err(PlacementError::Token { why: answer.why(), status: answer.status, url });
    }
    let ends: Body = answer.json("a token")?;
    let value = answer.subject_token.ok_or_else(|| PlacementError::Answer {
        what: "a token".to_owned(),
        why: "it has no X-Subject-Token".to_owned(),
    })?;
    let expires = ends.token.expires_at.parse().map_err(|e: jiff::Error| PlacementError::Answer {
        what: "a token".to_owned(),
        why: e.to_string(),
    })?;
    Ok(Token { value, expires })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_before_it_ends() {
        let expires: Timestamp = "2026-01-01T12:00:00.000000Z".parse().unwrap();
        let token = Token { value: String::new(), expires };
        assert!(token.is_good_at(expires - SignedDuration::from_secs(200)));
        assert!(!token.is_good_at(expires - SignedDuration::from_secs(100)));
        let never = Token { value: String::new(), expires: Timestamp::MIN };
        assert!(!never.is_good_at(expires));
    }
}
