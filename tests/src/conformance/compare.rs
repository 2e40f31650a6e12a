//! The probes of one state, sent around both nodes until each is judged.

use crate::conformance::pair::Side;
use crate::conformance::volley::{Shot, fire};
use crate::conformance::{Judgement, Observation, Probe, Round, State, judge};
use crate::world::World;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// More looks at what is still undecided tell nothing new.
const MOST_LOOKS: u32 = 10;

/// How long to wait, and how often to look.
#[derive(Clone, Copy, Debug)]
pub struct Care {
    /// How long nothing must come back to call it a drop, in the first look.
    pub silence: Duration,
    /// The same in later looks, for machines under load.
    pub patience: Duration,
    /// A difference is one if it is there in so many looks.
    pub looks: u32,
    /// Whether one difference is enough, so that others need not be confirmed.
    pub one_is_enough: bool,
    /// Whether both nodes have the same proxy. What it leaves to chance may then differ in both directions.
    pub same_proxy: bool,
}

impl Care {
    /// For a comparison that must find nothing.
    pub const FULL: Care = Care {
        silence: Duration::from_millis(400),
        patience: Duration::from_millis(2500),
        looks: 3,
        one_is_enough: false,
        same_proxy: false,
    };
    /// For one that must find something.
    pub const QUICK: Care = Care {
        silence: Duration::from_millis(300),
        patience: Duration::from_millis(300),
        looks: 2,
        one_is_enough: true,
        same_proxy: false,
    };
}

/// A probe and how it ended.
#[derive(Debug)]
pub struct Judged<'a> {
    /// The probe.
    pub probe: &'a Probe,
    /// The last look: reference, subject.
    pub seen: [Observation; 2],
    /// In how many looks the nodes differed.
    pub differed: u32,
    /// The difference of the first of them.
    pub first: Option<String>,
    /// The judgement; `NeedMore` only if the comparison ended because one difference was enough.
    pub judgement: Judgement,
}

impl Judged<'_> {
    /// Whether it is a difference that counts.
    #[must_use]
    pub fn is_different(&self) -> bool {
        matches!(self.judgement, Judgement::Different(_))
    }

    /// Tries of each side that the next look must make; 0 = done.
    fn open(&self, care: Care) -> usize {
        let made = self.seen[0].tries().min(self.seen[1].tries());
        match self.judgement {
            // Also where silence ended the tries early.
            Judgement::NeedMore { tries } => tries.saturating_sub(made).max(1),
            Judgement::Different(_) if self.differed < care.looks => self.probe.first_tries(),
            _ => 0,
        }
    }
}

/// Sends `probes` around both nodes and judges them. A difference is looked at again on both sides, with more patience, before
/// it is believed.
#[must_use]
pub fn compare<'a>(
    worlds: &[World; 2],
    round: &Round,
    state: &State,
    probes: &[&'a Probe],
    care: Care,
) -> Vec<Judged<'a>> {
    let unseen = |probe: &&'a Probe| Judged {
        probe,
        seen: Default::default(),
        differed: 0,
        first: None,
        judgement: Judgement::NeedMore { tries: probe.first_tries() },
    };
    let mut all: Vec<Judged> = probes.iter().map(unseen).collect();
    for look in 1..=MOST_LOOKS {
        let mut open: Vec<usize> = (0..all.len()).filter(|&index| all[index].open(care) > 0).collect();
        if care.one_is_enough {
            if all.iter().any(|j| j.is_different() && j.differed >= care.looks) {
                break;
            }
            // The first few that differ.
            let differing: Vec<usize> =
                open.iter().copied().filter(|&index| all[index].is_different()).take(4).collect();
            if !differing.is_empty() {
                open = differing;
            }
        }
        if open.is_empty() {
            break;
        }
        look_at(worlds, round, &mut all, &open, if look == 1 { care.silence } else { care.patience }, care);
        for index in open {
            let one = &mut all[index];
            one.judgement = judgement(round, state, one.probe, &one.seen, care);
            if let Judgement::Different(how) = &one.judgement {
                one.differed += 1;
                one.first.get_or_insert_with(|| how.clone());
            }
        }
    }
    for one in &mut all {
        let undecided = matches!(one.judgement, Judgement::NeedMore { .. });
        if one.is_different() && one.differed < care.looks {
            one.judgement = Judgement::NeedMore { tries: 0 };
        } else if undecided && !care.one_is_enough {
            one.judgement = Judgement::Different(format!("still undecided after {MOST_LOOKS} looks"));
        }
    }
    all
}

fn judgement(
    round: &Round,
    state: &State,
    probe: &Probe,
    [reference, subject]: &[Observation; 2],
    care: Care,
) -> Judgement {
    let judgement = judge(round, state, probe, reference, subject);
    if care.same_proxy && matches!(judgement, Judgement::Different(_)) {
        let mirrored = judge(round, state, probe, subject, reference);
        if matches!(mirrored, Judgement::Deliberate(_)) {
            return mirrored;
        }
    }
    judgement
}

/// By node; then what must be sent one after the other, since one changes what the next sees: the probes of one client to
/// Services that remember it.
type Series = (usize, Result<(IpAddr, String), usize>);

fn look_at(worlds: &[World; 2], round: &Round, all: &mut [Judged], open: &[usize], timeout: Duration, care: Care) {
    let mut series: BTreeMap<Series, Vec<(usize, Shot)>> = BTreeMap::new();
    for &index in open {
        let tries = all[index].open(care);
        let one = &mut all[index];
        if one.is_different() {
            // A new look at both.
            one.seen = Default::default();
        }
        let Probe { party, source, proto, to, .. } = one.probe;
        let services: BTreeSet<String> = one.probe.services.iter().map(ToString::to_string).collect();
        for side in Side::BOTH {
            let together = if one.probe.sticky {
                Ok((*source, services.iter().cloned().collect::<Vec<_>>().join(" ")))
            } else {
                Err(index)
            };
            let shot = Shot {
                side,
                party: party.clone(),
                source: *source,
                proto: *proto,
                to: *to,
                tries,
                timeout,
                silences: 3,
            };
            series.entry((side.index(), together)).or_default().push((index, shot));
        }
    }
    let series: Vec<Vec<(usize, Shot)>> = series.into_values().collect();
    let shots: Vec<Vec<Shot>> = series.iter().map(|s| s.iter().map(|(_, shot)| shot.clone()).collect()).collect();
    for (group, seen) in series.iter().zip(fire(worlds, &shots)) {
        for ((index, shot), seen) in group.iter().zip(seen) {
            let one = &mut all[*index];
            seen.iter().for_each(|s| one.seen[shot.side.index()].add(s, &round.world, one.probe));
        }
    }
}
