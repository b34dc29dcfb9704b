//! Compiles C sources one after another, a process for each as `make` has it, and links them at the end, again and again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sterna_guest_programs::arguments::Arguments;
use sterna_guest_programs::pace::Every;
use sterna_guest_programs::report::Report;

const USAGE: &str = "builder [--sources DIRECTORY] [--output DIRECTORY] [--interval-ms BETWEEN-LINES]";

fn main() {
    let arguments = Arguments::from_process(USAGE);
    let directory: PathBuf = arguments.get("sources", "/src".to_owned()).into();
    let output: PathBuf = arguments.get("output", "/tmp/build".to_owned()).into();
    let interval = Duration::from_millis(arguments.get("interval-ms", 1000));
    let sources = sources(&directory).unwrap_or_else(|problem| arguments.reject("sources", &problem.to_string()));
    if let Err(problem) = std::fs::create_dir_all(&output) {
        arguments.reject("output", &problem.to_string());
    }

    let report = Report::from_environment();
    report.line(format_args!("BUILDER ready units={}", sources.len()));
    let mut interval = Every::new(interval, Instant::now());
    let (mut units, mut bytes, mut total, mut bad) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut sizes: Vec<Option<u64>> = vec![None; sources.len()];
    loop {
        let mut objects = Vec::new();
        for (source, size) in sources.iter().zip(&mut sizes) {
            let object = output.join(source.file_stem().unwrap_or_default()).with_extension("o");
            let mut compiler = Command::new("tcc");
            compiler.arg("-w").arg("-c").arg("-o").arg(&object).arg(source);
            // The first time it also says what it reads.
            let list = object.with_extension("d");
            if size.is_none() {
                compiler.arg("-MD").arg("-MF").arg(&list);
            }
            bad += u64::from(!succeeds(&mut compiler));
            bytes += *size.get_or_insert_with(|| bytes_read(&list));
            objects.push(object);
            units += 1;
            if let Some(elapsed) = interval.elapsed(Instant::now()) {
                total += units;
                let per_second = units as f64 / elapsed.as_secs_f64();
                let kib = bytes / 1024;
                report.line(format_args!(
                    "BUILDER ok units_per_s={per_second:.2} units={units} kib={kib} bad={bad} total={total}"
                ));
                (units, bytes) = (0, bytes % 1024);
            }
        }
        bad += u64::from(!succeeds(Command::new("tcc").arg("-r").arg("-o").arg(output.join("all.o")).args(&objects)));
    }
}

/// The C sources of a directory, by name.
fn sources(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    found.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    found.sort();
    if found.is_empty() { Err(std::io::Error::other("no C sources")) } else { Ok(found) }
}

/// The size of the files that a compiler's list of dependencies names; 0 where there is none.
fn bytes_read(list: &Path) -> u64 {
    let text = std::fs::read_to_string(list).unwrap_or_default();
    let names = text.split([' ', '\\', '\n']).filter(|name| name.starts_with('/'));
    names.filter_map(|name| std::fs::metadata(name).ok()).map(|metadata| metadata.len()).sum()
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}
