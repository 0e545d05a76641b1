//! Capture, journal, apply, read back, roll back.
