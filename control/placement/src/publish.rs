//! Writes the inventories of one resource provider.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use rtvirtio_fleet::Inventory;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Auth, PlacementConfig};
use crate::error::PlacementError;
use crate::http::{Answer, Http, read_word};
use crate::inventory::{Allocations, Plan, Wanted, plan};
use crate::keystone::{self, Token};

/// Microversion: from 1.26 on all of an inventory may be reserved.
const VERSION: &str = "placement 1.26";
/// Prefix of the resource classes written here.
const OURS: &str = "CUSTOM_RTVIRTIO_";
/// Attempts per round: others may change the provider in between.
const TRIES: u32 = 5;
/// Longest pause after failures.
const MAX_PAUSE: Duration = Duration::from_secs(600);

/// An inventory that was written, or would be.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Name of the resource class.
    pub class: String,
    /// Inventory before the round; `None` when there was none.
    pub from: Option<Inventory>,
    /// Inventory written, or to be written.
    pub to: Inventory,
}

/// Result of a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    /// UUID of the resource provider.
    pub provider: String,
    /// Target inventory of each resource class.
    pub inventories: BTreeMap<String, Inventory>,
    /// Inventories that were written; in a dry run those that would be.
    pub changes: Vec<Change>,
    /// Over-commitments and leftover resource classes, in words.
    pub notes: Vec<String>,
}

/// Publishes the inventories of one provider, round by round.
pub struct Publisher {
    http: Http,
    url: String,
    name: String,
    auth: Auth,
    every: Duration,
    token: Option<Token>,
    /// UUID of the provider, once it is found.
    provider: Option<String>,
    /// Resource classes known to exist.
    made: BTreeSet<String>,
    failures: u32,
}

#[derive(Deserialize)]
struct Providers {
    resource_providers: Vec<Provider>,
}

#[derive(Deserialize)]
struct Provider {
    uuid: String,
    name: String,
}

#[derive(Deserialize)]
struct Inventories {
    resource_provider_generation: u64,
    inventories: BTreeMap<String, Inventory>,
}

#[derive(Deserialize)]
struct AllocationsAnswer {
    resource_provider_generation: u64,
    allocations: BTreeMap<String, Consumer>,
}

#[derive(Deserialize)]
struct Consumer {
    resources: BTreeMap<String, u32>,
}

#[derive(Deserialize)]
struct Generation {
    resource_provider_generation: u64,
}

/// Outcome of one attempt.
enum Attempt {
    Done(Vec<Change>),
    /// The provider's generation changed: another client wrote in between.
    Conflict,
    /// A resource class does not exist any more, as after a reset of the service's database.
    NoClass,
}

impl Publisher {
    /// Publisher of a configuration; sends no request yet.
    ///
    /// # Errors
    /// [`PlacementError::Config`], and certificates that cannot be read.
    pub fn new(config: &PlacementConfig) -> Result<Self, PlacementError> {
        let auth = config.auth().map_err(PlacementError::Config)?;
        Ok(Self {
            http: Http::new(config.ca.as_deref())?,
            url: config.url.trim_end_matches('/').to_owned(),
            name: config.provider.clone(),
            auth,
            every: Duration::from_nanos(config.every.0),
            token: None,
            provider: None,
            made: BTreeSet::new(),
            failures: 0,
        })
    }

    /// Writes the inventories that differ from their target; with `is_dry` nothing is written.
    ///
    /// # Errors
    /// [`PlacementError`]; what was published before stays.
    pub fn round(&mut self, wanted: &Wanted, is_dry: bool) -> Result<Published, PlacementError> {
        let published = self.publish(wanted, is_dry);
        if published.is_ok() {
            self.failures = 0;
        } else {
            self.failures = self.failures.saturating_add(1);
            // The next round looks everything up again: the service may have another database.
            self.provider = None;
            self.made.clear();
        }
        published
    }

    /// Time until the next round: doubled after each failure in a row, ten minutes at most.
    #[must_use]
    pub fn pause(&self) -> Duration {
        let doubled = self.every.saturating_mul(1 << self.failures.min(16));
        if self.failures == 0 { self.every } else { doubled.min(MAX_PAUSE.max(self.every)) }
    }

