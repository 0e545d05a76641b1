//! Places in a table of fixed size, taken in rows.

/// Places, each free or taken.
#[derive(Debug)]
pub(crate) struct Places(Box<[bool]>);

impl Places {
    /// So many free places.
    pub(crate) fn new(n: u32) -> Self {
        Self(vec![false; n as usize].into())
    }

    /// Takes a row of `n` places, the first that is free. Returns the first of the row; `None` when
    /// there is no such row, and for 0.
    pub(crate) fn take(&mut self, n: u32) -> Option<u32> {
        let n = n as usize;
        let mut free = 0;
        let end = self.0.iter().position(|is_taken| {
            free = if *is_taken { 0 } else { free + 1 };
            n > 0 && free == n
        })?;
        let first = end + 1 - n;
        self.0[first..=end].fill(true);
        u32::try_from(first).ok()
    }

    /// Frees a row.
    pub(crate) fn release(&mut self, first: u32, n: u32) {
        let first = first as usize;
        if let Some(row) = self.0.get_mut(first..first + n as usize) {
            row.fill(false);
        }
    }

    /// Number of places up to the last one that is taken.
    pub(crate) fn end(&self) -> u32 {
        self.0.iter().rposition(|is_taken| *is_taken).map_or(0, |last| last as u32 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_do_not_overlap_and_are_used_again() {
        let mut places = Places::new(8);
        assert_eq!((places.take(0), places.take(9), places.end()), (None, None, 0));
        assert_eq!((places.take(3), places.take(2), places.take(4)), (Some(0), Some(3), None));
        assert_eq!((places.take(3), places.take(1), places.end()), (Some(5), None, 8));
        places.release(3, 2);
        assert_eq!((places.take(3), places.end()), (None, 8));
        places.release(5, 3);
        assert_eq!(places.end(), 3);
        assert_eq!((places.take(5), places.end()), (Some(3), 8));
        // Outside of the table.
        places.release(7, 2);
        assert_eq!(places.take(1), None);
    }
}
