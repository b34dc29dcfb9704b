use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

/// A program's arguments, all of the form `--name value`.
#[derive(Debug)]
pub struct Arguments {
    usage: &'static str,
    values: BTreeMap<String, String>,
}

impl Arguments {
    /// Reads this process's arguments; with `--help` or a malformed list, prints `usage` and ends the process.
    #[must_use]
    pub fn from_process(usage: &'static str) -> Self {
        match Self::parse(usage, std::env::args().skip(1)) {
            Ok(arguments) => arguments,
            Err(problem) => leave(usage, &problem),
        }
    }

    /// Reads `words`.
    ///
    /// # Errors
    /// A sentence about the first word that is no `--name` of `usage`, or lacks its value.
    pub fn parse(usage: &'static str, words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut values = BTreeMap::new();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").ok_or_else(|| format!("`{word}` is no option"))?;
            if !usage.split_whitespace().any(|known| known.trim_start_matches('[') == word) {
                return Err(format!("there is no option `{word}`"));
            }
            let value = words.next().ok_or_else(|| format!("`{word}` needs a value"))?;
            values.insert(name.to_owned(), value);
        }
        Ok(Self { usage, values })
    }

    /// The value of `--name`, or `default` where it was not given; a malformed one ends the process with the usage.
    #[must_use]
    pub fn get<T: FromStr>(&self, name: &str, default: T) -> T
    where
        T::Err: Display,
    {
        match self.values.get(name).map(|text| text.parse()) {
            None => default,
            Some(Ok(value)) => value,
            Some(Err(problem)) => leave(self.usage, &format!("--{name}: {problem}")),
        }
    }

    /// Ends the process, saying what is wrong with `--name`.
    pub fn reject(&self, name: &str, problem: &str) -> ! {
        leave(self.usage, &format!("--{name}: {problem}"))
    }
}

fn leave(usage: &str, problem: &str) -> ! {
    eprintln!("{problem}\nusage: {usage}");
    std::process::exit(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: &str = "program [--mib N] [--pattern sequential|random]";

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(USAGE, line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_are_read_by_name_and_default_where_absent() {
        let arguments = parse("--pattern random").expect("well-formed");
        assert_eq!(arguments.get("pattern", String::new()), "random");
        assert_eq!(arguments.get("mib", 64_usize), 64);
    }

    #[test]
    fn what_the_usage_does_not_name_is_refused() {
        for line in ["--mb 64", "64", "--mib", "--[--mib 3"] {
            assert!(parse(line).is_err(), "{line} was taken");
        }
    }
}
