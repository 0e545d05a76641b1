//! Readers and writers of kernel files under a root path, and host checks.
