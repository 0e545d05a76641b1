//! Splits bytes into lines, without keeping those that are too long.

/// Splitter state of a stream of lines.
#[derive(Debug)]
pub(crate) struct Lines {
    limit: usize,
    begun: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// Splitter for lines of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, begun: Vec::new(), is_too_long: false }
    }

    /// Lines that end in `bytes`, without their `\n`; `None` for one that was too long.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Option<Vec<u8>>> {
        let mut lines = Vec::new();
        let mut parts = bytes.split(|b| *b == b'\n');
        self.keep(parts.next().unwrap_or_default());
        for part in parts {
            let line = std::mem::take(&mut self.begun);
            lines.push((!std::mem::take(&mut self.is_too_long)).then_some(line));
            self.keep(part);
        }
        lines
    }

    fn keep(&mut self, part: &[u8]) {
        self.is_too_long |= self.begun.len() + part.len() > self.limit;
        if self.is_too_long {
            self.begun = Vec::new();
        } else {
            self.begun.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_pieces_and_long_ones_are_dropped_whole() {
        let mut lines = Lines::new(4);
        let line = |text: &str| Some(text.as_bytes().to_vec());
        assert_eq!(lines.push(b""), []);
        assert_eq!(lines.push(b"ab"), []);
        assert_eq!(lines.push(b"cd\n\nef\ng"), [line("abcd"), line(""), line("ef")]);
        assert_eq!(lines.push(b"1234"), [], "five bytes");
        assert_eq!((lines.push(b"5678"), lines.begun.capacity()), (vec![], 0));
        assert_eq!(lines.push(b"\nok\n"), [None, line("ok")]);
        assert_eq!(lines.push(b"12345\n1234\n"), [None, line("1234")]);
    }
}
