//! Result files, tables, SVG plots and the HTML report.
