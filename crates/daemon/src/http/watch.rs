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
                let news = match self.seen.get(&key) {
                    // A migration that had ended before anybody watched is no news.
                    None => progress.phase != Phase::Done,
                    Some((old, _)) if old.phase == Phase::Done => false,
                    Some((old, at)) => {
                        (old.phase, old.round) != (progress.phase, progress.round) || at.elapsed() >= PULSE
                    }
                };
                if !news {
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
