//! Limit of the parts of a key, checked on tokens before a tree is built.
//!
//! The TOML parser limits brackets and the parts of one key to 80 each, but not their product: 12
//! KiB of text give a tree of 6000 levels, and dropping it overflows a thread's stack. With short
//! keys the product is 400.

use toml_parser::Source;
use toml_parser::lexer::TokenKind;

use crate::source::Span;

/// Limit of dots in one key. The longest path of a spec, `vm.task.target.latency`, has three.
const MAX_DOTS: usize = 4;

/// Span of the first dot beyond the limit; `None` without one.
pub(crate) fn too_deep(text: &str) -> Option<Span> {
    let mut dots = 0usize;
    let mut in_key = true;
    for token in Source::new(text).lex() {
        match token.kind() {
            TokenKind::Dot if in_key => dots += 1,
            // Dots of an unquoted value create no tables; the parser reports them.
            TokenKind::Equals => in_key = false,
            TokenKind::LeftSquareBracket
            | TokenKind::LeftCurlyBracket
            | TokenKind::Comma
            | TokenKind::Newline => {
                in_key = true;
                dots = 0;
            }
            _ => {}
        }
        if dots > MAX_DOTS {
            return Some(token.span().start()..token.span().end());
        }
    }
    None
}
