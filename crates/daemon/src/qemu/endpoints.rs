//! Where a QEMU listens, or reads, by its arguments: what a second one with the same arguments would take from it.

use super::arguments::Item;

/// A place that one QEMU alone can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The path of a unix socket that it makes.
    Socket(String),
    /// A host and a port at which it listens: `HOST:PORT`, and a VNC display as `vnc HOST:NUMBER`.
    Port(String),
    /// The path of a pipe that it reads.
    Pipe(String),
}

/// Those of an option.
pub fn of(item: &Item) -> Vec<Place> {
    let value = item.value.as_deref().unwrap_or_default();
    match item.option.as_str() {
        "serial" | "parallel" | "debugcon" | "monitor" | "qmp" | "qmp-pretty" | "gdb" => stream(item, value),
        "s" => vec![Place::Port(":1234".into())],
        "vnc" => display(item, value),
        "display" => value.strip_prefix("vnc=").map(|value| display(item, value)).unwrap_or_default(),
        "chardev" => chardev(item),
        "spice" => ["port", "tls-port"].iter().filter_map(|key| Some(port(item.get("addr"), item.get(key)?))).collect(),
        _ => Vec::new(),
    }
}

/// Of a device that names its other end in short, such as `unix:/PATH,server=on`. Without a word on who listens it
/// counts as the one who does.
fn stream(item: &Item, value: &str) -> Vec<Place> {
    let connects = item.pairs().iter().any(|(key, value)| key == "server" && value == "off" || key == "reconnect");
    let value = value.strip_prefix("mon:").unwrap_or(value);
    let Some((kind, rest)) = first(value).split_once(':').filter(|_| !connects) else { return Vec::new() };
    let place = match kind {
        "unix" => Place::Socket(rest.into()),
        "tcp" | "telnet" | "tn3270" | "websocket" => Place::Port(rest.into()),
        "pipe" => Place::Pipe(rest.into()),
        _ => return Vec::new(),
    };
    vec![place]
}

fn chardev(item: &Item) -> Vec<Place> {
    let listens = item
        .pairs()
        .iter()
        .any(|(key, value)| key == "server" && value != "off" || key.is_empty() && value == "server");
    match (first_word(item).as_str(), item.get("path")) {
        ("pipe", Some(path)) => vec![Place::Pipe(path)],
        ("socket", Some(path)) if listens => vec![Place::Socket(path)],
        ("socket", None) if listens => item.get("port").map(|at| port(item.get("host"), at)).into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Of a VNC display: `HOST:NUMBER`, unless QEMU may choose another number, or is the one that calls.
fn display(item: &Item, value: &str) -> Vec<Place> {
    let at = first(value);
    match (at.strip_prefix("unix:"), at.contains(':')) {
        (Some(path), _) => vec![Place::Socket(path.into())],
        (None, true) if item.get("to").is_none() && item.get("reverse").is_none() => {
            vec![Place::Port(format!("vnc {at}"))]
        }
        _ => Vec::new(),
    }
}

fn port(host: Option<String>, port: String) -> Place {
    Place::Port(format!("{}:{port}", host.unwrap_or_default()))
}

fn first(value: &str) -> &str {
    value.split(',').next().unwrap_or_default()
}

fn first_word(item: &Item) -> String {
    first(item.value.as_deref().unwrap_or_default()).into()
}

#[cfg(test)]
mod tests {
    use super::super::arguments::parse;
    use super::*;

    #[test]
    fn places_are_told_however_they_are_named_and_who_calls_has_none() {
        let of = |line: &str| {
            let words: Vec<String> = line.split_whitespace().map(String::from).collect();
            parse(&words).iter().flat_map(super::of).collect::<Vec<_>>()
        };
        let (socket, port) = (|path: &str| Place::Socket(path.into()), |at: &str| Place::Port(at.into()));
        assert_eq!(
            of("-serial mon:unix:/a,server,nowait -qmp unix:/b,server=on -vnc unix:/c -monitor telnet:h:4,server=on \
                -gdb tcp::5 -s -vnc h:1 -display vnc=:2 -spice port=6,addr=h,tls-port=7 \
                -chardev socket,id=d,path=/d,server=on -chardev socket,id=e,host=h,port=8,server -serial pipe:/p \
                -chardev pipe,id=q,path=/q"),
            [
                socket("/a"),
                socket("/b"),
                socket("/c"),
                port("h:4"),
                port(":5"),
                port(":1234"),
                port("vnc h:1"),
                port("vnc :2"),
                port("h:6"),
                port("h:7"),
                socket("/d"),
                port("h:8"),
                Place::Pipe("/p".into()),
                Place::Pipe("/q".into())
            ]
        );
        assert!(
            of("-serial unix:/a,server=off -chardev socket,id=c,path=/c -chardev socket,id=d,host=h,port=1 \
                    -vnc :1,to=9 -vnc h:5500,reverse=on -vnc none -serial file:/x -serial stdio -display none")
            .is_empty()
        );
    }
}
