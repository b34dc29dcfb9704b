/// A word of Rust, or a sign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// As it stands there.
    pub text: String,
    /// Its line, from 1.
    pub line: usize,
}

impl Word {
    /// Whether this is a name or a keyword.
    pub fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// A text in words, without comments, texts and characters in quotes, and numbers' ends.
pub fn words(text: &str) -> Vec<Word> {
    let chars: Vec<char> = text.chars().collect();
    let (mut words, mut at, mut line) = (Vec::new(), 0, 1);
    while at < chars.len() {
        let end = match chars[at] {
            '/' if chars.get(at + 1) == Some(&'/') => line_end(&chars, at),
            '/' if chars.get(at + 1) == Some(&'*') => block_end(&chars, at),
            '"' => string_end(&chars, at),
            'r' | 'b' if raw_end(&chars, at).is_some() => raw_end(&chars, at).expect("just seen"),
            '\'' => quote_end(&chars, at),
            c if c.is_whitespace() => at + 1,
            c if c.is_alphanumeric() || c == '_' => {
                let end = (at..chars.len()).find(|&i| !chars[i].is_alphanumeric() && chars[i] != '_');
                let end = end.unwrap_or(chars.len());
                words.push(Word { text: chars[at..end].iter().collect(), line });
                end
            }
            ':' if chars.get(at + 1) == Some(&':') => {
                words.push(Word { text: "::".into(), line });
                at + 2
            }
            c => {
                words.push(Word { text: c.into(), line });
                at + 1
            }
        };
        line += chars[at..end].iter().filter(|c| **c == '\n').count();
        at = end;
    }
    words
}

fn line_end(chars: &[char], at: usize) -> usize {
    (at..chars.len()).find(|&i| chars[i] == '\n').unwrap_or(chars.len())
}

fn block_end(chars: &[char], at: usize) -> usize {
    let (mut depth, mut i) = (0, at);
    while i + 1 < chars.len() {
        match (chars[i], chars[i + 1]) {
            ('/', '*') => (depth, i) = (depth + 1, i + 2),
            ('*', '/') if depth == 1 => return i + 2,
            ('*', '/') => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
    }
    chars.len()
}

fn string_end(chars: &[char], at: usize) -> usize {
    let mut i = at + 1;
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// The end of `r"…"`, `r#"…"#` and what begins with `b`; nothing where none begins here.
fn raw_end(chars: &[char], at: usize) -> Option<usize> {
    let mut i = at + 1;
    let raw = chars[at] == 'r' || (chars[at] == 'b' && chars.get(i) == Some(&'r'));
    if chars[at] == 'b' && raw {
        i += 1;
    }
    if !raw {
        return (chars.get(i) == Some(&'"')).then(|| string_end(chars, i));
    }
    let hashes = chars[i..].iter().take_while(|c| **c == '#').count();
    i += hashes;
    if chars.get(i) != Some(&'"') {
        return None;
    }
    let ends = |&j: &usize| chars[j] == '"' && chars[j + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
    Some((i + 1..chars.len()).find(ends).map_or(chars.len(), |end| end + 1 + hashes))
}

/// The end of a character in quotes, or of the quote alone where it begins the name of a lifetime.
fn quote_end(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => (at + 3..chars.len()).find(|&i| chars[i] == '\'').map_or(chars.len(), |end| end + 1),
        (Some(_), Some('\'')) => at + 3,
        _ => at + 1,
    }
}

/// The words without what stands below `#[cfg(test)]`.
pub fn without_tests(words: Vec<Word>) -> Vec<Word> {
    const MARK: &[&str] = &["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let marked = words[at..].iter().map(|word| word.text.as_str()).take(MARK.len()).eq(MARK.iter().copied());
        if marked {
            at = item_end(&words, at + MARK.len());
        } else {
            kept.push(words[at].clone());
            at += 1;
        }
    }
    kept
}

/// Behind an item: its `;`, or the brace that closes its first.
fn item_end(words: &[Word], from: usize) -> usize {
    let mut depth = 0;
    for (i, word) in words.iter().enumerate().skip(from) {
        match word.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" => depth -= 1,
            "}" if depth == 1 => return i + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
    }
    words.len()
}

/// Reads a path, or a group of them, from `at` on behind `before`; yields where it ends.
pub fn path(words: &[Word], mut at: usize, before: &mut Vec<String>, found: &mut Vec<(Vec<String>, usize)>) -> usize {
    let depth = before.len();
    let line = words.get(at).map_or(0, |word| word.line);
    while let Some(word) = words.get(at) {
        if word.text == "{" {
            at += 1;
            while words.get(at).is_some_and(|word| word.text != "}") {
                at = match words[at].is_name() {
                    true => path(words, at, before, found),
                    false => at + 1,
                };
            }
            before.truncate(depth);
            return at + 1;
        }
        if !word.is_name() {
            break;
        }
        before.push(word.text.clone());
        at += 1;
        match words.get(at).map(|word| word.text.as_str()) {
            Some("::") => at += 1,
            _ => break,
        }
    }
    if before.last().is_some_and(|last| last == "self") && before.len() > 1 {
        before.pop();
    }
    found.push((before.clone(), line));
    before.truncate(depth);
    at
}

/// The types of `impl`s without a trait, with their lines.
pub fn inherent_impls(words: &[Word]) -> Vec<(String, usize)> {
    let begins = |at: usize| at == 0 || matches!(words[at - 1].text.as_str(), "}" | ";" | "]");
    let heads = words.iter().enumerate().filter(|(at, word)| word.text == "impl" && begins(*at));
    heads.filter_map(|(at, word)| Some((type_of(&words[at + 1..])?, word.line))).collect()
}

/// The type behind `impl`, where no trait is meant.
fn type_of(words: &[Word]) -> Option<String> {
    let (mut depth, mut name) = (0, None);
    for (at, word) in words.iter().enumerate() {
        match word.text.as_str() {
            "<" => depth += 1,
            // Not that of an arrow.
            ">" if at > 0 && words[at - 1].text != "-" => depth -= 1,
            "for" if depth == 0 => return None,
            "{" | "where" if depth == 0 => return name,
            text if depth == 0 && word.is_name() => name = Some(text.to_owned()),
            _ => {}
        }
    }
    None
}
