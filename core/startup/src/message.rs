//! Messages of a guest: lines on a virtio-serial port.

use std::fmt;

use rtvirtio_units::Nanos;

/// Name of the port, as the guest's kernel shows it in `/sys/class/virtio-ports/*/name`.
pub const PORT: &str = "org.rtvirtio.start.0";
/// Longest line that is read, in bytes; a longer one is ignored.
pub const LONGEST_LINE: usize = 64;

/// Message of a guest, one line of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartMessage {
    /// A program starts that a user waits for: `start ID MS`.
    Start {
        /// Distinguishes starts that overlap, such as a process id in the guest.
        id: u32,
        /// Longest time asked for; the host's own limit holds too.
        wanted: Nanos,
    },
    /// The start with this id is over: `end ID`.
    End { id: u32 },
}

impl fmt::Display for StartMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { id, wanted } => writeln!(f, "start {id} {}", wanted.0.div_ceil(1_000_000)),
            Self::End { id } => writeln!(f, "end {id}"),
        }
    }
}

impl StartMessage {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
        let (verb, id) = (fields.next()?, fields.next()?.parse().ok()?);
        let word = match verb {
            "start" => {
                let ms: u64 = fields.next()?.parse().ok()?;
                Self::Start { id, wanted: Nanos(ms.checked_mul(1_000_000)?) }
            }
            "end" => Self::End { id },
            _ => return None,
        };
        fields.next().is_none().then_some(word)
    }
}

/// Parser of a guest's byte stream, which buffers at most [`LONGEST_LINE`] bytes.
#[derive(Clone, Debug, Default)]
pub struct StartMessageReader {
    line: Vec<u8>,
    /// Whether the present line is too long, and ignored up to its end.
    too_long: bool,
    ignored: u64,
}

impl StartMessageReader {
    /// Takes bytes and calls `on_word` for each complete valid line.
    pub fn push(&mut self, bytes: &[u8], on_word: &mut dyn FnMut(StartMessage)) {
        for byte in bytes {
            if *byte != b'\n' {
                self.too_long |= self.line.len() >= LONGEST_LINE;
                if !self.too_long {
                    self.line.push(*byte);
                }
                continue;
            }
            match StartMessage::parse(&self.line).filter(|_| !self.too_long) {
                Some(word) => on_word(word),
                None => self.ignored += 1,
            }
            self.line.clear();
            self.too_long = false;
        }
    }

    /// Number of invalid lines.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> (Vec<StartMessage>, u64) {
        let (mut reader, mut words) = (StartMessageReader::default(), Vec::new());
        reader.push(bytes, &mut |word| words.push(word));
        (words, reader.ignored())
    }

    #[test]
    fn lines_are_words_or_ignored() {
        let start = StartMessage::Start { id: 7, wanted: Nanos(1_500_000_000) };
        assert_eq!(start.to_string(), "start 7 1500\n");
        let (words, ignored) = read(b"start 7 1500\nend 7\nstart 7\nend\n\nsta");
        assert_eq!((words, ignored), (vec![start, StartMessage::End { id: 7 }], 3));
        assert_eq!(read(b"start 1 18446744073709551615\nend 5000000000\nend 1 2\n\xff\n"), (Vec::new(), 4));
        let mut long = vec![b' '; LONGEST_LINE + 1];
        long.extend(b"\nend 1\n");
        assert_eq!(read(&long), (vec![StartMessage::End { id: 1 }], 1));
    }

    proptest! {
        #[test]
        fn words_survive_any_cut(ids in proptest::collection::vec((any::<u32>(), 0u64..1 << 40), 0..9), cut in 1usize..20) {
            let words: Vec<StartMessage> = ids
                .iter()
                .map(|&(id, ms)| if ms % 3 == 0 { StartMessage::End { id } } else { StartMessage::Start { id, wanted: Nanos(ms * 1_000_000) } })
                .collect();
            let text: String = words.iter().map(StartMessage::to_string).collect();
            let (mut reader, mut got) = (StartMessageReader::default(), Vec::new());
            for piece in text.as_bytes().chunks(cut) {
                reader.push(piece, &mut |word| got.push(word));
            }
            prop_assert_eq!((got, reader.ignored()), (words, 0));
        }

        #[test]
        fn no_bytes_are_kept_beyond_a_line(bytes in proptest::collection::vec(any::<u8>(), 0..2_000)) {
            let mut reader = StartMessageReader::default();
            reader.push(&bytes, &mut |_| {});
            prop_assert!(reader.line.len() <= LONGEST_LINE);
        }
    }
}
