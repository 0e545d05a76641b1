//! Rendering of results, plans and profiles: terminal tables, SVG plots and one self-contained HTML
//! file.
//!
//! Nothing here measures, judges or decides. Verdicts with reasons come from `rtvirtio-measure`,
//! settings with reasons from `rtvirtio-planner`; this crate only formats them. All functions are
//! pure: the same input gives the same bytes.
//!
//! Names of VMs and devices are untrusted text. All text for a terminal goes through
//! `rtvirtio_text::terminal` (no control or direction-changing characters), all text for HTML or
//! SVG through `rtvirtio_text::xml` (escaped as well).

mod cpu_time;
pub mod html;
mod num;
mod summary;
pub mod svg;
pub mod text;
mod words;

pub use cpu_time::cpu_room;
pub use html::{ReportInput, html};
pub use rtvirtio_text::{terminal, terminal_lines, xml};
pub use summary::{Tally, tally};
pub use words::knob_name;

#[cfg(test)]
mod fixture;
