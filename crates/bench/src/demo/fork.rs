//! A guest computes something for a while, and goes on as eleven: itself and ten clones. Each is given other numbers to
//! go on with, at a console of its own, and needs what was computed before. The answers are computed again outside.

use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::Table;
use serde::Serialize;
use serde_json::json;
use sterna_api::Forked;
use sterna_api::units::show_size;

use super::{narrator, table, write};
use crate::accelerator;
use crate::command::PATIENCE;
use crate::console::Console;
use crate::error::{Error, Result};
use crate::footprint::{self, Ram};
use crate::guest::{Guest, plugged};
use crate::lab::{self, Lab, LabConfig};
use crate::sterna::SternaVm;
use crate::tools;

/// The number of clones.
const CLONES: u64 = 10;
/// The guest's memory, bytes.
const MEMORY: u64 = 512 << 20;
/// The guest knows the chains of all numbers below this one, two bytes each.
const KNOWN: u64 = 32_000_000;
/// How many numbers each of the eleven goes on with.
const PART: u64 = 200_000;
/// What the shell shows when it waits for a command.
const PROMPT: &str = "guest# ";

/// What the guest computes: for each number how many steps it takes to 1, where an even number is halved and an odd one
/// becomes three times itself and one. With what it knows it then looks for the longest chain among numbers that it is
/// given.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
unsigned short *known;
unsigned long size;
unsigned long chain(unsigned long n) {
  unsigned long steps = 0;
  for (; n >= size || !known[n]; steps++) n = n & 1 ? 3 * n + 1 : n / 2;
  return steps + known[n] - 1;
}
int main(int count, char **words) {
  unsigned long n, from, to, steps, most, best;
  size = strtoul(words[1], 0, 10);
  known = calloc(size, 2);
  known[1] = 1;
  for (n = 2; n < size; n++) known[n] = chain(n) + 1;
  printf("CHAINS ready\n");
  fflush(stdout);
  while (scanf("%lu %lu", &from, &to) == 2) {
    for (n = from, most = 0; n < to; n++) if ((steps = chain(n)) > most) most = steps, best = n;
    printf("CHAINS best=%lu steps=%lu\n", best, most);
    fflush(stdout);
  }
}"#;

/// Runs it, prints what happened, and writes it to `json`. Returns whether all eleven went on rightly.
///
/// # Errors
/// Where the lab or the guest does not come up, or the guest cannot be forked.
pub fn run(json: Option<&Path>) -> Result<bool> {
    let say = narrator();
    lab::clear_orphans();
    say("bringing up a host");
    let name = format!("demo{}", std::process::id());
    let lab = Lab::up(LabConfig { hosts: vec!["a".into()], ..LabConfig::pair(&name) })?;
    let mut guest = Guest::new(&lab, "origin", 10, "");
    guest.memory_bytes = MEMORY;
    guest.beat = Duration::from_millis(10);
    guest.typed_at = true;
    let seen = plugged(&lab, std::slice::from_ref(&guest), || watch(&lab, &guest, &say))?;
    lab.down()?;
    say("done; the lab is gone");

    println!("{}", seen.table());
    if let Some(file) = json {
        write(&json!({ "accelerator": accelerator::chosen().name(), "fork": seen }), file)?;
    }
    let wrong: Vec<&Answer> = seen.answers.iter().filter(|answer| !answer.is_right()).collect();
    wrong.iter().for_each(|answer| eprintln!("error: {}'s answer is wrong", answer.guest));
    Ok(wrong.is_empty())
}

/// What was seen.
#[derive(Serialize)]
struct Seen {
    /// How long the guest computed before it was forked, milliseconds.
    computed_ms: f64,
    /// The fork's report.
    report: Forked,
    /// Memory that the guest's RAM took before, bytes, and that of all eleven took when they had gone on.
    one_bytes: u64,
    all_bytes: u64,
    /// All of the host's memory before and then: also QEMU's own, eleven times.
    host_before_bytes: u64,
    host_after_bytes: u64,
    /// What the eleven found.
    answers: Vec<Answer>,
}

/// The longest chain that one of the eleven found among its numbers.
#[derive(Serialize)]
struct Answer {
    guest: String,
    from: u64,
    to: u64,
    best: u64,
    steps: u64,
}

