//! What a person sees of a result, a plan or a profile: terminal tables, SVG plots and one
//! self-contained HTML file.
//!
//! Nothing here measures, judges or decides. Verdicts and their reasons come from
//! `rtvirtio-measure`, settings and theirs from `rtvirtio-planner`; this crate only puts them into
//! words, columns and marks. All functions are pure: the same input gives the same bytes.
//!
//! Names of VMs and devices are other people's text. Everything that reaches a terminal goes
//! through `rtvirtio_text::terminal` (no control or direction-changing characters), everything that
//! reaches HTML or SVG through `rtvirtio_text::xml` (escaped as well).

pub mod html;
mod num;
mod summary;
pub mod svg;
pub mod text;
mod words;

pub use html::{ReportInput, html};
pub use rtvirtio_text::{terminal, xml};
pub use summary::{Tally, tally};
pub use words::knob_name;

#[cfg(test)]
mod fixture;
