use super::*;

#[test]
fn a_typo_finds_its_word() {
    let words = ["name", "op", "block", "pattern", "rate", "depth", "loop", "target"];
    for (typo, word) in [
        ("nmae", "name"),
        ("blok", "block"),
        ("rates", "rate"),
        ("Depth", "depth"),
        ("patern", "pattern"),
        ("ob", "op"),
    ] {
        assert_eq!(closest(typo, words), Some(word), "{typo}");
    }
}

#[test]
fn a_foreign_word_finds_nothing() {
    for word in ["", "x", "priority", "zz", &"block".repeat(20)] {
        assert_eq!(closest(word, ["block", "op", "rate"]), None, "{word}");
    }
}
