//! A Rust source file as a flat list of tokens, each with its line, its inline module, and whether it is test code.
//!
//! Tokens, unlike a plain search, do not confuse code with comments and strings, and unlike a syntax tree they show what is
//! inside macros.

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::rc::Rc;

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A word: name or keyword.
    Ident(String),
    /// One punctuation character.
    Punct(char),
    /// A literal as written, quotes included.
    Literal(String),
    /// An opening bracket.
    Open(char),
    /// A closing bracket.
    Close(char),
}

/// One token.
#[derive(Clone, Debug)]
pub struct Token {
    /// What it is.
    pub kind: Kind,
    /// Line, from 1.
    pub line: usize,
    /// Whether it is inside an item marked `#[cfg(test)]`.
    pub test: bool,
    /// Inline modules around it, outermost first.
    pub modules: Rc<Vec<String>>,
}

/// A path as code names it, made absolute where it starts with `crate`, `super` or `self`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPath {
    /// Segments; the first is `crate` for this crate, else the crate or name that the path starts with.
    pub segments: Vec<String>,
    /// Line, from 1.
    pub line: usize,
    /// Whether test code names it.
    pub test: bool,
}

/// A parsed file.
pub struct SourceFile {
    /// Path from the top of the workspace.
    pub path: String,
    /// The text.
    pub text: String,
    /// The tokens in order.
    pub tokens: Vec<Token>,
}

impl SourceFile {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// If it is not made of Rust tokens.
    pub fn parse(path: &str, text: &str) -> Result<Self> {
        let stream: TokenStream = text.parse().map_err(|error| anyhow!("{path}: not made of Rust tokens: {error}"))?;
        let mut tokens = Vec::new();
        flatten(stream, false, &Rc::default(), &mut tokens);
        Ok(Self { path: path.to_owned(), text: text.to_owned(), tokens })
    }

    /// Whether the whole file is test code: `tests.rs`, or in a directory `tests`.
    #[must_use]
    pub fn is_test(&self) -> bool {
        self.path.ends_with("/tests.rs") || self.path.split('/').any(|part| part == "tests" || part == "benches")
    }

