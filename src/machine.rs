//! What the machine gives a process: memory.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Whose memory is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Process {
    /// This one's.
    Own,
    /// That of another one on this machine.
    Other(u32),
    /// Whatever bounds it besides the machine.
    Unknown,
}

/// The memory that a process can have, in bytes: the machine's, or less where a control group bounds it. `None`: the
/// kernel does not tell.
#[must_use]
pub fn memory_bytes(process: Process) -> Option<u64> {
    let machine = machine_bytes(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let process = match process {
        Process::Own => "self".to_owned(),
        Process::Other(pid) => pid.to_string(),
        Process::Unknown => return Some(machine),
    };
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
    let limits = limit_files(&groups).into_iter().filter_map(|path| {
        // `max`, where there is no limit, is no number.
        fs::read_to_string(path).ok()?.trim().parse().ok()
    });
    Some(limits.fold(machine, u64::min))
}

/// Whether the process of that id is of a program of this name, as far as this machine can tell.
#[must_use]
pub fn is_program(pid: u32, name: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
}

/// Of `/proc/meminfo`, which has KiB.
fn machine_bytes(table: &str) -> Option<u64> {
    let total = table.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The files with the limits of a process's control groups, by its `/proc/…/cgroup` (cgroups(7)): of its own group, and of
/// all around it, since each bounds what is in it. In a container that sees its own group as the root, the path of the
/// first hierarchy may lead nowhere, and its root counts.
fn limit_files(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = Path::new(root).join(path.trim_start_matches('/'));
        files.extend(
            group.ancestors().take_while(|group| group.starts_with(root)).map(|group| group.join(file)),
        );
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_memory_is_that_of_the_kernels_table() {
        let table = "MemTotal:       16315776 kB\nMemFree:         1048576 kB\n";
        assert_eq!(machine_bytes(table), Some(16_315_776 * 1024));
        for table in ["", "MemTotal: odd kB\n", "MemTotal: 18446744073709551615 kB\n"] {
            assert_eq!(machine_bytes(table), None, "{table}");
        }
    }

    #[test]
    fn every_group_around_a_process_may_bound_it() {
        let paths = |groups: &str| -> Vec<String> {
            limit_files(groups).iter().map(|path| path.display().to_string()).collect()
        };
        let unified = [
            "/sys/fs/cgroup/system.slice/kvspoa.service/memory.max",
            "/sys/fs/cgroup/system.slice/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(paths("0::/system.slice/kvspoa.service\n"), unified);
        assert_eq!(paths("0::/\n"), ["/sys/fs/cgroup/memory.max"]);
        let split = "12:cpu,cpuacct:/docker/a:b\n5:memory:/docker/a:b\n1:name=systemd:/docker\n";
        let file = "memory.limit_in_bytes";
        let expected =
            ["/docker/a:b/", "/docker/", "/"].map(|group| format!("/sys/fs/cgroup/memory{group}{file}"));
        assert_eq!(paths(split), expected);
        assert_eq!(paths("no groups\n"), Vec::<String>::new());
    }

    #[test]
    fn this_process_has_memory() {
        assert!(memory_bytes(Process::Own).is_some_and(|bytes| bytes > 1 << 20));
        assert!(!is_program(std::process::id(), "haproxy"));
    }
}
