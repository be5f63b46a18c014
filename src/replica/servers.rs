//! The servers of one HAProxy backend, merged of `show servers state`, `show servers conn` and `show stat`
//! (management.txt §9.1, §9.3).

use super::table::{Table, by_commas, by_spaces};
use crate::config::HttpAddr;
use std::{collections::HashMap, net::IpAddr, time::Duration};

/// Whether HAProxy gives a server new requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ServerState {
    /// It does, in so far as its weight is above 0 and it is no idle backup.
    Up,
    /// Its check fails.
    Down,
    /// In maintenance: by the operator, by a server that it tracks, or because its name does not resolve.
    Maint,
    /// It finishes what it has.
    Drain,
}

impl ServerState {
    /// All states, in the order of their discriminants.
    pub const ALL: [Self; 4] = [Self::Up, Self::Down, Self::Maint, Self::Drain];

    /// The state as metric labels and `/explain` spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Maint => "maint",
            Self::Drain => "drain",
        }
    }

    /// Of `srv_op_state` and `srv_admin_state`. A server that stops (`http-check disable-on-404`) drains.
    const fn of(operational: u32, administrative: u32) -> Self {
        // Forced, inherited, and unresolved. (0x04 and 0x40 only note where another bit came from.)
        const MAINTENANCE: u32 = 0x01 | 0x02 | 0x20;
        const DRAIN: u32 = 0x08 | 0x10;
        const STOPPED: u32 = 0;
        const STOPPING: u32 = 3;
        if administrative & MAINTENANCE != 0 {
            Self::Maint
        } else if operational == STOPPED {
            Self::Down
        } else if administrative & DRAIN != 0 || operational == STOPPING {
            Self::Drain
        } else {
            Self::Up
        }
    }
}

/// One server at the moment of a poll.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Server {
    /// Its name in the backend.
    pub name: String,
    /// Its address: HAProxy can move a server at run time.
    pub addr: String,
    /// Its port.
    pub port: u16,
    /// Whether HAProxy speaks TLS to it.
    pub tls: bool,
    /// Whether it gets requests.
    pub state: ServerState,
    /// Its weight, 0 to 256; while it starts slowly, what it has reached of it.
    pub weight: u32,
    /// Whether it serves only while no other server is up.
    pub backup: bool,
    /// Requests on it now.
    pub in_flight: u32,
    /// Requests that wait for a slot of it.
    pub queued: u32,
    /// `maxconn`; `None` where there is none.
    pub limit: Option<u32>,
    /// Connections in use, kept ones of clients included.
    pub connections: u32,
}

impl Server {
    /// Where its HTTP interface is. None while it is a free slot: HAProxy's own name for that is the address 0.0.0.0, and
    /// a name that does not resolve has none.
    #[must_use]
    pub fn http(&self) -> Option<HttpAddr> {
        let ip: IpAddr = self.addr.parse().ok()?;
        let is_placed = !ip.is_unspecified() && self.port != 0;
        let at = std::net::SocketAddr::new(ip, self.port).to_string().parse().ok()?;
        is_placed.then_some(HttpAddr { tls: self.tls, at })
    }
}

/// The process that answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its number, as it sees itself.
    pub pid: u32,
    /// How long it has run, in whole seconds.
    pub uptime: Duration,
}

impl Process {
    /// Whether `later` is another process: HAProxy was reloaded or started again in between.
    #[must_use]
    pub fn was_replaced_by(self, later: Self) -> bool {
        self.pid != later.pid || later.uptime < self.uptime
    }
}

/// Why an answer tells nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AnswerError {
    /// HAProxy has no such backend.
    #[error("HAProxy has no backend named {0}")]
    UnknownBackend(String),
    /// A table is missing, or a column of it.
    #[error("the answer of HAProxy has no {column} of `{command}`: {said}")]
    Missing {
        /// The command that should have brought it.
        command: &'static str,
        /// The first column where there is no table at all.
        column: &'static str,
        /// What stands there, shortened: most likely a refusal.
        said: String,
    },
}

/// The commands whose answers the parsers here read, on one line. Backend names hold no `;` (checked with the
/// configuration), so nothing else can be asked for.
#[must_use]
pub fn commands(backend: &str) -> String {
    // 4: servers; -1: all of them.
    format!("show info;show servers state {backend};show servers conn {backend};show stat {backend} 4 -1\n")
}

/// The process, of `show info`.
///
/// # Errors
/// [`AnswerError::Missing`].
pub fn parse_process(answer: &str) -> Result<Process, AnswerError> {
    let number = |key: &'static str| {
        let value = answer.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
        let number = value.and_then(|value| value.trim().parse().ok());
        number.ok_or_else(|| missing(answer, "show info", key))
    };
    Ok(Process { pid: number("Pid")?, uptime: Duration::from_secs(number("Uptime_sec")?.into()) })
}