    /// The module of the crate that this file is, below `src/`: `nft::object` for `proxy/src/nft/object.rs`, empty for `lib.rs`.
    #[must_use]
    pub fn module(&self) -> Vec<String> {
        let inside = self.path.split_once("/src/").map_or(self.path.as_str(), |(_, rest)| rest);
        let stem = inside.strip_suffix(".rs").unwrap_or(inside);
        let mut parts: Vec<String> = stem.split('/').map(str::to_owned).collect();
        if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
            parts.pop();
        }
        parts
    }

    /// The word at token `index`.
    #[must_use]
    pub fn word(&self, index: usize) -> Option<&str> {
        match self.tokens.get(index).map(|t| &t.kind) {
            Some(Kind::Ident(word)) => Some(word),
            _ => None,
        }
    }

    fn is_punct(&self, index: usize, character: char) -> bool {
        self.tokens.get(index).is_some_and(|t| t.kind == Kind::Punct(character))
    }

    /// Whether tokens `index` and the next are `::`.
    #[must_use]
    pub fn is_separator(&self, index: usize) -> bool {
        self.is_punct(index, ':') && self.is_punct(index + 1, ':')
    }

    /// All paths of two or more segments that the file names, `use` trees spread out.
    #[must_use]
    pub fn paths(&self) -> Vec<NamedPath> {
        let mut found = Vec::new();
        for (index, token) in self.tokens.iter().enumerate() {
            let starts = self.word(index).is_some_and(|word| word != "use")
                && self.is_separator(index + 1)
                && !(index >= 2 && self.is_separator(index - 2) && self.continues_path(index - 2))
                && !self.in_use_tree(index);
            if starts {
                let mut spread = Vec::new();
                self.tree(index, &[], &mut spread);
                for (segments, line) in spread {
                    let segments = self.absolute(segments, &token.modules);
                    found.push(NamedPath { segments, line, test: token.test || self.is_test() });
                }
            }
        }
        found
    }

    /// Whether the `::` at `index` follows a word or `>`, so that it continues a path (a leading `::` starts one).
    fn continues_path(&self, index: usize) -> bool {
        index > 0 && (self.word(index - 1).is_some_and(|w| w != "use") || self.is_punct(index - 1, '>'))
    }

    /// Whether `index` is in a `{…}` that a `::` opens: then the tree that contains it has it.
    fn in_use_tree(&self, index: usize) -> bool {
        let mut depth = 0usize;
        for i in (0..index).rev() {
            match &self.tokens[i].kind {
                Kind::Close(_) => depth += 1,
                Kind::Open(bracket) => {
                    if depth > 0 {
                        depth -= 1;
                    } else {
                        return *bracket == '{' && i >= 2 && self.is_separator(i - 2);
                    }
                }
                Kind::Punct(';') if depth == 0 => return false,
                _ => {}
            }
        }
        false
    }

    /// Spreads the path or use tree at `index`; returns the index after it.
    fn tree(&self, mut index: usize, prefix: &[String], found: &mut Vec<(Vec<String>, usize)>) -> usize {
        let mut segments = prefix.to_vec();
        let mut line = self.tokens.get(index).map_or(0, |t| t.line);
        loop {
            match self.tokens.get(index).map(|t| &t.kind) {
                Some(Kind::Ident(word)) => {
                    line = self.tokens[index].line;
                    if word != "self" || segments.is_empty() {
                        segments.push(word.clone());
                    }
                    index += 1;
                    if self.is_separator(index) {
                        index += 2;
                        continue;
                    }
                }
                Some(Kind::Punct('*')) => {
                    segments.push("*".into());
                    index += 1;
                }
                Some(Kind::Open('{')) => {
                    index += 1;
                    while index < self.tokens.len() && self.tokens[index].kind != Kind::Close('}') {
                        let next = self.tree(index, &segments, found);
                        // After a branch: perhaps `as name`, then a comma or the end.
                        index = next.max(index + 1);
                        while index < self.tokens.len()
                            && !matches!(self.tokens[index].kind, Kind::Punct(',') | Kind::Close('}'))
                        {
                            index += 1;
                        }
                        if self.is_punct(index, ',') {
                            index += 1;
                        }
                    }
                    return index + 1;
                }
                _ => {}
            }
            found.push((segments, line));
            return index;
        }
    }

    fn absolute(&self, segments: Vec<String>, inline: &[String]) -> Vec<String> {
        let mut base: Vec<String> = self.module().into_iter().chain(inline.iter().cloned()).collect();
        let mut rest = segments.as_slice();
        match rest.first().map(String::as_str) {
            Some("super") => {
                while rest.first().is_some_and(|s| s == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            Some("self") => rest = &rest[1..],
            _ => return segments,
        }
        std::iter::once("crate".to_owned()).chain(base).chain(rest.iter().cloned()).collect()
    }
}

fn flatten(stream: TokenStream, test: bool, modules: &Rc<Vec<String>>, out: &mut Vec<Token>) {
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    // Set by `#[cfg(test)]` until the end of the item that follows.
    let mut test_item = false;
    for (index, tree) in trees.iter().enumerate() {
        let line = tree.span().start().line;
        let mut push = |kind, line| out.push(Token { kind, line, test: test || test_item, modules: modules.clone() });
        match tree {
            TokenTree::Ident(word) => push(Kind::Ident(word.to_string()), line),
            TokenTree::Literal(literal) => push(Kind::Literal(literal.to_string()), line),
            TokenTree::Punct(punct) => {
                push(Kind::Punct(punct.as_char()), line);
                if punct.as_char() == ';' {
                    test_item = false;
                }
            }
            TokenTree::Group(group) => {
                let brackets = match group.delimiter() {
                    Delimiter::Parenthesis => Some(('(', ')')),
                    Delimiter::Brace => Some(('{', '}')),
                    Delimiter::Bracket => Some(('[', ']')),
                    Delimiter::None => None,
                };
                if let Some((open, _)) = brackets {
                    push(Kind::Open(open), group.span_open().start().line);
                }
                let name = index.checked_sub(2).and_then(|i| match (&trees[i], &trees[i + 1]) {
                    (TokenTree::Ident(keyword), TokenTree::Ident(name)) if keyword == "mod" => Some(name.to_string()),
                    _ => None,
                });
                let inner = match name {
                    Some(name) if group.delimiter() == Delimiter::Brace => {
                        Rc::new(modules.iter().cloned().chain([name]).collect())
                    }
                    _ => modules.clone(),
                };
                flatten(group.stream(), test || test_item, &inner, out);
                let end = group.span_close().start().line;
                if let Some((_, close)) = brackets {
                    out.push(Token {
                        kind: Kind::Close(close),
                        line: end,
                        test: test || test_item,
                        modules: modules.clone(),
                    });
                }
                if group.delimiter() == Delimiter::Brace {
                    test_item = false;
                }
                if group.delimiter() == Delimiter::Bracket && group.stream().to_string().replace(' ', "") == "cfg(test)"
                {
                    test_item = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(path: &str, text: &str) -> Vec<(String, usize, bool)> {
        let file = SourceFile::parse(path, text).unwrap();
        file.paths().into_iter().map(|p| (p.segments.join("::"), p.line, p.test)).collect()
    }

    #[test]
    fn use_trees_are_spread_and_made_absolute() {
        let text = "use super::{object::Set, expr::{self, Expr as E}};\nuse crate::model::*;\nfn f() { g(super::super::sys::now()) }";
        let found = paths("proxy/src/nft/netlink/mod.rs", text);
        let expected = [
            ("crate::nft::object::Set", 1),
            ("crate::nft::expr", 1),
            ("crate::nft::expr::Expr", 1),
            ("crate::model::*", 2),
            ("crate::sys::now", 3),
        ];
        assert_eq!(found, expected.map(|(p, l)| (p.to_owned(), l, false)));
    }

    #[test]
    fn comments_and_strings_name_nothing_but_macros_do() {
        let text = "// use crate::agent::run;\nconst A: &str = \"crate::agent::run\";\nm! { crate::agent::run }";
        assert_eq!(paths("proxy/src/x.rs", text), [("crate::agent::run".to_owned(), 3, false)]);
    }

    #[test]
    fn test_code_is_known_and_ends_with_its_item() {
        let text = "#[cfg(test)]\nmod tests { use super::a::B; }\n#[cfg(test)]\nuse std::fs;\nuse std::io;";
        let found = paths("proxy/src/x.rs", text);
        assert_eq!(found[0], ("crate::x::a::B".to_owned(), 2, true));
        assert_eq!(found[1], ("std::fs".to_owned(), 4, true));
        assert_eq!(found[2], ("std::io".to_owned(), 5, false));
    }

    #[test]
    fn a_leading_separator_starts_a_path_and_generic_arguments_do_not() {
        let found = paths("proxy/src/x.rs", "use ::tokio::time;\nfn f() { a::b::<u8>::c() }");
        assert_eq!(found[0].0, "tokio::time");
        assert_eq!(found[1].0, "a::b");
        assert_eq!(found.len(), 2);
    }
}
