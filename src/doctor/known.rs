//! What is known of HAProxy's versions, as far as it concerns a site with an SPOE agent.

use std::fmt;

/// `major.minor.patch` of a release.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Version(pub(super) u32, pub(super) u32, pub(super) u32);

impl Version {
    /// Of a text such as `2.6.12-1+deb12u4`; of `3.5-dev5` the patch is 0.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim().split(['.', '-', '+']).map(str::parse);
        let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        let patch = numbers.next().and_then(Result::ok).unwrap_or_default();
        Some(Self(major, minor, patch))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The oldest release that the forms are tried with.
pub(super) const OLDEST: Version = Version(2, 6, 0);

/// A fault of some releases, from the first to the last.
pub(super) struct Bug {
    from: Version,
    to: Version,
    /// What it does.
    pub(super) what: &'static str,
    /// What to do.
    pub(super) advice: &'static str,
}

const BUGS: &[Bug] = &[
    Bug {
        from: Version(3, 2, 0),
        to: Version(3, 2, 13),
        what: "requests can be stuck in a server's queue when agents answer at different times (haproxy issue 3290)",
        advice: "update HAProxy to 3.2.14 or newer; until then no `maxconn` on the replicas' servers",
    },
    Bug {
        from: Version(3, 4, 0),
        to: Version(3, 4, 0),
        what: "a stream spins after a 413 of HAProxy's own beside an SPOE filter and FastCGI (haproxy issue 3425)",
        advice: "update HAProxy, or serve no FastCGI from the same process",
    },
];

/// The faults of one release.
pub(super) fn bugs(version: Version) -> impl Iterator<Item = &'static Bug> {
    BUGS.iter().filter(move |bug| (bug.from..=bug.to).contains(&version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_haproxy_says() {
        assert_eq!(Version::parse("2.6.12-1+deb12u4"), Some(Version(2, 6, 12)));
        assert_eq!(Version::parse("3.2.0-abcdef"), Some(Version(3, 2, 0)));
        assert_eq!(Version::parse("3.5-dev5-123"), Some(Version(3, 5, 0)));
        assert_eq!(Version::parse("unknown"), None);
    }

    #[test]
    fn a_release_has_the_faults_of_its_range() {
        let count = |version| bugs(version).count();
        assert_eq!(count(Version(3, 2, 13)), 1);
        assert_eq!(count(Version(3, 2, 14)), 0);
        assert_eq!(count(Version(2, 8, 25)), 0);
        assert_eq!(count(Version(3, 4, 0)), 1);
    }
}