/// The servers of a backend, in the order of HAProxy's configuration.
///
/// # Errors
/// [`AnswerError`].
pub fn parse_servers(answer: &str, backend: &str) -> Result<Vec<Server>, AnswerError> {
    let states = states(answer, backend)?;
    let mut connections = connections(answer, backend);
    let statistics = statistics(answer, backend)?;
    let servers = states.into_iter().filter_map(|state| {
        // A server that was deleted between the two commands is in one of them only.
        let Statistics { weight, backup, in_flight, queued, limit } = *statistics.get(state.name)?;
        Some(Server {
            name: state.name.to_owned(),
            addr: state.addr.to_owned(),
            port: state.port,
            tls: state.tls,
            state: state.state,
            weight,
            backup,
            in_flight,
            queued,
            limit,
            connections: connections.remove(state.name).unwrap_or_default(),
        })
    });
    Ok(servers.collect())
}

struct State<'a> {
    name: &'a str,
    addr: &'a str,
    port: u16,
    tls: bool,
    state: ServerState,
}

fn states<'a>(answer: &'a str, backend: &str) -> Result<Vec<State<'a>>, AnswerError> {
    const COMMAND: &str = "show servers state";
    let table = Table::find(answer, "be_id", by_spaces).ok_or_else(|| {
        if answer.contains("Can't find backend") {
            return AnswerError::UnknownBackend(backend.to_owned());
        }
        missing(answer, COMMAND, "table")
    })?;
    let column = |name| table.column(name).ok_or_else(|| missing(answer, COMMAND, name));
    let [of, name, addr, port, operational, administrative] =
        ["be_name", "srv_name", "srv_addr", "srv_port", "srv_op_state", "srv_admin_state"].map(column);
    let (of, name, addr, port) = (of?, name?, addr?, port?);
    let (operational, administrative) = (operational?, administrative?);
    // Since HAProxy 2.2.
    let tls = table.column("srv_use_ssl");
    let rows = table.rows().filter(|row| row.get(of) == Some(&backend)).filter_map(|row| {
        Some(State {
            name: row.get(name)?,
            addr: row.get(addr)?,
            port: row.get(port)?.parse().unwrap_or_default(),
            tls: tls.and_then(|tls| row.get(tls)).is_some_and(|tls| *tls == "1"),
            state: ServerState::of(
                row.get(operational)?.parse().ok()?,
                row.get(administrative)?.parse().ok()?,
            ),
        })
    });
    Ok(rows.collect())
}

/// Connections in use by server. They are for show, so their absence is no error.
fn connections<'a>(answer: &'a str, backend: &str) -> HashMap<&'a str, u32> {
    let Some(table) = Table::find(answer, "bkname/svname", by_spaces) else { return HashMap::new() };
    let Some(used) = table.column("used_cur") else { return HashMap::new() };
    let rows = table.rows().filter_map(|row| {
        let name = row.first()?.strip_prefix(backend)?.strip_prefix('/')?;
        Some((name, row.get(used)?.parse().ok()?))
    });
    rows.collect()
}

#[derive(Clone, Copy)]
struct Statistics {
    weight: u32,
    backup: bool,
    in_flight: u32,
    queued: u32,
    limit: Option<u32>,
}

fn statistics<'a>(answer: &'a str, backend: &str) -> Result<HashMap<&'a str, Statistics>, AnswerError> {
    const COMMAND: &str = "show stat";
    let table = Table::find(answer, "pxname", by_commas).ok_or_else(|| {
        if answer.contains("No such proxy") {
            return AnswerError::UnknownBackend(backend.to_owned());
        }
        missing(answer, COMMAND, "table")
    })?;
    let column = |name| table.column(name).ok_or_else(|| missing(answer, COMMAND, name));
    let [of, name, weight, backup, in_flight, queued, limit] =
        ["pxname", "svname", "weight", "bck", "scur", "qcur", "slim"].map(column);
    let (of, name, weight, backup) = (of?, name?, weight?, backup?);
    let (in_flight, queued, limit) = (in_flight?, queued?, limit?);
    let rows = table.rows().filter(|row| row.get(of) == Some(&backend)).filter_map(|row| {
        let number = |column: usize| row.get(column).and_then(|cell| cell.parse().ok());
        let statistics = Statistics {
            weight: number(weight)?,
            backup: number(backup) == Some(1),
            in_flight: number(in_flight)?,
            queued: number(queued)?,
            limit: number(limit).filter(|limit| *limit > 0),
        };
        Some((*row.get(name)?, statistics))
    });
    Ok(rows.collect())
}

