//! Tables with aligned columns.

use unicode_width::UnicodeWidthStr;

use super::{Paint, Style};

/// Spaces between two columns.
const GAP: usize = 2;
/// Least width of names that are cut, in columns.
const NAME_MIN: usize = 6;

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left, for text.
    Left,
    /// Right, for numbers.
    Right,
}

/// Heading and alignment of a column.
#[derive(Clone, Debug)]
pub struct Column {
    title: String,
    align: Align,
    name: bool,
}

/// Text and colour of one field.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    paint: Option<Paint>,
}

/// A table; fields are cleaned and measured when it is drawn.
#[derive(Clone, Debug, Default)]
pub struct Table {
    columns: Vec<Column>,
    groups: Vec<(usize, String)>,
    rows: Vec<Vec<Cell>>,
}

impl Column {
    /// A column of numbers, to the right.
    #[must_use]
    pub fn number(title: &str) -> Self {
        Self { title: title.to_owned(), align: Align::Right, name: false }
    }

    /// A column of short fixed words, to the left.
    #[must_use]
    pub fn word(title: &str) -> Self {
        Self { title: title.to_owned(), align: Align::Left, name: false }
    }

    /// A column of names, to the left; cut in the middle when the table is too wide.
    #[must_use]
    pub fn name(title: &str) -> Self {
        Self { title: title.to_owned(), align: Align::Left, name: true }
    }
}

impl Cell {
    /// A field in a colour.
    #[must_use]
    pub fn painted(text: &str, paint: Option<Paint>) -> Self {
        Self { text: text.to_owned(), paint }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, paint: None }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::from(text.to_owned())
    }
}

impl Table {
    /// An empty table with these columns.
    #[must_use]
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, groups: Vec::new(), rows: Vec::new() }
    }

    /// Adds headings above the headings: each over this many columns, from the left.
    #[must_use]
    pub fn grouped(mut self, groups: Vec<(usize, String)>) -> Self {
        self.groups = groups;
        self
    }

    /// Adds a row; missing fields are empty, fields beyond the columns are dropped.
    pub fn row(&mut self, mut cells: Vec<Cell>) {
        cells.resize_with(self.columns.len(), || Cell::from(""));
        self.rows.push(cells);
    }

    /// Lines of the table, each with a newline and without trailing spaces.
    #[must_use]
    pub fn draw(&self, style: &Style) -> String {
        let rows: Vec<Vec<(String, Option<Paint>)>> =
            self.rows.iter().map(|r| r.iter().map(|c| (style.clean(&c.text), c.paint)).collect()).collect();
        let widths = self.widths(&rows, style.width);
        let rule = if style.ascii { "-" } else { "─" };
        let mut out = String::new();
        if !self.groups.is_empty() {
            out.push_str(&self.group_line(&widths, style));
        }
        let titles: Vec<_> = self.columns.iter().map(|c| (c.title.clone(), Some(Paint::Strong))).collect();
        out.push_str(&self.line(&titles, &widths, style));
        let rules: Vec<_> = widths.iter().map(|&w| (rule.repeat(w), None)).collect();
        out.push_str(&self.line(&rules, &widths, style));
        for row in &rows {
            out.push_str(&self.line(row, &widths, style));
        }
        out
    }

    /// Natural widths, then names shortened from the widest until the table fits or all names have
    /// their least width.
    fn widths(&self, rows: &[Vec<(String, Option<Paint>)>], room: usize) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|c| c.title.width()).collect();
        for row in rows {
            for (w, (text, _)) in widths.iter_mut().zip(row) {
                *w = (*w).max(text.width());
            }
        }
        // Saturating, because an empty table has no gaps.
        let gaps = GAP * widths.len().saturating_sub(1);
        while widths.iter().sum::<usize>() + gaps > room {
            let widest = (0..widths.len())
                .filter(|&i| self.columns[i].name && widths[i] > NAME_MIN.max(self.columns[i].title.width()))
                .max_by_key(|&i| widths[i]);
            match widest {
                Some(i) => widths[i] -= 1,
                None => break,
            }
        }
        widths
    }

    fn line(&self, fields: &[(String, Option<Paint>)], widths: &[usize], style: &Style) -> String {
        let mut out = String::new();
        for (i, ((text, paint), &w)) in fields.iter().zip(widths).enumerate() {
            let text = style.shorten(text, w);
            let pad = " ".repeat(w - text.width().min(w));
            let text = paint.map_or_else(|| text.clone(), |p| style.paint(&text, p));
            if i > 0 {
                out.push_str(&" ".repeat(GAP));
            }
            match self.columns[i].align {
                Align::Left => out.push_str(&format!("{text}{pad}")),
                Align::Right => out.push_str(&format!("{pad}{text}")),
            }
        }
        format!("{}\n", out.trim_end())
    }

    /// Group titles, each centred on a rule over its columns.
    fn group_line(&self, widths: &[usize], style: &Style) -> String {
        let rule = if style.ascii { "-" } else { "─" };
        let (mut out, mut next) = (String::new(), 0);
        for (span, title) in &self.groups {
            let cols = &widths[next.min(widths.len())..(next + span).min(widths.len())];
            let room = cols.iter().sum::<usize>() + GAP * cols.len().saturating_sub(1);
            if next > 0 {
                out.push_str(&" ".repeat(GAP));
            }
            next += span;
            if title.is_empty() {
                out.push_str(&" ".repeat(room));
                continue;
            }
            let title = style.shorten(&style.clean(title), room.saturating_sub(4));
            let fill = room.saturating_sub(title.width() + 2);
            let title = style.paint(&title, Paint::Strong);
            out.push_str(&format!("{} {title} {}", rule.repeat(fill / 2), rule.repeat(fill - fill / 2)));
        }
        format!("{}\n", out.trim_end())
    }
}
