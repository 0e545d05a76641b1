//! The `[placement]` table.

use std::path::{Path, PathBuf};

use rtvirtio_units::Nanos;
use serde::Deserialize;

/// Placement service, credentials and this host's fleet file. Paths are relative to the
/// configuration file until [`PlacementConfig::below`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementConfig {
    /// The service, such as `https://cloud.example:8778` or `http://controller/placement`.
    pub url: String,
    /// The resource provider of this compute node, by name (Nova's name of the host) or UUID.
    pub provider: String,
    /// Time between two rounds; at least 500 ms.
    #[serde(default = "default_every", deserialize_with = "rtvirtio_units::as_text::deserialize")]
    pub every: Nanos,
    /// CA certificates in PEM, in addition to the system's.
    #[serde(default)]
    pub ca: Option<PathBuf>,
    /// A fixed token, such as `admin` where Placement runs with `auth_strategy = noauth2`.
    #[serde(default)]
    pub token: Option<String>,
    /// A file with a token, read anew whenever one is needed.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// Application credential for tokens from Keystone.
    #[serde(default)]
    pub keystone: Option<KeystoneConfig>,
    /// The fleet file with this host and the contracts that may come to it: the one of which
    /// `rtvirtio fleet --openstack` makes the flavours, so that all count alike.
    pub fleet: PathBuf,
    /// This host's name in the fleet file; that of the provider where not given.
    #[serde(default)]
    pub host: Option<String>,
}

/// An application credential of Keystone, version 3 of its API.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeystoneConfig {
    /// The identity service with its version, such as `https://cloud.example:5000/v3`.
    pub url: String,
    /// The application credential's id.
    pub id: String,
    pub secret_file: PathBuf,
}

fn default_every() -> Nanos {
    Nanos::from_millis(60_000)
}

/// Way in which requests are authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// No token is sent.
    None,
    /// A fixed token of the configuration.
    Token(String),
    /// A file with the token, read for each request.
    File(PathBuf),
    /// Credential with which Keystone issues tokens.
    Keystone(KeystoneConfig),
}

impl PlacementConfig {
    /// This host's name in the fleet file.
    #[must_use]
    pub fn host_name(&self) -> &str {
        self.host.as_deref().unwrap_or(&self.provider)
    }

    /// Shortest time between two rounds.
    const SHORTEST: Nanos = Nanos::from_millis(500);

    /// Makes its paths relative to `dir`.
    #[must_use]
    pub fn below(mut self, dir: &Path) -> Self {
        self.fleet = dir.join(&self.fleet);
        self.ca = self.ca.map(|ca| dir.join(ca));
        self.token_file = self.token_file.map(|file| dir.join(file));
        if let Some(keystone) = &mut self.keystone {
            keystone.secret_file = dir.join(&keystone.secret_file);
        }
        self
    }

    /// Authentication that the configuration asks for.
    ///
    /// # Errors
    /// Several ways of authentication, or an invalid value.
    pub fn auth(&self) -> Result<Auth, String> {
        if !self.url.starts_with("http://") && !self.url.starts_with("https://") {
            return Err(format!("`placement.url` is {:?}: write http://... or https://...", self.url));
        }
        if self.provider.trim().is_empty() {
            return Err("`placement.provider` is empty: write the name of this host's compute node".into());
        }
        if self.every < Self::SHORTEST {
            return Err(format!("`placement.every` is {}: at least {}", self.every, Self::SHORTEST));
        }
        match (&self.token, &self.token_file, &self.keystone) {
            (None, None, None) => Ok(Auth::None),
            (Some(token), None, None) => Ok(Auth::Token(token.clone())),
            (None, Some(file), None) => Ok(Auth::File(file.clone())),
            (None, None, Some(keystone)) => Ok(Auth::Keystone(keystone.clone())),
            _ => Err("`placement` has several of `token`, `token_file` and `keystone`: keep one".into()),
        }
    }
}
