//! "Did you mean": finds the nearest known word.

use strsim::osa_distance;

/// Longest word considered: no key is longer, and the distance costs the product of the lengths.
const MAX_LEN: usize = 32;

/// Candidate that `word` was probably meant to be; ignores case.
///
/// Up to a third of the letters may be wrong, at least one and at most three; the first candidate
/// wins a tie.
pub(crate) fn closest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    if word.len() > MAX_LEN {
        return None;
    }
    let word = word.to_lowercase();
    candidates
        .into_iter()
        .map(|c| {
            let wanted = c.to_lowercase();
            let longer = wanted.chars().count().max(word.chars().count());
            (osa_distance(&word, &wanted), longer, c)
        })
        // A word in which every letter differs is not a typo.
        .filter(|&(d, longer, _)| d <= (longer / 3).clamp(1, 3) && d < longer)
        .min_by_key(|&(d, ..)| d)
        .map(|(.., c)| c)
}

#[cfg(test)]
mod tests;
