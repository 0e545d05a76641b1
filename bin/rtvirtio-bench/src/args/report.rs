//! `rtvirtio-bench report`.

use std::path::PathBuf;

use clap::Args;

/// `rtvirtio-bench report`.
#[derive(Args, Debug)]
pub struct BenchReportArgs {
    /// Directory of the datasets, and of models as DEVICE.model.json
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub data: PathBuf,
    /// Write the claims that have a limit as a page in Markdown here
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write all claims, a line each with tabs between its cells, here
    #[arg(long, value_name = "FILE")]
    pub table: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
