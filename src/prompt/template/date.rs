//! The date as templates print it (`strftime_now`).

use minijinja::{Error, ErrorKind};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// How far the engine's clock may be from ours when it renders the same request.
const CLOCKS_APART: Duration = Duration::from_secs(2);

/// The date as the engine prints it at `now`.
///
/// # Errors
/// The format is not known, or the text changes so soon (at midnight, for a date) that the engine may print another one.
pub(in crate::prompt) fn of_engine(
    format: &str,
    now: SystemTime,
    utc_offset_seconds: i32,
) -> Result<String, Error> {
    let before = strftime(format, now - CLOCKS_APART, utc_offset_seconds)?;
    if before != strftime(format, now + CLOCKS_APART, utc_offset_seconds)? {
        return Err(Error::new(ErrorKind::InvalidOperation, "a date that is about to change")
            .with_source(AboutToChange));
    }
    Ok(before)
}

/// Marks the error of a date that is not certain.
#[derive(Debug, thiserror::Error)]
#[error("the date is about to change")]
pub(in crate::prompt) struct AboutToChange;

/// Formats `now`, moved by the engine's offset from UTC, as Python's `strftime` does in the C locale.
fn strftime(format: &str, now: SystemTime, utc_offset_seconds: i32) -> Result<String, Error> {
    let unix = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let local = i64::try_from(unix).unwrap_or(i64::MAX).saturating_add(i64::from(utc_offset_seconds));
    let (days, seconds) = (local.div_euclid(86_400), local.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let twelve = (hour + 11) % 12 + 1;
    let weekday = DAYS[(days + 3).rem_euclid(7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let day_of_year = days - days_before(year, 1, 1) + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut letter = chars.next();
        let padded = letter != Some('-');
        if !padded {
            letter = chars.next();
        }
        let number = |value: i64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        out.push_str(&match letter {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => number(day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "a date format that is not supported")),
        });
    }
    Ok(out)
}

/// Days since 1970-01-01 of a date of the Gregorian calendar. Years are counted from March, so that leap days come last.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let year = if month > 2 { year } else { year - 1 };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// Year, month and day of a number of days since 1970-01-01.
fn civil(days: i64) -> (i64, i64, i64) {
    // A year has fewer than 366 days on average: the estimate is never late.
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1, 1, 1) <= days {
        year += 1;
    }
    let mut month = 12;
    while days_before(year, month, 1) > days {
        month -= 1;
    }
    (year, month, days - days_before(year, month, 1) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix: u64, offset: i32, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(unix), offset).expect("a date")
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, 0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_782_400, 0, "%F %a %b %-d"), "2000-02-29 Tue Feb 29");
        assert_eq!(at(1_735_689_599, 0, "%d %b %Y, %I:%M %p"), "31 Dec 2024, 11:59 PM");
    }

    #[test]
    fn the_engines_offset_moves_the_date() {
        assert_eq!(at(1_735_689_599, 3600, "%d %b %Y"), "01 Jan 2025");
        assert_eq!(at(1_735_689_600, -3600, "%-d %B %y"), "31 December 24");
    }

    #[test]
    fn a_date_is_not_certain_around_midnight_of_the_engine() {
        let at = |unix, offset| of_engine("%F", UNIX_EPOCH + Duration::from_secs(unix), offset).ok();
        let midnight = 1_735_689_600;
        assert_eq!(at(midnight - 3, 0).as_deref(), Some("2024-12-31"));
        assert_eq!([at(midnight - 1, 0), at(midnight, 0), at(midnight + 1, 0)], [None, None, None]);
        assert_eq!(at(midnight + 3, 0).as_deref(), Some("2025-01-01"));
        assert_eq!(at(midnight, 3600).as_deref(), Some("2025-01-01"));
        assert!(of_engine("%S", UNIX_EPOCH + Duration::from_secs(midnight + 9), 0).is_err());
    }

    #[test]
    fn an_unknown_format_is_an_error() {
        assert!(strftime("%U", UNIX_EPOCH, 0).is_err());
        assert!(strftime("%", UNIX_EPOCH, 0).is_err());
    }
}
