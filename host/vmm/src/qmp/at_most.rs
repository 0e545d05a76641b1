//! Lists of which the other side chooses the length.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// The first `N` items of a list; further ones are read and dropped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AtMost<T, const N: usize> {
    pub(super) items: Vec<T>,
    pub(super) has_more: bool,
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for AtMost<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(List(PhantomData))
    }
}

struct List<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for List<T, N> {
    type Value = AtMost<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while items.len() < N {
            match list.next_element()? {
                Some(item) => items.push(item),
                None => return Ok(AtMost { items, has_more: false }),
            }
        }
        let mut has_more = false;
        while list.next_element::<IgnoredAny>()?.is_some() {
            has_more = true;
        }
        Ok(AtMost { items, has_more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_ends_at_the_limit() {
        let read = |text: &str| serde_json::from_str::<AtMost<u8, 2>>(text);
        let at_most = |items: &[u8], has_more| AtMost { items: items.to_vec(), has_more };
        assert_eq!(read("[]").unwrap(), at_most(&[], false));
        assert_eq!(read("[1, 2]").unwrap(), at_most(&[1, 2], false));
        assert_eq!(read("[1, 2, {}, \"x\"]").unwrap(), at_most(&[1, 2], true));
        for wrong in ["[1, {}]", "{}", "[1, 2, 3"] {
            read(wrong).unwrap_err();
        }
    }
}
