//! QMP and guest-agent clients.
