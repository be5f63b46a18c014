//! From facts to checks. Pure: what is found here is found in tests as well.

mod agent;
mod cfg;
mod events;
mod haproxy;
mod offload;
mod replica;
mod requests;
mod tokens;

use super::{
    facts::{Facts, PoolFacts, ReplicaFacts},
    report::{Check, Class, Judge},
};

/// Every check that the facts allow.
pub(super) fn all(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    agent::judge(&facts.agent, &mut judge(Class::Agent, "", &mut checks));
    haproxy::judge(facts, &mut judge(Class::Haproxy, "", &mut checks));
    cfg::judge(facts, &mut judge(Class::Haproxy, "", &mut checks));
    // Of a socket that does not answer was told.
    let haproxy_answers = facts.haproxy.as_ref().is_none_or(|haproxy| haproxy.info.is_ok());
    for pool in &facts.pools {
        replica::judge_pool(pool, haproxy_answers, &mut judge(Class::Replicas, &pool.backend, &mut checks));
        for found in &pool.replicas {
            judge_replica(facts, pool, found, &mut checks);
        }
    }
    requests::judge(facts, &mut judge(Class::Requests, "", &mut checks));
    checks
}

fn judge_replica(facts: &Facts, pool: &PoolFacts, found: &ReplicaFacts, checks: &mut Vec<Check>) {
    let name = format!("{}/{}", pool.backend, found.server);
    let readiness = facts.agent.readiness.as_ref();
    if !replica::judge(found, pool, readiness, &mut judge(Class::Replicas, &name, checks)) {
        return;
    }
    tokens::judge(found, &mut judge(Class::Tokens, &name, checks));
    for (number, rank) in (0u16..).zip(&found.ranks) {
        let subject = if found.ranks.len() > 1 { format!("{name} rank {number}") } else { name.clone() };
        let known = readiness.and_then(|readiness| {
            let mut ranks = readiness.ranks.iter();
            ranks.find(|known| {
                known.pool == pool.backend && known.server == found.server && known.rank == number
            })
        });
        let mut events = judge(Class::Events, &subject, checks);
        events::judge(found, rank, known, &mut events);
        offload::judge(found, rank, &mut events);
        tokens::judge_rank(rank, &mut judge(Class::Tokens, &subject, checks));
    }
}

fn judge<'a>(class: Class, subject: &str, checks: &'a mut Vec<Check>) -> Judge<'a> {
    Judge { class, subject: subject.to_owned(), checks }
}

#[cfg(test)]
mod tests;
