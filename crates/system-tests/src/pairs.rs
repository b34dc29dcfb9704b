//! Options in all pairs: where no two options fail together, three seldom do.

use std::collections::HashSet;

/// An option of `sterna migrate`, and what it may be.
pub type Technique = (&'static str, &'static [&'static str]);

/// The words of migrations in which every value of each option meets every value of each other option. The choice is
/// greedy: the next migration is the one with the most new pairs. It is the same every day.
#[must_use]
pub fn pairwise(techniques: &[Technique]) -> Vec<Vec<&'static str>> {
    let mut all: Vec<Vec<usize>> = vec![vec![]];
    for (_, values) in techniques {
        let with = |choice: &Vec<usize>, value| [&choice[..], &[value]].concat();
        all = all.iter().flat_map(|choice| (0..values.len()).map(move |value| with(choice, value))).collect();
    }
    let pairs = |choice: &Vec<usize>| -> Vec<_> {
        let position = |a: usize| (a + 1..choice.len()).map(move |b| (a, choice[a], b, choice[b]));
        (0..choice.len()).flat_map(position).collect()
    };
    let mut open: HashSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let news = |choice: &&Vec<usize>| pairs(choice).iter().filter(|pair| open.contains(pair)).count();
        let best = all.iter().rev().max_by_key(news).expect("there are choices");
        for pair in pairs(best) {
            open.remove(&pair);
        }
        chosen.push(best);
    }
    let words = |choice: &Vec<usize>| -> Vec<_> {
        techniques.iter().zip(choice).flat_map(|((option, values), value)| [*option, values[*value]]).collect()
    };
    chosen.into_iter().map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_meets_every_value_of_each_other_option_in_few_migrations() {
        let techniques: [Technique; 4] =
            [("--a", &["1", "2", "3"]), ("--b", &["1", "2"]), ("--c", &["1", "2", "3"]), ("--d", &["1", "2", "3"])];
        let migrations = pairwise(&techniques);
        assert!(migrations.len() <= 12, "{}", migrations.len());
        for (index, (first, values)) in techniques.iter().enumerate() {
            for (second, others) in &techniques[index + 1..] {
                for (value, other) in values.iter().flat_map(|value| others.iter().map(move |other| (value, other))) {
                    let together = |words: &Vec<&str>| {
                        [[*first, *value], [*second, *other]]
                            .iter()
                            .all(|pair| words.chunks(2).any(|words| words == pair))
                    };
                    assert!(migrations.iter().any(together), "{first} {value} with {second} {other}");
                }
            }
        }
    }
}