    fn publish(&mut self, wanted: &Wanted, is_dry: bool) -> Result<Published, PlacementError> {
        let provider = self.provider()?;
        for _ in 0..TRIES {
            let there = self.inventories(&provider)?;
            let (generation, allocations) = self.allocations(&provider)?;
            if generation != there.resource_provider_generation {
                continue;
            }
            let Plan { inventories, mut notes } = plan(wanted, &allocations);
            let strange = there.inventories.keys().filter(|c| c.starts_with(OURS));
            let strange: Vec<&String> = strange.filter(|c| !inventories.contains_key(*c)).collect();
            notes.extend(strange.into_iter().map(|class| {
                format!(
                    "{class}: this host has nothing of that name any more: `openstack resource provider inventory delete {provider} --resource-class {class}`"
                )
            }));
            let differs = |class: &str, to: &Inventory| there.inventories.get(class) != Some(to);
            let changes: Vec<Change> = inventories
                .iter()
                .filter(|(class, to)| differs(class, to))
                .map(|(class, to)| Change {
                    class: class.clone(),
                    from: there.inventories.get(class).cloned(),
                    to: to.clone(),
                })
                .collect();
            let attempt = if is_dry {
                Attempt::Done(changes)
            } else {
                self.write(&provider, there.resource_provider_generation, changes)?
            };
            match attempt {
                Attempt::Done(changes) => return Ok(Published { provider, inventories, changes, notes }),
                Attempt::Conflict => {}
                Attempt::NoClass => self.made.clear(),
            }
        }
        Err(PlacementError::Conflict { tries: TRIES })
    }

    fn write(
        &mut self,
        provider: &str,
        mut generation: u64,
        changes: Vec<Change>,
    ) -> Result<Attempt, PlacementError> {
        for change in &changes {
            let class = &change.class;
            self.make_class(class)?;
            let mut body = serde_json::to_value(&change.to).map_err(|e| PlacementError::Answer {
                what: "an inventory".to_owned(),
                why: e.to_string(),
            })?;
            let at = format!("/resource_providers/{provider}/inventories");
            let what = format!("the inventory of {class}");
            let answer = match change.from {
                Some(_) => {
                    body["resource_provider_generation"] = generation.into();
                    self.ask("PUT", &format!("{at}/{class}"), Some(&body), &what)?
                }
                None => {
                    body["resource_class"] = class.as_str().into();
                    self.ask("POST", &at, Some(&body), &what)?
                }
            };
            match answer.status {
                200 | 201 => {}
                409 => return Ok(Attempt::Conflict),
                // The class, or its inventory, was removed in between.
                400 | 404 if is_missing(&answer) => return Ok(Attempt::NoClass),
                status => return Err(PlacementError::Refused { what, status, why: answer.why() }),
            }
            let now: Generation = answer.json(&what)?;
            // A new inventory is accepted at any generation: allocations may have changed.
            let next = generation.checked_add(1).ok_or_else(|| PlacementError::Answer {
                what: what.clone(),
                why: format!("the provider's generation {generation} has none after it"),
            })?;
            if now.resource_provider_generation != next {
                return Ok(Attempt::Conflict);
            }
            generation = next;
        }
        Ok(Attempt::Done(changes))
    }

    fn make_class(&mut self, class: &str) -> Result<(), PlacementError> {
        if self.made.contains(class) {
            return Ok(());
        }
        let what = format!("the resource class {class}");
        let answer = self.ask("PUT", &format!("/resource_classes/{class}"), None, &what)?;
        match answer.status {
            200..=299 => {
                self.made.insert(class.to_owned());
                Ok(())
            }
            status => Err(PlacementError::Refused { what, status, why: answer.why() }),
        }
    }

    /// UUID of the provider that the configuration names by name or UUID.
    fn provider(&mut self) -> Result<String, PlacementError> {
        if let Some(known) = &self.provider {
            return Ok(known.clone());
        }
        let what = "the resource providers";
        let key = if is_uuid(&self.name) { "uuid" } else { "name" };
        let path = format!("/resource_providers?{key}={}", percent_encoded(&self.name));
        let answer = self.expect(&path, what)?;
        let found: Providers = answer.json(what)?;
        let is_it = |p: &Provider| p.name == self.name || p.uuid.eq_ignore_ascii_case(&self.name);
        let found = found.resource_providers.into_iter().find(is_it);
        let uuid = found.ok_or_else(|| PlacementError::NoProvider { name: self.name.clone() })?.uuid;
        if !is_uuid(&uuid) {
            return Err(PlacementError::Answer {
                what: what.to_owned(),
                why: format!("{uuid:?} is no UUID"),
            });
        }
        self.provider = Some(uuid.clone());
        Ok(uuid)
    }

    fn inventories(&mut self, provider: &str) -> Result<Inventories, PlacementError> {
        let what = "the provider's inventories";
        let path = format!("/resource_providers/{provider}/inventories");
        let found: Inventories = self.expect(&path, what)?.json(what)?;
        match found.inventories.keys().find(|class| !is_class(class)) {
            None => Ok(found),
            Some(class) => Err(PlacementError::Answer {
                what: what.to_owned(),
                why: format!("{class:?} is no name of a resource class"),
            }),
        }
    }

