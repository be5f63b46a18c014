//! The agent itself.

use crate::{
    doctor::{facts::AgentFacts, report::Judge},
    spop::client::Answer,
};

pub(super) fn judge(facts: &AgentFacts, judge: &mut Judge<'_>) {
    let AgentFacts { admin, spop, .. } = facts;
    match &facts.samples {
        Err(why) => judge.fail(
            "agent_running",
            format!("no agent answers at {admin}: {why}"),
            "start it: `kvspoa run` (or systemctl start kvspoa). Until then HAProxy balances by itself.\n\
             What only the agent can tell is left out below.",
        ),
        Ok(samples) => {
            let ours = env!("CARGO_PKG_VERSION");
            match samples.label("kvspoa_build_info", "version") {
                Some(theirs) if theirs != ours => judge.warn(
                    "agent_running",
                    format!("the agent at {admin} runs version {theirs}, this is {ours}"),
                    "restart the agent, so that both are the same",
                ),
                _ => judge.ok("agent_running", format!("the agent answers at {admin}, version {ours}")),
            }
        }
    }
    match &facts.hello {
        Ok(Answer::Hello { version, max_frame_size }) => judge.ok(
            "agent_hello",
            format!("SPOP answers at {spop}: version {version}, frames of {max_frame_size} bytes"),
        ),
        Ok(Answer::Refused(status)) => judge.fail(
            "agent_hello",
            format!("SPOP at {spop} refuses the handshake: {status}"),
            "its log says why; is another program at this address?",
        ),
        Err(why) => judge.fail(
            "agent_hello",
            format!("nothing answers SPOP at {spop}: {why}"),
            "is `spop.listen` the address that the agent runs with, and HAProxy's `server agent …` too?",
        ),
    }
    let modes = facts.status.iter().flat_map(|status| &status.pools);
    for pool in modes.filter(|pool| pool.mode != "on") {
        let name = &pool.pool;
        judge.warn(
            "pool_mode",
            format!(
                "pool {name} is {}: HAProxy balances its requests, or those of the other sessions",
                pool.mode
            ),
            format!("`kvspoa pool {name} on` puts it to work"),
        );
    }
    if let Some(readiness) = &facts.readiness {
        for pool in &readiness.discovering {
            judge.warn(
                "agent_discovering",
                format!("the agent does not know all replicas of {pool} yet"),
                "it asks for them until they answer: see the replicas below",
            );
        }
    }
}
