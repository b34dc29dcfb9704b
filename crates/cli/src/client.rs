//! The API's client: one connection per request, over the daemon's unix socket.

use std::path::PathBuf;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna_api::{Blame, Code, Problem};
use tokio::net::UnixStream;

use crate::failure::{Failure, UNREACHABLE};

/// The client of one daemon.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the daemon at `unix:PATH`.
    ///
    /// # Errors
    /// The address has another form.
    pub fn new(api: &str) -> Result<Self, Failure> {
        match api.strip_prefix("unix:") {
            Some(path) if !path.is_empty() => Ok(Self { socket: path.into() }),
            _ => Err(Failure::usage(format!("the daemon's address '{api}' is not of the form unix:PATH"))),
        }
    }

    /// Asks for a value.
    ///
    /// # Errors
    /// The daemon's problem, or that it cannot be reached.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.read(self.send(Method::GET, path, Bytes::new()).await?).await
    }

    /// Sends a value and reads the answer.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.nonsense(&error))?;
        self.read(self.send(Method::POST, path, body.into()).await?).await
    }

    /// Replaces a value and reads the answer.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.nonsense(&error))?;
        self.read(self.send(Method::PUT, path, body.into()).await?).await
    }

    /// Removes a value and reads the answer, which is what it was.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.read(self.send(Method::DELETE, path, Bytes::new()).await?).await
    }

    /// Sends a command whose only answer is its success.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn command(&self, method: Method, path: &str) -> Result<(), Failure> {
        self.tell(method, path, Bytes::new()).await
    }

    /// Sends a command with a body.
    ///
    /// # Errors
    /// The daemon's problem, or that it cannot be reached.
    pub async fn post_command(&self, path: &str, body: &impl Serialize) -> Result<(), Failure> {
        let body = serde_json::to_vec(body).map_err(|error| Failure::host("cannot write the request", &error))?;
        self.tell(Method::POST, path, body.into()).await
    }

    async fn tell(&self, method: Method, path: &str, body: Bytes) -> Result<(), Failure> {
        let answer = self.send(method, path, body).await?;
        let (success, body) = self.collect(answer).await?;
        if success { Ok(()) } else { Err(self.problem(&body)) }
    }

    /// Asks for a stream of lines.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn lines(&self, path: &str) -> Result<Lines, Failure> {
        let answer = self.send(Method::GET, path, Bytes::new()).await?;
        if !answer.status().is_success() {
            let (_, body) = self.collect(answer).await?;
            return Err(self.problem(&body));
        }
        Ok(Lines { body: answer.into_body(), buffer: Vec::new() })
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, Failure> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(&error))?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "sternad")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| Failure::usage(format!("'{path}' cannot be asked for: {error}")))?;
        sender.send_request(request).await.map_err(|error| self.unreachable(&error))
    }

    async fn read<T: DeserializeOwned>(&self, answer: Response<Incoming>) -> Result<T, Failure> {
        let (success, body) = self.collect(answer).await?;
        if !success {
            return Err(self.problem(&body));
        }
        serde_json::from_slice(&body).map_err(|error| self.nonsense(&error))
    }

    async fn collect(&self, answer: Response<Incoming>) -> Result<(bool, Bytes), Failure> {
        let success = answer.status().is_success();
        let body = answer.into_body().collect().await.map_err(|error| self.unreachable(&error))?;
        Ok((success, body.to_bytes()))
    }

    fn problem(&self, body: &[u8]) -> Failure {
        serde_json::from_slice::<Problem>(body).map_or_else(|error| self.nonsense(&error), Failure::from)
    }

    fn unreachable(&self, error: &dyn std::error::Error) -> Failure {
        let mut problem = Problem::from_error(Code::DaemonUnreachable, Blame::Host, error)
            .hint("is sternad running, and are you root? another socket: --api unix:PATH");
        let cause =
            std::mem::replace(&mut problem.message, format!("cannot reach the daemon at {}", self.socket.display()));
        problem.cause.insert(0, cause);
        Failure { problem: Box::new(problem), code: UNREACHABLE }
    }

    fn nonsense(&self, error: &dyn std::error::Error) -> Failure {
        let mut problem = Problem::from_error(Code::DaemonAnswer, Blame::Ours, error)
            .hint("are sterna and sternad of the same version?");
        let cause = std::mem::replace(&mut problem.message, "the daemon's answer is not understood".into());
        problem.cause.insert(0, cause);
        Failure::from(problem)
    }
}

/// A stream of lines.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Lines {
    /// The next line; `None` at the end.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.drain(..=end).collect::<Vec<u8>>();
                return Some(String::from_utf8_lossy(&line).trim_end().to_string());
            }
            let frame = self.body.frame().await?.ok()?;
            self.buffer.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
        }
    }
}

/// A name as part of a path: characters that a path cannot hold are written as `%XX`.
pub fn escape(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_the_path() {
        assert_eq!(escape("db-1.x_y"), "db-1.x_y");
        assert_eq!(escape("a/b?c d"), "a%2Fb%3Fc%20d");
    }

    #[test]
    fn only_unix_sockets_are_taken() {
        assert!(Client::new("unix:/run/x").is_ok());
        assert_eq!(Client::new("tcp:1").unwrap_err().code, crate::failure::USAGE);
    }
}