    fn allocations(&mut self, provider: &str) -> Result<(u64, Allocations), PlacementError> {
        let what = "the provider's allocations";
        let answer: AllocationsAnswer =
            self.expect(&format!("/resource_providers/{provider}/allocations"), what)?.json(what)?;
        let all = answer.allocations.into_iter().map(|(uuid, of)| (uuid.to_ascii_lowercase(), of.resources));
        Ok((answer.resource_provider_generation, all.collect()))
    }

    /// Body of a GET; any status but 200 is an error.
    fn expect(&mut self, path: &str, what: &str) -> Result<Answer, PlacementError> {
        let answer = self.ask("GET", path, None, what)?;
        match answer.status {
            200 => Ok(answer),
            status => Err(PlacementError::Refused { what: what.to_owned(), status, why: answer.why() }),
        }
    }

    /// Any answer but 401, 403 and a gateway's 502 to 504, which are errors.
    fn ask(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        what: &str,
    ) -> Result<Answer, PlacementError> {
        let url = format!("{}{path}", self.url);
        let answer = self.ask_as(method, &url, body)?;
        // A token may be revoked before it expires.
        let answer = if answer.status == 401 && self.token.take().is_some() {
            self.ask_as(method, &url, body)?
        } else {
            answer
        };
        match answer.status {
            401 | 403 => Err(PlacementError::Forbidden {
                what: what.to_owned(),
                status: answer.status,
                why: answer.why(),
            }),
            502..=504 => Err(PlacementError::Away { url, why: format!("HTTP {}", answer.status) }),
            _ => Ok(answer),
        }
    }

    fn ask_as(&mut self, method: &str, url: &str, body: Option<&Value>) -> Result<Answer, PlacementError> {
        let token = match &self.auth {
            Auth::None => None,
            Auth::Token(token) => Some(token.clone()),
            Auth::File(file) => Some(read_word(file)?),
            Auth::Keystone(of) => {
                if !self.token.as_ref().is_some_and(|t| t.is_good_at(Timestamp::now())) {
                    self.token = Some(keystone::token(&self.http, of)?);
                }
                self.token.as_ref().map(|t| t.value.clone())
            }
        };
        let mut headers = vec![("openstack-api-version", VERSION)];
        headers.extend(token.as_deref().map(|token| ("x-auth-token", token)));
        self.http.send(method, url, &headers, body)
    }
}

/// Whether an answer says that a resource class or its inventory is not there.
fn is_missing(answer: &Answer) -> bool {
    let why = answer.why();
    why.contains("No such resource class") || why.contains("No inventory") || answer.status == 404
}

/// Whether a text has the form of a resource class (Placement's schema: `^[A-Z0-9_]+$`, at most
/// 255 characters). Notes print it in a command.
fn is_class(text: &str) -> bool {
    let may = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_';
    (1..=255).contains(&text.len()) && text.bytes().all(may)
}

fn is_uuid(text: &str) -> bool {
    let is_at =
        |(i, c): (usize, char)| if [8, 13, 18, 23].contains(&i) { c == '-' } else { c.is_ascii_hexdigit() };
    text.len() == 36 && text.char_indices().all(is_at)
}

/// Percent-encodes a value of a query.
fn percent_encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_encoded_and_uuids_known() {
        assert_eq!(percent_encoded("n1.example&x=é"), "n1.example%26x%3D%C3%A9");
        assert!(is_uuid("f0d2c3a4-0000-4000-8000-00000000000A"));
        assert!(!is_uuid("f0d2c3a4-0000-4000-8000-00000000000") && !is_uuid("n1"));
    }

    #[test]
    fn pauses_grow_while_the_service_is_away() {
        let text = "url = \"http://127.0.0.1:9\"\nprovider = \"n1\"\nfleet = \"f\"\nevery = \"1min\"\n";
        let config: PlacementConfig = toml::from_str(text).unwrap();
        let mut publisher = Publisher::new(&config).unwrap();
        let minutes = |p: &Publisher| p.pause().as_secs() / 60;
        assert_eq!(minutes(&publisher), 1);
        let mut seen = Vec::new();
        for failures in 1..=70 {
            publisher.failures = failures;
            seen.push(minutes(&publisher));
        }
        assert_eq!(seen[..5], [2, 4, 8, 10, 10]);
        assert!(seen[5..].iter().all(|m| *m == 10));
    }
}