fn watch(lab: &Lab, guest: &Guest, say: &dyn Fn(&str)) -> Result<Seen> {
    let qemu = tools::qemu_10_0().or_else(|_| tools::qemu_7_2())?;
    let host = lab.host("a")?;
    say(&format!("booting a guest of {}", show_size(MEMORY)));
    let origin = SternaVm::start(lab, "a", guest, &qemu)?;
    guest.wait_until_up(PATIENCE)?;
    guest.wait_until_says(PROMPT, PATIENCE)?;
    say(&format!("the guest computes the chains of all numbers below {KNOWN}"));
    let (mut console, begin) = (Console::open(guest)?, Instant::now());
    // The compiler looks for the C library by its plain name.
    console.type_line(&format!("ln -s libc.so.6 /lib/libc.so; cat >/tmp/chains.c <<'END'{PROGRAM}\nEND"))?;
    console.type_line(&format!("tcc -run -L/lib /tmp/chains.c {KNOWN}"))?;
    console.wait_for("CHAINS ready", PATIENCE)?;
    let computed_ms = begin.elapsed().as_secs_f64() * 1e3;
    let ram = |vm: &SternaVm| Ram::of(vm.pid()?, MEMORY);
    let one_bytes = footprint::of(&[ram(&origin)?])?.frames * 4096;
    let host_before_bytes = host.group.memory_bytes()?;

    let names: Vec<String> = (1..=CLONES).map(|number| format!("clone{number}")).collect();
    say(&format!("forking it {CLONES} times"));
    let (report, clones) = origin.fork(&names, &[])?;
    say("giving each of the eleven numbers of its own to go on with");
    let mut consoles = vec![(guest.name.clone(), console)];
    for name in &names {
        consoles.push((name.clone(), Console::open(&guest.clone_of_name(name))?));
    }
    for (part, (_, console)) in (0..).zip(&mut consoles) {
        let (from, to) = numbers(part);
        console.type_line(&format!("{from} {to}"))?;
    }
    let mut answers = Vec::new();
    for (part, (name, console)) in (0..).zip(&mut consoles) {
        let (from, to) = numbers(part);
        let line = console.wait_for("CHAINS best=", PATIENCE)?;
        let form = || Error::Form { what: format!("{name}'s answer"), reason: line.clone() };
        let number = |key| number(&line, key).ok_or_else(form);
        answers.push(Answer { guest: name.clone(), from, to, best: number("best=")?, steps: number("steps=")? });
    }
    let rams = std::iter::once(&origin).chain(&clones).map(ram).collect::<Result<Vec<_>>>()?;
    let all_bytes = footprint::of(&rams)?.frames * 4096;
    let host_after_bytes = host.group.memory_bytes()?;
    Ok(Seen { computed_ms, report, one_bytes, all_bytes, host_before_bytes, host_after_bytes, answers })
}

/// The numbers that one of the eleven goes on with.
fn numbers(part: u64) -> (u64, u64) {
    (KNOWN + part * PART, KNOWN + (part + 1) * PART)
}

/// The number that stands behind this key in a line.
fn number(line: &str, key: &str) -> Option<u64> {
    line.split(' ').find_map(|word| word.strip_prefix(key)?.parse().ok())
}

impl Answer {
    /// Whether it is what comes out where nothing is known before.
    fn is_right(&self) -> bool {
        (self.best, self.steps) == longest(self.from, self.to)
    }
}

/// The first number with the longest chain, and its steps.
fn longest(from: u64, to: u64) -> (u64, u64) {
    (from..to)
        .map(|number| (number, steps(number)))
        .fold((from, 0), |best, one| if one.1 > best.1 { one } else { best })
}

fn steps(number: u64) -> u64 {
    let next = |number: &u64| (*number > 1).then(|| if number % 2 == 1 { 3 * number + 1 } else { number / 2 });
    std::iter::successors(Some(number), next).skip(1).count() as u64
}

impl Seen {
    fn table(&self) -> Table {
        let mut table = table();
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        let Self { report, one_bytes, all_bytes, .. } = self;
        let last = report.clones.iter().map(|clone| clone.ms).fold(0.0, f64::max);
        let many = report.clones.len() as u64 + 1;
        row("guest", format!("{}: {} RAM, under {}", report.vm, show_size(MEMORY), accelerator::chosen().name()));
        let table_bytes = show_size(2 * KNOWN);
        let computed = self.computed_ms / 1e3;
        row("what it had computed", format!("the chains of {KNOWN} numbers, {table_bytes}, in {computed:.1} s"));
        row("clones", format!("{}, the last one ran {last:.0} ms after the request", report.clones.len()));
        row("the guest's own pause", format!("{:.1} ms", report.pause_ms));
        row("host memory of its RAM, before", show_size(*one_bytes));
        let (factor, apart) = (*all_bytes as f64 / (*one_bytes).max(1) as f64, show_size(many * one_bytes));
        let all = show_size(*all_bytes);
        row(
            &format!("of all {many} guests' RAM"),
            format!("{all}, {factor:.2} × as much; apart they would take {apart}"),
        );
        let (before, after) = (show_size(self.host_before_bytes), show_size(self.host_after_bytes));
        row("all of the host's memory", format!("{before} before, {after} with {many} QEMUs"));
        for Answer { guest, from, to, best, steps } in &self.answers {
            row(guest, format!("of {from} to {}: {best} has the longest chain, {steps} steps", to - 1));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_right_if_it_is_the_first_number_with_the_longest_chain() {
        assert_eq!((steps(1), steps(6), steps(27)), (0, 8, 111));
        assert_eq!(longest(1, 30), (27, 111));
        // 12 and 13 take nine steps each.
        assert_eq!(longest(12, 14), (12, 9));
        let answer = |best, steps| Answer { guest: "g".into(), from: 1, to: 30, best, steps };
        assert!(answer(27, 111).is_right());
        assert!(!answer(27, 110).is_right() && !answer(29, 111).is_right());
    }

    #[test]
    fn the_eleven_have_different_numbers_that_nobody_knows_yet() {
        let parts: Vec<(u64, u64)> = (0..=CLONES).map(numbers).collect();
        assert_eq!(parts[0].0, KNOWN);
        assert!(parts.windows(2).all(|pair| pair[0].1 == pair[1].0));
        assert_eq!(number("CHAINS best=27 steps=111", "steps="), Some(111));
    }
}