fn missing(answer: &str, command: &'static str, column: &'static str) -> AnswerError {
    /// Enough for HAProxy's one-line refusals.
    const SHOWN: usize = 60;
    let line = answer.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
    AnswerError::Missing { command, column, said: line.chars().take(SHOWN).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As HAProxy 2.6.12 wrote it; some columns of no interest are left out of the statistics.
    const ANSWER: &str = "\
Name: HAProxy
Pid: 21337
Uptime: 0d 0h00m03s
Uptime_sec: 3

1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port
3 be 1 s1 127.0.0.1 0 0 50 50 4 8 2 0 6 0 0 0 - 39872 - 0 0 - - 0
3 be 2 s2 127.0.0.1 0 5 1 1 4 1 0 0 8 0 0 0 - 39873 - 0 0 - - 0
3 be 3 s3 127.0.0.1 2 0 1 1 4 1 0 2 0 0 0 0 - 39874 - 0 0 - - 0
3 be 4 s4 127.0.0.1 2 8 7 7 4 1 0 2 0 0 0 0 - 39875 - 0 0 - - 0

# bkname/svname bkid/svid addr port - purge_delay used_cur used_max need_est unsafe_nb safe_nb idle_lim idle_cur idle_per_thr[2]
be/s1 3/1 127.0.0.1 39872 - 5000 2 2 1 0 0 -1 0 0 0
be/s2 3/2 127.0.0.1 39873 - 5000 0 0 0 0 0 -1 0 0 0

# pxname,svname,qcur,qmax,scur,smax,slim,stot,status,weight,act,bck,last_chk,agent_status,
be,s1,3,0,4,0,4,0,DOWN,50,1,0,\"Connection refused, twice\",,
be,s2,0,0,0,0,,0,MAINT,1,1,0,,,
be,s3,0,0,1,0,0,0,no check,1,0,1,,,
be,s4,0,0,0,0,,0,DRAIN,7,1,0,,,

";

    #[test]
    fn the_tables_are_merged_by_server() {
        let servers = parse_servers(ANSWER, "be").expect("complete");
        let first = Server {
            name: "s1".to_owned(),
            addr: "127.0.0.1".to_owned(),
            port: 39872,
            tls: false,
            state: ServerState::Down,
            weight: 50,
            backup: false,
            in_flight: 4,
            queued: 3,
            limit: Some(4),
            connections: 2,
        };
        assert_eq!(servers[0], first);
        let states: Vec<_> = servers.iter().map(|server| server.state).collect();
        assert_eq!(states, [ServerState::Down, ServerState::Maint, ServerState::Up, ServerState::Drain]);
        assert!(servers[2].backup && !servers[3].backup);
        assert_eq!(servers[2].limit, None, "0 is no limit");
        let process = parse_process(ANSWER).expect("complete");
        assert_eq!(process, Process { pid: 21337, uptime: Duration::from_secs(3) });
    }

    #[test]
    fn the_mark_of_a_configured_maintenance_outlives_it_and_means_nothing() {
        assert_eq!(ServerState::of(2, 0x04), ServerState::Up);
        assert_eq!(ServerState::of(2, 0x20), ServerState::Maint);
        assert_eq!(ServerState::of(3, 0), ServerState::Drain);
        assert_eq!(ServerState::of(1, 0), ServerState::Up);
        assert_eq!(ServerState::of(0, 0x08), ServerState::Down);
    }

    #[test]
    fn an_answer_that_lacks_something_says_what() {
        let unknown = "Pid: 1\n\nCan't find backend.\n\nNo such proxy.\n\n";
        assert_eq!(parse_servers(unknown, "be"), Err(AnswerError::UnknownBackend("be".to_owned())));
        let denied = parse_servers("Permission denied\n", "be").expect_err("no table").to_string();
        assert!(denied.contains("show servers state") && denied.contains("Permission denied"), "{denied}");
        let column = parse_servers(&ANSWER.replace(",bck,", ",backup,"), "be").expect_err("no column");
        assert!(column.to_string().contains("bck"), "{column}");
        assert!(parse_process("Pid: x\n").is_err());
        assert_eq!(parse_servers(ANSWER, "other"), Ok(Vec::new()));
    }

    #[test]
    fn half_a_line_is_no_server() {
        for cut in 0..ANSWER.len() {
            // Never a panic; a cut row is left out.
            if let Ok(servers) = parse_servers(&ANSWER[..cut], "be") {
                assert!(servers.len() <= 4);
            }
        }
    }

    #[test]
    fn another_process_is_known_by_its_number_or_its_age() {
        let at = |pid, seconds| Process { pid, uptime: Duration::from_secs(seconds) };
        assert!(!at(1, 5).was_replaced_by(at(1, 6)));
        assert!(at(1, 5).was_replaced_by(at(2, 6)));
        assert!(at(1, 5).was_replaced_by(at(1, 0)));
    }
}
