//! Live progress: a line of JSON whenever something changes, and at least once a second for every migration under way.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use futures_util::stream;
use serde::Deserialize;
use sterna_api::{Phase, Problem, Progress};
use utoipa::IntoParams;

use super::answer::{Failure, Query};
use crate::daemon::Daemon;
use crate::problems::unknown_vm;

/// How often migrations are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How often a line comes although nothing changes.
const PULSE: Duration = Duration::from_secs(1);

/// What to watch.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WatchQuery {
    /// Only this machine; the stream then ends with its migration.
    vm: Option<String>,
}

/// Progress of the migrations under way, as lines of JSON.
#[utoipa::path(
    get,
    path = "/v1/watch",
    params(WatchQuery),
    responses((status = 200, body = Progress, content_type = "application/x-ndjson"), (status = 404, body = Problem))
)]
pub async fn watch(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<WatchQuery>,
) -> Result<impl IntoResponse, Failure> {
    if let Some(name) = &query.vm
        && !daemon.machines.table().contains_key(name)
    {
        return Err(Failure(unknown_vm(name)));
    }
    let watcher = Watcher { daemon, vm: query.vm, seen: HashMap::new(), ended: false };
    let lines = stream::unfold(watcher, |mut watcher| async move {
        let lines = watcher.next().await?;
        Some((Ok::<_, Infallible>(lines), watcher))
    });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)))
}

struct Watcher {
    daemon: Arc<Daemon>,
    vm: Option<String>,
    /// The last line of each migration and machine, and its time.
    seen: HashMap<(u64, String), (Progress, Instant)>,
    ended: bool,
}

impl Watcher {
    /// The next lines, as soon as there are some; `None` where the watched migration has ended.
    async fn next(&mut self) -> Option<Bytes> {
        while !self.ended {
            let lines = self.look();
            if !lines.is_empty() {
                return Some(lines.into());
            }
            tokio::time::sleep(TICK).await;
            let gone = self.vm.as_ref().is_some_and(|name| !self.daemon.machines.table().contains_key(name));
            // A moved machine leaves the table before its migration's last line.
            self.ended |= gone && self.seen.values().all(|(progress, _)| progress.phase == Phase::Done);
        }
        None
    }

    fn look(&mut self) -> String {
        let mut lines = String::new();
        for job in self.daemon.jobs().list() {
            for progress in job.progress() {
                if self.vm.as_ref().is_some_and(|name| *name != progress.vm) {
                    continue;
                }
                let key = (job.id, progress.vm.clone());
                let said = self.seen.get(&key).map(|(old, at)| (old, at.elapsed()));
                if !is_news(&progress, said) {
                    continue;
                }
                if let Ok(line) = serde_json::to_string(&progress) {
                    lines.push_str(&line);
                    lines.push('\n');
                }
                self.ended |= self.vm.is_some() && progress.phase == Phase::Done;
                self.seen.insert(key, (progress, Instant::now()));
            }
        }
        lines
    }
}

/// Whether there is a line to say, where the last one was `said` so long ago.
fn is_news(progress: &Progress, said: Option<(&Progress, Duration)>) -> bool {
    match said {
        // What had ended before anybody watched is no news.
        None => progress.phase != Phase::Done,
        Some((old, _)) if old.phase == Phase::Done => false,
        Some((old, ago)) => (old.phase, old.round) != (progress.phase, progress.round) || ago >= PULSE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(phase: Phase, round: u32) -> Progress {
        Progress { phase, round, ..Progress::default() }
    }

    #[test]
    fn a_line_comes_when_something_changes_and_else_once_a_pulse() {
        let old = progress(Phase::Precopy, 1);
        let moment = Duration::from_nanos(1);
        assert!(is_news(&old, None));
        assert!(!is_news(&old, Some((&old, Duration::ZERO))), "the clock stands still");
        assert!(!is_news(&old, Some((&old, PULSE - moment))));
        assert!(is_news(&old, Some((&old, PULSE))));
        assert!(is_news(&old, Some((&old, PULSE * 86_400))), "the clock has jumped");
        for new in [progress(Phase::Precopy, 2), progress(Phase::Switchover, 1), progress(Phase::Done, 1)] {
            assert!(is_news(&new, Some((&old, Duration::ZERO))), "{new:?}");
        }
        let sent = Progress { bytes_on_wire: 1 << 30, ..old.clone() };
        assert!(!is_news(&sent, Some((&old, PULSE - moment))), "bytes alone wait for the pulse");
    }

    #[test]
    fn an_end_is_said_once_and_not_at_all_where_nobody_watched_before() {
        let done = progress(Phase::Done, 3);
        assert!(!is_news(&done, None));
        assert!(!is_news(&done, Some((&done, PULSE * 10))));
    }
}
