//! One module per command.

pub mod boxed;
pub mod demo;
mod domain;
pub mod kvm;
pub mod lab;
pub mod profile;
